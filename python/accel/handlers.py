"""What a constructor argument of Accelerator says when a value is not enough.

The names and fields are those that Accelerate's scripts use.
"""

from __future__ import annotations

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
