"""Where accel is started from, and who looks on: odd signal settings, few descriptors,
readers that do not read, other users, files that are not files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import NOBODY, Cluster, alive, eventually, send

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")


def python(*statements: str) -> list[str]:
    """A command that does these things and then becomes what follows it."""
    code = ["import os, resource, signal, sys", *statements, "os.execv(sys.argv[1], sys.argv[1:])"]
    return [sys.executable, "-c", "\n".join(code)]


# --- descriptors that others share ------------------------------------------------------


def test_a_pipe_that_others_write_to_stays_blocking(cluster: Cluster) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [cluster.accel, "launch", "-n", "2", "true"], env=cluster.environment(), stdout=writer
    ) as proc:
        assert proc.wait(20) == 0
    assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(reader)
    os.close(writer)


def test_a_worker_reads_from_the_terminal_as_without_accel(cluster: Cluster) -> None:
    ask = cluster.write(
        cluster.files / "ask.py",
        "import fcntl, os\n"
        "assert not fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK, 'nonblocking'\n"
        "print('name?', flush=True)\n"
        "print('hello', input())\n",
    )
    job = cluster.start("--python", sys.executable, ask, tty=True)
    job.expect(b"name?")
    job.keys(b"ada\n")
    job.expect(b"hello ada")
    assert job.wait().code == 0


def test_few_descriptors_are_enough(cluster: Cluster) -> None:
    limit = python("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
    r = cluster.launch("-n", "2", "true", prefix=limit)
    assert (r.code, r.talk) == (0, "")


# --- signals as they were when accel came -----------------------------------------------


@pytest.mark.parametrize("more", [{}, {"ACCEL_NO_PIDFD": "1"}], ids=["pidfd", "no_pidfd"])
def test_blocked_signals_do_no_harm(cluster: Cluster, more: dict[str, str]) -> None:
    block = python("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())")
    ready = cluster.fifo()
    assert cluster.launch("-n", "2", "true", prefix=block, env=more).code == 0
    job = cluster.start(cluster.worker, "ready", ready, "pause", prefix=block, env=more)
    ready.take(1)
    job.signal(signal.SIGKILL)
    job.proc.wait(5)
    assert eventually(lambda: not cluster.left_processes())


def test_an_ignored_sigchld_keeps_nobody_alive(cluster: Cluster) -> None:
    ready = cluster.fifo()
    ignore = python("signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    job = cluster.start(
        "-n", "2", cluster.worker, "setsid-child", ready, "ready", ready, "pause", prefix=ignore
    )
    ready.take(2, "ready")
    send(job.daemon, signal.SIGKILL)
    assert job.wait(10).code == 4
    assert not cluster.left_processes()


@pytest.mark.parametrize("ignored", [True, False])
def test_sigpipe_is_to_a_worker_what_it_was_to_accel(cluster: Cluster, ignored: bool) -> None:
    how = "SIG_IGN" if ignored else "SIG_DFL"
    r = cluster.launch(
        "grep", "SigIgn", "/proc/self/status", prefix=python(f"signal.signal(13, signal.{how})")
    )
    mask = int(r.text.split()[1], 16)
    assert bool(mask & 1 << (signal.SIGPIPE - 1)) == ignored


def test_a_suspended_worker_hears_the_stop(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "pause")
    pids = [int(words[2]) for words in ready.take(2)]
    for pid in pids:
        send(pid, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    r = job.wait()
    assert r.code == 143
    assert r.seconds < 10, "a suspended worker took the whole grace"


# --- readers ----------------------------------------------------------------------------


@pytest.mark.parametrize("tty", [False, True])
def test_asked_twice_accel_ends_though_nobody_reads(cluster: Cluster, tty: bool) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n", "2", cluster.worker, "ready", ready, "exec", "/usr/bin/yes", tty=tty, hold=True
    )
    ready.take(2)
    time.sleep(0.3)  # not for readiness: the pipes are to fill up
    job.signal(signal.SIGTERM)
    time.sleep(0.2)  # two at once are one
    job.signal(signal.SIGTERM)
    assert job.proc.wait(10) == 143
    job.read_on()
    assert not cluster.left_processes()


def test_asked_once_accel_ends_after_the_grace_though_nobody_reads(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "--grace", "1", cluster.worker, "ready", ready, "exec", "/usr/bin/yes", hold=True
    )
    ready.take(1)
    time.sleep(0.3)  # not for readiness: the pipes are to fill up
    job.signal(signal.SIGTERM)
    assert job.proc.wait(10) == 143
    job.read_on()


def test_the_death_of_a_client_with_unread_words_is_noticed(cluster: Cluster) -> None:
    """Its socket then reports an error before its end."""
    ready = cluster.fifo()
    job = cluster.start(
        cluster.worker, "ready", ready, "ignore", "USR1", "flood", "900000", "pause", hold=True
    )
    ready.take(1)
    time.sleep(0.3)  # not for readiness: the socket is to fill up
    daemon = job.daemon
    send(daemon, signal.SIGSTOP)
    job.signal(signal.SIGUSR1)
    time.sleep(0.1)
    job.signal(signal.SIGKILL)
    job.proc.wait(5)
    send(daemon, signal.SIGCONT)
    assert eventually(lambda: not cluster.left_processes())


SAVES_ON_SIGINT = """
import os, signal, sys, time
def on_sigint(*_):
    try:
        print("saving", flush=True)
    except OSError:
        pass
    time.sleep(0.5)
    open(sys.argv[2], "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGINT, on_sigint)
# Not by a file object: what a handler raises while one is destroyed is dropped.
os.write(os.open(sys.argv[1], os.O_WRONLY), b"ready\\n")
while True:
    time.sleep(1)
"""


def test_a_reader_that_dies_with_the_same_ctrl_c_cuts_no_save_short(cluster: Cluster) -> None:
    ready, saved = cluster.fifo(), cluster.files / "saved"
    script = cluster.write(cluster.files / "save.py", SAVES_ON_SIGINT)
    reader, writer = os.pipe()
    argv = [cluster.accel, "launch", "--python", sys.executable, script, str(ready), saved]
    with subprocess.Popen(
        argv, env=cluster.environment(), stdout=writer, stderr=subprocess.DEVNULL
    ) as proc:
        ready.take(1)
        proc.send_signal(signal.SIGINT)
        os.close(reader)
        os.close(writer)
        assert proc.wait(10) == 130
    assert saved.read_text() == "saved"


def test_a_long_line_stays_whole_in_a_pipe(cluster: Cluster) -> None:
    line = "x" * 50_000
    r = cluster.launch("-n", "2", "sh", "-c", "printf '%050000d\\n' 0 | tr 0 x")
    assert sorted(r.lines) == [f"[0] {line}", f"[1] {line}"]


# --- a supervisor that is stuck ---------------------------------------------------------


def test_a_second_signal_ends_a_supervisor_that_does_not_answer(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(cluster.worker, "setsid-child", ready, "ready", ready, "pause")
    ready.take(1, "ready")
    send(job.daemon, signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    time.sleep(0.2)  # two at once are one
    job.signal(signal.SIGTERM)
    r = job.wait(20)
    assert r.code == 143
    assert "does not answer" in r.talk


def test_a_stuck_supervisor_does_not_outlive_its_client_for_long(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(cluster.worker, "setsid-child", ready, "ready", ready, "pause")
    ready.take(1, "ready")
    send(job.daemon, signal.SIGSTOP)
    job.signal(signal.SIGKILL)
    job.proc.wait(5)
    assert eventually(lambda: not cluster.left_processes(), timeout=20)


def test_the_pid_that_status_shows_stops_the_job(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "pause")
    ready.take(2)
    shown = json.loads(cluster.run_accel("status", "--json").text)
    send(shown[0]["pid"], signal.SIGTERM)
    assert job.wait().code == 143


# --- devices ----------------------------------------------------------------------------

FAKE_DEV = """
mount -t tmpfs none /dev && mknod /dev/null c 1 3 && touch /dev/nvidia0 /dev/nvidia1 || exit 99
exec "$@"
"""


@ROOT_ONLY
@pytest.mark.parametrize(
    ("env", "n", "device"),
    [
        ((), 2, "cuda:1"),
        (("CUDA_VISIBLE_DEVICES=1",), 1, "cuda:0"),
        (("CUDA_VISIBLE_DEVICES=",), 1, "cpu"),
    ],
)
def test_devices_that_env_hides_are_not_counted(
    cluster: Cluster, env: tuple[str, ...], n: int, device: str
) -> None:
    prefix = ["unshare", "--mount", "sh", "-c", FAKE_DEV, "sh"]
    words = [word for e in env for word in ("--env", e)]
    show = ["sh", "-c", 'echo "$WORLD_SIZE $RANK $ACCEL_DEVICE"']
    r = cluster.launch(*words, *show, prefix=prefix)
    if r.code == 99 or "unshare" in r.talk:
        pytest.skip("no new mount namespace can be made here")
    last = f"{n} {n - 1} {device}"
    assert last in [line.removeprefix(f"[{n - 1}] ") for line in r.lines], r.talk
    assert len(r.lines) == n
    dry = cluster.launch("--dry-run", *words, *show, prefix=prefix)
    assert f"WORLD_SIZE={n}\n" in dry.text
    assert f"ACCEL_DEVICE={device}\n" in dry.text


def test_a_list_of_devices_may_begin_with_a_comma(cluster: Cluster) -> None:
    assert cluster.launch("--env", "ZE_AFFINITY_MASK=,", "true", timeout=10).code == 0


# --- what is on disk while a job runs ---------------------------------------------------


def test_events_are_on_disk_as_they_happen(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "2", cluster.worker, "ready", ready, "pause")
    ready.take(2)

    def started() -> bool:
        assert job.jobdir
        return (job.jobdir / "events.jsonl").read_text().count('"started"') == 2

    assert eventually(started)
    assert (job.jobdir / "plan.json").exists()
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143


def test_an_error_file_that_is_no_file_holds_nobody_up(cluster: Cluster) -> None:
    r = cluster.launch("sh", "-c", 'mkfifo "$TORCHELASTIC_ERROR_FILE"; exit 5')
    assert r.code == 5
    assert r.seconds < 10


def test_status_never_takes_a_starting_job_for_a_dead_one(cluster: Cluster) -> None:
    env = cluster.environment()
    ask = f"while :; do {cluster.accel} status; done >/dev/null 2>&1"
    with subprocess.Popen(["sh", "-c", ask], env=env, start_new_session=True) as looker:
        for _ in range(60):
            assert cluster.launch("sh", "-c", 'test -S "$ACCEL_SOCKET"').code == 0
        os.killpg(looker.pid, signal.SIGKILL)


def test_a_tilde_that_the_shell_left_is_the_home_folder(cluster: Cluster) -> None:
    r = cluster.launch("--log-dir=~/logs", "true")
    assert r.code == 0
    logs = cluster.home / "logs"
    assert len(list(logs.glob("*/report.json"))) == 1
    shutil.rmtree(logs)


def test_a_refused_job_leaves_no_folder_it_made(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = str(squatter.getsockname()[1])
        deep = cluster.files / "a" / "b" / "c"
        r = cluster.launch("--log-dir", deep, "--master-port", port, "true")
    assert r.code == 2
    assert not (cluster.files / "a").exists()


# --- other users ------------------------------------------------------------------------


@ROOT_ONLY
def test_a_stranger_in_the_temporary_folder_stops_nobody(cluster: Cluster) -> None:
    prefix = cluster.as_nobody()
    taken = cluster.tmp / f"accel-{NOBODY}"
    taken.mkdir(mode=0o755)
    os.chown(taken, 1234, 1234)
    ready = cluster.fifo()
    os.chown(ready.path, NOBODY, NOBODY)
    job = cluster.start(
        cluster.worker, "ready", ready, "pause", prefix=prefix, without=["XDG_RUNTIME_DIR"]
    )
    ready.take(1)
    r = cluster.run_accel("status", prefix=prefix, without=["XDG_RUNTIME_DIR"])
    assert "1 of 1 running" in r.text
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    taken.rmdir()


def test_a_grandchild_with_an_empty_environment_is_found(cluster: Cluster) -> None:
    pidfile = cluster.files / "pid"
    ready = cluster.fifo()
    job = cluster.start(
        "sh",
        "-c",
        f"env -i setsid sh -c 'echo $$ >{pidfile}; echo ready >{ready}; exec sleep 600' &"
        " sleep 600",
    )
    ready.take(1)
    keeper, daemon = job.keeper, job.daemon
    for pid in (keeper, daemon):
        send(pid, signal.SIGSTOP)
    for pid in (keeper, daemon):
        send(pid, signal.SIGKILL)
    assert job.wait(10).code == 4
    assert not alive(int(Path(pidfile).read_text()))


# --- nothing more to be had -------------------------------------------------------------


@ROOT_ONLY
def test_a_user_out_of_processes_is_told_so(cluster: Cluster) -> None:
    limit = python("resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))")
    r = cluster.launch("-n", "8", "sleep", "600", prefix=[*cluster.as_nobody(), *limit])
    assert r.code != 0
    assert os.strerror(errno.EAGAIN) in r.talk
    assert r.seconds < 10
