"""The names that programs import from accelerate.utils, in one place."""

from __future__ import annotations

from .handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from .operations import (
    ConvertOutputsToFp32,
    TensorInformation,
    broadcast,
    broadcast_object_list,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    gather,
    gather_object,
    get_data_structure,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_torch_tensor,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)
from .rng import RNGType, set_seed, synchronize_rng_state, synchronize_rng_states
from .state import DistributedType

__all__ = [
    "AutocastKwargs",
    "ConvertOutputsToFp32",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "RNGType",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "wait_for_everyone",
]


def wait_for_everyone() -> None:
    """Wait until all ranks are here. Collective."""
    from .state import PartialState

    PartialState().wait_for_everyone()
