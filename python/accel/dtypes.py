"""How tensors of any type and shape travel: as arrays of the types accel.h knows.

Bytes are moved as they are, so a type the runtime does not know can be gathered and
broadcast under the name of another of the same width. Arithmetic needs the real type.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _lib

# The types the runtime computes with.
CODES: dict[torch.dtype, int] = {
    torch.float32: _lib.FLOAT32,
    torch.float64: _lib.FLOAT64,
    torch.float16: _lib.FLOAT16,
    torch.bfloat16: _lib.BFLOAT16,
    torch.int8: _lib.INT8,
    torch.uint8: _lib.UINT8,
    torch.int16: _lib.INT16,
    torch.int32: _lib.INT32,
    torch.int64: _lib.INT64,
    torch.bool: _lib.BOOL,
}
BY_CODE = {code: dtype for dtype, code in CODES.items()}

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dense(tensor: Tensor) -> Tensor:
    """`tensor` detached, contiguous, of a type in CODES, and with at most 8 dimensions.
    Shares memory with it where that is possible.

    Complex numbers become pairs in a last dimension. Dimensions beyond the eighth are
    folded into it.

    Raises TypeError for tensors that are not plain arrays (sparse, quantized, nested).
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"a {_layout(tensor)} tensor cannot travel between ranks as it is: convert it to a "
            "dense one first"
        )
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype not in CODES:
        tensor = tensor.contiguous().view(_SAME_WIDTH[tensor.element_size()])
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dim() > _lib.MAX_DIMS:
        kept = tensor.shape[: _lib.MAX_DIMS - 1]
        tensor = tensor.view(*kept, math.prod(tensor.shape[_lib.MAX_DIMS - 1 :]))
    return tensor


def _layout(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return str(tensor.layout).removeprefix("torch.").replace("_", " ")


def computable(tensor: Tensor, op: str) -> None:
    """Raises TypeError where `op` ("sum", "mean", "min", "max") makes no sense for the
    type of `tensor`, ValueError where there is no such operation."""
    dtype = tensor.dtype
    if op not in OPS:
        raise ValueError(f"there is no reduction {op!r}: use one of {', '.join(OPS)}")
    if dtype.is_complex:
        if op in ("min", "max"):
            raise TypeError(f"complex numbers have no order: reduce() cannot take their {op}")
    elif dtype not in CODES:
        raise TypeError(f"{name(dtype)} cannot be reduced: convert it first, e.g. to int64")
    elif op == "mean" and not dtype.is_floating_point:
        raise TypeError(
            f"the mean of {name(dtype)} is not {name(dtype)}: convert it to a floating type "
            "first, or reduce with 'sum'"
        )


OPS = {"sum": _lib.SUM, "mean": _lib.MEAN, "min": _lib.MIN, "max": _lib.MAX}


def name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
