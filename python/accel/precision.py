"""16-bit training: autocast around a model's forward, and the scale of the loss.

"bf16" and "fp16" keep parameters in float32 and compute in 16 bits where torch.autocast
finds that safe. float16 gradients vanish where they are small, so "fp16" multiplies the
loss and divides the gradients again, on CPUs as on CUDA devices.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .handlers import AutocastKwargs, GradScalerKwargs
from .operations import convert_to_fp32
from .runs import runs

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .world import World

_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """A mixed precision ("no", "fp16", "bf16") on a type of device.

    Raises ValueError where the device cannot compute with it.
    """

    def __init__(
        self, name: str, device: torch.device, autocast: AutocastKwargs | None = None
    ) -> None:
        self.name = name
        self.dtype = _DTYPES[name]
        self._device = device.type
        self._autocast = autocast or AutocastKwargs()
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(
                f"{torch.cuda.get_device_name(device)} cannot compute with bfloat16: use "
                'mixed_precision="fp16" or "no"'
            )

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context in which torch computes in 16 bits where that is safe."""
        options = handler or self._autocast
        if self.dtype is None and options.enabled:
            return nullcontext()
        return torch.autocast(
            self._device,
            dtype=self.dtype,
            enabled=options.enabled,
            cache_enabled=options.cache_enabled,
        )

    def wrap(self, model: nn.Module) -> None:
        """Let the model's forward compute in 16 bits and return float32.

        Only the object's `forward` is replaced, by a method bound to it: a deep copy has
        its own, and an unpickled copy the plain forward of its class.
        """
        if self.dtype is None or is_wrapped(model):
            return
        own = model.__dict__.get("forward")
        if own is None and isinstance(model, torch.jit.ScriptModule):
            own = model.forward
        if own is not None:
            model.__dict__[_OWN_FORWARD] = own
        function = _forward_of_class(self, type(model)) if own is None else _forward_of_own(self)
        model.__dict__["forward"] = types.MethodType(function, model)


_OWN_FORWARD = "_accel_own_forward"


def _forward_of_class(precision: Precision, cls: type[nn.Module]) -> Callable[..., Any]:
    inner = cls.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            output = inner(self, *args, **kwargs)
        return convert_to_fp32(output)

    forward.__dict__["_accel_autocast"] = True
    return forward


def _forward_of_own(precision: Precision) -> Callable[..., Any]:
    """Around a forward that the object has instead of its class', as compiled ones do."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            output = self.__dict__[_OWN_FORWARD](*args, **kwargs)
        return convert_to_fp32(output)

    forward.__dict__["_accel_autocast"] = True
    return forward


def is_wrapped(model: nn.Module) -> bool:
    """Whether the model's forward computes in mixed precision by itself."""
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    return getattr(function, "_accel_autocast", False)


def unwrap(model: nn.Module) -> None:
    """Undo Precision.wrap()."""
    if is_wrapped(model):
        del model.__dict__["forward"]
        if _OWN_FORWARD in model.__dict__:
            model.__dict__["forward"] = model.__dict__.pop(_OWN_FORWARD)


def loss_scaler(
    precision: Precision, device: torch.device, options: GradScalerKwargs
) -> LossScaler | None:
    """The LossScaler that this precision needs on this device, or None."""
    if precision.name != "fp16" or not options.enabled:
        return None
    return LossScaler(
        device.type,
        init_scale=options.init_scale,
        growth_factor=options.growth_factor,
        backoff_factor=options.backoff_factor,
        growth_interval=options.growth_interval,
    )


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler, for any number of optimizers and ranks.

    The scale is updated when the next loss is scaled and not in a step, so that all
    optimizers which step after one backward divide by the scale it was made with. An
    overflow on one rank is one on all.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        runs.watch()
        self._unscaled: dict[int, Optimizer] = {}
        self._done: set[int] = set()  # of those, whose gradients were used or dropped
        # How often scale() was called and backward has run, at the last step of each.
        self._n_scaled = 0
        self._first_step = (0, runs.count)
        self._last_step: dict[int, tuple[int, int]] = {}

    # ---- the scale ---------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """The loss times the scale."""
        if self._unscaled:
            self._settle()
        self._n_scaled += 1
        return super().scale(outputs)

    def get_scale(self) -> float:
        self._settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return super().state_dict()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to the overflows since the last update; done by itself."""
        if new_scale is not None or self._any_recorded():
            super().update(new_scale)
        self._unscaled.clear()
        self._done.clear()

    def _settle(self) -> None:
        for key, optimizer in self._unscaled.items():
            if key not in self._done and _has_no_gradient(optimizer):
                self._done.add(key)
        if self._unscaled and self._done >= self._unscaled.keys():
            self.update()

    def _any_recorded(self) -> bool:
        return any(s["found_inf_per_device"] for s in self._per_optimizer_states.values())

    # ---- gradients ---------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale they were made with, once."""
        if id(optimizer) in self._unscaled:
            return
        if self._scale is None:  # a rank that had no loss to scale
            super().scale(torch.zeros((), device=self._device))
        try:
            super().unscale_(optimizer)
        except ValueError as error:
            if "FP16" not in str(error):
                raise
            raise ValueError(
                'with mixed_precision="fp16" the parameters stay in float32, and some of this '
                "optimizer's are float16: leave out model.half(), autocast makes the halves"
            ) from None
        self._unscaled[id(optimizer)] = optimizer

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients are dropped: do not wait for its step."""
        if id(optimizer) in self._unscaled:
            self._done.add(id(optimizer))

    def step_agreed(self, optimizer: Optimizer, world: World) -> bool:
        """Step, unless a gradient of any rank is infinite or NaN. Returns whether the
        step was made. Collective in a world of more than one.

        Raises RuntimeError when backward ran since the last step without a scaled loss.
        """
        key = id(optimizer)
        self._check_scaled(optimizer)
        if key in self._done:
            self._settle()
        self.unscale_(optimizer)
        found = self._per_optimizer_states[key]["found_inf_per_device"]
        overflow = any(bool(f.item()) for f in found.values())
        if world.size > 1:
            overflow = _any_rank(overflow, world, self._scale.device)
        if overflow:
            if not found:
                found[self._scale.device] = torch.ones_like(self._scale)
            for flag in found.values():
                flag.fill_(1.0)
        elif found:
            super().step(optimizer)
        else:
            optimizer.step()
        self._done.add(key)
        return not overflow

    def _check_scaled(self, optimizer: Optimizer) -> None:
        scaled, ran = self._last_step.get(id(optimizer), self._first_step)
        self._last_step[id(optimizer)] = (self._n_scaled, runs.count)
        if runs.count > ran and self._n_scaled == scaled and not _has_no_gradient(optimizer):
            raise RuntimeError(
                "these gradients come from loss.backward(), and with mixed_precision="
                '"fp16" the loss has to be scaled first: call accelerator.backward(loss)'
            )


def _any_rank(overflow: bool, world: World, device: torch.device) -> bool:
    flag = torch.tensor([float(overflow)], device=device)
    world.reduce_(flag, "max", "step(), overflows")
    return bool(flag.item())


def _has_no_gradient(optimizer: Optimizer) -> bool:
    """Whether all gradients are None or zero."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return not any(bool(g.any()) for g in gradients if g is not None)
