#!/usr/bin/env python3
"""Launch of N x /bin/true: accel, a bare posix_spawn loop, hydra, mpirun and torchrun.

Each command is timed from its start until it was reaped, without input and output. In
every round the variants take turns; figures are medians over the rounds, ratios and
differences are medians of what each round gave. The slow ones (mpirun, torchrun) have
rounds of their own with accel, so that no quick one is measured in the wake of a command
that took seconds. A variant that runs into the limit is killed with all it started and
given up for that N.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

TRUE = "/bin/true"
SIZES = (2, 8, 64, 256)
LIMIT_S = 20.0
# Within this much of the spawn loop: 1.3 times its time, and 5 ms.
LOOP_FACTOR = 1.3
ALLOWANCE_MS = 5.0
COMMAND_TARGET_MS = 5.0
# What takes milliseconds varies by its own length from run to run: more rounds.
MORE_ROUNDS = 5
MORE_ROUNDS_UP_TO_N = 64


@dataclass
class Variant:
    """One way to launch N processes."""

    name: str
    argv: Callable[[int], list[str]]
    slow: bool = False
    given_up: dict[int, str] = field(default_factory=dict)
    """Sizes at which it hung or failed, and how."""

    def sample_ms(self, n: int) -> float | None:
        if n in self.given_up:
            return None
        r = common.run(self.argv(n), LIMIT_S)
        if r.code == 0:
            return r.seconds * 1000
        self.given_up[n] = (
            f"hung, killed after {LIMIT_S:.0f} s" if r.code is None else f"exit {r.code}"
        )
        common.note(f"{self.name}, N = {n}: {self.given_up[n]}, given up")
        return None


def find_variants(build: common.Build, python: str) -> list[Variant]:
    accel = build.program("accel")
    loop = build.program("bench/launch/spawn_loop")
    hydra = common.peer("mpiexec.hydra")
    openmpi = common.peer("mpirun.openmpi")
    torchrun = common.torchrun(python)
    found = [
        Variant("accel", lambda n: [accel, "launch", "-n", str(n), TRUE]),
        Variant("spawn loop", lambda n: [loop, str(n), TRUE]),
    ]
    if hydra:
        found.append(Variant("hydra", lambda n: [hydra, "-n", str(n), TRUE]))
    if openmpi:
        options = ["--oversubscribe", "--allow-run-as-root"]
        found.append(
            Variant("mpirun", lambda n: [openmpi, *options, "-n", str(n), TRUE], slow=True)
        )
    if torchrun:
        found.append(
            Variant(
                "torchrun",
                lambda n: [*torchrun, "--nproc-per-node", str(n), "--no-python", TRUE],
                slow=True,
            )
        )
    return found


def take_turns(variants: list[Variant], n: int, rounds: int) -> dict[str, list[float | None]]:
    return common.take_turns(
        {v.name: lambda _, v=v: v.sample_ms(n) for v in variants}, rounds
    )


def summary(v: Variant, n: int, samples: dict[str, list[float | None]]) -> dict[str, Any]:
    given_up = v.given_up.get(n)
    taken = samples[v.name]
    return {
        "ms": None if given_up else common.median(taken),
        "times_accel": None if given_up else common.ratio(taken, samples["accel"]),
        "rounds": sum(s is not None for s in taken),
        "given_up": given_up,
    }


def measure_launch(variants: list[Variant], n: int, rounds: int) -> dict[str, Any]:
    """One row: medians, and how accel stands to each of the others."""
    quick = [v for v in variants if not v.slow]
    slow = [v for v in variants if v.slow]
    more = MORE_ROUNDS if n <= MORE_ROUNDS_UP_TO_N else 1
    samples = take_turns(quick, n, rounds * more)
    row: dict[str, Any] = {"n": n, **{v.name: summary(v, n, samples) for v in quick}}
    accel, loop = samples["accel"], samples["spawn loop"]
    row["accel_over_loop"] = common.ratio(accel, loop)
    row["over_budget_ms"] = common.paired(accel, loop, lambda a, b: a - LOOP_FACTOR * b)
    if slow:
        samples = take_turns([quick[0], *slow], n, rounds)
        row |= {v.name: summary(v, n, samples) for v in slow}
    return row


def command_ms(argv: list[str], want_code: int) -> float:
    r = common.run(argv, LIMIT_S)
    if r.code != want_code:
        sys.exit(f"{' '.join(argv)}: exit {r.code}, not {want_code}")
    return r.seconds * 1000


def measure_commands(accel: str, rounds: int) -> list[dict[str, Any]]:
    """What a word on the command line costs that starts nothing."""
    commands = {
        TRUE: ([TRUE], 0),
        "accel --help": ([accel, "--help"], 0),
        "accel launch --num-procs 2 x": ([accel, "launch", "--num-procs", "2", "x"], 2),
    }
    samples = common.take_turns(
        {k: lambda _, a=argv, c=code: command_ms(a, c) for k, (argv, code) in commands.items()},
        rounds * MORE_ROUNDS,
    )
    return [
        {
            "command": name,
            "ms": common.median(taken),
            "over_true_ms": common.paired(taken, samples[TRUE], lambda a, b: a - b),
        }
        for name, taken in samples.items()
    ]


def figure(row: dict[str, Any], v: Variant) -> str:
    at = row[v.name]
    if at["given_up"]:
        return "hung" if "hung" in at["given_up"] else at["given_up"]
    return common.cell(at["ms"], ".1f")


def verdict(row: dict[str, Any]) -> str:
    budget = row["over_budget_ms"]
    if budget is None:
        return "-"
    return "yes" if budget <= ALLOWANCE_MS else f"no, by {budget - ALLOWANCE_MS:.1f} ms"


def show(variants: list[Variant], rows: list[dict[str, Any]], commands: list[Any]) -> None:
    others = [v for v in variants if v.name not in ("accel", "spawn loop")]
    common.print_table(
        f"launch of N x {TRUE}, ms",
        [
            "N",
            *(v.name for v in variants),
            "accel/loop",
            f"accel-{LOOP_FACTOR}*loop",
            f"within {ALLOWANCE_MS:.0f} ms",
            *(f"{v.name}/accel" for v in others),
        ],
        [
            [
                str(r["n"]),
                *(figure(r, v) for v in variants),
                common.times(r["accel_over_loop"]),
                common.cell(r["over_budget_ms"], ".1f"),
                verdict(r),
                *(common.times(r[v.name]["times_accel"]) for v in others),
            ]
            for r in rows
        ],
    )
    for v in variants:
        few = [f"{r[v.name]['rounds']} at N = {r['n']}" for r in rows]
        print(f"rounds of {v.name}: {', '.join(few)}")
        for n, how in v.given_up.items():
            print(f"{v.name} at N = {n}: {how}; given up")
    common.print_table(
        f"commands that start nothing, ms (to be at most {COMMAND_TARGET_MS:.0f})",
        ["command", "ms", f"more than {TRUE}"],
        [
            [c["command"], common.cell(c["ms"], ".2f"), common.cell(c["over_true_ms"], ".2f")]
            for c in commands
        ],
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("-n", type=int, nargs="+", default=list(SIZES), help="process counts")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="measure only these besides accel and the loop"
    )
    args = parser.parse_args()
    build = common.Build(args.build)
    with common.scratch():
        variants = find_variants(build, args.python)
        if args.only is not None:
            wanted = {"accel", "spawn loop", *args.only}
            variants = [v for v in variants if v.name in wanted]
        commands = measure_commands(build.program("accel"), args.rounds)
        rows = [measure_launch(variants, n, args.rounds) for n in args.n]
    common.print_results(
        args.json,
        {"launch": rows, "commands": commands},
        lambda: show(variants, rows, commands),
    )


if __name__ == "__main__":
    main()
