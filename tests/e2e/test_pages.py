"""Control pages and the ring: what the supervisor hands to its workers, how a program
gets hold of it whatever stands between, and what both say to each other there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pages
import pytest
from pages import Pages
from test_contract import cores, read_env

from cluster import Cluster, Fifo, Job, Result, eventually, send

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
ADDRESSES = pytest.mark.parametrize("how", ["path", "name"])

# Descriptors a worker was born with that are the supervisor's memory.
SHOW_MEMFDS = """
import os
links = {n: os.readlink(f"/proc/self/fd/{n}") for n in map(int, os.listdir("/proc/self/fd"))
         if os.path.exists(f"/proc/self/fd/{n}")}
print(sorted(v.split()[0] for v in links.values() if v.startswith("/memfd:")))
"""


def address(cluster: Cluster, how: str = "path") -> str:
    path = pages.path_of(cluster.run)
    return path if how == "path" else pages.name_of(path)


@contextmanager
def pages_of(cluster: Cluster, n: int, how: str = "path") -> Iterator[list[Pages]]:
    """Those of all ranks of the only job."""
    with ExitStack() as stack:
        yield [stack.enter_context(pages.pages(address(cluster, how), r)) for r in range(n)]


def start_pausing(cluster: Cluster, n: int, *words: str, **more: object) -> Job:
    """A job whose ranks all run, and wait."""
    ready = cluster.fifo()
    job = cluster.start("-n", str(n), cluster.worker, *words, "ready", ready, "pause", **more)
    ready.take(n, "ready")
    return job


def end(job: Job) -> None:
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


def limited(kind: int, value: int) -> list[str]:
    """A command that lowers a limit and becomes what follows it."""
    code = f"import os, resource, sys; resource.setrlimit({kind}, ({value}, {value}))"
    return [sys.executable, "-c", f"{code}; os.execv(sys.argv[1], sys.argv[1:])"]


# --- what is handed out -----------------------------------------------------------------


def test_a_worker_inherits_its_page_and_the_ring_and_nothing_else(cluster: Cluster) -> None:
    r = cluster.launch("-n", "2", cluster.write("fds.py", SHOW_MEMFDS))
    own = "['/memfd:accel-page', '/memfd:accel-ring']"
    assert sorted(r.lines) == [f"[0] {own}", f"[1] {own}"]


@ADDRESSES
def test_both_addresses_hand_out_what_was_inherited(cluster: Cluster, how: str) -> None:
    out = cluster.files / "env"
    job = start_pausing(cluster, 3, "env", str(out))
    with pages_of(cluster, 3, how) as held:
        for rank, p in enumerate(held):
            env, control = read_env(out, rank), p.control()
            assert (control.magic, control.version) == (pages.PAGE_MAGIC, 1)
            assert (control.rank, control.attempt, control.owner) == (rank, 0, 0)
            assert pages.inode(p.page_fd) == int(env["ACCEL_CONTROL_INO"])
            assert p.ring_fd is not None
            assert pages.inode(p.ring_fd) == control.ring_inode
            assert control.n_cores == cores()
            assert all(pages.seals(fd) & pages.SEALS == pages.SEALS for fd in p.fds)
            inherited = os.stat(f"/proc/{job.workers[rank]}/fd/{control.ring_fd}")
            assert inherited.st_ino == control.ring_inode
            head = pages.RING_PAGE.unpack(os.pread(p.ring_fd, pages.RING_PAGE.size, 0))
            assert (head[0], head[2]) == (pages.RING_MAGIC, 3)
            assert head[4] == control.nonce
        assert len({pages.inode(p.page_fd) for p in held}) == 3
        assert len({p.control().ring_inode for p in held}) == 1
        assert len({p.control().nonce for p in held}) == 1
    end(job)


def test_two_jobs_share_nothing(cluster: Cluster) -> None:
    nonces = set()
    for _ in range(2):
        job = start_pausing(cluster, 1)
        with pages_of(cluster, 1) as (p,):
            nonces.add(p.control().nonce)
        end(job)
        os.unlink(cluster.files / "ready")
    assert len(nonces) == 2


@ADDRESSES
def test_a_rank_that_is_not_there_has_no_page(cluster: Cluster, how: str) -> None:
    job = start_pausing(cluster, 2)
    with pages.connect(address(cluster, how)) as s:
        for rank in (2, 99, 2**32 - 1):
            assert pages.ask(s, rank) == (errno.ENOENT, [])
        error, fds = pages.ask(s, 1)  # the connection has survived
        assert not error and len(fds) == 2
        Pages(fds).close()
    end(job)


def test_a_worker_that_has_ended_has_no_page(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "2", cluster.worker, "if", "0", "exit", "0", "ready", ready, "pause")
    ready.take(1, "ready")
    with pages.connect(address(cluster)) as s:

        def answer() -> int:
            error, fds = pages.ask(s, 0)
            for fd in fds:
                os.close(fd)
            return error

        assert eventually(lambda: answer() == errno.ENOENT)
    end(job)


def test_many_askers_at_once_are_all_served(cluster: Cluster) -> None:
    job = start_pausing(cluster, 2)
    with ExitStack() as stack:
        for i in range(40):
            how = ("path", "name")[i % 2]
            s = stack.enter_context(pages.connect(address(cluster, how)))
            error, fds = pages.ask(s, i % 2)
            assert not error
            stack.enter_context(Pages(fds))
    end(job)


@ROOT_ONLY
def test_a_stranger_gets_nothing_under_the_abstract_name(cluster: Cluster) -> None:
    job = start_pausing(cluster, 1)
    name = address(cluster, "name")
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setuid(65534)
        try:
            with pages.connect(name) as s:
                pages.ask(s, 0)
            os._exit(1)
        except (ConnectionResetError, BrokenPipeError):
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    end(job)


@pytest.mark.parametrize("how", ["path", "name"])
@pytest.mark.parametrize(
    "packet",
    [b"", b"x", b"\xff" * 12, b"\x01\x00\x00\x11\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00"],
    ids=["nothing", "a byte", "another version", "a field cut short"],
)
def test_nonsense_is_hung_up_on(cluster: Cluster, how: str, packet: bytes) -> None:
    job = start_pausing(cluster, 1)
    with pages.connect(address(cluster, how)) as s:
        s.send(packet)
        try:
            assert s.recv(4096) == b""
        except ConnectionResetError:
            pass
    with pages_of(cluster, 1, how):
        pass
    end(job)


def test_an_abstract_name_does_not_outlive_its_supervisor(cluster: Cluster) -> None:
    job = start_pausing(cluster, 1)
    name = address(cluster, "name")
    pages.connect(name).close()
    send(job.daemon, signal.SIGKILL)
    assert job.wait(10).code == 4
    with pytest.raises(ConnectionRefusedError):
        pages.connect(name)


def test_the_cores_are_told_though_the_user_chose_the_threads(cluster: Cluster) -> None:
    job = start_pausing(cluster, 1, env={"OMP_NUM_THREADS": "1"})
    with pages_of(cluster, 1) as (p,):
        assert p.control().n_cores == cores()
    end(job)


# --- no ring ----------------------------------------------------------------------------


def test_more_ranks_than_a_ring_holds_run_without_one(cluster: Cluster) -> None:
    r = cluster.launch("-n", "1025", "true", timeout=60)
    assert r.code == 0
    (line,) = r.talk.splitlines()
    assert "1025 ranks" in line and "1024" in line


def test_a_limit_on_files_too_small_for_a_ring_is_no_end_of_the_job(cluster: Cluster) -> None:
    job = start_pausing(cluster, 2, prefix=limited(resource.RLIMIT_FSIZE, 1 << 20))
    with pages_of(cluster, 2) as held:
        for p in held:
            assert len(p.fds) == 1
            assert (p.control().ring_fd, p.control().ring_inode) == (-1, 0)
    job.signal(signal.SIGTERM)
    r = job.wait()
    assert r.code == 143
    assert re.search(r"shared memory of 2 ranks: .*`ulimit -f`", r.talk), r.talk


def test_a_limit_on_files_still_ends_a_worker_as_without_accel(cluster: Cluster) -> None:
    """The supervisor ignores the signal; its workers are born with what accel had."""
    r = cluster.launch("grep", "SigIgn", "/proc/self/status")
    assert not int(r.text.split()[1], 16) & 1 << (signal.SIGXFSZ - 1)


# --- stop -------------------------------------------------------------------------------


def start_hearing(cluster: Cluster, n: int) -> tuple[Job, Fifo]:
    """Ranks that say when a signal came, and go on."""
    heard = cluster.fifo("heard")
    return start_pausing(cluster, n, "term-says", str(heard)), heard


@pytest.mark.parametrize(
    ("whom", "signo"),
    [("accel", signal.SIGTERM), ("accel", signal.SIGINT), ("acceld", signal.SIGTERM)],
)
def test_who_hears_a_signal_may_read_why(cluster: Cluster, whom: str, signo: int) -> None:
    job, heard = start_hearing(cluster, 8)
    with pages_of(cluster, 8) as held:
        assert [p.control().stop for p in held] == [0] * 8
        send(job.pid if whom == "accel" else job.daemon, signo)
        heard.take(1, "term")
        assert [p.control().stop for p in held] == [1] * 8
    job.signal(signal.SIGKILL)
    job.proc.wait(5)


def test_a_lost_client_is_a_reason_to_stop(cluster: Cluster) -> None:
    job, heard = start_hearing(cluster, 2)
    with pages_of(cluster, 2) as held:
        job.signal(signal.SIGKILL)
        heard.take(2, "term")
        assert [p.control().stop for p in held] == [1, 1]
    job.proc.wait(5)


def test_a_failure_is_no_stop_in_order(cluster: Cluster) -> None:
    heard, ready, go = cluster.fifo("heard"), cluster.fifo(), cluster.fifo("go")
    words = ["term-says", heard, "ready", ready, "if", "0", "wait", go, "if", "0", "exit", "3"]
    job = cluster.start("-n", "2", "--grace", "1", cluster.worker, *words, "pause")
    ready.take(2)
    with pages_of(cluster, 2) as held:
        go.release()
        heard.take(1, "term")
        assert held[1].control().stop == 0
        assert job.wait().code == 3


# --- steps ------------------------------------------------------------------------------


def test_status_shows_how_far_the_ranks_are(cluster: Cluster) -> None:
    job = start_pausing(cluster, 3)

    name = cluster.job_folders()[0].name  # the user may have other jobs

    def shown() -> tuple[str, tuple[int, int]]:
        lines = cluster.run_accel("status").lines
        listed = json.loads(cluster.run_accel("status", "--json").text)
        (text,) = (line for line in lines if line.startswith(name))
        (job,) = (job for job in listed if job["job"] == name)
        return text, (job["step_lowest"], job["step_highest"])

    with pages_of(cluster, 3) as held:
        text, steps = shown()
        assert "step" not in text and steps == (0, 0)
        for step, p in zip((120, 118, 119), held, strict=True):
            p.set_step(step)
        text, steps = shown()
        assert ", steps 118 to 120" in text and steps == (118, 120)
        for p in held:
            p.set_step(2**33)
        text, steps = shown()
        assert f", step {2**33}" in text and steps == (2**33, 2**33)
    end(job)


# --- programs that use libaccel ---------------------------------------------------------
#
# Whatever stands between accel and the program: both ranks meet.

# Closes every descriptor but the three standard ones.
BY_SUBPROCESS = [
    sys.executable,
    "-c",
    "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
]
KEPT = "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|ACCEL_[A-Z_]*|E2E_MARK"
BY_ENV_I = ["sh", "-c", f"exec env -i $(env | grep -E '^({KEPT})=') \"$@\"", "sh"]
WRAPPERS = {
    "nothing": [],
    "sh": ["sh", "-c", '"$@"; exit $?', "sh"],
    "subprocess": BY_SUBPROCESS,
    "env -i": BY_ENV_I,
    "env -i in subprocess": [*BY_SUBPROCESS, *BY_ENV_I],
    "nice nohup setsid": ["nice", "nohup", "setsid", "--wait"],
    "one of two": [
        "sh",
        "-c",
        f'[ $RANK = 0 ] || set -- {shlex.join(BY_SUBPROCESS)} "$@"; "$@"',
        "sh",
    ],
}
HIDE = 'mount -t tmpfs none "${ACCEL_SOCKET%/*}" && test ! -e "$ACCEL_SOCKET" || exit 97; exec "$@"'
HIDDEN_FOLDER = ["unshare", "--mount", "sh", "-c", HIDE, "sh"]
NAMESPACES = {
    "mount, folder hidden": [*HIDDEN_FOLDER, *BY_SUBPROCESS],
    "net": ["unshare", "--net", *BY_SUBPROCESS],
    "pid": ["unshare", "--pid", "--fork"],
    "pid, in subprocess": ["unshare", "--pid", "--fork", *BY_SUBPROCESS],
    "user": ["unshare", "--user"],
    "user, in subprocess": ["unshare", "--user", "--map-root-user", *BY_SUBPROCESS],
    "mount and net, inherited": ["unshare", "--net", *HIDDEN_FOLDER],
}


@pytest.fixture
def probe(cluster: Cluster) -> Path:
    return cluster.build / "tests" / "e2e" / "page_probe"


def in_wrapper(code: str) -> list[str]:
    """Python that does something to what the worker inherited, and becomes the program."""
    head = 'import fcntl, os, sys; number = int(os.environ["ACCEL_CONTROL_FD"])'
    return [sys.executable, "-c", f"{head}\n{code}\nos.execv(sys.argv[1], sys.argv[1:])"]


def said(r: Result, n: int = 2) -> dict[int, list[str]]:
    """What each of several ranks printed."""
    return {
        rank: [line.removeprefix(f"[{rank}] ") for line in r.lines if line[1] == str(rank)]
        for rank in range(n)
    }


def assert_meet(r: Result) -> None:
    assert r.code == 0, (r.text, r.talk)
    for rank, lines in said(r).items():
        joined = f"join: rank {rank} of 2, local rank {rank} of 2"
        assert lines == [joined, "barrier: ok", "sum: 3"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_meet_through_a_wrapper(cluster: Cluster, probe: Path, wrapper: str) -> None:
    assert_meet(cluster.launch("-n", "2", *WRAPPERS[wrapper], probe, "join", "barrier", "sum"))


@ROOT_ONLY
@pytest.mark.parametrize("wrapper", NAMESPACES)
def test_ranks_meet_from_namespaces(cluster: Cluster, probe: Path, wrapper: str) -> None:
    words = NAMESPACES[wrapper]
    flags = list(itertools.takewhile(lambda word: word.startswith("--"), words[1:]))
    if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no such namespace can be made here")
    assert_meet(cluster.launch("-n", "2", *words, probe, "join", "barrier", "sum"))


@ROOT_ONLY
def test_behind_a_wall_the_sentence_says_so(cluster: Cluster, probe: Path) -> None:
    wall = ["unshare", "--net", *HIDDEN_FOLDER, *BY_SUBPROCESS]
    r = cluster.launch("-n", "2", *wall, probe, "join")
    if r.code == 97 or "unshare" in r.talk:
        pytest.skip("no such namespaces can be made here")
    assert r.code == 8
    assert "join: ACCEL_E_UNREACHABLE" in r.text and "another container" in r.text


CLOSED = "os.close(number)"
FOREIGN = 'os.dup2(os.open(os.environ["FOREIGN"], os.O_RDWR), number)'
OTHER_PAGE = """
fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
os.write(fd, os.pread(number, 4096, 0))
fcntl.fcntl(fd, 1033, 7)
os.dup2(fd, number)
"""
NOT_A_NUMBER = 'os.environ["ACCEL_CONTROL_FD"] = "-x"'
UNSET = 'del os.environ["ACCEL_CONTROL_FD"], os.environ["ACCEL_CONTROL_INO"]'
NO_RING = """
for n in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{n}") and "accel-ring" in os.readlink(f"/proc/self/fd/{n}"):
        os.close(int(n))
