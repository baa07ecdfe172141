"""The models whose gradients are averaged, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a batch."""


def mlp() -> nn.Module:
    """0.1 M parameters in 8 tensors."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def transformer(width: int, layers: int) -> nn.Module:
    """An encoder without dropout, so that both averagings see the same gradients."""
    layer = nn.TransformerEncoderLayer(
        width, nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


CASES = {
    "0.1M": Case(mlp, (64, 64)),
    "5M": Case(lambda: transformer(256, 6), (6, 32, 256)),
    "25M": Case(lambda: transformer(512, 8), (5, 32, 512)),
}


def loss_of(output: Tensor) -> Tensor:
    """Any scalar whose gradients differ from rank to rank with the batch."""
    target = torch.linspace(-1, 1, output.shape[-1])
    return (output - target).square().mean()
