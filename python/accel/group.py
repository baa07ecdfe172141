"""Collectives through torch.distributed: for CUDA memory, and for ranks that share no
memory, on several machines or behind a container's wall.

Results and errors are those of libaccel. Before any data moves, every call exchanges a
header that says what its rank wants; ranks that want different things all raise
MismatchError. A rank in join() answers the headers of the others and adds nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dtypes import BY_CODE, CODES, OPS, name
from .errors import AccelError, InvalidError, LostError, MismatchError, WaitTimeoutError
from .labels import WORDS, packed, unpacked

if TYPE_CHECKING:
    from .world import World

# What a header may ask for.
_BARRIER, _STOP, _GATHER, _REDUCE, _BROADCAST, _JOIN = range(1, 7)
_WANTS = {
    _BARRIER: "barrier",
    _STOP: "should-stop",
    _GATHER: "gather",
    _REDUCE: "reduce",
    _BROADCAST: "broadcast",
}
_DEVICES = ("cpu", "cuda")
_OP_NAMES = dict(enumerate(OPS))

# want, device, dtype, operation or root, number of dimensions; eight dimensions; the label
_HEADER = 5
_LABEL = _HEADER + 8
_LENGTH = _LABEL + WORDS

_NO_LABEL = [0] * WORDS

Header = list[int]
Exchange = Callable[[Tensor], Tensor]


class Group:
    """The collectives of one world over torch's default process group.

    `exchange` gives every rank the headers of all, as a (size, length) int64 tensor; by
    default through the group itself, but memory that the ranks share is quicker.
    `ask_to_stop` is the runtime's collective question whether to stop.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange | None = None,
        ask_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange or self._exchange_through_group
        self._ask_to_stop = ask_to_stop

    # ---- what the world calls -----------------------------------------------

    def barrier(self, label: str = "") -> None:
        self._agree(_BARRIER, label=label)

    def should_stop(self) -> bool:
        self._agree(_STOP)
        return self._ask_to_stop()

    def gather_rows(self, tensor: Tensor, label: str = "") -> tuple[Tensor, list[int]]:
        headers = self._agree(_GATHER, tensor, label=label)
        counts = [_rows(h) for h in headers]
        return self._gather(tensor, counts), counts

    def reduce_(self, tensor: Tensor, op: str, label: str = "") -> None:
        headers = self._agree(_REDUCE, tensor, list(OPS).index(op), label)
        self._reduce(tensor, op, sum(h[0] == _REDUCE for h in headers))

    def broadcast_(self, tensor: Tensor, root: int, label: str = "") -> None:
        headers = self._agree(_BROADCAST, tensor, root, label)
        if headers[root][0] == _JOIN:
            raise LeftToOthersError.by(root)
        self._broadcast(tensor, root)

    def join(self) -> None:
        """Answer the others until all ranks are in here."""
        while True:
            headers = self._headers([_JOIN] + [0] * (_LENGTH - 1))
            asking = [h for h in headers if h[0] != _JOIN]
            if not asking:
                return
            if not _differ(asking):
                self._answer(asking[0], headers)

    # ---- agreeing -----------------------------------------------------------

    def _agree(
        self, want: int, tensor: Tensor | None = None, value: int = 0, label: str = ""
    ) -> list[Header]:
        header = [want, 0, 0, value, 0] + [0] * 8 + (packed(label) if label else _NO_LABEL)
        if tensor is not None:
            header[1] = _DEVICES.index(tensor.device.type)
            header[2] = CODES[tensor.dtype]
            header[4] = tensor.dim()
            header[_HEADER : _HEADER + tensor.dim()] = tensor.shape
        headers = self._headers(header)
        if _differ([h for h in headers if h[0] != _JOIN]):
            raise MismatchError(_who_wants_what(headers))
        return headers

    def _headers(self, header: Header) -> list[Header]:
        return self._exchange(torch.tensor(header)).tolist()

    def _exchange_through_group(self, header: Tensor) -> Tensor:
        device = "cpu" if "cpu" in group_devices() else "cuda"
        out = torch.empty((self.size, _LENGTH), dtype=torch.int64, device=device)
        _call("exchange of headers", dist.all_gather, list(out), header.to(device))
        return out

    # ---- moving data, once all agree ----------------------------------------

    def _gather(self, tensor: Tensor, counts: list[int]) -> Tensor:
        shape, most = tensor.shape[1:], max(counts)
        row = tensor.element_size() * shape.numel()
        mine = torch.zeros(most * row, dtype=torch.uint8, device=tensor.device)
        if tensor.numel():
            mine[: tensor.numel() * tensor.element_size()] = _bytes(tensor)
        everything = torch.empty((self.size, most * row), dtype=torch.uint8, device=tensor.device)
        if most * row:
            _call("gather", dist.all_gather, list(everything), mine)
        parts = [part[: n * row] for part, n in zip(everything, counts, strict=True)]
        return torch.cat(parts).view(tensor.dtype).reshape(sum(counts), *shape)

    def _reduce(self, tensor: Tensor, op: str, contributors: int) -> None:
        wide = tensor.to(_WIDENED.get(tensor.dtype, tensor.dtype))
        how = dist.ReduceOp.SUM if op == "mean" else getattr(dist.ReduceOp, op.upper())
        _call("reduce", dist.all_reduce, wide, how)
        if op == "mean":
            wide /= contributors
        if tensor.dtype == torch.bool:
            wide = wide != 0
        if wide is not tensor:
            tensor.copy_(wide)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        if tensor.numel():
            _call("broadcast", dist.broadcast, _bytes(tensor), root)

    def _answer(self, asked: Header, headers: list[Header]) -> None:
        """Take part in what the others do, adding nothing."""
        want, device, dtype, value, n_dims, *dims = asked
        if want == _STOP:
            self._ask_to_stop()
        if want in (_BARRIER, _STOP):
            return
        shape = dims[:n_dims]
        like = {"dtype": BY_CODE[dtype], "device": own_device(_DEVICES[device])}
        if want == _GATHER:
            rows = torch.empty([0, *shape[1:]], **like)
            self._gather(rows, [_rows(h) for h in headers])
        elif want == _REDUCE:
            op = _OP_NAMES[value]
            self._reduce(_neutral(op, shape, like), op, 1)
        elif headers[value][0] != _JOIN:
            self._broadcast(torch.empty(shape, **like), value)


