"""The variables that every worker is given, and that a launch inside a worker is a job
of its own."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
from pathlib import Path

import pytest

from cluster import Cluster, alive, eventually

PAGE = """
import fcntl, json, os, sys
fd, ino = int(os.environ["ACCEL_CONTROL_FD"]), int(os.environ["ACCEL_CONTROL_INO"])
F_GET_SEALS = 1034
print(json.dumps({
    "seals": fcntl.fcntl(fd, F_GET_SEALS),
    "same": os.fstat(fd).st_ino == ino,
    "size": os.fstat(fd).st_size,
    "socket": os.stat(os.environ["ACCEL_SOCKET"]).st_mode,
    "folder": os.stat(os.path.dirname(os.environ["ACCEL_SOCKET"])).st_mode,
}))
"""
STALE = {
    "RANK": "7",
    "WORLD_SIZE": "99",
    "LOCAL_RANK": "6",
    "LOCAL_WORLD_SIZE": "98",
    "GROUP_RANK": "5",
    "GROUP_WORLD_SIZE": "97",
    "ROLE_RANK": "4",
    "ROLE_WORLD_SIZE": "96",
    "ROLE_NAME": "old",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_MAX_RESTARTS": "9",
    "TORCHELASTIC_RUN_ID": "old",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_ERROR_FILE": "/nonexistent/old",
    "ACCEL_NODE": "3",
    "ACCEL_ATTEMPT": "8",
    "ACCEL_CONTROL_FD": "77",
    "ACCEL_CONTROL_INO": "77",
    "ACCEL_SOCKET": "/nonexistent/s",
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_USE_CPU": "false",
}
CONTRACT = set(STALE) | {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
    "ACCEL_JOB",
    "ACCEL_DEVICE",
    "ACCEL_MIXED_PRECISION",
    "GLOO_ENABLE_STORE_V2_API",
}


def read_env(path: Path, rank: int) -> dict[str, str]:
    entries = Path(f"{path}.{rank}").read_bytes().split(b"\0")[:-1]
    pairs = [os.fsdecode(e).split("=", 1) for e in entries]
    assert len(dict(pairs)) == len(pairs), "a name appears twice"
    return dict(pairs)


def worker_envs(cluster: Cluster, n: int, *options: str, **more: object) -> list[dict[str, str]]:
    out = cluster.files / "env"
    r = cluster.launch("-n", str(n), *options, cluster.worker, "env", out, **more)
    assert r.code == 0, r.talk
    return [read_env(out, rank) for rank in range(n)]


def cores() -> int:
    """What this process may use: its affinity, lowered by a quota of its cgroup."""
    n = len(os.sched_getaffinity(0))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
            files = [root / path.lstrip("/") / "cpu.max" for root in roots]
            pairs = [f.read_text().split() for f in files if f.is_file()]
        elif "cpu" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/cpu") / path.lstrip("/")
            names = [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
            pairs = [[f.read_text().strip() for f in names]] if names[0].is_file() else []
        else:
            continue
        for quota, period in pairs:
            if quota not in ("max", "-1"):
                n = min(n, math.ceil(int(quota) / int(period)))
    return max(n, 1)


@pytest.mark.parametrize("n", [1, 3])
def test_every_worker_is_given_the_whole_contract(cluster: Cluster, n: int) -> None:
    envs = worker_envs(cluster, n)
    jobdir = cluster.job_folders()[0]
    for rank, env in enumerate(envs):
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": str(n),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(n),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(n),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": str(max(1, cores() // n)),
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_USE_CPU": "true",
            "GLOO_ENABLE_STORE_V2_API": "1",
            "ACCEL_JOB": jobdir.name,
            "ACCEL_NODE": "0",
            "ACCEL_ATTEMPT": "0",
            "ACCEL_DEVICE": "cpu",
            "ACCEL_MIXED_PRECISION": "no",
        }
        assert {k: env.get(k) for k in expected} == expected
        assert 1024 <= int(env["MASTER_PORT"]) <= 65535
        assert env["TORCHELASTIC_RUN_ID"] == jobdir.name
        assert Path(env["TORCHELASTIC_ERROR_FILE"]).is_absolute()
        assert int(env["ACCEL_CONTROL_FD"]) > 2
        added = set(env) - {k.decode() for k in cluster.environment()}
        assert added == CONTRACT
    assert len({e["MASTER_PORT"] for e in envs}) == 1
    assert len({e["TORCHELASTIC_ERROR_FILE"] for e in envs}) == n
    assert len({e["ACCEL_CONTROL_INO"] for e in envs}) == n


def test_stale_variables_of_another_launcher_are_overwritten(cluster: Cluster) -> None:
    fresh = worker_envs(cluster, 1)[0]
    env = worker_envs(cluster, 1, env=STALE)[0]
    changing = {
        "ACCEL_JOB",
        "ACCEL_CONTROL_FD",
        "ACCEL_CONTROL_INO",
        "ACCEL_SOCKET",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
    }
    same = set(STALE) - changing
    assert {k: env[k] for k in same} == {k: fresh[k] for k in same}
    for name in changing & set(STALE):
        assert env[name] != STALE[name], name


def test_other_launchers_variables_pass_but_decide_nothing(cluster: Cluster) -> None:
    given = {"SLURM_NTASKS": "8", "PMI_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "8"}
    env = worker_envs(cluster, 1, env=given)[0]
    assert env["WORLD_SIZE"] == "1"
    assert {k: env[k] for k in given} == given


def test_threads_that_the_user_has_set_are_kept(cluster: Cluster) -> None:
    env = worker_envs(cluster, 2, env={"OMP_NUM_THREADS": "13"})[0]
    assert env["OMP_NUM_THREADS"] == "13"
    env = worker_envs(cluster, 2, "--env", "OMP_NUM_THREADS=14")[1]
    assert env["OMP_NUM_THREADS"] == "14"


def test_threads_follow_the_cores_this_process_may_use(cluster: Cluster) -> None:
    first = str(min(os.sched_getaffinity(0)))
    env = worker_envs(cluster, 1, prefix=["taskset", "-c", first])[0]
    assert env["OMP_NUM_THREADS"] == "1"


def test_a_value_for_gloo_that_the_user_has_set_is_kept(cluster: Cluster) -> None:
    env = worker_envs(cluster, 1, env={"GLOO_ENABLE_STORE_V2_API": "0"})[0]
    assert env["GLOO_ENABLE_STORE_V2_API"] == "0"


def test_mixed_precision_reaches_the_worker_under_both_names(cluster: Cluster) -> None:
    env = worker_envs(cluster, 1, "--mixed-precision", "bf16")[0]
    assert (env["ACCEL_MIXED_PRECISION"], env["ACCELERATE_MIXED_PRECISION"]) == ("bf16", "bf16")


def test_the_chosen_master_port_is_used(cluster: Cluster) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert worker_envs(cluster, 2, "--master-port", str(port))[1]["MASTER_PORT"] == str(port)


def test_the_control_page_is_sealed_and_its_socket_is_private(cluster: Cluster) -> None:
    r = cluster.launch(cluster.write("page.py", PAGE))
    assert r.code == 0, r.talk
    page = json.loads(r.text)
    shrink, grow = 2, 4
    assert page["seals"] & (shrink | grow) == shrink | grow
    assert page["same"] and page["size"] > 0
    assert stat.S_ISSOCK(page["socket"])
    assert stat.S_IMODE(page["folder"]) == 0o700


# --- a launch inside a worker ---------------------------------------------------------


def test_a_launch_inside_a_worker_is_a_job_of_its_own(cluster: Cluster) -> None:
    outer, inner = cluster.files / "outer", cluster.files / "inner"
    r = cluster.launch(
        "-n",
        "2",
        "--mixed-precision",
        "bf16",
        cluster.worker,
        "env",
        outer,
        "if",
        "0",
        "exec",
        cluster.accel,
        "launch",
        "-n",
        "3",
        cluster.worker,
        "env",
        inner,
    )
    assert r.code == 0, r.talk
    out = read_env(outer, 0)
    for rank in range(3):
        env = read_env(inner, rank)
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert env["ACCEL_MIXED_PRECISION"] == "no"
        assert env["ACCELERATE_MIXED_PRECISION"] == "no"
        for name in ("ACCEL_JOB", "MASTER_PORT", "ACCEL_SOCKET", "ACCEL_CONTROL_INO"):
            assert env[name] != out[name], name
    assert len(cluster.job_folders()) == 2


def test_a_launch_inside_a_worker_counts_its_own_processes_and_threads(cluster: Cluster) -> None:
    inner = cluster.files / "inner"
    r = cluster.launch(
        "-n",
        "2",
        cluster.worker,
        "if",
        "0",
        "exec",
        cluster.accel,
        "launch",
        cluster.worker,
        "env",
        inner,
    )
    assert r.code == 0, r.talk
    assert read_env(inner, 0)["WORLD_SIZE"] == "1"


@pytest.mark.tree
def test_a_launch_inside_a_worker_ends_with_that_worker(cluster: Cluster) -> None:
    ready = cluster.fifo()
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "if",
        "0",
        "exec",
        cluster.accel,
        "launch",
        "-n",
        "2",
        cluster.worker,
        "daemon",
        ready,
        "ready",
        ready,
        "pause",
    )
    inner = [int(words[2]) for words in ready.take(4)]
    assert len(job.workers) == 1, "rank 1 has nothing to do"
    os.kill(job.workers[0], 9)
    result = job.wait()
    assert result.code == 137
    assert eventually(lambda: not any(alive(pid) for pid in inner))


@pytest.mark.tree
def test_a_failing_neighbour_ends_a_launch_inside_a_worker(cluster: Cluster) -> None:
    ready, go = cluster.fifo(), cluster.fifo("go")
    job = cluster.start(
        "-n",
        "2",
        cluster.worker,
        "if",
        "1",
        "wait",
        go,
        "if",
        "1",
        "exit",
        "3",
        "exec",
        cluster.accel,
        "launch",
        "-n",
        "2",
        cluster.worker,
        "ready",
        ready,
        "pause",
    )
    inner = [int(words[2]) for words in ready.take(2)]
    go.release()
    assert job.wait().code == 3
    assert eventually(lambda: not any(alive(pid) for pid in inner))
