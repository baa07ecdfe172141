"""Ranks that make different numbers of steps: how they wait for each other, and how they
have the same model again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import data
from . import model as models
from .gradients import Gradients
from .optimizer import PreparedOptimizer
from .scheduler import PreparedScheduler
from .world import World

_LABEL = "end of an uneven loop"


@dataclass
class Prepared:
    """What an Accelerator has prepared, in the same order on all ranks."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[data.PreparedLoader] = field(default_factory=list)

    def clear(self) -> None:
        self.models.clear()
        self.optimizers.clear()
        self.schedulers.clear()
        self.loaders.clear()


class Uneven:
    """Joins for an Accelerator's prepared loaders, and its join_uneven_inputs()."""

    def __init__(self, world: World, gradients: Gradients, prepared: Prepared) -> None:
        self._world = world
        self._gradients = gradients
        self._prepared = prepared
        self._is_left_to_torch = False

    def as_world(self) -> World:
        """The world for a loader: when one has no more batches here, while other ranks have,
        its join() ends with the same model on all of them."""
        return cast(World, _LoaderWorld(self._world, self._join))

    def _join(self) -> None:
        if not self._is_left_to_torch:
            self._world.join()
            self.catch_up()

    @contextmanager
    def left_to_torch(self, wrapped: list[DistributedDataParallel]) -> Iterator[None]:
        """A block in which torch answers for ranks that are done, within the forward and
        backward of these models."""
        from torch.distributed.algorithms.join import Join

        self._is_left_to_torch = True
        try:
            with Join(wrapped):
                yield
        finally:
            self._is_left_to_torch = False

    def catch_up(self) -> None:
        """After a join: give ranks that made fewer steps the state of one that made all.
        Collective."""
        if self._gradients.reducer is None:
            return
        mine = torch.tensor([self._gradients.n_steps])
        steps = self._world.all_gather(mine, _LABEL).tolist()
        most = max(steps)
        if min(steps) == most:
            return
        # Which may have been made without those in the join.
        self._gradients.reducer.forget_plan()
        root = steps.index(most)
        for model in self._prepared.models:
            if models.is_sharded(model):
                continue
            for tensor in models.tensors_of(model):
                self._world.broadcast_(tensor.data, root, _LABEL)
        state = self._world.broadcast_object(self._progress(), root, _LABEL)
        if self._gradients.n_steps != most:
            self._take(state)

    def _progress(self) -> dict[str, Any]:
        scaler = self._gradients.scaler
        return {
            "optimizers": [o.state_dict() for o in self._prepared.optimizers],
            "schedulers": [s.state_dict() for s in self._prepared.schedulers],
            "scaler": scaler.state_dict() if scaler is not None else None,
            "steps": self._gradients.n_steps,
        }

    def _take(self, state: dict[str, Any]) -> None:
        for optimizer, theirs in zip(self._prepared.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(theirs)
        for scheduler, theirs in zip(self._prepared.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)
        if self._gradients.scaler is not None:
            self._gradients.scaler.load_state_dict(state["scaler"])
        self._gradients.n_steps = state["steps"]


class _LoaderWorld:
    """A world with another join()."""

    def __init__(self, world: World, join: Callable[[], None]) -> None:
        self.join = join
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_world"], name)
