"""What the benchmarks of the runtime share: ranks that do, over a socket, what they are
asked, so that variants which live in different processes can take turns within one run.

A rank connects to the socket that $BENCH_SOCKET names and says "hello RANK". From then on
each line it reads is one request, words with blanks between them, and each line it writes
is the result, JSON. Ranks that nobody asks sleep. The ranks' side for Python is serve().
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common

SOCKET = "BENCH_SOCKET"
START_S = 120.0
ANSWER_S = 600.0


# ---- the driver's side -------------------------------------------------------


class Ranks:
    """The ranks of one command, from their start until close()."""

    def __init__(
        self, socket_path: Path, argv: Sequence[str], n: int, env: Mapping[str, str]
    ) -> None:
        self._name = " ".join(argv)
        self._links: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(socket_path))
            listener.listen(n)
            self._process = subprocess.Popen(
                argv,
                env={**env, SOCKET: str(socket_path)},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            try:
                self._accept(listener, n)
            except BaseException:
                self.close()
                raise
        socket_path.unlink()

    def ask(self, *words: object) -> list[Any]:
        """Let all ranks do the same at the same time. Returns what each answered."""
        line = " ".join(str(w) for w in words) + "\n"
        for link in self._links:
            self._or_exit(lambda link=link: link.sendall(line.encode()))
        return [json.loads(self._or_exit(lambda f=f: f.readline())) for f in self._files]

    def close(self) -> None:
        """Ranks end when their link does; those that do not are killed."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            common.note(f"{self._name}: did not end")
            common.kill_children()
            return
        if code:
            common.note(f"{self._name}: exit {code}")

    def _accept(self, listener: socket.socket, n: int) -> None:
        end = time.monotonic() + START_S
        links: dict[int, socket.socket] = {}
        with contextlib.closing(_PidFd(self._process.pid)) as ended:
            while len(links) < n:
                ready, _, _ = select.select([listener, ended], [], [], end - time.monotonic())
                if listener not in ready:
                    sys.exit(f"{self._name}: {len(links)} of {n} ranks came up")
                link, _ = listener.accept()
                self._links.append(link)
                link.settimeout(ANSWER_S)
                word, rank = link.makefile().readline().split()
                assert word == "hello"
                links[int(rank)] = link
        self._links = [links[rank] for rank in range(n)]
        self._files = [link.makefile() for link in self._links]

    def _or_exit(self, talk: Callable[[], Any]) -> Any:
        try:
            answer = talk()
        except OSError as e:
            sys.exit(f"{self._name}: {e}")
        if answer == "":
            sys.exit(f"{self._name}: a rank ended too early")
        return answer


class _PidFd:
    """Readable when the process has ended."""

    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def environment(build: common.Build) -> dict[str, str]:
    """Where the ranks find accel; one thread for each of them."""
    path = [str(common.REPOSITORY / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "ACCEL_BUILD": str(build.folder),
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def started(
    build: common.Build, folder: Path, name: str, argv: Sequence[str], n: int | None
) -> Iterator[Ranks]:
    """@n ranks of @argv under `accel launch`; for None one process, started by hand."""
    if n is not None:
        launch = [build.program("accel"), "launch", "--cpu", "-n", str(n)]
        argv = [*launch, "--no-python", *argv]
    ranks = Ranks(folder / f"{name}.socket", argv, n or 1, environment(build))
    try:
        yield ranks
    finally:
        ranks.close()


def installed(python: str, module: str) -> str | None:
    """The version of a module that @python has, or None."""
    ask = [python, "-c", f"import {module}; print({module}.__version__)"]
    r = subprocess.run(ask, capture_output=True, text=True, check=False)
    return r.stdout.strip() if r.returncode == 0 else None


def need_torch(python: str) -> None:
    version = installed(python, "torch")
    if version is None:
        sys.exit(f"{python} has no torch: name another interpreter with --python")
    common.note(f"torch {version}")


# ---- figures -------------------------------------------------------------------


def slowest(samples: Sequence[Sequence[float]]) -> list[float]:
    """Of samples that all ranks took together, one list for each rank: how long the
    slowest took."""
    return [max(of_ranks) for of_ranks in zip(*samples, strict=True)]


def percentile(values: Sequence[float], percent: int) -> float:
    """The sample that @percent of the samples are below."""
    return sorted(values)[len(values) * percent // 100]


# ---- the ranks' side -----------------------------------------------------------


def serve(rank: int, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Do what is asked, until the link ends. The first word of a request names the
    handler, the others are its arguments."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(os.environ[SOCKET])
        with link.makefile("rw") as file:
            print("hello", rank, file=file, flush=True)
            for line in file:
                name, *words = line.split()
                print(json.dumps(handlers[name](*words)), file=file, flush=True)