# What backends cannot add, or not exactly enough.
_WIDENED = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}


def _neutral(op: str, shape: list[int], like: dict[str, Any]) -> Tensor:
    """What changes nothing: 0 in a sum, the largest number in a minimum."""
    dtype = like["dtype"]
    if op in ("sum", "mean"):
        return torch.zeros(shape, **like)
    if dtype == torch.bool:
        value: float = op == "min"
    elif dtype.is_floating_point:
        value = float("inf") if op == "min" else float("-inf")
    else:
        limits = torch.iinfo(dtype)
        value = limits.max if op == "min" else limits.min
    return torch.full(shape, value, **like)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that every backend can move every type."""
    return tensor.view(-1).view(torch.uint8)


def _rows(header: Header) -> int:
    if header[0] == _JOIN:
        return 0
    return header[_HEADER] if header[4] else 1


def _key(header: Header) -> tuple[int, ...]:
    """What must be equal on all ranks: of a gather all but the rows."""
    if header[0] != _GATHER:
        return tuple(header)
    return (*header[:_HEADER], *header[_HEADER + 1 :])


def _differ(headers: list[Header]) -> bool:
    return len({_key(h) for h in headers}) > 1


def _describe(header: Header) -> str:
    want, device, dtype, value, n_dims, *dims = header
    if want == _JOIN:
        return "has nothing more to do"
    label = unpacked(header[_LABEL:])
    about = f" ({label})" if label else ""
    if want in (_BARRIER, _STOP):
        return _WANTS[want] + about
    detail = {_REDUCE: f" ({_OP_NAMES.get(value)})", _BROADCAST: f" from rank {value}"}
    shape = ", ".join(str(d) for d in dims[:n_dims])
    where = "" if _DEVICES[device] == "cpu" else f" on {_DEVICES[device]}"
    what = f"{_WANTS[want]}{detail.get(want, '')} of {name(BY_CODE[dtype])} ({shape})"
    return what + where + about


class LeftToOthersError(MismatchError):
    """A broadcast from a rank that is in join()."""

    @classmethod
    def by(cls, root: int) -> LeftToOthersError:
        return cls(
            f"broadcast from rank {root}, which has no more data and left this call to the others"
        )


def _who_wants_what(headers: list[Header]) -> str:
    lines = [f"  rank {rank}: {_describe(h)}" for rank, h in enumerate(headers)]
    return (
        "the ranks want different things, so nothing was sent:\n"
        + "\n".join(lines)
        + "\nAll ranks must make the same calls in the same order."
    )


def _call(what: str, function: Callable[..., Any], *args: Any) -> None:
    """A collective of torch.distributed; its failures as those of the runtime."""
    try:
        function(*args)
    except AccelError:
        raise
    except RuntimeError as error:
        text = str(error)
        kind = WaitTimeoutError if "imed out" in text or "imeout" in text else LostError
        raise kind(f"{what} through torch.distributed: {text}") from error


# ---- the process group -----------------------------------------------------

_ours = False
_failed = False


def initialize(
    world: World,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Initialise torch.distributed with the ranks of `world`, unless the program did.

    Under accel and torchrun through env://, with keys in the launcher's store that are this
    program's own, where the ranks share memory to agree on them: programs of a job may run
    one after another. Without MASTER_ADDR and MASTER_PORT rank 0 hosts a store on a free
    port, and tells it to the others through the runtime.

    Raises InvalidError where the program's own group has other ranks, or where there is
    no way to tell the port.
    """
    global _ours
    if world.size == 1 or not dist.is_available():
        return
    if dist.is_initialized():
        _check_group(world)
        return
    options: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
    if timeout is not None:
        options["timeout"] = timeout
    if init_method not in (None, "env://"):
        options["init_method"] = init_method
    elif os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT"):
        if world.handle is None:
            options["init_method"] = "env://"
        else:
            options["store"] = _own_part_of_store(world, timeout)
    else:
        options["store"] = _shared_store(world, timeout)
    dist.init_process_group(backend or default_backend(), **options)
    _ours = True
    atexit.register(_close, os.getpid())
    os.register_at_fork(after_in_child=_keep_in_fork)


