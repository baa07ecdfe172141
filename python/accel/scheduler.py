"""The prepared scheduler: one step for each step the optimizer really made.

A schedule is written for one process, which would make `num_processes` times as many
steps on the same data; so each real step counts as that many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .gradients import Gradients
from .optimizer import PreparedOptimizer


class PreparedScheduler:
    """Wraps `scheduler`; has its attributes.

    With `with_optimizer` False, step() is that of the scheduler inside, whatever the
    optimizer did. `per_process` False: a step counts once, as where batches are split
    over the ranks and an epoch has as many steps as with one process.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[PreparedOptimizer],
        gradients: Gradients,
        *,
        per_process: bool = True,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._gradients = gradients
        self._with_optimizer = with_optimizer
        # A plateau is told a metric per call, which counts once.
        once = not per_process or isinstance(scheduler, ReduceLROnPlateau)
        self._n_times = 1 if once else gradients.world.size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule; nothing in a micro-step of accumulate() that does not end a
        step, nor after an optimizer step that was skipped."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradients.sync:
            if self._gradients.plugin.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        if any(o.step_was_skipped for o in self.optimizers):
            return
        for _ in range(self._n_times):
            if self._is_at_end():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_at_end(self) -> bool:
        """OneCycleLR raises beyond its total; a schedule whose length is no multiple of the
        number of processes gets there in the middle of a step."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
