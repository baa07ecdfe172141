"""The prepared optimizer: steps once per step of the whole job.

It averages what backward left unaveraged, divides by the loss scale, leaves out the
micro-steps of an accumulation, and keeps its state where the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .gradients import Gradients


class PreparedOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer`; has its attributes, and is an Optimizer to schedulers.

    step() raises ValueError, in a world of more than one, when it steps parameters that
    no prepared model has: their gradients are not averaged.
    """

    # Not Optimizer.__init__: the parameters are those of the optimizer inside.
    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: Gradients, *, place: bool = True
    ) -> None:
        self.optimizer = optimizer
        self._gradients = gradients
        self._place = place
        self._was_skipped = False
        self._is_used = False  # a step was made since the gradients were zeroed
        self._n_averaged = 0  # at the last step
        self._checked: list[int] = []
        if place:
            self.place()

    # ---- the step ----------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the average of all ranks; nothing in a micro-step of accumulate()
        that does not end a step. `closure` may call accelerator.backward() or
        loss.backward(). Returns what the optimizer inside returns.
        """
        gradients = self._gradients
        self._was_skipped = False
        if not gradients.sync:
            return None
        self._is_used = True
        gradients.n_steps += 1
        result = None
        if closure is not None:
            result = self._step_with(closure)
        else:
            if gradients.reducer is not None:
                self._check_parameters()
                self._n_averaged = gradients.finish_for(self._n_averaged)
            if gradients.scaler is None:
                result = self.optimizer.step()
            else:
                self._was_skipped = not gradients.scaler.step_agreed(
                    self.optimizer, gradients.world
                )
        gradients.world.step()
        return result

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        gradients = self._gradients
        if gradients.scaler is not None:
            raise RuntimeError(
                'an optimizer with a closure does not work with mixed_precision="fp16", whose '
                'gradients have to be looked at before a step: use "bf16" or "no"'
            )
        if gradients.reducer is not None:
            self._check_parameters()

        def averaged() -> Any:
            loss = closure()
            self._n_averaged = gradients.finish_for(self._n_averaged)
            return loss

        return self.optimizer.step(averaged)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient was infinite or NaN."""
        return self._was_skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients; in an accumulation only those that a step has used.

        So it does not matter whether a loop calls it before backward or after the step.
        """
        if not self._may_drop():
            return
        self._is_used = False
        if self._gradients.scaler is not None:
            self._gradients.scaler.forget(self.optimizer)
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def _may_drop(self) -> bool:
        gradients = self._gradients
        if gradients.plugin.num_steps == 1 and gradients.sync:
            return True
        if not gradients.is_micro_step_used:  # before backward
            return self._is_used
        return gradients.sync

    # ---- parameters --------------------------------------------------------

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _check_parameters(self) -> None:
        """Raises ValueError where a parameter belongs to no prepared model."""
        # Again when groups came or went; each of them is a list of its own.
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        if groups == self._checked:
            return
        known = self._gradients.parameter_ids()
        strangers = [p for p in self._parameters() if p.requires_grad and id(p) not in known]
        if strangers:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:4])
            more = ", ..." if len(strangers) > 4 else ""
            raise ValueError(
                f"this optimizer steps {len(strangers)} parameters that no prepared model has "
                f"(shapes {shapes}{more}), so each rank would step them its own way: make them "
                "parameters of a module and prepare() that, or make the optimizer from the model "
                "that is prepared"
            )
        self._checked = groups

    def replace_parameters(self, new: dict[int, Tensor]) -> None:
        """Step new parameters, by the id of the old, with the state of the old."""
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        state = self.optimizer.state
        for old in [p for p in state if id(p) in new]:
            state[new[id(old)]] = state.pop(old)

    def place_again(self) -> None:
        """A model was moved after this optimizer was prepared."""
        if self._place:
            self.place()

    def place(self) -> None:
        """Move the state to the devices of the parameters."""
        for group in self.optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                state = self.optimizer.state.get(parameter)
                if not state:
                    continue
                for key, value in state.items():
                    # torch counts steps on the CPU, unless the step itself runs on the device.
                    if key != "step" or on_device:
                        state[key] = _on(parameter.device, value)

    # ---- otherwise the optimizer inside ------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self.place_again()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, or what was pickled, is the optimizer inside: this object belongs to the
        # ranks of its process.
        return _itself, (self.optimizer,)

    def __repr__(self) -> str:
        return repr(self.optimizer)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, dict):
        return {k: _on(device, v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [_on(device, v) for v in value]
        return type(value)(moved) if type(value) in (list, tuple) else value
    return value
