"""Real processes as ranks of one world, for the tests of the Python package.

They are started with plain subprocess and the variables that torchrun sets; the test
process hosts the store, as torchrun's agent does, so no port can be taken meanwhile.
Each rank runs a program, or a function of a test module whose result comes back:

    def who() -> int:
        return accel.PartialState().process_index

    def test_ranks_are_told_apart(ranks: RunRanks) -> None:
        assert [r.value for r in ranks(3, who)] == [0, 1, 2]
"""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PACKAGES = REPOSITORY / "python"

# What a launcher sets, so that a test that runs under one starts from nothing.
_LAUNCHERS = (
    "ACCEL_",
    "ACCELERATE_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "MV2_",
    "SLURM_",
    "MASTER_",
)
_RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
_KEPT = {"ACCEL_BUILD", "ACCEL_LIBRARY"}

# Runs in each rank: a function by its module and name, its result into a file.
_CALL_FUNCTION = """
import importlib, pickle, sys
module, name, folder, here = sys.argv[1:]
sys.path.insert(0, here)
with open(folder + "/arguments", "rb") as file:
    args, kwargs = pickle.load(file)
value = getattr(importlib.import_module(module), name)(*args, **kwargs)
import os
rank = os.environ.get("TEST_RANK", "0")
with open(f"{folder}/value-{rank}.part", "wb") as file:
    pickle.dump(value, file)
os.rename(f"{folder}/value-{rank}.part", f"{folder}/value-{rank}")
"""


@dataclass
class Rank:
    """What became of one rank. `code` is negative where a signal ended it."""

    rank: int
    code: int
    out: str
    err: str
    value: Any = None


class RunRanks(Protocol):
    def __call__(
        self,
        n: int,
        what: str | Path | Callable[..., Any],
        *args: Any,
        timeout: float = 60,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        variables: Callable[[int, int], dict[str, str]] | None = None,
        **kwargs: Any,
    ) -> list[Rank]: ...


def plain_environment() -> dict[str, str]:
    """This environment without what any launcher set; torch on one thread."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k in _KEPT or not (k.startswith(_LAUNCHERS) or k in _RANK_VARIABLES)
    }
    path = [str(PACKAGES), env.get("PYTHONPATH", "")]
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env


def alone(rank: int, n: int) -> dict[str, str]:
    """The variables of a program started by hand: none."""
    return {}


class Torchrun:
    """The variables torchrun sets, with a store like that of its agent."""

    def __init__(self) -> None:
        import torch.distributed

        self.run_id = uuid.uuid4().hex
        self.store = torch.distributed.TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )

    def __call__(self, rank: int, n: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


class _Output:
    """Collects a stream, and lets a test wait for what it says."""

    def __init__(self, stream: IO[str]) -> None:
        self.text = ""
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self.text += line
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def expect(self, text: str, timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: text in self.text or self._ended, timeout)
            return text in self.text

    def finish(self, timeout: float) -> str:
        self._thread.join(timeout)
        return self.text


class Group:
    """n running ranks. `close()` kills what is left, whatever happened."""

    def __init__(
        self,
        n: int,
        what: str | Path | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        env: Mapping[str, str] | None = None,
        variables: Callable[[int, int], dict[str, str]] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.processes: list[subprocess.Popen[str]] = []
        self._out: list[_Output] = []
        self._err: list[_Output] = []
        # Held on to: the store lives as long as the ranks.
        self._variables = variables or Torchrun()
        try:
            command = self._command(what, args, kwargs)
            for rank in range(n):
                self._start(command, rank, n, env or {})
        except BaseException:
            self.close()
            raise

    def _command(
        self, what: str | Path | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        # A test that is killed takes its ranks along.
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-u"]
        if not callable(what):
            program = ["-c", what] if isinstance(what, str) else [str(what)]
            return command + program + [str(a) for a in args]
        file = Path(inspect.getfile(what))
        (self.folder / "arguments").write_bytes(pickle.dumps((args, kwargs)))
        call = [file.stem, what.__name__, str(self.folder), str(file.parent)]
        return [*command, "-c", _CALL_FUNCTION, *call]

    def _start(self, command: list[str], rank: int, n: int, env: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env={
                **plain_environment(),
                **self._variables(rank, n),
                "TEST_RANK": str(rank),
                **env,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout and process.stderr
        self.processes.append(process)
        self._out.append(_Output(process.stdout))
        self._err.append(_Output(process.stderr))

    def expect(self, rank: int, text: str, timeout: float = 60, of: str = "out") -> None:
        """Wait until the rank has printed `text` to stdout, or with of="err" to stderr."""
        output = self._out if of == "out" else self._err
        if not output[rank].expect(text, timeout):
            raise AssertionError(f"rank {rank} never said {text!r}:\n{self._said(rank)}")

    def expect_waiting(self, rank: int, timeout: float = 60) -> None:
        """Wait until the rank's main thread is asleep, and stays so."""
        end, seen = time.monotonic() + timeout, 0
        stat = Path(f"/proc/{self.processes[rank].pid}/stat")
        while seen < 5:
            if time.monotonic() > end:
                raise AssertionError(f"rank {rank} never waited:\n{self._said(rank)}")
            state = stat.read_text().rpartition(")")[2].split()[0]
            seen = seen + 1 if state == "S" else 0
            time.sleep(0.02)

    def signal(self, rank: int, signo: int) -> None:
        self.processes[rank].send_signal(signo)

    def wait(self, timeout: float = 60) -> list[Rank]:
        """What became of all ranks; those still running at the time limit are killed,
        which is an AssertionError."""
        end = time.monotonic() + timeout
        late = []
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        self._kill()
        if late:
            said = "\n".join(self._said(r) for r in range(len(self.processes)))
            raise AssertionError(f"ranks {late} still ran after {timeout} s\n{said}")
        return [self._result(rank) for rank in range(len(self.processes))]

    def _result(self, rank: int) -> Rank:
        file = self.folder / f"value-{rank}"
        return Rank(
            rank,
            self.processes[rank].returncode,
            self._out[rank].finish(10),
            self._err[rank].finish(10),
            pickle.loads(file.read_bytes()) if file.exists() else None,
        )

    def _said(self, rank: int) -> str:
        out, err = self._out[rank].text, self._err[rank].text
        return f"--- rank {rank} ({self.processes[rank].poll()}) stdout\n{out}\n--- stderr\n{err}"

    def _kill(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def close(self) -> None:
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_ranks(
    n: int,
    what: str | Path | Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    variables: Callable[[int, int], dict[str, str]] | None = None,
    **kwargs: Any,
) -> list[Rank]:
    """Run `what` on n ranks and wait for them.

    `what` is a function at the top level of a test module (called with args and kwargs,
    its result is Rank.value), a program's path, or a program's text. `variables(rank, n)`
    replaces what torchrun sets; `env` is added last. With `check`, a rank that ends with
    another status than 0 is an AssertionError that shows what it said.
    """
    group = Group(n, what, args, kwargs, env, variables)
    try:
        results = group.wait(timeout)
        if check and any(r.code for r in results):
            raise AssertionError("\n".join(group._said(r.rank) for r in results if r.code))
        return results
    finally:
        group.close()
