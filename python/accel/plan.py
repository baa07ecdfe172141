"""How the gradient of a parameter is to lie in memory, so that all ranks add up the same
numbers, and how to make it lie so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Hold:
    """Whether the gradients of a model are left alone."""

    held: int = 0  # by so many no_sync()


@dataclass(slots=True)
class Slot:
    """A parameter in the plan."""

    entry: Hold
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]  # its dimensions, the one with the largest stride first
    strides: tuple[int, ...]  # that a gradient needs to be averaged where it is
    way: str  # "runtime", "world" or "sparse"

    @property
    def is_row_major(self) -> bool:
        return self.order == tuple(range(len(self.shape)))


class StaleError(Exception):
    """A gradient that does not fit the plan: its parameter has changed."""


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor, the one with the largest stride first; None where
    its elements overlap or leave gaps."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    expected = 1
    for d in reversed(order):
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            return None
        expected *= tensor.shape[d]
    return tuple(order)


def strides_of(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides, expected = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = expected
        expected *= max(shape[d], 1)
    return tuple(strides)


def zeros_for(slot: Slot) -> Tensor:
    """A gradient of zeros that lies in memory as planned."""
    gradient = torch.empty_strided(
        slot.shape, slot.strides, dtype=slot.dtype, device=slot.parameter.device
    )
    return gradient.zero_()


def as_planned(slot: Slot, gradient: Tensor) -> Tensor:
    """The gradient where it is, or a copy that lies in memory as planned.

    Raises StaleError when its type or shape is not the planned one.
    """
    if gradient.dtype is not slot.dtype or gradient.shape != slot.shape:
        raise StaleError(
            f"the gradient of {slot.name} is {gradient.dtype} {tuple(gradient.shape)}, and the "
            f"parameter {slot.dtype} {tuple(slot.shape)}: drop old gradients with zero_grad() "
            "when a parameter changes"
        )
    if is_plain(gradient) and (
        gradient.stride() == slot.strides or (slot.is_row_major and gradient.is_contiguous())
    ):
        return gradient
    return zeros_for(slot).copy_(dense(gradient.detach()))


def put_back(parameter: nn.Parameter, averaged: Tensor) -> None:
    """An averaged copy into the gradient it was made from, or in its place."""
    gradient = parameter.grad
    if gradient is not None and is_plain(gradient):
        gradient.data.copy_(averaged)
    else:
        parameter.grad = averaged


def is_plain(gradient: Tensor) -> bool:
    """Whether each element has a place of its own, and is there as it is."""
    return (
        gradient.layout is torch.strided
        and not gradient.is_conj()
        and not gradient.is_neg()
        and not any(
            stride == 0 and n > 1
            for stride, n in zip(gradient.stride(), gradient.shape, strict=True)
        )
    )


def dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
