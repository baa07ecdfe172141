"""When gradients are averaged, unscaled and used: what an Accelerator shares with the
optimizers and schedulers it prepared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .handlers import GradientAccumulationPlugin
from .reducer import Reducer
from .runs import runs

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .precision import LossScaler
    from .world import World


@dataclass
class Gradients:
    """The state of the gradients between backward and step.

    `sync` is False in the micro-steps of an accumulation that do not end a step. `reducer`
    is None in a world of one, and `scaler` without fp16.
    """

    world: World
    reducer: Reducer | None = None
    scaler: LossScaler | None = None
    plugin: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    sync: bool = True
    micro_step: int = 0
    # In this micro-step of accumulate() backward has run already.
    is_micro_step_used: bool = True
    n_steps: int = 0  # of optimizers
    # Models whose gradients torch's DistributedDataParallel averages.
    wrapped: list[nn.Module] = field(default_factory=list)

    def begin_micro_step(self, is_last_batch: bool) -> None:
        """accumulate() begins: does this micro-step end a step?"""
        self.is_micro_step_used = False
        if is_last_batch and self.plugin.sync_with_dataloader:
            self.micro_step, self.sync = 0, True
        else:
            self.micro_step += 1
            self.sync = self.micro_step % self.plugin.num_steps == 0

    def run_backward(self, loss: Tensor, kwargs: dict[str, Any]) -> None:
        """accelerator.backward(), with a loss that is scaled already."""
        self.is_micro_step_used = True
        reducer = self.reducer
        if reducer is None:
            loss.backward(**kwargs)
            return
        runs.is_announced = True
        try:
            loss.backward(**kwargs)
        finally:
            runs.is_announced = False
            # One that raises halfway has left gradients too.
            reducer.note()
        if self.sync or self.plugin.sync_each_batch:
            reducer.average()

    def finish(self) -> None:
        """Average what was not: the gradients of a bare loss.backward()."""
        if self.reducer is not None and self.reducer.is_pending():
            self.reducer.average()

    def finish_for(self, n_averaged: int) -> int:
        """As finish(), for a user who has seen `n_averaged` averages; one that has seen all
        of them takes part in another, with ranks that had a backward when this had none.
        Returns how many there are now."""
        reducer = self.reducer
        if reducer is None:
            return 0
        if reducer.n_averaged == n_averaged or reducer.is_pending():
            reducer.average()
        return reducer.n_averaged

    def unscale(self, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the loss scale, for all optimizers that step one of these
        parameters."""
        if self.scaler is None:
            return
        ids = {id(p) for p in parameters}
        for optimizer in optimizers:
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                self.scaler.unscale_(optimizer)

    def parameter_ids(self) -> set[int]:
        """The id() of all parameters that prepared models have."""
        ids = self.reducer.parameter_ids() if self.reducer is not None else set()
        return ids | {id(p) for model in self.wrapped for p in model.parameters()}