def default_backend() -> str:
    """gloo; on machines with CUDA, NCCL for memory there."""
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def _keep_in_fork() -> None:
    """A fork has none of the threads that gloo's destructor waits for: it would hang or
    abort at its end. So there the group is never destroyed."""
    if dist.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


def backend_name() -> str | None:
    """The name of the default group's backend, e.g. "gloo"; None without a group."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.get_backend() if is_there else None


def group_devices() -> set[str]:
    """The kinds of devices whose tensors the process group can move."""
    backend = dist.get_backend_config() if hasattr(dist, "get_backend_config") else None
    if backend is None:
        return {"cuda"} if dist.get_backend() == "nccl" else {"cpu"}
    pairs = [entry.split(":") for entry in str(backend).split(",")]
    return {device for device, engine in pairs if engine not in ("nccl",) or device == "cuda"}


def own_device(kind: str) -> torch.device:
    """The device of this rank of that kind."""
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


def _check_group(world: World) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (world.rank, world.size):
        raise InvalidError(
            f"torch.distributed was initialised as rank {rank} of {size}, and this process is "
            f"rank {world.rank} of {world.size}: leave the initialisation to accel, or give "
            "init_process_group the launcher's rank and world size"
        )


_START = "start of torch.distributed"


def _own_part_of_store(world: World, timeout: timedelta | None) -> dist.Store:
    """The store of env://, with a prefix that no other program of the job has: what an earlier
    one left there, such as the addresses of its processes, is not found."""
    from torch.distributed.rendezvous import rendezvous

    # The runtime has the ranks of this very program, and none of an earlier one.
    prefix = world.broadcast_object(uuid.uuid4().hex if world.rank == 0 else None, label=_START)
    limit = {} if timeout is None else {"timeout": timeout}
    store, _, _ = next(rendezvous("env://", world.rank, world.size, **limit))
    return dist.PrefixStore(f"accel/{prefix}", store)


def _shared_store(world: World, timeout: timedelta | None) -> dist.TCPStore:
    if world.handle is None:
        raise InvalidError(
            "there is no way to the other ranks: MASTER_ADDR and MASTER_PORT are not set, and the "
            "ranks share no memory. Start the program with accel launch or torchrun, or export "
            "the name of rank 0's machine and a free port there in these variables"
        )
    limit = timeout or timedelta(minutes=30)
    # Ranks that share memory share the machine, and its loopback device.
    common = {"host_name": "localhost", "world_size": world.size, "timeout": limit}
    store = None
    if world.rank == 0:
        store = dist.TCPStore(port=0, is_master=True, wait_for_workers=False, **common)
    port = world.broadcast_object(store.port if store else None, label=_START)
    return store or dist.TCPStore(port=port, is_master=False, **common)


def program_failed() -> None:
    """An exception ends the program: leave the group, so that nobody waits for this rank
    though some thread may keep its process alive."""
    global _failed
    _failed = True
    close()


def close() -> None:
    """Destroy the process group, where initialize() made it.

    What refers to it is freed before: gloo can abort the process where the interpreter
    goes down with a group alive.
    """
    global _ours
    if not _ours:
        return
    _ours = False
    gc.collect()
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if _failed and abort is not None and "cuda" in group_devices():
        abort()  # NCCL would wait for collectives that never end
    else:
        dist.destroy_process_group()


def _close(pid: int) -> None:
    if os.getpid() == pid:
        close()
