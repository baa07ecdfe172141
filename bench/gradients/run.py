#!/usr/bin/env python3
"""Exposed communication of averaging gradients: accel against torch's DDP over gloo.

A step is zero_grad, forward, backward and averaging. Exposed is what it takes beyond the
same step under no_sync(). accel and DDP work in the same processes, started by
`accel launch`, on the same batches, different on each rank; all four modes take turns.
A step's time is the slowest rank's, a mode's the 20th percentile of all its steps, and
both averagings must give the same gradients before anything is measured.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import ranks

PROCESS_COUNTS = (2, 4)
PERCENT = 20
# Steps of each mode in a round.
STEPS = {"0.1M": 60, "5M": 8, "25M": 4}
PAIRS = {"accel": "accel no_sync", "ddp": "ddp no_sync"}
# At most this much of DDP's exposed communication.
TARGETS = {"0.1M": 0.15, "5M": 0.2, "25M": 0.35}
TARGET_SHARED_CORES = 0.3


def measure(
    build: common.Build, folder: Path, python: str, model: str, n: int, rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    argv = [python, str(Path(__file__).with_name("rank.py")), model]
    with ranks.started(build, folder, f"{model}-{n}", argv, n) as job:
        for _ in range(rounds):
            answers = job.ask("steps", STEPS[model])
            for mode in answers[0]:
                taken = ranks.slowest([a[mode] for a in answers])
                seconds.setdefault(mode, []).extend(taken)
    percentile = {m: ranks.percentile(s, PERCENT) * 1000 for m, s in seconds.items()}
    median = {m: statistics.median(s) * 1000 for m, s in seconds.items()}
    return {
        "model": model,
        "n": n,
        "steps": len(seconds["accel"]),
        "ms": percentile,
        "exposed_ms": exposed(percentile),
        "ratio": ratio(exposed(percentile)),
        "ratio_of_medians": ratio(exposed(median)),
        "target": target(model, n),
    }


def exposed(ms: dict[str, float]) -> dict[str, float]:
    return {mode: ms[mode] - ms[alone] for mode, alone in PAIRS.items()}


def ratio(exposed_ms: dict[str, float]) -> float | None:
    """None where DDP's is lost in the noise."""
    return exposed_ms["accel"] / exposed_ms["ddp"] if exposed_ms["ddp"] > 0 else None


def target(model: str, n: int) -> float | None:
    """What is asked of two ranks with a core each, and of four on two cores."""
    if n == 2:
        return TARGETS[model]
    return TARGET_SHARED_CORES if (n, len(os.sched_getaffinity(0))) == (4, 2) else None


def show(rows: list[dict[str, Any]]) -> None:
    def within(r: dict[str, Any]) -> str:
        if r["target"] is None or r["ratio"] is None:
            return "-"
        return "yes" if r["ratio"] <= r["target"] else "no"

    common.print_table(
        f"step, no_sync and exposed communication, ms ({PERCENT}th percentile of the steps)",
        [
            "model, ranks",
            "steps",
            "accel",
            "no_sync",
            "exposed",
            "DDP",
            "no_sync",
            "exposed",
            "accel/DDP",
            "at most",
            "within",
            "of medians",
        ],
        [
            [
                f"{r['model']}, {r['n']}",
                str(r["steps"]),
                *(
                    f"{value:.2f}"
                    for mode, alone in PAIRS.items()
                    for value in (r["ms"][mode], r["ms"][alone], r["exposed_ms"][mode])
                ),
                common.times(r["ratio"]),
                common.cell(r["target"], ".2f"),
                within(r),
                common.times(r["ratio_of_medians"]),
            ]
            for r in rows
        ],
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "-n", type=int, nargs="+", default=list(PROCESS_COUNTS), help="process counts"
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="models")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: 2 or more")
    build = common.Build(args.build)
    ranks.need_torch(args.python)
    with common.scratch() as folder:
        rows = [
            measure(build, folder, args.python, model, n, args.rounds)
            for n in args.n
            for model in args.only
        ]
    common.print_results(args.json, {"gradients": rows}, lambda: show(rows))


if __name__ == "__main__":
    main()
