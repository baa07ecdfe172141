"""Many checks in one set of ranks, since importing torch takes longer than most of them.

    checks = Checks()

    @checks.on(1, 2, 3)
    def the_ranks_are_told_apart() -> None:
        assert ...

    test_together = checks.test()

A check that fails on some ranks only is a failure of the check, and ends the run.
"""

from __future__ import annotations

import functools
import importlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from ranks import run_ranks

Check = Callable[[], None]


class Checks:
    """The checks of a test module. `timeout` is for all of one set of ranks, in seconds."""

    def __init__(self, timeout: float = 180) -> None:
        self.timeout = timeout
        self.functions: dict[str, Check] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}

    def on(self, *sizes: int) -> Callable[[Check], Check]:
        """Run the function on so many ranks, once for each size."""

        def add(function: Check) -> Check:
            assert function.__name__ not in self.functions
            self.functions[function.__name__] = function
            self.sizes[function.__name__] = sizes
            return function

        return add

    def names(self, n: int) -> list[str]:
        return [name for name, sizes in self.sizes.items() if n in sizes]

    def test(self) -> Callable[..., None]:
        """A test function with a case for each check and size."""
        module = next(iter(self.functions.values())).__module__

        @pytest.mark.parametrize(
            ("name", "n"), [(name, n) for name, sizes in self.sizes.items() for n in sizes]
        )
        def test_together(name: str, n: int) -> None:
            failed = outcomes(module, n, self.timeout)
            assert name not in failed, failed[name]

        return test_together


@functools.cache
def outcomes(module: str, n: int, timeout: float) -> dict[str, str]:
    """What failed, and how."""
    try:
        return run_ranks(n, run_checks, module, n, timeout=timeout)[0].value
    except AssertionError as error:  # a rank died, or hung: nobody knows at which check
        return dict.fromkeys(importlib.import_module(module).checks.functions, str(error))


def run_checks(module: str, n: int) -> dict[str, str]:
    """Runs in each rank."""
    checks: Checks = importlib.import_module(module).checks
    return run_in_turn({name: checks.functions[name] for name in checks.names(n)})


def run_in_turn(functions: dict[str, Callable[[], None]]) -> dict[str, str]:
    """Runs in each rank. The tracebacks of what failed, by name."""
    import torch
    from accel import AcceleratorState, PartialState

    failed: dict[str, str] = {}
    for name, function in functions.items():
        AcceleratorState._reset_state()
        torch.manual_seed(0)
        trouble = _trouble(function)
        if trouble:
            print(f"{name}: {trouble}", file=sys.stderr, flush=True)
        troubles: list[Any] = PartialState().world.all_gather_object(trouble)
        if any(troubles):
            failed[name] = "\n".join(f"rank {r}: {t}" for r, t in enumerate(troubles) if t)
            if not all(troubles):
                # Who knows where the others are: the rest has not been run.
                rest = list(functions)[list(functions).index(name) + 1 :]
                return failed | dict.fromkeys(rest, f"not run, after {name}")
    return failed


def _trouble(function: Callable[[], None]) -> str:
    try:
        function()
    except Exception:
        return traceback.format_exc()
    return ""
