"""Saving, so that a file is there whole or not at all, and only one rank writes it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

WEIGHTS_SAFE, WEIGHTS_TORCH = "model.safetensors", "pytorch_model.bin"

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

StateDict = dict[str, Tensor]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, which becomes `path` when the block ends without an exception."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def save(obj: Any, f: str | os.PathLike[str] | IO[bytes], safe_serialization: bool = False) -> None:
    """Save `obj` with torch.save(), or a dict of tensors as safetensors."""
    if safe_serialization:
        write: Callable[[Any], None] = lambda part: _write_safe(obj, part, {})  # noqa: E731
    else:
        write = lambda part: torch.save(obj, part)  # noqa: E731
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            raise TypeError("safetensors are saved to a path, not to an open file")
        write(f)
        return
    with whole_file(f) as part:
        write(part)


def save_weights(
    state: StateDict,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Save a state dict into `folder` as one file, or as several of at most
    `max_shard_size` (bytes, or "500MB") and an index. Returns the names of the files.

    safetensors where that package is installed, else torch.save(). A tensor that several
    names share is saved once.
    """
    safe = safe_serialization and importlib.util.find_spec("safetensors") is not None
    name = WEIGHTS_SAFE if safe else WEIGHTS_TORCH
    Path(folder).mkdir(parents=True, exist_ok=True)
    same_as: dict[str, str] = {}
    if safe:
        state, same_as = without_shared(state)
    shards = split(state, size_in_bytes(max_shard_size))
    names = _names(name, len(shards))
    for shard, file in zip(shards, names, strict=True):
        with whole_file(Path(folder) / file) as part:
            if safe:
                _write_safe(shard, part, same_as)
            else:
                torch.save(shard, part)
    if len(shards) > 1:
        _write_index(Path(folder) / f"{name}.index.json", shards, names)
        names.append(f"{name}.index.json")
    return names


def _names(name: str, n: int) -> list[str]:
    stem, suffix = name.rsplit(".", 1)
    return [name] if n == 1 else [f"{stem}-{i + 1:05}-of-{n:05}.{suffix}" for i in range(n)]


def _write_index(path: Path, shards: list[StateDict], names: list[str]) -> None:
    total = sum(t.nbytes for shard in shards for t in shard.values())
    places = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
    with whole_file(path) as part:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
        part.write_text(text + "\n")


def _write_safe(state: StateDict, path: Path, same_as: dict[str, str]) -> None:
    from safetensors.torch import save_file

    metadata = {"format": "pt", **same_as}
    save_file({k: t.detach().contiguous() for k, t in state.items()}, path, metadata)


def without_shared(state: StateDict) -> tuple[StateDict, dict[str, str]]:
    """The state dict with each tensor under its first name only, and the other names with
    that one. Tensors that share a part of their memory become copies."""
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    kept: StateDict = {}
    same_as: dict[str, str] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            same_as[name] = first[key]
            continue
        first[key] = name
        is_part = tensor.nbytes < tensor.untyped_storage().nbytes() or storage in storages
        kept[name] = tensor.clone() if is_part else tensor
        storages.add(storage)
    return kept, same_as


def split(state: StateDict, limit: int) -> list[StateDict]:
    """Parts of at most `limit` bytes each, in order; a larger tensor is a part of its own."""
    parts: list[StateDict] = [{}]
    filled = 0
    for name, tensor in state.items():
        if parts[-1] and filled + tensor.nbytes > limit:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    return parts


def size_in_bytes(size: int | str) -> int:
    """ "10GB" as a number of bytes. Raises ValueError where it is none."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)?", size.strip().upper())
    if match is None or (match[2] or "B") not in _UNITS:
        raise ValueError(f'max_shard_size is {size!r}: say a number of bytes, or "500MB"')
    return int(float(match[1]) * _UNITS[match[2] or "B"])
