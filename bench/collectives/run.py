#!/usr/bin/env python3
"""All-reduce, barrier and heartbeat: accel from C and from Python, gloo, and one memcpy.

Two jobs run side by side under `accel launch`, one of C ranks (collectives_load.c) and
one of Python ranks (rank.py, accel and gloo in the same processes). Only one of them has
something to do at any time, and the variants take turns. A turn gives samples of several
calls, which all ranks begin together; the slowest rank's time counts, and of a turn's
samples the 25th percentile.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB)
PROCESS_COUNTS = (2,)
PERCENT = 25
# Name, the job it belongs to, what that is asked for.
REDUCE = {
    "C": ("c", "private"),
    "C, accel_alloc": ("c", "arena"),
    "memcpy": ("c", "memcpy"),
    "Python": ("python", "accel"),
    "gloo": ("python", "gloo"),
}
OTHERS = {
    "barrier, C": ("c", "barrier"),
    "barrier, Python": ("python", "accel_barrier"),
    "barrier, gloo": ("python", "gloo_barrier"),
    "accel_step(), C": ("c", "step"),
    "World.step(), Python": ("python", "step"),
}
LIMITS_NS = {"barrier, C": 1000.0, "accel_step(), C": 50.0, "World.step(), Python": 1000.0}
OTHER_CALLS = {"accel_step(), C": 10000, "World.step(), Python": 1000}


@dataclass(frozen=True)
class Target:
    """What a ratio of two variants must reach at some sizes."""

    a: str
    b: str
    compare: Callable[[float, float], bool]
    limit: float
    sizes: tuple[int, ...]


MIDDLE = (64 * KIB, 256 * KIB, MIB)
TARGETS = (
    Target("gloo", "C", operator.ge, 10, MIDDLE),
    Target("gloo", "C", operator.ge, 6, (25 * MIB,)),
    Target("gloo", "Python", operator.ge, 20, (KIB,)),
    Target("C", "memcpy", operator.le, 1, (25 * MIB,)),
    Target("C, accel_alloc", "memcpy", operator.le, 0.6, (25 * MIB,)),
)
LIMIT_1K_NS = 2500.0


def calls_of(n_bytes: int) -> int:
    """In a sample: enough for the clock, few enough for sums not to overflow."""
    return max(1, min(32, 4 * MIB // n_bytes))


def samples_of(n_bytes: int) -> int:
    """In a turn."""
    return 30 if n_bytes <= MIB else 8


def turn(
    jobs: dict[str, ranks.Ranks], which: tuple[str, str], n_bytes: int, calls: int, samples: int
) -> float:
    """ns for a call."""
    job, what = which
    answers = jobs[job].ask(what, n_bytes, calls, samples)
    return ranks.percentile(ranks.slowest(answers), PERCENT)


def measure_reduce(jobs: dict[str, ranks.Ranks], n_bytes: int, rounds: int) -> dict[str, Any]:
    amount = (n_bytes, calls_of(n_bytes), samples_of(n_bytes))
    samples = common.take_turns(
        {name: lambda _, w=which: turn(jobs, w, *amount) for name, which in REDUCE.items()},
        rounds,
    )
    pairs = {
        ("gloo", "C"),
        ("gloo", "C, accel_alloc"),
        ("gloo", "Python"),
        ("C", "memcpy"),
        ("C, accel_alloc", "memcpy"),
    }
    return {
        "bytes": n_bytes,
        "ns": {name: common.median(taken) for name, taken in samples.items()},
        "ratios": {f"{a}/{b}": common.ratio(samples[a], samples[b]) for a, b in sorted(pairs)},
    }


def measure_others(jobs: dict[str, ranks.Ranks], rounds: int) -> dict[str, float | None]:
    samples = common.take_turns(
        {
            name: lambda _, w=which, c=OTHER_CALLS.get(name, 32): turn(jobs, w, 0, c, 30)
            for name, which in OTHERS.items()
        },
        rounds,
    )
    return {name: common.median(taken) for name, taken in samples.items()}


def measure(
    build: common.Build, folder: Path, python: str, n: int, sizes: list[int], rounds: int
) -> dict[str, Any]:
    load = [build.program("bench/collectives/collectives_load"), str(max(sizes))]
    rank = [python, str(Path(__file__).with_name("rank.py")), str(max(sizes))]
    with (
        ranks.started(build, folder, f"c-{n}", load, n) as c,
        ranks.started(build, folder, f"python-{n}", rank, n) as of_python,
    ):
        jobs = {"c": c, "python": of_python}
        return {
            "n": n,
            "reduce": [measure_reduce(jobs, size, rounds) for size in sizes],
            "others_ns": measure_others(jobs, rounds),
        }


# ---- what is printed --------------------------------------------------------------


def size_text(n_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:g} {name}"
    return f"{n_bytes} B"


def us(ns: float | None) -> str:
    return common.cell(None if ns is None else ns / 1000, ".2f" if (ns or 0) < 1e5 else ".0f")


def verdicts(row: dict[str, Any]) -> list[str]:
    """Of the targets for this size, ratio, target and whether it was reached."""
    found = []
    for t in TARGETS:
        ratio = row["ratios"][f"{t.a}/{t.b}"]
        if row["bytes"] in t.sizes:
            sign = ">=" if t.compare is operator.ge else "<="
            reached = "yes" if t.compare(ratio, t.limit) else "no"
            found.append(f"{t.a} / {t.b} {common.times(ratio)} {sign} {t.limit:g}: {reached}")
    if row["bytes"] == KIB:
        reached = "yes" if row["ns"]["C"] <= LIMIT_1K_NS else "no"
        found.append(f"C {us(row['ns']['C'])} <= {us(LIMIT_1K_NS)} us: {reached}")
    return found


def show(results: list[dict[str, Any]], rounds: int) -> None:
    cores = common.machine()["cores"]
    for r in results:
        common.print_table(
            f"all-reduce on {r['n']} ranks, us (median of {rounds})",
            ["bytes", *REDUCE, *r["reduce"][0]["ratios"]],
            [
                [
                    size_text(row["bytes"]),
                    *(us(row["ns"][name]) for name in REDUCE),
                    *(common.times(x) for x in row["ratios"].values()),
                ]
                for row in r["reduce"]
            ],
        )
        for row in r["reduce"] if r["n"] <= cores else []:
            for verdict in verdicts(row):
                print(f"{size_text(row['bytes'])}: {verdict}")
        show_others(r, r["n"] <= cores)


def show_others(r: dict[str, Any], judged: bool) -> None:
    limits = LIMITS_NS if judged else {}
    rows = []
    for name, ns in r["others_ns"].items():
        limit = limits.get(name)
        within = "-" if limit is None else "yes" if ns <= limit else "no"
        rows.append([name, common.cell(ns, ".0f"), common.cell(limit, ".0f"), within])
    common.print_table(
        f"other calls on {r['n']} ranks, ns", ["call", "ns", "at most", "within"], rows
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "-n", type=int, nargs="+", default=list(PROCESS_COUNTS), help="process counts (2)"
    )
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=list(SIZES), help="sizes, multiples of 4"
    )
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: 2 or more")
    if min(args.bytes) < 4 or any(b % 4 for b in args.bytes):
        parser.error("--bytes: multiples of 4")
    build = common.Build(args.build)
    ranks.need_torch(args.python)
    with common.scratch() as folder:
        results = [measure(build, folder, args.python, n, args.bytes, args.rounds) for n in args.n]
    common.print_results(args.json, {"collectives": results}, lambda: show(results, args.rounds))


if __name__ == "__main__":
    main()
