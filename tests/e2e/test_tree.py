"""The process tree: whoever is killed, whenever, nobody of the job stays.

accel has one child, the keeper; the keeper has one child, the daemon; the daemon's
children are the workers. Each worker here has a child, a child in a session of its own
and a daemon that is deaf to SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from cluster import Cluster, Job, alive, children, eventually, send

pytestmark = pytest.mark.tree

VICTIMS = {
    "accel": ("accel",),
    "daemon": ("daemon",),
    "keeper": ("keeper",),
    "accel_and_daemon": ("accel", "daemon"),
    "daemon_and_accel": ("daemon", "accel"),
    "accel_and_keeper": ("accel", "keeper"),
    "keeper_and_daemon": ("keeper", "daemon"),
    "all_three": ("accel", "keeper", "daemon"),
}
STATES = ("starting", "running", "stopping")


def kill(job: Job, victims: tuple[str, ...]) -> None:
    """All in one instant: they are stopped first, so that none acts on another's end."""
    keeper = job.keeper
    pids = {"accel": job.pid, "keeper": keeper, "daemon": children(keeper)[0].pid}
    chosen = [pids[v] for v in victims]
    if len(chosen) > 1:
        for pid in chosen:
            send(pid, signal.SIGSTOP)
    for pid in chosen:
        send(pid, signal.SIGKILL)


def bring_to(state: str, cluster: Cluster) -> tuple[Job, list[int], list[int]]:
    """A job in that state; its workers and their descendants as far as known."""
    ready, go = cluster.fifo(), cluster.fifo("go")
    family = ["child", ready, "setsid-child", ready, "daemon", ready]
    if state == "starting":
        job = cluster.start("-n", "48", cluster.worker, *family, "ready", ready, "pause")
        workers = [int(words[2]) for words in ready.take(1, "ready")]
        return job, workers, [int(words[2]) for words in ready.take(3, "child")]
    job = cluster.start(
        "-n",
        "3",
        "--grace",
        "60",
        cluster.worker,
        "if",
        "0",
        "wait",
        go,
        "if",
        "0",
        "exit",
        "3",
        "term-says",
        ready,
        *family,
        "ready",
        ready,
        "pause",
    )
    workers = [int(words[2]) for words in ready.take(2, "ready")]
    family_pids = [int(words[2]) for words in ready.take(6, "child")]
    if state == "stopping":
        go.release()
        ready.take(2, "term")
    return job, workers, family_pids


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("victims", VICTIMS.values(), ids=VICTIMS.keys())
def test_nobody_survives_the_death_of(
    cluster: Cluster, victims: tuple[str, ...], state: str
) -> None:
    job, workers, family = bring_to(state, cluster)
    kill(job, victims)
    if len(victims) == 3:
        # Nobody is left who could look for the workers' children: the kernel ends the
        # workers themselves, and that is the promise.
        assert eventually(lambda: not any(alive(p) for p in workers))
        cluster.kill_everything()
        # The next look at the jobs removes socket and cgroup of the one that was.
        assert str(cluster.root) not in cluster.run_accel("status").text
    assert eventually(lambda: not any(alive(p) for p in workers + family))
    assert eventually(lambda: not cluster.left_processes())
    code = job.wait(10).code
    if "accel" in victims:
        assert code == -signal.SIGKILL
    elif state == "stopping" and "daemon" not in victims:
        assert code == 3, "a worker had failed before"
    else:
        assert code == 4, job.so_far("err")


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 3, 5, 8, 13])
def test_accel_killed_while_it_starts_leaves_nobody(cluster: Cluster, delay_ms: int) -> None:
    ready = cluster.fifo()
    job = cluster.start("-n", "32", cluster.worker, "daemon", ready, "pause")
    time.sleep(delay_ms / 1000)  # not for readiness: any moment will do
    job.signal(signal.SIGKILL)
    job.proc.wait(5)
    assert eventually(lambda: not cluster.left_processes())


def test_a_dead_supervisor_is_named(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(cluster.worker, "ready", ready, "pause")
    ready.take(1)
    os.kill(job.daemon, signal.SIGKILL)
    r = job.wait(10)
    assert r.code == 4
    assert "acceld" in r.talk or "supervisor" in r.talk
    assert "SIGKILL" in r.talk or "killed" in r.talk


def test_a_fork_storm_is_ended(cluster: Cluster) -> None:
    """Children that make new ones faster than they can be listed."""
    ready = cluster.fifo()
    storm = cluster.write(
        "storm.py",
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1], 'w').write('ready 0 0\\n')\n"
        "for _ in range(400):\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    os.setsid()\n"
        "    time.sleep(0.002)\n"
        "time.sleep(60)\n",
    )
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "if",
        "0",
        "exec",
        "/usr/bin/python3",
        storm,
        ready,
        "if",
        "1",
        "pause",
    )
    ready.take(1)
    job.signal(signal.SIGKILL)
    assert eventually(lambda: not cluster.left_processes(), 10)


def test_a_stopped_client_does_not_stop_the_workers(cluster: Cluster) -> None:
    """Ctrl-Z on the client: workers go on, and files grow."""
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "ready",
        ready,
        "wait",
        go,
        "lines",
        "2000",
        "1000000",
        "ready",
        ready,
    )
    ready.take(2)
    job.signal(signal.SIGSTOP)
    go.release(2)
    ready.take(2)
    job.signal(signal.SIGCONT)
    r = job.wait()
    assert r.code == 0
    assert r.file(1).read_text().count("\n") == 2000


def test_two_jobs_do_not_touch_each_other(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    words = ["-n", "2", cluster.worker, "ready", ready, "wait", go, "out", "done"]
    first, second = cluster.start(*words), cluster.start(*words)
    ready.take(4)
    first.signal(signal.SIGKILL)
    first.proc.wait(5)
    assert len(second.workers) == 2
    go.release(4)
    assert sorted(second.wait().lines) == ["[0] done", "[1] done"]


def test_acceld_as_the_first_process_of_a_container_reaps(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*prefix, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no new process namespace can be made here")
    r = cluster.launch(
        "-n", "2", cluster.worker, "daemon", "/dev/null", "out", "done", prefix=prefix
    )
    assert (r.code, sorted(r.lines)) == (0, ["[0] done", "[1] done"])
