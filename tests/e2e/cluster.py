"""Real `accel` jobs for the tests: started in folders of their own, watched, and
checked for what they leave behind.

A `Cluster` is n nodes on this host; so far a job runs on one. Everything a job may
write lies below one private folder, and every process of a job carries a marker
variable, so a test can tell what is its own. Orphans come to the test process, which
is a subreaper: nothing escapes by losing its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "E2E_MARK"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the machine sets so that numeric libraries work on its processor, and the
# switches of the programs under test.
PASSED_ON = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "ACCEL_NO_PIDFD",
    "ASAN_OPTIONS",
    "UBSAN_OPTIONS",
)
PR_SET_CHILD_SUBREAPER = 36
NOBODY = 65534

Text = str | bytes
Env = Mapping[Text, Text]


def be_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def eventually(check: Callable[[], Any], timeout: float = 5.0) -> Any:
    """The first true value of `check`, or its last value when time is up."""
    end = time.monotonic() + timeout
    while True:
        value = check()
        if value or time.monotonic() >= end:
            return value
        time.sleep(0.005)


# --- processes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    name: str


def processes() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        name, _, rest = stat.partition(b"(")[2].rpartition(b")")
        state, parent = rest.split()[:2]
        pid = int(entry.name)
        found[pid] = Process(pid, int(parent), state.decode(), name.decode("utf-8", "replace"))
    return found


def children(pid: int) -> list[Process]:
    return sorted((p for p in processes().values() if p.parent == pid), key=lambda p: p.pid)


def descendants(pid: int) -> list[Process]:
    table = processes()
    tree, todo = [], [pid]
    while todo:
        parent = todo.pop()
        for p in table.values():
            if p.parent == parent:
                tree.append(p)
                todo.append(p.pid)
    return tree


def alive(pid: int) -> bool:
    p = processes().get(pid)
    return p is not None and p.state not in "ZX"


def marked(mark: str) -> list[int]:
    """Living processes whose environment holds the marker."""
    needle = f"{MARK}={mark}".encode()
    pids = []
    for p in processes().values():
        if p.state in "ZX":
            continue
        try:
            if needle in Path(f"/proc/{p.pid}/environ").read_bytes().split(b"\0"):
                pids.append(p.pid)
        except OSError:
            continue
    return pids


def resident_kb(pid: int, field: str = "VmHWM") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no {field}")


def send(pid: int, signo: int) -> None:
    try:
        os.kill(pid, signo)
    except ProcessLookupError:
        pass


# --- what must not be left behind -----------------------------------------------------


def abstract_sockets() -> set[str]:
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    names = (line.split()[-1] for line in lines if len(line.split()) > 7)
    return {n for n in names if n.startswith("@") and "accel" in n}


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def memfds(pids: Iterable[int]) -> set[str]:
    """Control pages and rings that these processes hold, as inode numbers."""
    held = set()
    for pid in pids:
        try:
            for fd in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(fd.path).startswith("/memfd:accel"):
                    held.add(str(os.stat(fd.path).st_ino))
        except OSError:
            continue
    return held


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


# --- jobs -----------------------------------------------------------------------------


@dataclass
class Result:
    code: int
    out: bytes
    err: bytes
    jobdir: Path | None
    seconds: float

    @property
    def text(self) -> str:
        return self.out.decode("utf-8", "replace")

    @property
    def talk(self) -> str:
        return self.err.decode("utf-8", "replace")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def _job(self) -> Path:
        assert self.jobdir, f"no job folder; accel said:\n{self.talk}"
        return self.jobdir

    def file(self, rank: int, stream: str = "out", attempt: int = 0) -> Path:
        return self._job() / f"attempt-{attempt}" / f"0-{rank}.{stream}"

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self._job() / "report.json").read_text())

    @property
    def plan(self) -> dict[str, Any]:
        return json.loads((self._job() / "plan.json").read_text())

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = (self._job() / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


class Fifo:
    """Lines that workers write to say how far they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        # Read and write: never at its end while workers come and go.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self._lines: list[str] = []

    def __str__(self) -> str:
        return str(self.path)

    def _read(self, timeout: float) -> None:
        if not select.select([self.fd], [], [], max(timeout, 0))[0]:
            return
        *lines, self._rest = (self._rest + os.read(self.fd, 65536)).split(b"\n")
        self._lines += [line.decode() for line in lines]

    def take(self, n: int, word: str = "", timeout: float = 20.0) -> list[list[str]]:
        """The next `n` lines that begin with `word`, split in words."""
        end = time.monotonic() + timeout
        while True:
            hits = [line for line in self._lines if line.startswith(word)][:n]
            if len(hits) == n:
                for hit in hits:
                    self._lines.remove(hit)
                return [hit.split() for hit in hits]
            if time.monotonic() >= end:
                raise AssertionError(f"{len(hits)} of {n} workers said '{word}': {self._lines}")
            self._read(end - time.monotonic())

    def release(self, n: int = 1) -> None:
        """Let `n` waiting workers go on."""
        os.write(self.fd, b"x" * n)

    def close(self) -> None:
        os.close(self.fd)


