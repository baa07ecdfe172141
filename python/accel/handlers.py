"""What a constructor argument of Accelerator says when a value is not enough.

The names and fields are those that Accelerate's scripts use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar


class DDPCommunicationHookType(Enum):
    """How DistributedDataParallel sends gradients between CUDA devices."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs:
    """Arguments of torch's DistributedDataParallel, for models on CUDA devices.

    On CPUs `broadcast_buffers` counts as well; the others have nothing to decide there:
    parameters without a gradient, static or not, are averaged right as they are.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)


@dataclass
class GradScalerKwargs:
    """Arguments of torch.amp.GradScaler, for mixed_precision="fp16"."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AutocastKwargs:
    """Arguments of torch.autocast. `cache_enabled` None leaves it to torch."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs:
    """Arguments of torch.distributed.init_process_group."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class GradientAccumulationPlugin:
    """How Accelerator.accumulate() counts.

    `num_steps` micro-steps make one step; with `sync_with_dataloader` the last batch of a
    loader ends a step early. `adjust_scheduler`: a scheduler counts the micro-steps it
    was called in. `sync_each_batch`: average gradients in every micro-step.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share the data out; see data.prepare_data_loader().

    `use_seedable_sampler` and `data_seed` are accepted and not needed: the shuffle is the
    same on all ranks whatever their seeds are.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


Handler = TypeVar("Handler")

_HANDLERS: tuple[type, ...] = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    AutocastKwargs,
    InitProcessGroupKwargs,
)


class Handlers:
    """The kwargs_handlers of an Accelerator: at most one of each kind.

    Raises TypeError for anything else, ValueError for two of one kind.
    """

    def __init__(self, handlers: Iterable[Any] | None) -> None:
        self._by_type: dict[type, Any] = {}
        for handler in handlers or ():
            kind = next((k for k in _HANDLERS if isinstance(handler, k)), None)
            if kind is None:
                raise TypeError(
                    f"kwargs_handlers takes {', '.join(k.__name__ for k in _HANDLERS)}, "
                    f"not {type(handler).__name__}"
                )
            if kind in self._by_type:
                raise ValueError(f"kwargs_handlers has {kind.__name__} twice")
            self._by_type[kind] = handler

    def get(self, kind: type[Handler]) -> Handler:
        """The handler of this kind, or one with the defaults."""
        found = self._by_type.get(kind)
        return kind() if found is None else found


# ---- the other constructor arguments ---------------------------------------------

# Constructor arguments of Accelerate that accel has no use for, and what to do instead.
_UNSUPPORTED = {
    "deepspeed_plugin": "accel does not drive DeepSpeed",
    "deepspeed_plugins": "accel does not drive DeepSpeed",
    "fsdp_plugin": "accel does not shard parameters: wrap the model with torch's fully_shard",
    "megatron_lm_plugin": "accel does not drive Megatron-LM",
    "torch_tp_plugin": "accel does not split layers over ranks: use torch's parallelize_module",
    "parallelism_config": "accel averages gradients over all ranks, and knows no other mesh",
    "dynamo_backend": "call torch.compile(model) before or after prepare()",
    "dynamo_plugin": "call torch.compile(model) before or after prepare()",
    "log_with": "accel keeps no trackers: log from `if accelerator.is_main_process:`",
    "project_config": "accel keeps no project folder: say paths where something is saved",
}


def refuse(arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for what Accelerate has and accel does not, TypeError for
    what neither has."""
    for name, value in arguments.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"Accelerator has no argument {name!r}")
        if value is not None and str(value).lower() not in ("no", "false"):
            raise NotImplementedError(f"Accelerator({name}=...): {_UNSUPPORTED[name]}")


def asked_precision(mixed_precision: str | None, fp16: bool | None) -> str | None:
    """The precision that the two arguments ask for. Raises ValueError where they differ."""
    if fp16 is None:
        return mixed_precision
    if mixed_precision is not None and fp16 != (str(mixed_precision) == "fp16"):
        raise ValueError(
            f"fp16={fp16} and mixed_precision={mixed_precision!r} contradict each other"
        )
    return "fp16" if fp16 else mixed_precision or "no"


def loading(
    config: DataLoaderConfiguration | None,
    split_batches: bool | None,
    dispatch_batches: bool | None,
    even_batches: bool | None,
) -> DataLoaderConfiguration:
    """`config`, or one of the single arguments. Raises ValueError for both."""
    single = {
        "split_batches": split_batches,
        "dispatch_batches": dispatch_batches,
        "even_batches": even_batches,
    }
    said = {name: value for name, value in single.items() if value is not None}
    if config is None:
        return DataLoaderConfiguration(**said)
    if said:
        raise ValueError(f"{', '.join(said)} belong into dataloader_config, which is given as well")
    return config


def accumulation(
    plugin: GradientAccumulationPlugin | None, steps: int | None
) -> GradientAccumulationPlugin:
    """`plugin`, or one with `steps`, else with what the launcher says. Raises ValueError for
    both, and for less than one step."""
    if plugin is not None:
        if steps not in (None, 1):
            raise ValueError(
                "gradient_accumulation_steps and gradient_accumulation_plugin are both given: say "
                "num_steps in the plugin"
            )
        at_least_one(plugin.num_steps)
        return plugin
    if steps is None:
        text = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
        steps = int(text) if text.isdigit() else 0
    return GradientAccumulationPlugin(num_steps=at_least_one(steps))


def at_least_one(steps: int) -> int:
    """`steps`. Raises ValueError for less than one."""
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps is {steps!r}: say 1 or more")
    return steps
