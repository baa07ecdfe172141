#!/usr/bin/env python3
"""What an ordinary loop pays for accel and for Accelerate: steps, gather and import.

Steps: one process, started by hand, for each of a bare loop, accel and Accelerate, fresh
in each round, which run an epoch in turn. Gather: two processes for each library, started
by `accel launch`, which call gather_for_metrics() in turn. Import: a fresh interpreter
that has imported torch.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import ranks

PROGRAM = str(Path(__file__).with_name("rank.py"))
LIBRARIES = ("accel", "accelerate")
EPOCHS = 7  # of each process
GATHER_CALLS, GATHER_SAMPLES, GATHER_PERCENT = 16, 40, 25
# What is imported, by whom.
IMPORTS = {
    "import accel": "accel",
    "from accel import Accelerator": "accel",
    "import accelerate": "accelerate",
    "from accelerate import Accelerator": "accelerate",
}
IMPORT_TIMER = """
import time, torch
start = time.perf_counter()
{}
print(time.perf_counter() - start)
"""
TARGET_ADDED = 1 / 3
TARGET_GATHER = 5.0
TARGET_IMPORT_MS = 30.0


def peers(python: str) -> list[str]:
    """Of LIBRARIES, those that are there."""
    version = ranks.installed(python, "accelerate")
    if version is None:
        common.note(f"skipped: {python} has no accelerate")
        return ["accel"]
    common.note(f"accelerate {version}")
    return list(LIBRARIES)


# ---- steps -----------------------------------------------------------------------


def measure_steps(
    build: common.Build, folder: Path, python: str, libraries: list[str], rounds: int
) -> dict[str, Any]:
    steps: dict[str, list[float]] = {}
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, epochs in epochs_of_round(build, folder, python, libraries).items():
            taken = [s for e in epochs for s in e["step"]]
            steps.setdefault(name, []).append(statistics.median(taken))
            speeds.setdefault(name, []).append(
                statistics.median(e["steps"] / e["seconds"] for e in epochs)
            )
    added = {
        name: [s - bare for s, bare in zip(steps[name], steps["bare"], strict=True)]
        for name in libraries
    }
    return {
        "step_us": {name: statistics.median(s) * 1e6 for name, s in steps.items()},
        "steps_per_s": {name: statistics.median(s) for name, s in speeds.items()},
        "added_us": {name: statistics.median(a) * 1e6 for name, a in added.items()},
    }


def epochs_of_round(
    build: common.Build, folder: Path, python: str, libraries: list[str]
) -> dict[str, list[dict[str, Any]]]:
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(
                ranks.started(build, folder, name, [python, PROGRAM, name], None)
            )
            for name in ["bare", *libraries]
        }
        taken = common.take_turns(
            {name: lambda _, j=job: j.ask("epoch")[0] for name, job in jobs.items()}, EPOCHS
        )
    return {name: [e for e in epochs if e] for name, epochs in taken.items()}


# ---- gather ----------------------------------------------------------------------


def measure_gather(
    build: common.Build, folder: Path, python: str, libraries: list[str], rounds: int
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(
                ranks.started(build, folder, f"{name}-2", [python, PROGRAM, name], 2)
            )
            for name in libraries
        }
        taken = common.take_turns(
            {name: lambda _, j=job: gather_us(j) for name, job in jobs.items()}, rounds
        )
    return {
        "us": {name: common.median(t) for name, t in taken.items()},
        "ratio": common.ratio(taken["accelerate"], taken["accel"])
        if "accelerate" in taken
        else None,
    }


def gather_us(job: ranks.Ranks) -> float:
    answers = job.ask("gather", GATHER_CALLS, GATHER_SAMPLES)
    return ranks.percentile(ranks.slowest(answers), GATHER_PERCENT) * 1e6


# ---- import ----------------------------------------------------------------------


def import_environment(build: common.Build, folder: Path) -> dict[str, str]:
    """All modules are compiled, as those of an installed package are, whatever the user's
    settings about it and whether this checkout's have ever been."""
    env = {**ranks.environment(build), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def import_ms(python: str, env: dict[str, str], statement: str) -> float:
    r = subprocess.run(
        [python, "-c", IMPORT_TIMER.format(statement)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if r.returncode:
        sys.exit(f"{statement}: {r.stderr}")
    return float(r.stdout) * 1000


def measure_import(
    build: common.Build, folder: Path, python: str, libraries: list[str], rounds: int
) -> dict[str, float | None]:
    env = import_environment(build, folder)
    statements = [s for s, library in IMPORTS.items() if library in libraries]
    for s in statements:
        import_ms(python, env, s)  # compiles
    taken = common.take_turns(
        {s: lambda _, s=s: import_ms(python, env, s) for s in statements}, rounds
    )
    return {s: common.median(t) for s, t in taken.items()}


# ---- what is printed ---------------------------------------------------------------


def show_steps(r: dict[str, Any]) -> None:
    common.print_table(
        "one process: loader, forward, backward, optimizer (batch of 64)",
        ["loop", "steps/s", "us a step", "added us"],
        [
            [
                name,
                f"{r['steps_per_s'][name]:.0f}",
                f"{r['step_us'][name]:.1f}",
                common.cell(r["added_us"].get(name), ".1f"),
            ]
            for name in r["step_us"]
        ],
    )
    if "accelerate" in r["added_us"]:
        ratio = r["added_us"]["accel"] / r["added_us"]["accelerate"]
        reached = "yes" if ratio <= TARGET_ADDED else "no"
        print(f"added, accel / Accelerate: {ratio:.2f} <= {TARGET_ADDED:.2f}: {reached}")


def show_gather(r: dict[str, Any]) -> None:
    common.print_table(
        "gather_for_metrics of a (64, 10) tensor on 2 ranks",
        ["library", "us"],
        [[name, common.cell(us, ".1f")] for name, us in r["us"].items()],
    )
    if r["ratio"] is not None:
        reached = "yes" if r["ratio"] >= TARGET_GATHER else "no"
        print(f"Accelerate / accel: {common.times(r['ratio'])} >= {TARGET_GATHER:g}: {reached}")


def show_import(ms: dict[str, float | None]) -> None:
    rows = []
    for statement, taken in ms.items():
        limit = TARGET_IMPORT_MS if IMPORTS[statement] == "accel" else None
        within = "-" if limit is None or taken is None else "yes" if taken <= limit else "no"
        rows.append([statement, common.cell(taken, ".1f"), common.cell(limit, ".0f"), within])
    common.print_table("import beyond torch, ms", ["statement", "ms", "at most", "within"], rows)


MEASURE = {"steps": measure_steps, "gather": measure_gather, "import": measure_import}
SHOW = {"steps": show_steps, "gather": show_gather, "import": show_import}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SHOW, default=list(SHOW), help="parts")
    args = parser.parse_args()
    build = common.Build(args.build)
    ranks.need_torch(args.python)
    libraries = peers(args.python)
    with common.scratch() as folder:
        results = {
            part: MEASURE[part](build, folder, args.python, libraries, args.rounds)
            for part in args.only
        }

    def show() -> None:
        for part, result in results.items():
            SHOW[part](result)

    common.print_results(args.json, results, show)


if __name__ == "__main__":
    main()
