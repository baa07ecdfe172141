"""Adds up JUnit results and prints "N passed, N failed, N skipped". Ends with 1 when
anything failed or nothing ran."""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broken", type=int, default=0, help="failed steps that are no tests")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    counts = {"passed": 0, "failed": args.broken, "skipped": 0}
    for path in args.files:
        if not path.exists():
            continue
        for case in ET.parse(path).iter("testcase"):
            kind = outcome(case)
            counts[kind] += 1
            if kind == "failed":
                print(f"failed: {path.stem}: {case.get('classname')} {case.get('name')}")
    print(", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
