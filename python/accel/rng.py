"""Random numbers: seeds for everything a program draws from, and one state on all ranks."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterable
from enum import StrEnum

import torch
from torch import Tensor

from . import world as worlds
from .world import World


class RNGType(StrEnum):
    """What can be synchronised. "generator" is one torch.Generator that is passed along."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    GENERATOR = "generator"
    NUMPY = "numpy"
    PYTHON = "python"

    @classmethod
    def of(cls, kind: RNGType | str) -> RNGType:
        """Raises ValueError that lists the types there are."""
        try:
            return cls(kind)
        except ValueError:
            known = ", ".join(k.value for k in cls)
            raise ValueError(f"there is no RNG type {kind!r}: use some of {known}") from None


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, on all devices.

    With `device_specific`, each rank gets `seed` plus its rank, so that random
    augmentation differs. With `deterministic`, torch uses deterministic algorithms only.
    """
    if device_specific:
        seed += worlds.current().rank
    random.seed(seed)
    if importlib.util.find_spec("numpy"):
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # those of all devices too
    if "torch_xla" in sys.modules:
        sys.modules["torch_xla.core.xla_model"].set_rng_state(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None,
    generator: torch.Generator | None = None,
    *,
    world: World | None = None,
) -> None:
    """Give all ranks the state of rank 0's generator. Collective; nothing in a world of
    one.

    Raises ValueError for "generator" without one, and for a type there is not.
    """
    kind = RNGType.of(rng_type or RNGType.TORCH)
    world = world or worlds.current()
    if kind is RNGType.GENERATOR and generator is None:
        raise ValueError("to synchronise a generator, pass it as generator=")
    if world.size == 1:
        return
    if kind is RNGType.PYTHON:
        random.setstate(world.broadcast_object(random.getstate(), label=_label(kind)))
    elif kind is RNGType.NUMPY:
        import numpy

        state = numpy.random.get_state()
        numpy.random.set_state(world.broadcast_object(state, label=_label(kind)))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(_from_rank_0(world, torch.get_rng_state(), kind))
    elif kind is RNGType.CUDA:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_rank_0(world, torch.cuda.get_rng_state(), kind))
    elif kind is RNGType.XLA:
        model = sys.modules.get("torch_xla.core.xla_model")
        if model is not None:
            state = world.broadcast_object(model.get_rng_state(), label=_label(kind))
            model.set_rng_state(state)
    else:
        assert generator is not None
        generator.set_state(_from_rank_0(world, generator.get_state(), kind))


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str],
    generator: torch.Generator | None = None,
    *,
    world: World | None = None,
) -> None:
    """synchronize_rng_state() for each of `rng_types`."""
    for kind in rng_types:
        synchronize_rng_state(kind, generator, world=world)


def _from_rank_0(world: World, state: Tensor, kind: RNGType) -> Tensor:
    world.broadcast_(state, label=_label(kind))
    return state


def _label(kind: RNGType) -> str:
    return f"random state, {kind}"
