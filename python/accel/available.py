"""What this machine and its Python environment have."""

from __future__ import annotations

import importlib.util

import torch


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_cuda_available() -> bool:
    """Does torch see a CUDA device?"""
    return torch.cuda.is_available()


def is_mps_available(min_version: str | None = None) -> bool:
    """Does torch see the GPU of an Apple machine?"""
    return torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Does torch see an XPU of Intel's?"""
    return hasattr(torch, "xpu") and torch.xpu.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Is torch_xla installed?"""
    return _is_installed("torch_xla")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Can mixed_precision="bf16" be used here?"""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_tensorboard_available() -> bool:
    """Is tensorboard, or tensorboardX, installed?"""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_wandb_available() -> bool:
    """Is wandb installed?"""
    return _is_installed("wandb")


def is_tqdm_available() -> bool:
    """Is tqdm installed?"""
    return _is_installed("tqdm")


def is_rich_available() -> bool:
    """Is rich installed?"""
    return _is_installed("rich")


def is_transformers_available() -> bool:
    """Is transformers installed?"""
    return _is_installed("transformers")


def is_datasets_available() -> bool:
    """Is datasets installed?"""
    return _is_installed("datasets")
