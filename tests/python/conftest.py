"""Fixtures of the Python package's tests; the machinery is in ranks.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

from ranks import Group, RunRanks, plain_environment, run_ranks  # noqa: E402

# The tests themselves are a world of one, whatever started them.
for _name in set(os.environ) - set(plain_environment()):
    del os.environ[_name]


@pytest.fixture
def ranks() -> RunRanks:
    """Runs a function or program on n real processes: see ranks.run_ranks()."""
    return run_ranks


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., Group]]:
    """As `ranks`, but returns while they run: expect(), signal(), wait()."""
    groups: list[Group] = []

    def start(
        n: int, what: Any, *args: Any, env: Any = None, variables: Any = None, **kwargs: Any
    ) -> Group:
        groups.append(Group(n, what, args, kwargs, env, variables))
        return groups[-1]

    yield start
    for group in groups:
        group.close()
