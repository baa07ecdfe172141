"""Collectives and conversions on nested structures of tensors.

A structure is a tensor, or a dict (any Mapping), list, tuple, namedtuple or dataclass
of structures. None stands for "nothing here" and passes through everything. Structures
come back as the type they were; the input is never modified, except by the functions
whose purpose that is.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from . import world as worlds
from .world import World

# ---- structures -------------------------------------------------------------


def is_torch_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The parts of a structure with what selects them, or None for a leaf."""
    if isinstance(value, Mapping):
        return ((f"[{k!r}]", v) for k, v in value.items())
    if is_namedtuple(value):
        return ((f".{k}", v) for k, v in zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return ((f"[{i}]", v) for i, v in enumerate(value))
    if _is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        return ((f".{name}", getattr(value, name)) for name in names)
    return None


def leaves(data: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    """All leaves of a structure with their paths: ('data["x"][0]', tensor)."""
    children = _children(data)
    if children is None:
        yield path, data
        return
    for selector, child in children:
        yield from leaves(child, path + selector)


def map_structure(function: Callable[[Any], Any], data: Any) -> Any:
    """A structure of the same types with `function` applied to each leaf but None."""
    if data is None:
        return None
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return _like_mapping(data, {k: map_structure(function, v) for k, v in data.items()})
    if isinstance(data, (list, tuple)):
        return honor_type(data, [map_structure(function, v) for v in data])
    if _is_dataclass(data):
        return _like_dataclass(data, lambda v: map_structure(function, v))
    return function(data)


def map_alike(function: Callable[[Tensor, str], Any], data: Any) -> Any:
    """map_structure() for a structure of tensors that all ranks have: they all come to its
    parts in the same order, whatever the order in which their mappings were filled.

    `function(tensor, label)` is called with a label of each tensor, which tells its path and
    how many tensors there are; "" where there is no structure.
    """
    if isinstance(data, Tensor):
        return function(data, "")
    n = sum(leaf is not None for _, leaf in leaves(data))
    number = count(1)

    def go(value: Any, path: str) -> Any:
        if value is None:
            return None
        if isinstance(value, Mapping):
            done = {key: go(v, f"{path}[{name}]") for name, key, v in _in_order(value)}
            return _like_mapping(value, {key: done[key] for key in value})
        children = _children(value)
        if children is None:
            return function(value, f"{path}, {next(number)} of {n}")
        parts = [go(child, path + selector) for selector, child in children]
        if isinstance(value, (list, tuple)):
            return honor_type(value, parts)
        fields = iter(parts)
        return _like_dataclass(value, lambda _: next(fields))

    return go(data, "data")


def _in_order(data: Mapping[Any, Any]) -> list[tuple[str, Any, Any]]:
    """The items of a mapping as (name, key, value), in the order of the names."""
    if all(isinstance(key, str) for key in data):
        return [(repr(key), key, data[key]) for key in sorted(data)]
    # An address is not the same on all ranks.
    named = [(re.sub(" at 0x[0-9a-f]+", "", repr(key)), key, v) for key, v in data.items()]
    return sorted(named, key=lambda item: item[0])


def honor_type(obj: Any, values: Any) -> Any:
    """A list, tuple or namedtuple of the type of `obj` that holds `values`."""
    return type(obj)(*values) if is_namedtuple(obj) else type(obj)(values)


def _like_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return values
    if _is_dataclass(data):  # such as the ModelOutput of transformers
        return type(data)(**values)
    if isinstance(data, (dict, UserDict)):
        result = copy.copy(data)  # keeps what else there is: a default factory, an order
        result.update(values)
        return result
    try:
        return type(data)(values)
    except TypeError:  # only its maker knows how to make one
        return values


def _like_dataclass(data: Any, function: Callable[[Any], Any]) -> Any:
    result = copy.copy(data)
    for field in dataclasses.fields(data):
        if hasattr(data, field.name):
            # A frozen one too: nobody has seen this copy yet.
            object.__setattr__(result, field.name, function(getattr(data, field.name)))
    return result


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to each leaf that `test_type` accepts; other
    leaves stay as they are, or are a TypeError with their path."""
    if isinstance(data, Tensor) and test_type is is_torch_tensor:
        return func(data, *args, **kwargs)
    if error_on_other_type:
        for path, leaf in leaves(data):
            if leaf is not None and not test_type(leaf):
                raise TypeError(f"{path} is a {type(leaf).__name__}, not a tensor")
    return map_structure(lambda v: func(v, *args, **kwargs) if test_type(v) else v, data)


def _only_tensors(what: str, data: Any, advice: str = "") -> None:
    if isinstance(data, Tensor):
        return
    for path, leaf in leaves(data):
        if leaf is not None and not isinstance(leaf, Tensor):
            kind = type(leaf).__name__
            raise TypeError(f"{what}: {path} is a {kind}, not a tensor{advice}")


_USE_OBJECTS = ": use gather_object() for what is not a tensor"


# ---- collectives -----------------------------------------------------------


def gather(tensor: Any, *, world: World | None = None) -> Any:
    """The tensors of all ranks behind each other along dimension 0, in rank order, for
    each tensor of a structure.

    (n, ...) on each rank becomes (sum of n, ...); n may differ. A tensor without
    dimensions counts as one row. Collective. Raises TypeError with the path of a leaf
    that is not a tensor, MismatchError on all ranks when types or other dimensions differ,
    or the structures do; the order of the keys of a mapping does not matter.
    """
    world = world or worlds.current()
    if isinstance(tensor, Tensor):
        return world.all_gather(tensor)
    _only_tensors("gather", tensor, _USE_OBJECTS)
    return map_alike(world.all_gather, tensor)


def gather_object(obj: Any, *, world: World | None = None) -> list[Any]:
    """The objects of all ranks as one list, in rank order. Lists and tuples are put behind
    each other; anything else is one element. Pickled on the way. Collective."""
    objects = (world or worlds.current()).all_gather_object(obj, "gather_object")
    if all(isinstance(o, (list, tuple)) for o in objects):
        return [element for o in objects for element in o]
    return objects


def reduce(
    tensor: Any, reduction: str = "mean", scale: float = 1.0, *, world: World | None = None
) -> Any:
    """Each tensor combined elementwise over all ranks, as a new one, times `scale`.

    `reduction` is "sum", "mean", "min", "max" or "none". Collective. Raises TypeError for
    the mean of integers, ValueError for another reduction, MismatchError on all ranks when
    shapes or types differ.
    """
    world = world or worlds.current()
    _only_tensors("reduce", tensor)

    def one(t: Tensor, label: str) -> Tensor:
        result = t.detach().clone()
        if reduction != "none":
            world.reduce_(result, reduction, label)
        return result if scale == 1.0 else result * scale

    return map_alike(one, tensor)


def broadcast(tensor: Any, from_process: int = 0, *, world: World | None = None) -> Any:
    """Copy each tensor of rank `from_process` into that of all others, in place.
    Returns the structure. Collective."""
    world = world or worlds.current()
    _only_tensors("broadcast", tensor, ": use broadcast_object_list() for what is not a tensor")

    def one(t: Tensor, label: str) -> Tensor:
        world.broadcast_(t, from_process, label)
        return t

    map_alike(one, tensor)
    return tensor


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, world: World | None = None
) -> list[Any]:
    """Replace the elements of the list by those of rank `from_process`, in place. Pickled
    on the way. Collective."""
    objects = (world or worlds.current()).broadcast_object(
        list(object_list), from_process, "broadcast_object_list"
    )
    if len(objects) != len(object_list):
        raise ValueError(
            f"rank {from_process} broadcast {len(objects)} objects, and there is room for "
            f"{len(object_list)} here"
        )
    object_list[:] = objects
    return object_list


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: int = 0,
    pad_first: bool = False,
    *,
    world: World | None = None,
) -> Any:
    """Each tensor made as long along `dim` as the longest of all ranks, with `pad_index`
    behind its data or, with `pad_first`, before it. One that has no such dimension stays as
    it is. Collective."""
    world = world or worlds.current()
    _only_tensors("pad_across_processes", tensor)

    def one(t: Tensor, label: str) -> Tensor:
        if not -t.dim() <= dim < t.dim():
            return t
        size = torch.tensor([t.shape[dim]])
        world.reduce_(size, "max", label or "pad_across_processes")
        missing = int(size) - t.shape[dim]
        if not missing:
            return t
        shape = list(t.shape)
        shape[dim] = missing
        padding = t.new_full(shape, pad_index)
        return torch.cat((padding, t) if pad_first else (t, padding), dim)

    return map_alike(one, tensor)


# ---- without other ranks ---------------------------------------------------


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """The structure with everything that has a .to() on `device`; the values of the
    `skip_keys` of mappings stay where they are."""
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []

    def go(value: Any) -> Any:
        if value is None or isinstance(value, (str, int, float)):
            return value
        if isinstance(value, Tensor) or (hasattr(value, "to") and not isinstance(value, type)):
            return _moved(value, device, non_blocking)
        if isinstance(value, Mapping):
            moved = {k: v if k in skipped else go(v) for k, v in value.items()}
            return _like_mapping(value, moved)
        if isinstance(value, (list, tuple)):
            return honor_type(value, [go(v) for v in value])
        return _like_dataclass(value, go) if _is_dataclass(value) else value

    return go(tensor)


def _moved(value: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # a type of somebody else, whose .to() knows less
        return value.to(device)


def find_batch_size(data: Any) -> int | None:
    """The first dimension of the first tensor that has one; None where none has.

    Raises TypeError where there is no tensor at all.
    """
    found = False
    for _, leaf in leaves(data):
        if isinstance(leaf, Tensor):
            if leaf.dim():
                return leaf.shape[0]
            found = True
    if not found:
        raise TypeError(f"there is no tensor in a {type(data).__name__} to tell a batch size")
    return None


def ignorant_find_batch_size(data: Any) -> int | None:
    """find_batch_size(), and None where there is no tensor."""
    try:
        return find_batch_size(data)
    except TypeError:
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor."""
    return next((leaf.device for _, leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Structures of the same form, their tensors put behind each other along `dim`."""
    first = data[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.cat(data, dim=dim)
    if isinstance(first, Mapping):
        values = {k: concatenate([d[k] for d in data], dim) for k in first}
        return _like_mapping(first, values)
    if isinstance(first, (list, tuple)):
        return honor_type(first, [concatenate(list(d), dim) for d in zip(*data, strict=True)])
    if _is_dataclass(first):
        result = copy.copy(first)
        for field in dataclasses.fields(first):
            parts = [getattr(d, field.name) for d in data]
            object.__setattr__(result, field.name, concatenate(parts, dim))
        return result
    raise TypeError(f"a {type(first).__name__} cannot be concatenated: only tensors can")


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Each tensor cut to `tensor_slice` along dimension 0."""
    return recursively_apply(lambda t: t[tensor_slice], data)


def listify(data: Any) -> Any:
    """Each tensor as (nested) lists of numbers."""
    return recursively_apply(lambda t: t.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Each float16 and bfloat16 tensor in float32; all others as they are."""
    half = (torch.float16, torch.bfloat16)
    return recursively_apply(
        lambda t: t.float(), tensor, test_type=lambda v: isinstance(v, Tensor) and v.dtype in half
    )


class ConvertOutputsToFp32:
    """Calls a function and converts what it returns with convert_to_fp32()."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what `model_forward` returns, in float32."""
    converter = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


class TensorInformation:
    """Shape and type of a tensor that is not here: a leaf of a structure, as a tensor is."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorInformation) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"TensorInformation(shape={tuple(self.shape)}, dtype={self.dtype})"


def get_data_structure(data: Any) -> Any:
    """The structure with the TensorInformation of each tensor in its place."""
    return recursively_apply(lambda t: TensorInformation(t.shape, t.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The reverse of get_data_structure(): tensors of that form, uninitialised."""
    return recursively_apply(
        lambda t: torch.empty(t.shape, dtype=t.dtype),
        data_structure,
        test_type=lambda v: isinstance(v, TensorInformation),
    )
