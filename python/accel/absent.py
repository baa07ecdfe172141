"""Names of Accelerate that accel does not have, and what to do instead.

hasattr() of them is False, and `from accel import name` an ImportError, as of any name that
is not there; only the sentence is another.
"""

from __future__ import annotations

import opcode
import re
import sys
from types import FrameType

_SAVING = (
    "save what the program needs on rank 0, accelerator.get_state_dict(model), "
    "optimizer.state_dict() and the epoch, with accelerator.save(), and load it on all ranks "
    "before prepare()"
)
_TRACKING = "write to the tracker of your choice inside `if accelerator.is_main_process:`"
_LAUNCHING = "put the program into a file, and start it with `accel launch -n 2 file.py`"
_BIG = "accel trains models that fit into the memory of each rank, and places no layers"
_SHARDING = "accel averages gradients over all ranks, and shards and splits nothing"
_PROFILE = "use torch.profiler.profile() around the loop"
_SKIPPING = (
    "leave the first batches out in the loop, `for step, batch in enumerate(loader): if step < "
    "n: continue`"
)
_PROJECT = "accel keeps no project folder: say paths where something is saved"
_CONFIG = "write accel.yaml with `accel config`, or pass flags to `accel launch`"

# Attributes of an Accelerator.
OF_ACCELERATOR = {
    "save_state": _SAVING,
    "load_state": _SAVING,
    "register_for_checkpointing": _SAVING,
    "register_save_state_pre_hook": _SAVING,
    "register_load_state_pre_hook": _SAVING,
    "save_iteration": _SAVING,
    "project_configuration": _PROJECT,
    "logging_dir": _PROJECT,
    "init_trackers": _TRACKING,
    "get_tracker": _TRACKING,
    "trackers": _TRACKING,
    "log": _TRACKING,
    "log_with": _TRACKING,
    "profile": _PROFILE,
    "skip_first_batches": _SKIPPING,
    "trigger_sync_in_backward": "the backward after no_sync() averages what is not averaged yet",
    "deepspeed_plugin": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_device_mesh": _SHARDING,
    "is_fsdp2": _SHARDING,
    "maybe_context_parallel": _SHARDING,
    "multi_device": "ask use_distributed or num_processes",
    "non_blocking": "ask dataloader_config.non_blocking",
    "should_save_model": "ask is_main_process",
    "verify_device_map": _BIG,
    "lomo_backward": "accel does not drive LOMO",
}

# What is imported from accelerate and accelerate.utils.
OF_PACKAGE = {
    "skip_first_batches": _SKIPPING,
    "notebook_launcher": _LAUNCHING,
    "debug_launcher": _LAUNCHING,
    "PrepareForLaunch": _LAUNCHING,
    "launch": _LAUNCHING,
    "launchers": _LAUNCHING,
    "write_basic_config": _CONFIG,
    "ProfileKwargs": _PROFILE,
    "ProjectConfiguration": _PROJECT,
    "LoggerType": _TRACKING,
    "tracking": _TRACKING,
    "checkpointing": _SAVING,
    "find_executable_batch_size": "choose a batch size that fits, with gradient accumulation",
    "init_empty_weights": _BIG,
    "init_on_device": _BIG,
    "load_checkpoint_and_dispatch": _BIG,
    "load_checkpoint_in_model": _BIG,
    "dispatch_model": _BIG,
    "infer_auto_device_map": _BIG,
    "get_balanced_memory": _BIG,
    "get_max_memory": _BIG,
    "cpu_offload": _BIG,
    "cpu_offload_with_hook": _BIG,
    "disk_offload": _BIG,
    "big_modeling": _BIG,
    "hooks": _BIG,
    "load_and_quantize_model": _BIG,
    "BnbQuantizationConfig": _BIG,
    "prepare_pippy": _SHARDING,
    "DeepSpeedPlugin": "accel does not drive DeepSpeed",
    "DummyOptim": "accel does not drive DeepSpeed",
    "DummyScheduler": "accel does not drive DeepSpeed",
    "FullyShardedDataParallelPlugin": f"{_SHARDING}: wrap the model with torch's fully_shard",
    "MegatronLMPlugin": "accel does not drive Megatron-LM",
    "ParallelismConfig": _SHARDING,
    "TorchTensorParallelPlugin": _SHARDING,
    "DynamoBackend": "call torch.compile(model) before or after prepare()",
    "TorchDynamoPlugin": "call torch.compile(model) before or after prepare()",
    "FP8RecipeKwargs": 'accel computes in float32, "fp16" and "bf16"',
    "AORecipeKwargs": 'accel computes in float32, "fp16" and "bf16"',
    "TERecipeKwargs": 'accel computes in float32, "fp16" and "bf16"',
    "save": "use accelerator.save()",
    "clear_environment": "clean_environment() makes an environment for child processes",
    "patch_environment": "clean_environment() makes an environment for child processes",
    "purge_accelerate_environment": "clean_environment() makes one for child processes",
    "is_compiled_module": "compare type(model).__name__ with 'OptimizedModule'",
    "is_torch_version": "compare torch.__version__",
    "compare_versions": "use packaging.version",
}

_AVAILABLE = "ask importlib.util.find_spec() for a package, and torch for a device"
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def of_accelerator(name: str) -> AttributeError:
    """The error for an attribute that an Accelerator does not have."""
    advice = OF_ACCELERATOR.get(name)
    if advice is None:
        return AttributeError(f"'Accelerator' object has no attribute {name!r}")
    return AttributeError(f"accel's Accelerator has no {name}: {advice}")


def of_module(module: str, name: str) -> AttributeError | ImportError:
    """The error for a name that a module of accel does not have; to be called in the module's
    __getattr__(). Import statements drop the sentence of an AttributeError, and get an
    ImportError."""
    advice = OF_PACKAGE.get(name)
    if advice is None and re.fullmatch(r"is_\w+_available", name):
        advice = _AVAILABLE
    if advice is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    text = f"{module} has no {name}: {advice}"
    if _is_import(sys._getframe(2)):
        return ImportError(text, name=module)
    return AttributeError(text)


def _is_import(frame: FrameType) -> bool:
    """Whether the frame is at `from module import name`."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