"""


@pytest.mark.parametrize(
    "what",
    [CLOSED, FOREIGN, OTHER_PAGE, NOT_A_NUMBER, UNSET, NO_RING],
    ids=["closed", "foreign", "other page", "not a number", "unset", "no ring"],
)
def test_a_descriptor_that_is_not_ours_is_left_alone(
    cluster: Cluster, probe: Path, what: str
) -> None:
    foreign = cluster.write("foreign", b"mine" * 4096)
    words = [*in_wrapper(what), probe, "join", "barrier", "sum"]
    assert_meet(cluster.launch("-n", "2", *words, env={"FOREIGN": str(foreign)}))
    assert foreign.read_bytes() == b"mine" * 4096


FUTURE_PAGE = """
fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
page = bytearray(os.pread(number, 4096, 0))
page[8] = 2
os.write(fd, page)
fcntl.fcntl(fd, 1033, 7)
os.set_inheritable(fd, True)
os.environ["ACCEL_CONTROL_FD"] = str(fd)
os.environ["ACCEL_CONTROL_INO"] = str(os.fstat(fd).st_ino)
"""


def test_a_page_of_another_version_is_told_and_not_used(cluster: Cluster, probe: Path) -> None:
    r = cluster.launch(*in_wrapper(FUTURE_PAGE), probe, "join")
    assert r.code == 7
    assert r.text.startswith("join: ACCEL_E_VERSION: ")
    assert "version 2" in r.text and "same release" in r.text


def test_a_socket_path_as_long_as_can_be_works(cluster: Cluster, probe: Path) -> None:
    """And so does the abstract name of the same text."""
    end = len("/accel/20260131-235959-abcd.sock")
    deep = cluster.run / ("d" * (107 - end - len(str(cluster.run)) - 1))
    deep.mkdir()
    env = {"XDG_RUNTIME_DIR": str(deep)}
    for wrapper in (BY_SUBPROCESS, NAMESPACES["mount, folder hidden"]):
        show = ["sh", "-c", 'test ${#ACCEL_SOCKET} = 107 && exec "$@"', "sh"]
        r = cluster.launch("-n", "2", *show, *wrapper, probe, "join", "barrier", "sum", env=env)
        if r.code == 97 or "unshare" in r.talk:
            pytest.skip("no new mount namespace can be made here")
        assert_meet(r)


# --- one process a rank -----------------------------------------------------------------


def test_a_child_with_its_parents_environment_is_told_whose_rank_it_is(
    cluster: Cluster, probe: Path
) -> None:
    script = f'echo "$$"; exec {probe} join spawn join barrier'
    r = cluster.launch("-n", "2", "sh", "-c", script)
    assert r.code == 0, r.text
    for rank, lines in said(r).items():
        pid, joined, refused, *_, met = lines
        assert joined.startswith("join: rank")
        assert refused.startswith("join: ACCEL_E_OWNED: ")
        assert f"process {pid} is rank {rank}" in refused
        assert any("env -u RANK" in line for line in lines)
        assert met == "barrier: ok"


def test_what_the_sentence_names_lets_a_child_run_by_itself(cluster: Cluster, probe: Path) -> None:
    refused = cluster.launch(probe, "join", "spawn", "join")
    (advice,) = (line.strip() for line in refused.lines if "env -u" in line)
    alone = f"{advice.removesuffix('...')} {probe} join"
    r = cluster.launch("-n", "2", "sh", "-c", f"{probe} join; {alone}")
    assert said(r)[1] == [
        "join: rank 1 of 2, local rank 1 of 2",
        "join: rank 0 of 1, local rank 0 of 1",
    ]


@pytest.mark.parametrize("wrapper", ["nothing", "subprocess"])
def test_programs_one_after_another_are_each_the_rank(
    cluster: Cluster, probe: Path, wrapper: str
) -> None:
    program = f"{shlex.join(WRAPPERS[wrapper])} {probe} join barrier sum"
    r = cluster.launch("-n", "2", "sh", "-c", f"{program} && {program} finish && {program}")
    assert r.code == 0, r.text
    for lines in said(r).values():
        assert lines.count("sum: 3") == 3


def test_a_fork_of_a_rank_is_told_what_it_is(cluster: Cluster, probe: Path) -> None:
    words = ["join", "fork", "barrier", "fork", "sum", "fork", "join", "barrier", "sum"]
    r = cluster.launch("-n", "2", probe, *words)
    assert r.code == 0, r.text
    for lines in said(r).values():
        for call in ("barrier", "sum", "join"):
            assert any(line.startswith(f"{call}: ACCEL_E_FORKED: ") for line in lines)
        assert lines[-2:] == ["barrier: ok", "sum: 3"], "the rank itself is as before"


# --- ranks that do not come -------------------------------------------------------------

DEAF = ["ignore", str(int(signal.SIGTERM))]


@pytest.mark.tree
def test_a_rank_that_is_killed_is_named_to_the_others(cluster: Cluster, probe: Path) -> None:
    ready = cluster.fifo()
    words = [*DEAF, "join", "if", "1", "ready", ready, "if", "1", "pause", "barrier", "barrier"]
    job = cluster.start("-n", "3", probe, *words)
    pid = int(ready.take(1)[0][2])
    began = time.monotonic()
    send(pid, signal.SIGKILL)
    r = job.wait()
    assert time.monotonic() - began < 1.5
    assert r.code == 137
    for rank in (0, 2):
        lines = said(r, 3)[rank][1:]
        assert len(lines) == 2, "the world stays broken"
        for line in lines:
            assert line.startswith("barrier: ACCEL_E_LOST: ")
            assert "rank 1 has died" in line and str(pid) in line


def test_a_rank_that_ends_in_order_is_missed_at_once(cluster: Cluster, probe: Path) -> None:
    words = [*DEAF, "join", "if", "1", "exit", "0", "barrier"]
    r = cluster.launch("-n", "2", probe, *words)
    assert r.code == 3
    assert r.seconds < 5
    assert said(r)[0][1].startswith("barrier: ACCEL_E_LOST: rank 1 has ")


def test_a_rank_that_ends_without_joining_is_missed_at_once(cluster: Cluster, probe: Path) -> None:
    r = cluster.launch("-n", "2", probe, *DEAF, "if", "1", "exit", "0", "join")
    assert r.code == 3
    assert r.seconds < 5
    refused = said(r)[0][0]
    assert refused.startswith("join: ACCEL_E_LOST: ")
    assert "rank 1 has ended without joining" in refused


def test_a_rank_whose_next_program_never_comes_is_missed_at_once(
    cluster: Cluster, probe: Path
) -> None:
    program = f"{probe} {shlex.join(DEAF)} join barrier"
    r = cluster.launch("-n", "2", "sh", "-c", f"{program}; [ $RANK = 1 ] || exec {program}")
    assert r.seconds < 5
    (failed,) = (line for line in said(r)[0] if "ACCEL_E" in line)
    assert failed.startswith("join: ACCEL_E_LOST: ")
    assert "rank 1 has ended without joining" in failed


@pytest.mark.tree
def test_a_rank_that_is_suspended_is_waited_for(cluster: Cluster, probe: Path) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", "ready", ready, "if", "1", "wait", go, "barrier", "sum"]
    job = cluster.start("-n", "2", probe, *words)
    pids = {words[1]: int(words[2]) for words in ready.take(2)}
    send(pids["1"], signal.SIGSTOP)
    go.release()
    time.sleep(0.5)  # not for readiness: the other rank is to look at it a few times
    send(pids["1"], signal.SIGCONT)
    r = job.wait()
    assert r.code == 0, r.text
    assert [lines[-1] for lines in said(r).values()] == ["sum: 3", "sum: 3"]


@pytest.mark.tree
def test_a_rank_that_stays_suspended_is_told_as_that(cluster: Cluster, probe: Path) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", "if", "1", "ready", ready, "if", "1", "wait", go, "barrier"]
    job = cluster.start("-n", "2", probe, *words, env={"ACCEL_TIMEOUT": "1"})
    pid = int(ready.take(1)[0][2])
    send(pid, signal.SIGSTOP)
    r = job.wait()
    assert r.code == 4
    line = said(r)[0][1]
    assert line.startswith("barrier: ACCEL_E_TIMEOUT: ")
    assert f"rank 1 (process {pid}, stopped" in line


def test_a_rank_that_says_why_it_fails_is_quoted(cluster: Cluster, probe: Path) -> None:
    words = [*DEAF, "join", "if", "1", "fail", "the disk is full", "if", "1", "exit", "5"]
    r = cluster.launch("-n", "2", probe, *words, "barrier")
    assert r.code == 5
    assert "rank 1 failed first" in r.talk and "the disk is full" in r.talk
    assert "the disk is full" in said(r)[0][1]
    assert said(r)[0][1].startswith("barrier: ACCEL_E_LOST: ")


# --- stop and steps, through the library ------------------------------------------------


@pytest.mark.parametrize("signo", [signal.SIGTERM, signal.SIGINT])
def test_all_ranks_stop_at_the_same_step(cluster: Cluster, probe: Path, signo: int) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n", "3", probe, "ignore", str(int(signo)), "join", "until-stop", ready, "barrier"
    )
    ready.take(3)
    job.signal(signo)
    r = job.wait()
    assert r.code == 128 + signo
    lines = said(r, 3)
    assert all(own[-1] == "barrier: ok" for own in lines.values())
    (step,) = {own[-2] for own in lines.values()}
    assert re.fullmatch(r"until-stop: step \d+", step)


def test_steps_of_a_program_are_seen_from_outside(cluster: Cluster, probe: Path) -> None:
    ready = cluster.fifo()
    words = ["join", "steps", "120", "if", "1", "steps", "3", "ready", ready, "pause"]
    job = cluster.start("-n", "2", probe, *words)
    ready.take(2)
    assert ", steps 120 to 123" in cluster.run_accel("status").text
    end(job)


def test_without_a_ring_ranks_cannot_meet_and_say_so(cluster: Cluster, probe: Path) -> None:
    small = limited(resource.RLIMIT_FSIZE, 1 << 20)
    r = cluster.launch("-n", "2", probe, "join", prefix=small)
    assert r.code == 8
    assert "join: ACCEL_E_UNREACHABLE: acceld has no shared memory" in r.text
    alone = cluster.launch(probe, "join", "barrier", prefix=small)
    assert alone.code == 0, alone.text
    assert alone.lines == ["join: rank 0 of 1, local rank 0 of 1", "barrier: ok"]
