#!/usr/bin/env python3
"""From the first failure to all others signalled: accel, a bare reaper and torchrun.

One rank of a job of N fails and notes when; the others note when their SIGTERM came
(victim.c). A sample is the last of these moments less the first, so it holds the
death, its discovery, the signals and the wake-up of every process. The failing rank
waits a while that differs from round to round, since torchrun looks at its workers at
fixed intervals.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

SIZES = (2, 8, 64)
LIMIT_S = 90.0
TARGET_MS = 1.0
TUNED_INTERVAL_S = 0.01
# struct board of victim.c, then one 64-bit time for each rank
BOARD = struct.Struct("=IIQ")
SETTLE_MS = 300  # for the launcher and the ranks to have nothing left to do
SPREAD_MS = 100  # torchrun's interval


@dataclass(frozen=True)
class Job:
    board: Path
    n: int
    failing: int
    pause_ms: int


def argv_of_victim(victim: str, job: Job) -> list[str]:
    return [victim, str(job.board), str(job.failing), str(job.pause_ms)]


def measure_ms(argv: list[str], job: Job) -> float:
    """One job to its end."""
    job.board.write_bytes(bytes(BOARD.size + 8 * job.n))
    r = common.run(argv, LIMIT_S)
    if r.code is None:
        sys.exit(f"{' '.join(argv)}: still running after {LIMIT_S:.0f} s")
    raw = job.board.read_bytes()
    _, n_signalled, failed_ns = BOARD.unpack_from(raw)
    times = struct.unpack_from(f"={job.n}Q", raw, BOARD.size)
    if not failed_ns or n_signalled != job.n - 1 or r.code != 1:
        sys.exit(
            f"{' '.join(argv)}: exit {r.code}, {n_signalled} of {job.n - 1} were signalled"
        )
    return (max(times) - failed_ns) / 1e6


def find_launchers(build: common.Build, python: str) -> dict[str, Callable[[int], list[str]]]:
    """What comes before the worker's own argv, by process count."""
    accel = build.program("accel")
    torchrun = common.torchrun(python)
    reaper = build.program("bench/failure/reaper")
    found: dict[str, Callable[[int], list[str]]] = {
        "accel": lambda n: [accel, "launch", "-n", str(n)],
        "reaper": lambda n: [reaper, str(n)],
    }
    if torchrun:
        interval = ["--monitor-interval", str(TUNED_INTERVAL_S)]
        found["torchrun"] = lambda n: [*torchrun, "--nproc-per-node", str(n), "--no-python"]
        found["torchrun tuned"] = lambda n: [
            *torchrun,
            *interval,
            "--nproc-per-node",
            str(n),
            "--no-python",
        ]
    return found


def pause_of(round_: int, rounds: int) -> int:
    """Evenly over an interval of torchrun, in an order that is not the rounds'."""
    return SETTLE_MS + (round_ * 3 % rounds) * SPREAD_MS // rounds


def measure(
    launchers: dict[str, Callable[[int], list[str]]],
    victim: str,
    folder: Path,
    n: int,
    rounds: int,
) -> dict[str, Any]:
    def sample(name: str, i: int) -> float:
        job = Job(folder / "board", n, i % n, pause_of(i, rounds))
        return measure_ms([*launchers[name](n), *argv_of_victim(victim, job)], job)

    samples = common.take_turns(
        {name: lambda i, name=name: sample(name, i) for name in launchers}, rounds
    )
    return {
        "n": n,
        **{
            name: {
                "ms": common.median(taken),
                "worst_ms": max(t for t in taken if t is not None),
                "times_accel": common.ratio(taken, samples["accel"]),
                "accel_more_ms": common.paired(samples["accel"], taken, lambda a, b: a - b),
            }
            for name, taken in samples.items()
        },
    }


def show(names: list[str], rows: list[dict[str, Any]], rounds: int) -> None:
    peers = [n for n in names if n.startswith("torchrun")]
    common.print_table(
        f"first failure to all others signalled, ms (median of {rounds}, in brackets the worst)",
        [
            "N",
            *names,
            "accel-reaper",
            f"accel within {TARGET_MS:.0f} ms",
            *(f"{n}/accel" for n in peers),
        ],
        [
            [
                str(r["n"]),
                *(f"{r[n]['ms']:.2f} ({r[n]['worst_ms']:.2f})" for n in names),
                common.cell(r["reaper"]["accel_more_ms"], ".2f"),
                "yes" if r["accel"]["ms"] <= TARGET_MS else "no",
                *(common.times(r[n]["times_accel"]) for n in peers),
            ]
            for r in rows
        ],
    )
    print("reaper: wait() and kill() alone (reaper.c), the kernel's share of accel's time")
    if "torchrun tuned" in names:
        print(f"torchrun tuned: --monitor-interval {TUNED_INTERVAL_S}")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("-n", type=int, nargs="+", default=list(SIZES), help="process counts")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: somebody must be left to be signalled: 2 or more")
    build = common.Build(args.build)
    victim = build.program("bench/failure/victim")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun has a warning to print else
    with common.scratch() as folder:
        launchers = find_launchers(build, args.python)
        rows = [measure(launchers, victim, folder, n, args.rounds) for n in args.n]
    common.print_results(
        args.json,
        {"failure": rows},
        lambda: show(list(launchers), rows, args.rounds),
    )


if __name__ == "__main__":
    main()
