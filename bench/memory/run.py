#!/usr/bin/env python3
"""Memory of accel's keeper and daemon and of torchrun's agent while N workers sleep.

PSS as the kernel accounts it (/proc/PID/smaps_rollup): private pages whole, shared ones
by the share. A sample is taken when every worker has said that it runs. acceld is a copy
in a folder of its own, so that no other job on the machine shares its pages. It does not
let itself be looked into, so that root (or CAP_SYS_PTRACE) is needed.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

SIZES = (2, 16, 64, 256)
TORCHRUN_SIZES = (2, 16)
READY = b"ready"
WORKER = ["/bin/sh", "-c", f"echo {READY.decode()}; exec sleep 600"]
LIMIT_S = 60.0
SETTLE_S = 0.3  # what follows the last worker's start: notes, journal lines
BASE_KIB = 3 * 1000 * 1000 / 1024
PER_WORKER_KIB = 64.0


@dataclass
class Sample:
    """KiB of PSS."""

    supervisor: float
    client: float | None = None


def pss_kib(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        sys.exit(f"the memory of process {pid} cannot be read: run this as root")
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1])
    sys.exit(f"/proc/{pid}/smaps_rollup has no Pss")


def wait_ready(child: subprocess.Popen[bytes], n: int) -> None:
    """Until @n workers have printed their line."""
    assert child.stdout
    seen = b""
    end = time.monotonic() + LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while seen.count(READY) < n:
            ready = selector.select(max(0.0, end - time.monotonic()))
            part = os.read(child.stdout.fileno(), 65536) if ready else b""
            if not part:
                sys.exit(f"{child.args}: {seen.count(READY)} of {n} workers came up")
            seen += part


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        common.note(f"{child.args}: did not end on SIGTERM")
    common.kill_children()


def start(argv: list[str], n: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    wait_ready(child, n)
    time.sleep(SETTLE_S)
    return child


def accel_sample(accel: str, n: int) -> Sample:
    child = start([accel, "launch", "-n", str(n), *WORKER], n)
    pids = [p for p in common.descendants(child.pid) if common.command_name(p) == "acceld"]
    if len(pids) != 2:
        sys.exit(f"{len(pids)} processes of acceld instead of keeper and daemon")
    sample = Sample(sum(map(pss_kib, pids)), pss_kib(child.pid))
    stop(child)
    return sample


def torchrun_sample(torchrun: list[str], n: int) -> Sample:
    child = start([*torchrun, "--nproc-per-node", str(n), "--no-python", *WORKER], n)
    sample = Sample(pss_kib(child.pid))
    stop(child)
    return sample


def private_copy(build: common.Build, folder: Path) -> str:
    """accel and the acceld beside it. Returns accel's path."""
    for name in ("acceld", "accel"):
        shutil.copy2(build.program(name), folder / name)
    return str(folder / "accel")


def budget_kib(n: int) -> float:
    return BASE_KIB + PER_WORKER_KIB * n


def measure(accel: str, torchrun: list[str] | None, n: int, rounds: int) -> dict[str, Any]:
    variants = {"accel": lambda _: accel_sample(accel, n)}
    if torchrun and n in TORCHRUN_SIZES:
        variants["torchrun"] = lambda _: torchrun_sample(torchrun, n)
    samples = common.take_turns(variants, rounds)
    supervisors = {k: [s.supervisor for s in taken if s] for k, taken in samples.items()}
    row: dict[str, Any] = {
        "n": n,
        "supervisor_kib": common.median(supervisors["accel"]),
        "client_kib": common.median([s.client for s in samples["accel"] if s]),
        "budget_kib": budget_kib(n),
        "torchrun_kib": None,
        "torchrun_times_accel": None,
    }
    if "torchrun" in supervisors:
        row["torchrun_kib"] = common.median(supervisors["torchrun"])
        row["torchrun_times_accel"] = common.ratio(
            supervisors["torchrun"], supervisors["accel"]
        )
    return row


def slope_kib(rows: list[dict[str, Any]]) -> float | None:
    """What one more worker costs, from the smallest to the largest job."""
    least, most = min(rows, key=lambda r: r["n"]), max(rows, key=lambda r: r["n"])
    if least["n"] == most["n"]:
        return None
    return (most["supervisor_kib"] - least["supervisor_kib"]) / (most["n"] - least["n"])


def show(rows: list[dict[str, Any]], rounds: int) -> None:
    common.print_table(
        f"PSS while N workers sleep, KiB (median of {rounds})",
        ["N", "keeper+daemon", "at most", "within", "client", "torchrun's agent", "ratio"],
        [
            [
                str(r["n"]),
                common.cell(r["supervisor_kib"], ".0f"),
                common.cell(r["budget_kib"], ".0f"),
                "yes" if r["supervisor_kib"] <= r["budget_kib"] else "no",
                common.cell(r["client_kib"], ".0f"),
                common.cell(r["torchrun_kib"], ".0f"),
                common.times(r["torchrun_times_accel"]),
            ]
            for r in rows
        ],
    )
    print(f"one more worker: {common.cell(slope_kib(rows), '.1f')} KiB (at most 64)")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("-n", type=int, nargs="+", default=list(SIZES), help="process counts")
    args = parser.parse_args()
    build = common.Build(args.build)
    with common.scratch() as folder:
        accel = private_copy(build, folder)
        torchrun = common.torchrun(args.python)
        rows = [measure(accel, torchrun, n, args.rounds) for n in args.n]
    common.print_results(
        args.json,
        {"memory": rows, "per_worker_kib": slope_kib(rows)},
        lambda: show(rows, args.rounds),
    )


if __name__ == "__main__":
    main()
