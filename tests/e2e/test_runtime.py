"""What goes wrong between the ranks of a program that uses libaccel: in each of its
collective calls, with ranks that accel started and with ranks that have only the
variables of torchrun."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import NOBODY, Cluster, Fifo, Job, descendants, eventually, processes, send

WAYS = ["accel", "torchrun"]
BOTH_WAYS = pytest.mark.parametrize("way", WAYS)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

# The ports are never opened: they are part of what names a job.
ports = itertools.count(20000 + os.getpid() % 1000 * 40)


@dataclass(frozen=True)
class Call:
    """A collective call: what all ranks do before it, what the last rank does of it before
    it is gone, and what the others do."""

    name: str
    before: tuple[str, ...] = ()
    half: tuple[str, ...] = ()

    @property
    def needed(self) -> list[str]:
        return list(self.before)


CALLS = {
    c.name: c
    for c in (
        Call("barrier"),
        Call("small"),
        Call("large"),
        Call("broadcast"),
        Call("gather"),
        Call("backward", before=("prepare",)),
        Call("prepare"),
        Call("leave"),
        Call("stop"),
        Call("alloc"),
        Call("in-place", before=("alloc",)),
    )
}
# Where the last rank is lost between the two parts of a call.
HALVES = {
    "gather": Call("gather", half=("gather-half",)),
    "backward": Call("backward", before=("prepare",), half=("backward-half",)),
}
EVERY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


class Ranks:
    """The processes of one job, running; `way` says who started them."""

    def __init__(
        self,
        cluster: Cluster,
        way: str,
        n: int,
        *words: object,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        prefix: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.n = n
        argv = [str(cluster.build / "tests" / "e2e" / "runtime_worker"), *map(str, words)]
        self.job: Job | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        if way == "accel":
            assert not prefix
            self.job = cluster.start("-n", str(n), *argv, env=env)
            return
        port = port or next(ports)
        for rank in range(n):
            own = self.variables(rank, n, port) | dict(env or {})
            self.processes.append(
                subprocess.Popen(
                    [*(prefix or {}).get(rank, ()), *argv],
                    env=cluster.environment(own),
                    cwd=cluster.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )

    @staticmethod
    def variables(rank: int, n: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }

    def wait(self, but: int = -1, timeout: float = 20.0) -> dict[int, list[str]]:
        """What each rank printed, once all have ended. Rank `but` is ended."""
        if self.job:
            r = self.job.wait(timeout)
            lines = {rank: [] for rank in range(self.n)}
            for line in r.lines:
                rank, _, text = line.removeprefix("[").partition("] ")
                lines[int(rank)].append(text)
            return lines
        found = {}
        for rank, p in sorted(enumerate(self.processes), key=lambda each: each[0] == but):
            if rank == but:
                p.kill()
            found[rank] = p.communicate(timeout=timeout)[0].decode().splitlines()
        return found

    @property
    def codes(self) -> list[int | None]:
        return [p.returncode for p in self.processes]


def suspend(pid: int) -> None:
    """Returns once it does nothing any more."""
    send(pid, signal.SIGSTOP)
    assert eventually(lambda: processes()[pid].state == "T")


def pids(fifo: Fifo, n: int) -> dict[int, int]:
    return {int(rank): int(pid) for _, rank, pid in fifo.take(n, "ready")}


def last(lines: dict[int, list[str]], *ranks: int) -> list[str]:
    return [lines[rank][-1] for rank in ranks]


def assert_all_well(lines: dict[int, list[str]]) -> None:
    for own in lines.values():
        assert own and all(re.match(r"join: rank|[\w-]+: (ok|-?\d+)$", line) for line in own), own


ERROR = re.compile(r"(?P<call>[\w-]+): (?P<code>ACCEL_E_\w+) at (?P<ms>\d+): (?P<text>.*)")


def error(line: str) -> re.Match[str]:
    found = ERROR.fullmatch(line)
    assert found, line
    return found


# --- ranks that are lost ----------------------------------------------------------------


def lose(
    cluster: Cluster, way: str, call: Call, event: str
) -> tuple[dict[int, list[str]], int, float]:
    """Rank 2 is lost in `event` while ranks 0 and 1 wait for it in `call`. What was printed,
    its pid and when it was lost, in seconds of the monotonic clock."""
    fifo, go = cluster.fifo(), cluster.fifo("go")
    event_words = {"finished": ["finish"], "failed": ["fail", "the disk\nis full"]}
    words = ["join", *call.needed, "ready", fifo, "unless", 2, "watch", fifo]
    words += ["unless", 2, "ignore", int(signal.SIGTERM)]  # accel ends what is left
    for word in call.half:
        words += ["if", 2, word]
    words += ["if", 2, "wait", go]
    if event in event_words:
        words += ["if", 2, *event_words[event]]
    words += ["if", 2, "pause", call.name, call.name]
    ranks = Ranks(cluster, way, 3, *words)
    pid = pids(fifo, 3)[2]
    fifo.take(2, "waiting")
    when = time.monotonic()
    if event == "killed":
        send(pid, signal.SIGKILL)
    else:
        go.release()
    return ranks.wait(but=2), pid, when


def assert_lost(lines: dict[int, list[str]], call: Call, texts: Sequence[str], when: float) -> None:
    for rank in (0, 1):
        first, second = (error(line) for line in lines[rank][-2:])
        assert (first["call"], first["code"]) == (call.name, "ACCEL_E_LOST")
        assert all(text in first["text"] for text in texts), first["text"]
        assert int(first["ms"]) / 1000 - when < 1
        assert (second["code"], second["text"]) == (first["code"], first["text"])
    assert error(lines[0][-1])["text"] == error(lines[1][-1])["text"]


@BOTH_WAYS
@EVERY_CALL
def test_a_rank_that_is_killed_is_named_within_a_second(
    cluster: Cluster, call: Call, way: str
) -> None:
    lines, pid, when = lose(cluster, way, call, "killed")
    assert_lost(lines, call, ["rank 2 has died", f"process {pid}"], when)


@BOTH_WAYS
@EVERY_CALL
def test_a_rank_that_has_finished_is_named_at_once(cluster: Cluster, call: Call, way: str) -> None:
    lines, pid, when = lose(cluster, way, call, "finished")
    assert_lost(lines, call, ["rank 2 has finished", f"process {pid}"], when)


@BOTH_WAYS
@EVERY_CALL
def test_what_a_rank_failed_of_is_told_at_once(cluster: Cluster, call: Call, way: str) -> None:
    lines, pid, when = lose(cluster, way, call, "failed")
    assert_lost(lines, call, ["rank 2 failed", f"process {pid}", "is full"], when)


@BOTH_WAYS
@pytest.mark.parametrize("event", ["killed", "finished", "failed"])
@pytest.mark.parametrize("call", HALVES.values(), ids=list(HALVES))
def test_a_rank_may_be_lost_in_the_middle_of_a_call(
    cluster: Cluster, call: Call, event: str, way: str
) -> None:
    text = {"killed": "has died", "finished": "has finished", "failed": "failed"}[event]
    lines, pid, when = lose(cluster, way, call, event)
    for rank in (0, 1):
        first, second = (error(line) for line in lines[rank][-2:])
        assert (first["call"], first["code"]) == (call.name, "ACCEL_E_LOST")
        assert f"rank 2 {text}" in first["text"] and f"process {pid}" in first["text"]
        assert int(first["ms"]) / 1000 - when < 1
        assert (second["code"], second["text"]) == (first["code"], first["text"])


@BOTH_WAYS
def test_a_rank_is_killed_amid_heavy_traffic(cluster: Cluster, way: str) -> None:
    fifo = cluster.fifo()
    words = ["join", "ready", fifo, "unless", 1, "ignore", int(signal.SIGTERM)]
    ranks = Ranks(cluster, way, 3, *words, "times", 10**9, "mixed")
    pid = pids(fifo, 3)[1]
    time.sleep(0.2)  # no synchronisation: anywhere in the traffic
    when = time.monotonic()
    send(pid, signal.SIGKILL)
    lines = ranks.wait()
    for rank in (0, 2):
        found = error(next(line for line in lines[rank] if "ACCEL_E" in line))
        assert found["code"] == "ACCEL_E_LOST"
        assert f"rank 1 has died (process {pid})" in found["text"]
        assert int(found["ms"]) / 1000 - when < 1


NEW_PIDS = ["unshare", "--pid", "--fork", "--kill-child"]


@ROOT_ONLY
@pytest.mark.parametrize("inside", [(1,), (0, 1)], ids=["one", "both"])
def test_a_rank_whose_pid_means_nothing_here_is_missed_too(
    cluster: Cluster, inside: tuple[int, ...]
) -> None:
    """With both in namespaces of their own, each has the other's pid."""
    fifo = cluster.fifo()
    words = ["join", "ready", fifo, "if", 1, "pause", "watch", fifo, "barrier"]
    if subprocess.run([*NEW_PIDS, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no new pid namespace can be made here")
    prefix = dict.fromkeys(inside, NEW_PIDS)
    env = {"ACCEL_TIMEOUT": "10"}
    ranks = Ranks(cluster, "torchrun", 2, *words, env=env, prefix=prefix)
    own = pids(fifo, 2)
    assert [own[rank] for rank in inside] == [1] * len(inside)
    fifo.take(1, "waiting")
    (pid,) = (p.pid for p in descendants(ranks.processes[1].pid))
    when = time.monotonic()
    send(pid, signal.SIGKILL)
    found = error(ranks.wait()[0][-1])
    assert found["code"] == "ACCEL_E_LOST"
    assert "rank 1 has died" in found["text"]
    assert int(found["ms"]) / 1000 - when < 1


@BOTH_WAYS
def test_an_interrupted_rank_that_lives_on_is_told_to_the_others_at_once(
    cluster: Cluster, way: str
) -> None:
    """Rank 1 waits with it, rank 2 comes later; it lives until both know."""
    fifo = cluster.fifo()
    go, later, end = cluster.fifo("go"), cluster.fifo("later"), cluster.fifo("end")
    words = ["join", "if", 0, "wait", go, "if", 2, "wait", later, "if", 1, "watch", fifo]
    words += ["if", 0, "give-up", "barrier", "ready", fifo, "wait", end]
    ranks = Ranks(cluster, way, 3, *words, env={"ACCEL_TIMEOUT": "10"})
    fifo.take(1, "waiting")
    when = {1: time.monotonic()}
    go.release()
    fifo.take(2, "ready")
    when[2] = time.monotonic()
    later.release()
    fifo.take(1, "ready")
    end.release(3)
    lines = ranks.wait()
    assert error(lines[0][-1])["code"] == "ACCEL_E_INTERRUPTED"
    for rank in (1, 2):
        found = error(lines[rank][-1])
        assert (found["call"], found["code"]) == ("barrier", "ACCEL_E_LOST")
        assert "rank 0 was interrupted in barrier" in found["text"]
        assert int(found["ms"]) / 1000 - when[rank] < 1


def test_a_rank_that_left_and_then_failed_is_the_one_that_is_blamed(cluster: Cluster) -> None:
    """It ends a while after it left, and those that waited for it end because of that."""
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", "watch", fifo, "if", 1, "wait", go, "if", 1, "finish"]
    words += ["if", 1, "linger", 500, "if", 1, "exit", 42, "barrier"]
    ranks = Ranks(cluster, "accel", 2, *words)
    assert ranks.job
    fifo.take(1, "waiting")
    go.release()
    r = ranks.job.wait()
    assert r.code == 42, r.talk
    failure = r.report["first_failure"]
    assert (failure["rank"], failure["exit_code"]) == (1, 42)
    block = r.talk.partition("accel: ")[2]
    assert "rank 1" in block and re.search(r"(code|status) 42", block), block


# --- ranks that only seem to be lost ----------------------------------------------------


@BOTH_WAYS
def test_a_rank_out_of_descriptors_takes_no_other_for_dead(cluster: Cluster, way: str) -> None:
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", "watch", fifo, "looks", 3, "if", 0, "descriptors", 0]
    ranks = Ranks(cluster, way, 2, *words, "if", 1, "wait", go, "barrier", "small")
    fifo.take(1, "waiting", timeout=5)
    go.release()
    lines = ranks.wait()
    assert_all_well(lines)
    assert last(lines, 0, 1) == ["small: ok"] * 2


@BOTH_WAYS
def test_a_rank_works_on_in_another_thread_after_its_main_thread(
    cluster: Cluster, way: str
) -> None:
    fifo, go, later = cluster.fifo(), cluster.fifo("go"), cluster.fifo("later")
    words = ["join", "ready", fifo, "watch", fifo, "looks", 3, "if", 1, "move"]
    words += ["if", 0, "wait", go, "if", 1, "wait", later, "barrier", "small"]
    ranks = Ranks(cluster, way, 2, *words)
    pid = pids(fifo, 2)[1]
    assert eventually(lambda: processes()[pid].state == "Z"), "the main thread goes on"
    go.release()
    try:
        fifo.take(1, "waiting", timeout=5)
    finally:
        later.release()  # what looks like a zombie nobody else ends
    lines = ranks.wait()
    assert_all_well(lines)
    assert last(lines, 0, 1) == ["small: ok"] * 2


# --- ranks that are suspended -----------------------------------------------------------


@BOTH_WAYS
@EVERY_CALL
def test_a_rank_that_was_suspended_amid_a_call_goes_on(
    cluster: Cluster, call: Call, way: str
) -> None:
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", *call.needed, "ready", fifo, "watch", fifo, "unless", 2, "wait", go]
    ranks = Ranks(cluster, way, 3, *words, call.name, "ready", fifo, "barrier", "small")
    pid = pids(fifo, 3)[2]
    fifo.take(1, "waiting")
    suspend(pid)
    go.release(2)
    fifo.take(2)  # they wait for the one that is suspended, or are done
    send(pid, signal.SIGCONT)
    lines = ranks.wait()
    assert_all_well(lines)
    assert last(lines, 0, 1, 2) == ["small: ok"] * 3


def test_a_rank_that_stays_suspended_is_told_as_that(cluster: Cluster) -> None:
    """All calls at once, since each takes a second."""
    jobs = {}
    for name, call in CALLS.items():
        fifo, go = cluster.fifo(f"ready-{name}"), cluster.fifo(f"go-{name}")
        words = ["join", *call.needed, "ready", fifo, "if", 1, "pause", "wait", go, call.name]
        ranks = Ranks(cluster, "torchrun", 2, *words, env={"ACCEL_TIMEOUT": "1"})
        jobs[name] = (ranks, fifo, go)
    suspended = {}
    for name, (_, fifo, go) in jobs.items():
        suspended[name] = pids(fifo, 2)[1]
        suspend(suspended[name])
        go.release()
    for name, (ranks, _, _) in jobs.items():
        found = error(ranks.wait(but=1)[0][-1])
        assert (found["call"], found["code"]) == (name, "ACCEL_E_TIMEOUT")
        assert "waited 1 s (ACCEL_TIMEOUT)" in found["text"]
        assert f"rank 1 (process {suspended[name]}, stopped by a signal)" in found["text"]


@pytest.mark.parametrize("call", HALVES.values(), ids=list(HALVES))
def test_a_rank_that_stays_suspended_amid_a_call_is_told_as_that(
    cluster: Cluster, call: Call
) -> None:
    fifo = cluster.fifo()
    words = ["join", *call.needed, *(f"if 1 {call.half[0]}".split()), "ready", fifo]
    words += ["watch", fifo, "if", 1, "pause", call.name]
    ranks = Ranks(cluster, "torchrun", 2, *words, env={"ACCEL_TIMEOUT": "1"})
    pid = pids(fifo, 2)[1]
    fifo.take(1, "waiting")
    suspend(pid)
    found = error(ranks.wait(but=1)[0][-1])
    assert found["code"] == "ACCEL_E_TIMEOUT"
    assert f"rank 1 (process {pid}, stopped by a signal)" in found["text"]


# --- one process a rank -----------------------------------------------------------------


@BOTH_WAYS
def test_a_fork_takes_part_in_no_call_and_does_no_harm(cluster: Cluster, way: str) -> None:
    words = ["join", "prepare"]
    # What accel_alloc() gave does not exist in a fork.
    names = [name for name in CALLS if name != "in-place"]
    for name in names:
        words += ["fork", name, name]
    lines = Ranks(cluster, way, 2, *words, "fork", "finish", "barrier").wait()
    for rank in (0, 1):
        told = [error(line) for line in lines[rank] if "ACCEL_E" in line]
        assert [e["call"] for e in told] == names
        assert {e["code"] for e in told} == {"ACCEL_E_FORKED"}
        assert all(f"fork of rank {rank}" in e["text"] for e in told)
        assert all(f"{name}: ok" in lines[rank] for name in names)
        assert lines[rank][-1] == "barrier: ok"


@BOTH_WAYS
def test_a_child_with_the_environment_of_a_rank_is_none(cluster: Cluster, way: str) -> None:
    fifo = cluster.fifo()
    words = ["join", "ready", fifo, "spawn", "join", "barrier", "small"]
    ranks = Ranks(cluster, way, 2, *words, env={"ACCEL_TIMEOUT": "10"})
    owners = pids(fifo, 2)
    lines = ranks.wait()
    for rank in (0, 1):
        _, refused, *met = lines[rank]
        found = error(refused)
        assert found["code"] == "ACCEL_E_OWNED", found["text"]
        assert f"process {owners[rank]} is rank {rank}" in found["text"]
        assert met == ["barrier: ok", "small: ok"]


def names_held(pid: int) -> set[str]:
    """The abstract sockets a process has bound."""
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.add(os.readlink(fd))
        except FileNotFoundError:  # closed meanwhile
            continue
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in links}
    return {name[1:] for name in names if name.startswith("@")}


def knock(name: str) -> None:
    """Connect and go. BlockingIOError when nobody opened to the many before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.setblocking(False)
        s.connect("\0" + name)


def test_however_many_asked_before_a_child_is_told_that_the_rank_is_taken(
    cluster: Cluster,
) -> None:
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["join", "ready", fifo, "if", 0, "wait", go, "if", 0, "spawn", "join", "barrier"]
    ranks = Ranks(cluster, "torchrun", 2, *words, env={"ACCEL_TIMEOUT": "10"})
    (name,) = names_held(pids(fifo, 2)[0])
    with pytest.raises(BlockingIOError):
        for _ in range(10000):
            knock(name)
    go.release()
    lines = ranks.wait()
    _, refused, met = lines[0]
    assert error(refused)["code"] == "ACCEL_E_OWNED"
    assert "is rank 0 of this job already" in error(refused)["text"]
    assert [met, lines[1][-1]] == ["barrier: ok"] * 2


def test_a_rank_that_executes_itself_is_told_what_it_has_missed(cluster: Cluster) -> None:
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["unless", 1, "ignore", int(signal.SIGTERM), "join", "ready", fifo, "watch", fifo]
    words += ["if", 1, "wait", go, "if", 1, "exec", "join", "barrier"]
    ranks = Ranks(cluster, "accel", 2, *words, env={"ACCEL_TIMEOUT": "10"})
    pid = pids(fifo, 2)[1]
    fifo.take(1, "waiting")
    when = time.monotonic()
    go.release()
    lines = ranks.wait()
    found = error(lines[1][-1])
    assert (found["call"], found["code"]) == ("join", "ACCEL_E_LOST")
    assert f"process {pid} was rank 1 already" in found["text"]
    assert "call accel_finish() before exec" in found["text"]
    found = error(lines[0][-1])
    assert (found["call"], found["code"]) == ("barrier", "ACCEL_E_LOST")
    assert "rank 1 " in found["text"]
    assert int(found["ms"]) / 1000 - when < 1


def in_a_row(cluster: Cluster, way: str, script: str) -> dict[int, list[str]]:
    """A shell script in the place of each of two ranks; {} is the program."""
    worker = cluster.build / "tests" / "e2e" / "runtime_worker"
    shell = ["sh", "-c", script.replace("{}", str(worker))]
    if way == "accel":
        r = cluster.launch("-n", "2", *shell)
        assert r.code == 0, r.text
        return {
            rank: [line[4:] for line in r.lines if line.startswith(f"[{rank}]")] for rank in (0, 1)
        }
    port = next(ports)
    started = [
        subprocess.Popen(
            shell,
            env=cluster.environment(Ranks.variables(rank, 2, port) | {"ACCEL_TIMEOUT": "20"}),
            cwd=cluster.cwd,
            stdout=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    out = {rank: p.communicate(timeout=30)[0].decode() for rank, p in enumerate(started)}
    assert [p.returncode for p in started] == [0, 0], out
    return {rank: text.splitlines() for rank, text in out.items()}


@BOTH_WAYS
@pytest.mark.parametrize("end", ["finish", "exit 0", "barrier"])
def test_programs_in_a_row_are_each_the_rank(cluster: Cluster, way: str, end: str) -> None:
    program = f"{{}} join small large gather alloc in-place {end}"
    lines = in_a_row(cluster, way, f"{program} && {program} && {program}")
    assert_all_well(lines)
    for rank in (0, 1):
        assert lines[rank].count(f"join: rank {rank} of 2") == 3
        assert lines[rank].count("in-place: ok") == 3


@BOTH_WAYS
def test_a_process_may_leave_and_join_again(cluster: Cluster, way: str) -> None:
    turn = ["join", "small", "gather", "finish"]
    lines = Ranks(cluster, way, 2, *turn * 3, env={"ACCEL_TIMEOUT": "20"}).wait()
    assert_all_well(lines)
    assert [len(lines[rank]) for rank in (0, 1)] == [9, 9]


@BOTH_WAYS
def test_forks_of_a_rank_do_not_keep_it_from_joining_again(cluster: Cluster, way: str) -> None:
    words = ["join", "heir", "small", "finish", "join", "gather", "barrier"]
    lines = Ranks(cluster, way, 2, *words, env={"ACCEL_TIMEOUT": "5"}).wait()
    assert_all_well(lines)
    assert last(lines, 0, 1) == ["barrier: ok"] * 2


def test_no_program_follows_one_that_was_killed(cluster: Cluster) -> None:
    worker = cluster.build / "tests" / "e2e" / "runtime_worker"
    r = cluster.launch("-n", "2", "sh", "-c", f"{worker} join if 1 raise 9; {worker} join")
    refused = error(next(line[4:] for line in r.lines if line.startswith("[1] join: ACCEL_E")))
    assert refused["code"] == "ACCEL_E_LOST"
    assert "which was rank 1, ended in the middle of its work" in refused["text"]


# --- ranks that want different things ---------------------------------------------------


@BOTH_WAYS
def test_a_mutual_wait_is_a_mismatch_on_both(cluster: Cluster, way: str) -> None:
    words = ["ignore", int(signal.SIGTERM), "join"]  # the first to end fails
    words += ["if", 0, "barrier", "if", 1, "gather", "barrier", "small"]
    lines = Ranks(cluster, way, 2, *words).wait()
    texts = set()
    for rank, call in ((0, "barrier"), (1, "gather")):
        _, refused, *met = lines[rank]
        found = error(refused)
        assert (found["call"], found["code"]) == (call, "ACCEL_E_MISMATCH")
        assert met == ["barrier: ok", "small: ok"]
        texts.add(found["text"])
    (text,) = texts
    assert "rank 0: barrier" in text
    assert re.search(r"rank 1: gather of float32 \(\d+, 2\)", text)


@BOTH_WAYS
def test_more_ranks_than_cores_get_along(cluster: Cluster, way: str) -> None:
    lines = Ranks(cluster, way, 9, "join", "times", 20, "mixed", "leave").wait(timeout=60)
    assert_all_well(lines)
    assert last(lines, *range(9)) == ["leave: ok"] * 9


# --- memory -----------------------------------------------------------------------------


def limited(kind: int, value: int) -> list[str]:
    """A command that lowers a limit and becomes what follows it."""
    code = f"import os, resource, sys; resource.setrlimit({kind}, ({value}, {value}))"
    return [sys.executable, "-c", f"{code}; os.execv(sys.argv[1], sys.argv[1:])"]


def test_memory_that_one_rank_has_no_room_for_is_refused_and_given_back(cluster: Cluster) -> None:
    prefix = {1: limited(resource.RLIMIT_AS, 100 << 20)}
    words = ["join", "alloc-mib", 64, "barrier", "held", "alloc", "in-place"]
    lines = Ranks(cluster, "torchrun", 2, *words, prefix=prefix).wait()
    for rank in (0, 1):
        _, refused, *rest = lines[rank]
        assert error(refused)["code"] == "ACCEL_E_MEMORY"
        assert rest[0] == "barrier: ok"
        assert int(rest[1].removeprefix("held: ")) < 32, "what nobody got is still held"
        assert rest[2:] == ["alloc: ok", "in-place: ok"]


# --- joining ----------------------------------------------------------------------------


def test_several_jobs_at_once_do_not_mix(cluster: Cluster) -> None:
    jobs = [
        Ranks(cluster, "torchrun", 2, "join", "times", 5, "mixed", "sum", 10**i) for i in range(4)
    ]
    for i, job in enumerate(jobs):
        lines = job.wait()
        assert last(lines, 0, 1) == [f"sum: {2 * 10**i}"] * 2


def alone(cluster: Cluster, *words: object, **env: str) -> tuple[int, list[str]]:
    """One process with these variables."""
    worker = cluster.build / "tests" / "e2e" / "runtime_worker"
    r = subprocess.run(
        [worker, *map(str, words)],
        env=cluster.environment(env),
        cwd=cluster.cwd,
        capture_output=True,
        timeout=20,
        check=False,
    )
    return r.returncode, r.stdout.decode().splitlines()


def test_half_of_the_variables_is_an_error_that_says_which(cluster: Cluster) -> None:
    code, (line,) = alone(cluster, "join", RANK="0")
    assert code == 1
    found = error(line)
    assert found["code"] == "ACCEL_E_INVALID"
    assert "RANK is set and WORLD_SIZE is not" in found["text"]


@pytest.mark.parametrize("value", ["soon", "0", "-1", "1.5", "10s", "99999999999999999999"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(cluster: Cluster, value: str) -> None:
    code, (line,) = alone(cluster, "join", ACCEL_TIMEOUT=value)
    assert code == 1
    found = error(line)
    assert found["code"] == "ACCEL_E_INVALID"
    assert f'ACCEL_TIMEOUT is "{value}"' in found["text"]


def test_ranks_on_other_machines_are_out_of_reach(cluster: Cluster) -> None:
    env = Ranks.variables(0, 4, next(ports)) | {"LOCAL_WORLD_SIZE": "2"}
    code, (line,) = alone(cluster, "join", **env)
    assert code == 8
    assert "2 of 4 ranks run on this machine" in error(line)["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_joins_alone_is_told_who_is_missing(cluster: Cluster, rank: int) -> None:
    env = Ranks.variables(rank, 2, next(ports)) | {"ACCEL_TIMEOUT": "1"}
    code, (line,) = alone(cluster, "join", **env)
    assert code == 4
    found = error(line)
    assert found["code"] == "ACCEL_E_TIMEOUT"
    assert f"local rank {1 - rank}" in found["text"]


def test_a_limit_on_files_is_an_error_of_the_first_rank_and_no_signal(cluster: Cluster) -> None:
    prefix = {0: limited(resource.RLIMIT_FSIZE, 1 << 20)}
    ranks = Ranks(cluster, "torchrun", 2, "join", prefix=prefix)
    found = error(ranks.wait(but=1)[0][-1])
    assert found["code"] == "ACCEL_E_MEMORY"
    assert "shared memory of 2 ranks" in found["text"] and "`ulimit -f`" in found["text"]


def test_a_rank_that_cannot_let_others_in_says_so(cluster: Cluster) -> None:
    """Its two sockets and the ring are all it may open."""
    words = ["if", 0, "descriptors", 3, "join"]
    found = error(Ranks(cluster, "torchrun", 2, *words).wait(but=1)[0][-1])
    assert found["code"] == "ACCEL_E_UNREACHABLE"
    assert f"accept: {os.strerror(errno.EMFILE)}" in found["text"]


def joining(
    cluster: Cluster, rank: int, port: int, timeout: int
) -> tuple[Ranks, subprocess.Popen[bytes], set[str]]:
    """The rank of two in the middle of joining; the other one waits. The ranks, the process
    and the sockets it has bound."""
    fifo, go = cluster.fifo(f"ready-{len(cluster.fifos)}"), cluster.fifo(f"go-{port}-{rank}")
    words = ["unless", rank, "wait", go, "watch", fifo, "join"]
    env = {"ACCEL_TIMEOUT": str(timeout)}
    ranks = Ranks(cluster, "torchrun", 2, *words, env=env, port=port)
    fifo.take(1, "waiting")
    process = ranks.processes[rank]
    return ranks, process, names_held(process.pid)


def test_who_keeps_knocking_does_not_put_off_the_deadline(cluster: Cluster) -> None:
    ranks, process, names = joining(cluster, 0, next(ports), 1)
    when = time.monotonic()
    while process.poll() is None and time.monotonic() < when + 10:
        try:
            knock(min(names, key=len))
        except ConnectionRefusedError:
            break
        time.sleep(0.005)  # no synchronisation: often
    found = error(ranks.wait(but=1)[0][-1])
    assert found["code"] == "ACCEL_E_TIMEOUT"
    assert "local rank 1" in found["text"]
    assert int(found["ms"]) / 1000 - when < 2


@contextmanager
def held_by_nobody(name: str) -> Iterator[None]:
    """The abstract socket belongs to another user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.bind("\0" + name)
        os.seteuid(NOBODY)
        try:
            s.listen(4)
        finally:
            os.seteuid(0)
        yield


@ROOT_ONLY
@pytest.mark.parametrize(("rank", "end"), [(0, ""), (0, "-0"), (1, ""), (1, "-1")])
def test_a_socket_of_another_user_is_told_as_that(cluster: Cluster, rank: int, end: str) -> None:
    port = next(ports)
    ranks, _, names = joining(cluster, 0, port, 10)
    for each in ranks.processes:
        each.kill()
    ranks.wait()
    name = min(names, key=len) + end
    with held_by_nobody(name):
        when = time.monotonic()
        env = Ranks.variables(rank, 2, port) | {"ACCEL_TIMEOUT": "10"}
        code, (line,) = alone(cluster, "join", **env)
    assert code == 8
    found = error(line)
    assert found["code"] == "ACCEL_E_UNREACHABLE"
    assert f"another user holds the abstract socket {name}" in found["text"]
    assert int(found["ms"]) / 1000 - when < 1


@pytest.fixture
def lonely(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[tuple[Fifo, Ranks]]:
    """The rank of two that the test asks for, in the middle of joining; it handles SIGUSR1.
    The other one waits for a byte in "go"."""
    rank: int = request.param
    fifo, go = cluster.fifo(), cluster.fifo("go")
    words = ["handle", int(signal.SIGUSR1), "unless", rank, "wait", go, "if", rank]
    ranks = Ranks(cluster, "torchrun", 2, *words, "watch", fifo, "join", "barrier")
    yield fifo, ranks
    go.release()


EITHER = pytest.mark.parametrize("lonely", [0, 1], indirect=True, ids=["first", "second"])


@EITHER
def test_a_signal_while_joining_is_no_reason_to_give_up(
    cluster: Cluster, lonely: tuple[Fifo, Ranks]
) -> None:
    fifo, ranks = lonely
    ((_, rank, pid),) = fifo.take(1, "waiting")
    for _ in range(20):
        send(int(pid), signal.SIGUSR1)
        time.sleep(0.005)  # one after the other, not all at once
    assert ranks.processes[int(rank)].poll() is None, "it has given up"
    cluster.fifos[1].release()
    lines = ranks.wait()
    assert_all_well(lines)
    assert last(lines, 0, 1) == ["barrier: ok"] * 2


def test_signals_amid_calls_are_no_reason_to_give_up(cluster: Cluster) -> None:
    fifo = cluster.fifo()
    words = ["handle", int(signal.SIGUSR1), "join", "ready", fifo, "times", 300, "mixed"]
    ranks = Ranks(cluster, "torchrun", 2, *words)
    own = pids(fifo, 2)
    while None in [p.poll() for p in ranks.processes]:
        for pid in own.values():
            send(pid, signal.SIGUSR1)
        time.sleep(0.001)
    assert_all_well(ranks.wait())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_callback_ends_the_joining(cluster: Cluster, rank: int) -> None:
    env = Ranks.variables(rank, 2, next(ports)) | {"ACCEL_TIMEOUT": "10"}
    code, (line,) = alone(cluster, "give-up", "join", **env)
    assert code == 11
    assert error(line)["code"] == "ACCEL_E_INTERRUPTED"


# --- the report of a failure ------------------------------------------------------------


def failure(cluster: Cluster, *texts: str) -> dict[str, object]:
    path = cluster.files / "error.json"
    words = ["join"]
    for text in texts:
        words += ["fail", text]
    code, _ = alone(cluster, *words, TORCHELASTIC_ERROR_FILE=str(path))
    assert code == 0
    assert [p.name for p in cluster.files.iterdir()] == ["error.json"], "a draft is left"
    return json.loads(path.read_text())["message"]


def test_a_failure_is_written_as_torchrun_reads_it(cluster: Cluster) -> None:
    text = 'Traceback:\n  "x"\\\tü €\x01 \U0001f600\nValueError: no'
    found = failure(cluster, text)
    assert found["message"] == text
    assert found["extraInfo"]["py_callstack"] == text
    assert abs(int(found["extraInfo"]["timestamp"]) - time.time()) < 60


def test_the_first_failure_stays(cluster: Cluster) -> None:
    assert failure(cluster, "first", "second")["message"] == "first"


def test_a_long_failure_is_cut_and_stays_readable(cluster: Cluster) -> None:
    text = failure(cluster, "é" * 60000)["message"]
    assert isinstance(text, str)
    assert set(text) == {"é"}
    assert 65530 <= len(text.encode()) <= 65536


def test_bytes_that_are_no_text_are_replaced(cluster: Cluster) -> None:
    broken = os.fsdecode(b"a\xffb\xc3(\xe2\x82 \xed\xa0\x80 c\xf0\x9f")
    text = failure(cluster, broken)["message"]
    assert isinstance(text, str)
    assert text.startswith("a\ufffdb\ufffd(") and " c\ufffd" in text


def test_nothing_is_left_when_all_ranks_are_killed_amid_a_call(cluster: Cluster) -> None:
    fifo = cluster.fifo()
    ranks = Ranks(cluster, "torchrun", 3, "join", "ready", fifo, "times", 10**9, "large")
    for pid in pids(fifo, 3).values():
        send(pid, signal.SIGKILL)
    ranks.wait()
    assert ranks.codes == [-signal.SIGKILL] * 3
    assert eventually(lambda: not cluster.left_sockets())
