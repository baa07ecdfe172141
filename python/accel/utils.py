"""The names that programs import from accelerate.utils, in one place."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .available import (
    is_bf16_available,
    is_cuda_available,
    is_datasets_available,
    is_mps_available,
    is_rich_available,
    is_tensorboard_available,
    is_torch_xla_available,
    is_tqdm_available,
    is_transformers_available,
    is_wandb_available,
    is_xpu_available,
)
from .environment import clean_environment
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
    "clean_environment",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_bf16_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_mps_available",
    "is_namedtuple",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_tensor",
    "is_torch_xla_available",
    "is_tqdm_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]


def wait_for_everyone() -> None:
    """Wait until all ranks are here. Collective."""
    from .state import PartialState

    PartialState().wait_for_everyone()


def tqdm(iterable: Iterable[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """The progress bar of the tqdm package, on the first rank of each machine; on all with
    main_process_only=False.

    Raises ImportError where that package is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise ImportError(
            "accel.utils.tqdm shows the progress bars of the tqdm package, which is not installed"
        ) from None
    from .state import PartialState

    if kwargs.pop("main_process_only", True) and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(iterable, *args, **kwargs)


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """The module that prepare() was given; see Accelerator.unwrap_model()."""
    from .model import unwrap

    return unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)


def release_memory(*objects: Any) -> list[None]:
    """A None for each of `objects`, and what torch kept of their memory is freed: `model,
    batch = release_memory(model, batch)`."""
    n = len(objects)
    del objects
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [None] * n


def __getattr__(name: str) -> Any:
    from .absent import of_module

    raise of_module(__name__, name)
