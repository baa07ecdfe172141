"""The ranks of a job, and the collectives that everything else is made of.

CPU tensors go through libaccel when the ranks share memory. CUDA tensors, and ranks on
several machines or behind a container's wall, go through torch.distributed, with the
same results and errors.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _lib, failure
from .dtypes import OPS, computable, dense
from .errors import (
    AccelError,
    InvalidError,
    MismatchError,
    OwnedError,
    UnreachableError,
)
from .group import Group, LeftToOthersError, initialize
from .ring import Ring


class World:
    """One process' place among the ranks of its job.

    `handle` is the runtime's world, or None where the ranks share no memory. `device`
    is where this rank computes, once PartialState has chosen it.

    All methods that involve other ranks are collective: all ranks call them in the same
    order. They raise MismatchError, on all ranks and before any data moves, when the
    ranks want different things; LostError when a rank died, failed or finished;
    WaitTimeoutError after ACCEL_TIMEOUT seconds (1800).

    `label` says in a few words what a call is about: errors name it, and it is compared
    between the ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        handle: ctypes.c_void_p | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.handle = handle
        self.device: torch.device | None = None
        self._library = _lib.load() if handle else None
        self._ring = Ring(handle, size) if handle else None
        if handle:
            self._group = Group(rank, size, self._exchange_through_ring, self._ask_to_stop)
        else:
            self._group = Group(rank, size)

    def __repr__(self) -> str:
        place = f"rank={self.rank}, size={self.size}, local_rank={self.local_rank}"
        return f"World({place}, shared_memory={self._ring is not None})"

    # ---- collectives --------------------------------------------------------

    def barrier(self, label: str = "") -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            self._way("cpu").barrier(label)

    def all_gather(self, tensor: Tensor, label: str = "") -> Tensor:
        """The tensors of all ranks behind each other along dimension 0, in rank order.

        Dimension 0 may differ from rank to rank, and be 0; the other dimensions and the
        type are the same. A tensor without dimensions counts as one row. The result is on
        the same device, without gradient. In a world of one it is the input.
        """
        return self.all_gather_rows(tensor, label)[0]

    def all_gather_rows(self, tensor: Tensor, label: str = "") -> tuple[Tensor, list[int]]:
        """As all_gather(), and how many rows each rank had."""
        if self.size == 1:
            rows = tensor if tensor.dim() else tensor.reshape(1)
            return rows, [rows.shape[0]]
        self._check_device(tensor)
        sent = dense(self._movable(tensor))
        if tensor.dim() > _lib.MAX_DIMS:
            self._compare_shapes(tensor.shape[1:], label)
        out, counts = self._way(sent.device.type).gather_rows(sent, label)
        if sent.dtype is not tensor.dtype:
            out = torch.view_as_complex(out) if tensor.is_complex() else out.view(tensor.dtype)
        if tensor.dim() > _lib.MAX_DIMS:
            out = out.reshape(out.shape[0], *tensor.shape[1:])
        return out.to(tensor.device), counts

    def reduce_(self, tensor: Tensor, op: str, label: str = "") -> None:
        """Combine elementwise over all ranks, in place: "sum", "mean", "min" or "max".

        16-bit types are accumulated in float32; the sum of booleans is "or". Raises
        TypeError for a mean of integers and an order of complex numbers.
        """
        computable(tensor, op)
        if self.size == 1:
            return
        self._check_device(tensor)
        sent = dense(self._movable(tensor))
        if tensor.dim() > _lib.MAX_DIMS:
            self._compare_shapes(tensor.shape, label)
        if self._through_ring(sent):
            assert self._ring
            self._ring.reduce_(sent, OPS[op], label)
        else:
            self._group.reduce_(sent, op, label)
        self._take_back(tensor, sent)

    def broadcast_(self, tensor: Tensor, root: int = 0, label: str = "") -> None:
        """Copy the tensor of rank `root` into that of all others, in place."""
        self._check_rank(root)
        if self.size == 1:
            return
        self._check_device(tensor)
        sent = dense(self._movable(tensor))
        if tensor.dim() > _lib.MAX_DIMS:
            self._compare_shapes(tensor.shape, label)
        self._way(sent.device.type).broadcast_(sent, root, label)
        if self.rank != root:
            self._take_back(tensor, sent)

    def broadcast_object(self, obj: Any, root: int = 0, label: str = "object") -> Any:
        """The object of rank `root`, pickled on the way. The root gets its own back."""
        self._check_rank(root)
        if self.size == 1:
            return obj
        mine = self.rank == root
        data, counts = self._gather_bytes(
            pickle.dumps(obj) if mine else b"", f"{label} of rank {root}"
        )
        if not counts[root]:
            raise LeftToOthersError.by(root)
        return obj if mine else pickle.loads(data)

    def all_gather_object(self, obj: Any, label: str = "objects") -> list[Any]:
        """The objects of all ranks in rank order, pickled on the way. A rank in join()
        has none."""
        if self.size == 1:
            return [obj]
        data, counts = self._gather_bytes(pickle.dumps(obj), label)
        objects, start = [], 0
        for rank, n in enumerate(counts):
            if n:
                objects.append(obj if rank == self.rank else pickle.loads(data[start : start + n]))
            start += n
        return objects

    def join(self) -> None:
        """For a rank that has nothing to do while others still have: answer their
        collectives, adding nothing, until all ranks have called this.

        A rank in here has no rows in a gather, is left out of a reduce and its mean, and
        counts as zero in an average of gradients. A broadcast from it fails on the others.
        """
        if self.size == 1:
            return
        if self._headers_first():
            self._group.join()
        else:
            assert self._ring
            self._ring.join()

    # ---- supervision --------------------------------------------------------

    def should_stop(self) -> bool:
        """Was the job asked to end in order? The same answer on all ranks. Collective."""
        if self.handle is None:
            return False
        return self._group.should_stop() if self._headers_first() else self._ask_to_stop()

    def step(self) -> None:
        """Count a step: the supervisor sees that the program moves. Does not block."""
        if self.handle is not None:
            self._library.accel_step(self.handle)

    def fail(self, text: str) -> None:
        """Report that this rank failed, and why. Ranks that wait for it get `text` as
        their error. Does not block; the program still has to end."""
        as_c = text.replace("\0", "\\0").encode("utf-8", "replace")
        _lib.load().accel_fail(self.handle, as_c)

    def finish(self) -> None:
        """Leave. Not collective: ranks that still wait for this one get an error.
        `handle` is None afterwards, and what was made from it is freed."""
        handle, self.handle, self._ring = self.handle, None, None
        if handle is not None:
            _lib.signals.ignore()
            self._library.accel_finish(handle)

    def _ask_to_stop(self) -> bool:
        return bool(_lib.check(self._library.accel_should_stop(self.handle)))

    # ---- which way ----------------------------------------------------------

    def _headers_first(self) -> bool:
        """Whether collectives begin with a header that Python exchanges: where CUDA
        memory takes part, a rank in join() must be able to answer for it."""
        return self._ring is None or (self.device is not None and self.device.type == "cuda")

    def _through_ring(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and not self._headers_first()

    def _way(self, device: str) -> Ring | Group:
        if device == "cpu" and not self._headers_first():
            assert self._ring
            return self._ring
        return self._group

    def _exchange_through_ring(self, header: Tensor) -> Tensor:
        if self._ring is None:
            raise AccelError("this process has left the world already")
        return self._ring.gather_rows(header.view(1, -1))[0]

    # ---- tensors on their way -----------------------------------------------

    def _movable(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that a transport can move."""
        return tensor if tensor.device.type in ("cpu", "cuda") else tensor.detach().cpu()

    def _take_back(self, tensor: Tensor, sent: Tensor) -> None:
        """What arrived in `sent`, a copy or a view of `tensor`, into `tensor`."""
        target = tensor.detach()
        if sent.dtype is not tensor.dtype and not tensor.is_complex():
            sent = sent.view(tensor.dtype)
        elif tensor.is_complex():
            sent = torch.view_as_complex(sent.reshape(*tensor.shape, 2))
        if sent.data_ptr() != target.data_ptr() or sent.device != target.device:
            target.copy_(sent.reshape(tensor.shape))

    def _check_device(self, tensor: Tensor) -> None:
        kind = tensor.device.type
        if kind == "cpu":
            return
        if kind == "meta":
            raise InvalidError("a tensor on the meta device has no data to send")
        if self.device is None or tensor.device == self.device:
            return
        raise InvalidError(
            f"this tensor is on {tensor.device}, and rank {self.rank} computes on {self.device}: "
            "move it with .to(accelerator.device) first"
        )

    def _check_rank(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise InvalidError(f"there is no rank {root}: the ranks are 0 to {self.size - 1}")

    def _compare_shapes(self, shape: torch.Size, label: str) -> None:
        shapes = self.all_gather_object(tuple(shape), label or "shapes")
        if len(set(shapes)) > 1:
            table = "\n".join(f"  {s}" for s in shapes)
            raise MismatchError(f"the tensors of the ranks have different shapes:\n{table}")

    def _gather_bytes(self, data: bytes, label: str) -> tuple[bytes, list[int]]:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING
        out, counts = self._way("cpu").gather_rows(sent, label)
        return out.numpy().tobytes(), counts


_NOTHING = torch.empty(0, dtype=torch.uint8)

_current: World | None = None
_lock = threading.Lock()


def current() -> World:
    """The world of this process. The first call joins, and where torchrun or another
    launcher started the processes waits until all ranks of the machine have come.

    Raises InvalidError where only half of a launcher's variables are set, OwnedError in
    a child that inherited a rank's environment, LibraryNotFoundError, VersionError.
    """
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                failure.report_to(None)
                _current = _join()
                atexit.register(_leave, _current, os.getpid())
                failure.report_to(_current)
    return _current


def _join() -> World:
    library = _lib.load()
    handle = ctypes.c_void_p()
    _lib.signals.watch()
    code = library.accel_init(ctypes.byref(handle))
    if code == UnreachableError.code:
        return _join_through_torch(_lib.error_of(code))
    if code == OwnedError.code:
        raise OwnedError(
            f"{_lib.error_of(code)}\nFrom Python, start it with "
            "subprocess.run(..., env=accel.utils.clean_environment())"
        )
    _lib.check(code)
    return World(
        library.accel_rank(handle),
        library.accel_size(handle),
        library.accel_local_rank(handle),
        library.accel_local_size(handle),
        handle,
    )


def _join_through_torch(reason: BaseException) -> World:
    world = World(*_ranks_from_environment(reason))
    if world.local_rank == 0:
        print(
            f"accel: the ranks share no memory, so collectives go through torch.distributed: "
            f"{reason}",
            file=sys.stderr,
            flush=True,
        )
    initialize(world)
    return world


# Rank, world size, local rank, local world size, as launchers call them.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def _ranks_from_environment(reason: BaseException) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size, where the runtime cannot tell
    them because it found no way to the others."""
    environ = os.environ
    for names in _LAUNCHERS:
        # Launchers may be nested; one that started a single process says nothing.
        if not all(environ.get(name) for name in names) or environ[names[1]] == "1":
            continue
        rank, size, local_rank = (int(environ[name]) for name in names[:3])
        if names[0] == "SLURM_PROCID":
            return rank, size, local_rank, _slurm_tasks_here(environ)
        return rank, size, local_rank, int(environ[names[3]])
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        # By hand, and not all on this machine, or the runtime would have joined.
        return int(environ["RANK"]), int(environ["WORLD_SIZE"]), 0, 1
    raise reason


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """The entry of this node in a list such as 2(x3),1."""
    counts: list[int] = []
    for entry in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        tasks, _, times = entry.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else 1


def _leave(world: World, pid: int) -> None:
    if os.getpid() == pid:
        world.finish()