class Job:
    """A running `accel`."""

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[Text],
        env: dict[bytes, bytes],
        stdin: Any,
        tty: bool,
        hold: bool,
    ) -> None:
        self.cluster = cluster
        self.argv = list(argv)
        self._before = set(cluster.job_folders())
        self._began = time.monotonic()
        self._chunks: dict[str, list[bytes]] = {"out": [], "err": []}
        self._threads: list[threading.Thread] = []
        self._seen = threading.Condition()
        self._reading = threading.Event()
        if not hold:
            self._reading.set()
        self.master = -1
        if tty:
            self._spawn_on_tty(env)
        else:
            self._spawn(env, stdin)
        cluster.jobs.append(self)

    @property
    def pid(self) -> int:
        return self.proc.pid

    def _spawn(self, env: dict[bytes, bytes], stdin: Any) -> None:
        feed = subprocess.PIPE if isinstance(stdin, bytes) else (stdin or subprocess.DEVNULL)
        self.proc = subprocess.Popen(
            self.argv,
            env=env,
            cwd=self.cluster.cwd,
            stdin=feed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.proc.stdout and self.proc.stderr
        self._collect("out", self.proc.stdout.fileno())
        self._collect("err", self.proc.stderr.fileno())
        if isinstance(stdin, bytes):
            assert self.proc.stdin
            try:
                self.proc.stdin.write(stdin)
                self.proc.stdin.close()
            except BrokenPipeError:
                pass

    def _spawn_on_tty(self, env: dict[bytes, bytes]) -> None:
        self.master, slave = os.openpty()
        # setsid -c makes the terminal the controlling one and executes in place,
        # so a typed Ctrl-C comes from the kernel as it does for a user.
        self.proc = subprocess.Popen(
            ["setsid", "-c", *self.argv],
            env=env,
            cwd=self.cluster.cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self._collect("out", self.master)

    def _collect(self, stream: str, fd: int) -> None:
        tty = self.master >= 0

        def pump() -> None:
            self._reading.wait()
            while self.master >= 0 or not tty:
                try:
                    chunk = os.read(fd, 1 << 20)
                except OSError:  # a terminal whose last user has gone
                    chunk = b""
                with self._seen:
                    if chunk:
                        self._chunks[stream].append(chunk)
                    self._seen.notify_all()
                if not chunk:
                    return

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        self._threads.append(thread)

    def read_on(self) -> None:
        """Read the output of a job that was started with `hold`."""
        self._reading.set()

    def so_far(self, stream: str = "out") -> bytes:
        return b"".join(self._chunks[stream])

    def expect(self, text: bytes, stream: str = "out", timeout: float = 20.0) -> None:
        """Return once `text` was printed."""
        with self._seen:
            if not self._seen.wait_for(lambda: text in self.so_far(stream), timeout):
                raise AssertionError(f"{text!r} did not appear in {self.so_far(stream)!r}")

    def hang_up(self) -> None:
        """Close the terminal of a job that was started with `hold`."""
        os.close(self.master)
        self.master = -1
        self.read_on()

    def keys(self, data: bytes) -> None:
        os.write(self.master, data)

    def signal(self, signo: int) -> None:
        self.proc.send_signal(signo)

    @property
    def keeper(self) -> int:
        found = eventually(lambda: [c for c in children(self.pid) if c.name.startswith("acceld")])
        assert found, "accel has started no acceld"
        return found[0].pid

    @property
    def daemon(self) -> int:
        keeper = self.keeper
        found = eventually(lambda: children(keeper))
        assert found, "the keeper has no daemon"
        return found[0].pid

    @property
    def workers(self) -> list[int]:
        return [c.pid for c in children(self.daemon)]

    @property
    def jobdir(self) -> Path | None:
        new = [f for f in self.cluster.job_folders() if f not in self._before]
        return new[0] if len(new) == 1 else None

    def wait(self, timeout: float = 30.0) -> Result:
        try:
            code = self.proc.wait(timeout)
        except subprocess.TimeoutExpired:
            shown = {s: self.so_far(s)[-4000:] for s in self._chunks}
            table = descendants(self.pid)
            raise AssertionError(
                f"{self.argv} did not end in {timeout} s: {shown} {table}"
            ) from None
        seconds = time.monotonic() - self._began
        for thread in self._threads:
            thread.join(5)
        stuck = [t for t in self._threads if t.is_alive()]
        assert not stuck, "accel has ended but somebody still holds its output"
        return Result(code, self.so_far("out"), self.so_far("err"), self.jobdir, seconds)

    def close(self) -> None:
        if self.master >= 0:
            self.hang_up()
        self.read_on()
        for stream in (self.proc.stdin, self.proc.stdout, self.proc.stderr):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass


class Cluster:
    """n nodes on this host, with folders of their own."""

    def __init__(self, n: int, build: Path) -> None:
        if n != 1:
            raise ValueError("a job runs on one node")
        self.build = build
        self.accel = build / "accel"
        self.acceld = build / "acceld"
        self.worker = build / "tests" / "e2e" / "e2e_worker"
        self.mark = uuid.uuid4().hex
        self.jobs: list[Job] = []
        self.fifos: list[Fifo] = []
        # Short, since a socket's path has 107 bytes at most.
        self.root = Path(tempfile.mkdtemp(prefix="e2e-"))
        self.root.chmod(0o755)
        for name in ("home", "state", "run", "tmp", "cwd", "files"):
            folder = self.root / name
            folder.mkdir(mode=0o700)
            setattr(self, name, folder)
        self._shm, self._abstract = shared_memory(), abstract_sockets()
        self._cwd: set[str] | None = None

    home: Path
    state: Path
    run: Path
    tmp: Path
    cwd: Path
    files: Path

    def fifo(self, name: str = "ready") -> Fifo:
        fifo = Fifo(self.files / name)
        self.fifos.append(fifo)
        return fifo

    def write(self, path: Path | str, text: Text, mode: int = 0o600) -> Path:
        """A file for the test, in `files` unless the path says otherwise."""
        path = self.files / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    def environment(
        self, more: Env | None = None, without: Iterable[str] = ()
    ) -> dict[bytes, bytes]:
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        env |= {
            "PATH": SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.state),
            "XDG_RUNTIME_DIR": str(self.run),
            "TMPDIR": str(self.tmp),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in without:
            env.pop(name, None)
        whole = {os.fsencode(k): os.fsencode(v) for k, v in env.items()}
        whole |= {os.fsencode(k): os.fsencode(v) for k, v in (more or {}).items()}
        whole[MARK.encode()] = self.mark.encode()
        return whole

    def install(self) -> Path:
        """Copies of the programs in a folder that any user may reach, as
        `meson install` lays them. Returns the folder."""
        to = self.root / "bin"
        if not to.exists():
            to.mkdir(mode=0o755)
            for program in (self.accel, self.acceld, self.worker):
                shutil.copy(program, to / program.name)
                (to / program.name).chmod(0o755)
            self.accel, self.acceld = to / "accel", to / "acceld"
            self.worker = to / "e2e_worker"
        return to

    def as_nobody(self) -> list[str]:
        """What to put before a command so that file permissions count: root is
        above them. Everything below the cluster's folder goes to that user."""
        if os.geteuid() != 0:
            return []
        self.install()
        for path in [self.home, self.state, self.run, self.tmp, self.cwd, self.files]:
            for each in [path, *path.rglob("*")]:
                os.chown(each, NOBODY, NOBODY, follow_symlinks=False)
        return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]

    def job_folders(self) -> list[Path]:
        jobs = self.state / "accel" / "jobs"
        return sorted(jobs.iterdir()) if jobs.is_dir() else []

    def run_accel(
        self,
        *args: Text | Path,
        env: Env | None = None,
        without: Iterable[str] = (),
        stdin: Any = None,
        tty: bool = False,
        prefix: Sequence[Text] = (),
        accel: Path | None = None,
        timeout: float = 30.0,
    ) -> Result:
        """Any `accel` command, to its end."""
        return self._start(args, env, without, stdin, tty, prefix, accel, False).wait(timeout)

    def launch(self, *args: Text | Path, **more: Any) -> Result:
        return self.run_accel("launch", *args, **more)

    def start(
        self,
        *args: Text | Path,
        env: Env | None = None,
        without: Iterable[str] = (),
        stdin: Any = None,
        tty: bool = False,
        prefix: Sequence[Text] = (),
        accel: Path | None = None,
        hold: bool = False,
    ) -> Job:
        """`accel launch`, running when this returns. With `hold`, nobody reads its
        output until read_on()."""
        return self._start(("launch", *args), env, without, stdin, tty, prefix, accel, hold)

    def _start(
        self,
        args: Sequence[Text | Path],
        env: Env | None,
        without: Iterable[str],
        stdin: Any,
        tty: bool,
        prefix: Sequence[Text],
        accel: Path | None,
        hold: bool,
    ) -> Job:
        if self._cwd is None:
            self._cwd = tree(self.cwd)
        words = [a if isinstance(a, bytes) else str(a) for a in args]
        argv = [*prefix, str(accel or self.accel), *words]
        return Job(self, argv, self.environment(env, without), stdin, tty, hold)

    def left_processes(self) -> list[int]:
        known = {job.pid for job in self.jobs}
        own = [p for p in descendants(os.getpid()) if p.pid not in known and p.state not in "ZX"]
        return sorted({p.pid for p in own} | (set(marked(self.mark)) - {os.getpid()}))

    def left_sockets(self) -> list[str]:
        """Abstract ones. A supervisor's is named by a path: not those of jobs that others
        run on this machine."""
        new = abstract_sockets() - self._abstract
        return sorted(n for n in new if not n.startswith("@/") or str(self.root) in n)

    def left_cgroups(self) -> list[str]:
        jobs = {f"accel-{folder.name}" for folder in self.job_folders()}
        return [p.name for p in Path("/sys/fs/cgroup").rglob("accel-*") if p.name in jobs]

    def kill_everything(self) -> list[int]:
        """SIGKILL to whatever is left, until nothing is. Returns what it was."""
        killed: set[int] = set()
        for _ in range(200):
            left = self.left_processes() + [j.pid for j in self.jobs if j.proc.poll() is None]
            if not left:
                break
            killed |= set(left)
            for pid in left:
                send(pid, signal.SIGKILL)
            time.sleep(0.005)
        return sorted(killed)

    def _reap_orphans(self) -> None:
        known = {job.pid for job in self.jobs}
        for p in children(os.getpid()):
            if p.pid not in known and p.state == "Z":
                os.waitpid(p.pid, os.WNOHANG)

    def leaks(self, timeout: float = 5.0, allowed: Iterable[str] = ()) -> dict[str, Any]:
        """What jobs have left behind, by kind, but for the kinds that are allowed. A
        process may need a moment to go."""
        found: dict[str, Any] = {}
        allowed = list(allowed)

        def look() -> bool:
            table, left = processes(), self.left_processes()
            files = [str(p.relative_to(self.run)) for p in self.run.rglob("*") if not p.is_dir()]
            found.update(
                {
                    "processes": [(pid, table[pid].name) for pid in left if pid in table],
                    "files in the runtime folder": files,
                    "abstract sockets": self.left_sockets(),
                    "shared memory": sorted(shared_memory() - self._shm),
                    "cgroups": self.left_cgroups(),
                    "memfds": sorted(memfds([*left, os.getpid()])),
                    "files in the working folder": sorted(
                        tree(self.cwd) - (tree(self.cwd) if self._cwd is None else self._cwd)
                    ),
                    "files in the temporary folder": sorted(tree(self.tmp)),
                    "files in the home folder": sorted(tree(self.home)),
                }
            )
            for kind in allowed:
                found.pop(kind, None)
            return not any(found.values())

        eventually(look, timeout)
        self._reap_orphans()
        return {kind: what for kind, what in found.items() if what}

    def close(self) -> None:
        self.kill_everything()
        for job in self.jobs:
            job.close()
        for fifo in self.fifos:
            fifo.close()
        self._reap_orphans()
        shutil.rmtree(self.root, ignore_errors=True)
