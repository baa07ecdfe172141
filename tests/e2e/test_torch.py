"""Unmodified PyTorch programs. Each test here starts processes that import torch, which
costs seconds: keep them few."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import Cluster, Result

# torch makes folders of its own in the temporary one.
pytestmark = [pytest.mark.torch, pytest.mark.leaves("files in the temporary folder")]

PROGRAMS = Path(__file__).parent / "programs"
OLD_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter with today's torch: the one that runs these tests."""
    if not importlib.util.find_spec("torch"):
        pytest.skip("this interpreter has no torch")
    return sys.executable


def accuracy(r: Result) -> float:
    assert r.code == 0, r.text + r.talk
    found = re.findall(r"accuracy (\d\.\d+)", r.text)
    assert len(found) == 1, r.text
    return float(found[0])


def test_torch_of_today_runs_its_collectives_and_ddp(cluster: Cluster, python: str) -> None:
    r = cluster.launch("-n", "2", "--python", python, PROGRAMS / "collectives.py", timeout=120)
    assert r.code == 0, r.text + r.talk
    assert "[0] all is well with torch 2." in r.text


def test_torch_of_today_works_with_four_ranks_and_a_chosen_port(
    cluster: Cluster, python: str
) -> None:
    r = cluster.launch("-n", "4", "--python", python, PROGRAMS / "collectives.py", timeout=120)
    assert r.code == 0, r.text + r.talk
    assert "[0] all is well" in r.text


def test_torch_of_debian_12_runs_its_collectives_and_ddp(cluster: Cluster) -> None:
    ask = [OLD_PYTHON, "-c", "import importlib.util as u; exit(not u.find_spec('torch'))"]
    if subprocess.run(ask, check=False).returncode:
        pytest.skip("python3-torch is not installed")
    r = cluster.launch("-n", "2", "--python", OLD_PYTHON, PROGRAMS / "collectives.py", timeout=120)
    assert r.code == 0, r.text + r.talk
    assert "[0] all is well with torch 1.13" in r.text


def test_a_script_of_accelerate_sees_two_processes(cluster: Cluster, python: str) -> None:
    if not importlib.util.find_spec("accelerate"):
        pytest.skip("accelerate is not installed")
    r = cluster.launch("-n", "2", "--python", python, PROGRAMS / "accelerated.py", timeout=120)
    assert r.code == 0, r.text + r.talk
    assert {"[0] 0 of 2 cpu", "[1] 1 of 2 cpu", "[0] seen [32, 32]"} <= set(r.lines)


@pytest.mark.parametrize("n", [1, 2])
def test_the_digits_are_learned(cluster: Cluster, python: str, repository: Path, n: int) -> None:
    script = repository / "examples" / "digits_ddp.py"
    r = cluster.launch("-n", str(n), "--python", python, script, timeout=120)
    assert accuracy(r) >= 0.96
    assert len([line for line in r.lines if "epoch 20" in line]) == n


def test_the_digits_are_learned_under_torchrun_too(
    cluster: Cluster, python: str, repository: Path
) -> None:
    argv = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(repository / "examples" / "digits_ddp.py"),
    ]
    r = subprocess.run(
        argv,
        env=cluster.environment(),
        cwd=cluster.tmp,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert r.returncode == 0, r.stderr.decode()
    assert float(re.findall(rb"accuracy (\d\.\d+)", r.stdout)[0]) >= 0.96


def test_the_digits_are_learned_by_plain_python(
    cluster: Cluster, repository: Path, python: str
) -> None:
    argv = [python, str(repository / "examples" / "digits_ddp.py")]
    r = subprocess.run(
        argv,
        env=cluster.environment(),
        cwd=cluster.cwd,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert r.returncode == 0, r.stderr.decode()
    assert float(re.findall(rb"accuracy (\d\.\d+)", r.stdout)[0]) >= 0.96


def test_a_rank_that_raises_ends_the_ranks_that_wait_for_it(cluster: Cluster, python: str) -> None:
    script = cluster.write(
        "t.py",
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    raise RuntimeError('out of luck')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "os._exit(9)\n",
    )
    r = cluster.launch("-n", "2", "--python", python, script, timeout=120)
    assert r.code == 1, r.talk
    block = r.talk.partition("accel: ")[2]
    assert "rank 1" in block and "RuntimeError: out of luck" in block
