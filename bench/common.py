"""What the benchmarks of launching, failing and memory share: commands run and timed
as a user's shell would see them, rounds in which the variants take turns, medians,
tables."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36

T = TypeVar("T")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    p = argparse.ArgumentParser(description=description.splitlines()[0])
    p.add_argument("--build", type=Path, help="build folder ($ACCEL_BUILD, build)")
    p.add_argument("--rounds", type=int, default=7, help="7; every figure is a median")
    p.add_argument(
        "--python", default=sys.executable, help="whose torchrun is measured (this one)"
    )
    p.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return p


class Build:
    """The programs of a build folder. An absent one ends the benchmark."""

    def __init__(self, folder: Path | None) -> None:
        given = folder or Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build"))
        self.folder = given.resolve()

    def program(self, name: str) -> str:
        path = self.folder / name
        if not os.access(path, os.X_OK):
            sys.exit(f"{path} is not there: build it, or name another folder with --build")
        return str(path)


def note(text: str) -> None:
    """Talk, not result."""
    print(text, file=sys.stderr, flush=True)


def peer(name: str) -> str | None:
    """A program on PATH to compare with; an absent one is said and skipped."""
    found = shutil.which(name)
    if not found:
        note(f"skipped: {name} is not on PATH")
    return found


def torchrun(python: str) -> list[str] | None:
    """How to start this interpreter's torchrun, without the wrapper script."""
    ask = [python, "-c", "import torch, torch.distributed.run; print(torch.__version__)"]
    try:
        r = subprocess.run(ask, capture_output=True, text=True, check=False)
    except OSError as e:
        note(f"skipped: torchrun of {python}: {e.strerror}")
        return None
    if r.returncode:
        note(f"skipped: torchrun, since {python} has no torch (--python names another)")
        return None
    note(f"torchrun of torch {r.stdout.strip()}")
    return [python, "-m", "torch.distributed.run"]


# ---- processes ----


def become_subreaper() -> None:
    """What a killed command leaves behind falls to us, so that it can be ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> dict[int, int]:
    """Parent of every process there is."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(errors="replace")
                found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below @root, parents before their children."""
    below: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        below.setdefault(parent, []).append(pid)
    found = list(below.get(root, []))
    for pid in found:
        found += below.get(pid, [])
    return found


def command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def kill_children() -> None:
    """Kill and reap every process below this one."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


@dataclass
class Run:
    """One command from its start until it was reaped."""

    seconds: float
    code: int | None
    """As a shell's $?; None when it was killed at the limit."""


def run(
    argv: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None
) -> Run:
    """Start a command without input or output and time it to its end."""
    null = "/dev/null"
    files = [
        (os.POSIX_SPAWN_OPEN, 0, null, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
    ]
    whole = dict(os.environ) if env is None else dict(env)
    start = time.perf_counter()
    pid = os.posix_spawnp(argv[0], list(argv), whole, file_actions=files)
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            kill_children()
            return Run(limit_s, None)
        _, status = os.waitpid(pid, 0)
        seconds = time.perf_counter() - start
    finally:
        os.close(pidfd)
    code = os.waitstatus_to_exitcode(status)
    return Run(seconds, code if code >= 0 else 128 - code)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder, in which accel also keeps its jobs instead of in the home.
    At its end, whatever the reason, nothing that was started is left."""
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="accel-bench-") as name:
        os.environ["XDG_STATE_HOME"] = name
        try:
            yield Path(name)
        finally:
            kill_children()


# ---- rounds and figures ----


def take_turns(
    variants: Mapping[str, Callable[[int], T | None]], rounds: int
) -> dict[str, list[T | None]]:
    """Call every variant once a round, in an order shuffled alike in every run, so that
    none always follows the same other. A variant returns its sample, or None where it
    sits the round out."""
    samples: dict[str, list[T | None]] = {n: [] for n in variants}
    order = random.Random(1)
    for i in range(rounds):
        for n in order.sample(list(variants), len(variants)):
            samples[n].append(variants[n](i))
    return samples


def median(values: Sequence[float | None]) -> float | None:
    """Of the samples there are; None if there are none."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def paired(
    a: Sequence[float | None],
    b: Sequence[float | None],
    how: Callable[[float, float], float],
) -> float | None:
    """Median of @how(a, b) over the rounds in which both were measured."""
    return median(
        [how(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    )


def ratio(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    return paired(a, b, lambda x, y: x / y)


def cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def times(value: float | None) -> str:
    """A ratio: two decimals where it is near one, none where it is not."""
    return cell(value, ".2f" if value is not None and value < 10 else ".0f")


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need, names to the left and figures to the right."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for r in [head, *rows]:
        first, *others = (
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(r, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())


def machine() -> dict[str, Any]:
    """What the figures hold for; the load says whether to believe them."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "kernel": os.uname().release,
    }


def print_results(
    as_json: bool, results: Mapping[str, Any], show: Callable[[], None]
) -> None:
    about = machine()
    if as_json:
        print(json.dumps({"machine": about, **results}, indent=1))
        return
    show()
    print(
        f"\n{about['cores']} cores, kernel {about['kernel']},"
        f" load average at the end {about['load']}"
    )
