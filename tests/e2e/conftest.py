"""Fixtures of the end-to-end tests. Every test that asks for a cluster is checked for
what it left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, be_subreaper

REPOSITORY = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    be_subreaper()
    config.addinivalue_line("markers", "torch: starts processes that import torch")
    config.addinivalue_line("markers", "tree: kills processes and looks for what survives")
    config.addinivalue_line("markers", "leaves(*kinds): what the test may leave behind, and why")


@pytest.fixture(scope="session")
def build() -> Path:
    folder = Path(os.environ.get("ACCEL_BUILD", REPOSITORY / "build")).resolve()
    if not (folder / "accel").exists():
        pytest.fail(f"no accel in {folder}: build it first, or say where in ACCEL_BUILD")
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def cluster(build: Path) -> Iterator[Cluster]:
    c = Cluster(1, build)
    yield c
    c.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """The leak check. It runs before the cluster is torn down, since it asked for it."""
    if "cluster" not in request.fixturenames:
        yield
        return
    c: Cluster = request.getfixturevalue("cluster")
    yield
    marker = request.node.get_closest_marker("leaves")
    leaks = c.leaks(allowed=marker.args if marker else ())
    assert not leaks, f"left behind: {leaks}"
