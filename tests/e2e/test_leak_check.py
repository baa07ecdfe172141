"""The leak check sees what it is there to see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from cluster import Cluster, alive, eventually

HOLDER = """
import os, socket, sys
fd = os.memfd_create("accel-page")
s = socket.socket(socket.AF_UNIX)
s.bind("\\0accel-" + sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_has_lost_its_parent_is_seen(cluster: Cluster) -> None:
    ready = cluster.fifo()
    subprocess.run(
        [cluster.worker, "daemon", str(ready), "ready", str(ready)],
        env=cluster.environment(),
        check=True,
    )
    pid = int(ready.take(1, "child")[0][2])
    assert [p for p, _ in cluster.leaks(0)["processes"]] == [pid]
    assert cluster.kill_everything() == [pid]
    assert eventually(lambda: not alive(pid))
    assert not cluster.leaks()


def test_a_process_that_has_dropped_its_environment_is_seen(cluster: Cluster) -> None:
    ready = cluster.fifo()
    subprocess.run([cluster.worker, "daemon", str(ready)], env={}, check=True)
    pid = int(ready.take(1, "child")[0][2])
    assert [p for p, _ in cluster.leaks(0)["processes"]] == [pid]
    cluster.kill_everything()
    assert not cluster.leaks()


def test_memory_and_sockets_without_a_file_are_seen(cluster: Cluster) -> None:
    name = uuid.uuid4().hex
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout
    holder.stdout.readline()
    leaks = cluster.leaks(0)
    holder.communicate()
    assert leaks["abstract sockets"] == [f"@accel-{name}"]
    assert len(leaks["memfds"]) == 1
    assert not cluster.leaks()


def test_files_are_seen_wherever_they_are(cluster: Cluster) -> None:
    cluster.launch("--version")  # what is in the working folder counts from here on
    shm = Path("/dev/shm", uuid.uuid4().hex)
    (cluster.run / "accel").mkdir()
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(cluster.run / "accel" / "x.sock"))
        for path in (cluster.cwd / "c", cluster.tmp / "t", cluster.home / "h", shm):
            path.touch()
        leaks = cluster.leaks(0)
    for path in (cluster.cwd / "c", cluster.tmp / "t", cluster.home / "h", shm):
        path.unlink()
    os.unlink(cluster.run / "accel" / "x.sock")
    assert leaks == {
        "files in the runtime folder": ["accel/x.sock"],
        "files in the working folder": ["c"],
        "files in the temporary folder": ["t"],
        "files in the home folder": ["h"],
        "shared memory": [shm.name],
    }
