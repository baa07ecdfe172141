"""Models: the same on all ranks, on the right device, in the right precision.

On CPUs the prepared model is the program's own object, and nothing is wrapped around it.
On CUDA devices, with more than one rank, it is torch's DistributedDataParallel.
"""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import precision as precisions
from .errors import MismatchError
from .handlers import DDPCommunicationHookType, DistributedDataParallelKwargs
from .precision import Precision
from .world import World

# By id: a module may define equality, and have no hash then.
_prepared: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def is_prepared(model: nn.Module) -> bool:
    """Whether this very object was prepared; a copy of it was not."""
    return _prepared.get(id(model)) is model


def prepare_model(
    model: nn.Module,
    *,
    world: World,
    device: torch.device,
    precision: Precision,
    device_placement: bool = True,
    ddp: DistributedDataParallelKwargs | None = None,
) -> nn.Module:
    """The model on `device` with the parameters and buffers of rank 0, computing with
    `precision`. Collective in a world of more than one. CUDA models are wrapped where
    `ddp` is given. A model that torch shards or averages itself stays as it is.

    Raises ValueError where the model cannot be trained on several ranks and where it has
    no memory yet, MismatchError on all ranks when they built different models.
    """
    _check_has_memory(model)
    if world.size > 1:
        _check_hooks(model)
    if device_placement and not averages_itself(model):
        _move(model, device)
    precision.wrap(model)
    if world.size > 1 and not averages_itself(model):
        if ddp is not None and _needs_ddp(model):
            model = _in_ddp(model, ddp)
        else:
            share(model, world)
    _prepared[id(model)] = model
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile() was given."""
    # Without importing torch._dynamo, which takes a second.
    is_compiled = type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules
    return model._modules["_orig_mod"] if is_compiled else model


def averages_itself(model: nn.Module) -> bool:
    """Whether torch averages the model's gradients."""
    return isinstance(uncompiled(model), DistributedDataParallel) or is_sharded(model)


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are DTensors, as fully_shard() makes them."""
    return any(hasattr(p, "placements") for p in model.parameters())


# ---- what cannot work ----------------------------------------------------------


def _check_has_memory(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"the shape of parameter {name} is not known yet: run the model once on one batch "
                "before prepare()"
            )
        if p.device.type == "meta":
            raise ValueError(
                f"parameter {name} is on the meta device and has no values: load or initialise "
                "the model before prepare()"
            )


def _check_hooks(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name} has a post-accumulate-grad hook, which uses its gradient during "
                "backward, and gradients are averaged over the ranks after it. Step the optimizer "
                "after accelerator.backward() instead, or register the hook after prepare() if it "
                "only looks"
            )


# ---- device ----------------------------------------------------------------------


def _move(model: nn.Module, device: torch.device) -> None:
    if getattr(model, "hf_device_map", None):  # its layers were placed one by one
        return
    tensors: Iterator[Tensor] = tensors_of(model)
    if any(not same_device(t.device, device) for t in tensors):
        model.to(device)


def same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# ---- CPU: the same on all ranks -------------------------------------------------


def share(model: nn.Module, world: World) -> None:
    """Give all ranks the parameters and buffers of rank 0, once it is sure that they have
    the same names, shapes and types. Collective."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    named = [(n, t) for n, t in _named_tensors(model) if n not in ignored]
    _compare(named, world)
    for name, tensor in named:
        world.broadcast_(tensor.data, label=f"prepare(), {name}")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


_LABEL = "prepare(), parameters of a model"


def _compare(named: list[tuple[str, Tensor]], world: World) -> None:
    mine = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in named]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    if all(d == digest for d in world.all_gather_object(digest, _LABEL)):
        return
    theirs = world.all_gather_object(mine, _LABEL)
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            raise MismatchError(
                f"ranks 0 and {rank} prepare different models:\n"
                f"{_first_difference(rank, theirs[0], other)}\n"
                "Build the same model on all ranks."
            )


def _first_difference(rank: int, first: list[str], other: list[str]) -> str:
    for i in range(max(len(first), len(other))):
        here = first[i] if i < len(first) else "nothing more"
        there = other[i] if i < len(other) else "nothing more"
        if here != there:
            return f"  rank 0 has {here}\n  rank {rank} has {there}"
    return "  their order differs"


# ---- CUDA ------------------------------------------------------------------------


def _needs_ddp(model: nn.Module) -> bool:
    return any(p.requires_grad and p.device.type == "cuda" for p in model.parameters())


def _in_ddp(model: nn.Module, options: DistributedDataParallelKwargs) -> nn.Module:
    devices = {p.device for p in model.parameters()}
    kwargs: dict[str, Any] = {
        "bucket_cap_mb": options.bucket_cap_mb,
        "find_unused_parameters": options.find_unused_parameters,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        "static_graph": options.static_graph,
    }
    if options.dim:
        kwargs["dim"] = options.dim
    if not options.broadcast_buffers:
        arguments = inspect.signature(DistributedDataParallel.__init__).parameters
        is_new = "forward_sync_buffers" in arguments
        kwargs["forward_sync_buffers" if is_new else "broadcast_buffers"] = False
    if options.check_reduction:
        kwargs["check_reduction"] = True
    if len(devices) == 1:
        kwargs["device_ids"] = list(devices)
    wrapped = DistributedDataParallel(model, **kwargs)
    _register_hook(wrapped, options)
    return wrapped


def _register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    kind = DDPCommunicationHookType
    if options.comm_hook is kind.NO:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[DDPCommunicationHookType, Any] = {
        kind.FP16: default_hooks.fp16_compress_hook,
        kind.BF16: default_hooks.bf16_compress_hook,
        kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
        kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Any] = {
        kind.FP16: default_hooks.fp16_compress_wrapper,
        kind.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[options.comm_hook]
    if options.comm_wrapper is not kind.NO:
        hook = wrappers[options.comm_wrapper](hook)
    state = None
    if options.comm_hook in (kind.POWER_SGD, kind.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option)
    model.register_comm_hook(state, hook)


# ---- the program's own object again ----------------------------------------------


def unwrap(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """The module that the program gave to prepare().

    `keep_fp32_wrapper` False takes mixed precision from its forward, for good.
    `keep_torch_compile` False returns what torch.compile() was given.
    """
    compiled = model if uncompiled(model) is not model else None
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        inner = inner.module
        if compiled is not None and keep_torch_compile and uncompiled(inner) is inner:
            return type(compiled)(inner, compiled.dynamo_ctx)
    elif compiled is not None and keep_torch_compile:
        inner = compiled
    if not keep_torch_compile:
        inner = uncompiled(inner)
    if not keep_fp32_wrapper:
        for module in (model, inner):
            precisions.unwrap(module)
    return inner
