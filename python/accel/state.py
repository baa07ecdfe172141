"""Which process this is, where it computes, and how it stands to the others.

PartialState is one per process: every instance is the same. It joins the world, chooses
the device, and initialises torch.distributed, so that the program's own collectives work.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import group
from . import world as worlds
from .errors import InvalidError
from .operations import honor_type
from .world import World

F = TypeVar("F", bound=Callable[..., Any])

_TRUE = {"1", "true", "yes", "on", "y", "t"}
_FALSE = {"", "0", "false", "no", "off", "n", "f"}


class DistributedType(StrEnum):
    """What kind of job this is. Only the first four, XLA and MPS occur; the others are
    here for programs that ask whether it is one of them."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    TPU = "XLA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Flag(int):
    """A bool that can be called, as older programs do: `if state.is_main_process():`."""

    def __new__(cls, value: object) -> Flag:
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self) if not spec else bool(self), spec)


def env_flag(name: str) -> bool | None:
    """Whether a variable says yes or no; None where it is not set.

    Raises InvalidError where it says neither.
    """
    value = os.environ.get(name)
    if value is None:
        return None
    if value.strip().lower() in _TRUE:
        return True
    if value.strip().lower() in _FALSE:
        return False
    raise InvalidError(f"{name} is {value!r}: set it to true or false")


class PartialState:
    """The process, without anything that concerns training.

    `cpu=True` computes on the CPU whatever else there is. `backend`, `init_method` and
    `timeout` (a timedelta) are for torch.distributed.

    Attributes: `device` (torch.device), `num_processes`, `process_index`,
    `local_process_index`, `num_local_processes`, `distributed_type`, `backend`
    (torch.distributed's, or None), `world`.

    Raises what world.current() raises, and InvalidError where there are more local ranks
    than CUDA devices, or where a later instance asks for another device.
    """

    _shared_state: dict[str, Any] = {}  # noqa: RUF012 - one for all, on purpose

    world: World
    device: torch.device
    distributed_type: DistributedType
    backend: str | None

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if kwargs:
            raise TypeError(f"PartialState does not know {', '.join(sorted(kwargs))}")
        if self.initialized:
            if cpu and self.device.type != "cpu":
                raise InvalidError(
                    f"the program computes on {self.device} already: say cpu=True where it makes "
                    "its first Accelerator or PartialState"
                )
            return
        world = worlds.current()
        device = choose_device(world, cpu)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        group.initialize(world, backend, init_method, timeout)
        world.device = device
        self.device = device
        self.distributed_type = _distributed_type(world, device)
        self.backend = group.backend_name() if world.size > 1 else None
        self.world = world  # the last one: it says that all is there

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @classmethod
    def _reset_state(cls) -> None:
        """Forget everything, so that the next instance chooses again; for tests. The world
        stays joined."""
        cls._shared_state.clear()

    @property
    def initialized(self) -> bool:
        return "world" in self._shared_state

    # ---- who ----------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        return self.world.size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def num_local_processes(self) -> int:
        return self.world.local_size

    @property
    def use_distributed(self) -> bool:
        """Are there other ranks?"""
        return self.world.size > 1

    @property
    def is_main_process(self) -> Flag:
        """Is this rank 0? Can be called as well."""
        return Flag(self.world.rank == 0)

    @property
    def is_local_main_process(self) -> Flag:
        """Is this the first rank of its machine? Can be called as well."""
        return Flag(self.world.local_rank == 0)

    @property
    def is_last_process(self) -> Flag:
        """Is this the rank with the highest number? Can be called as well."""
        return Flag(self.world.rank == self.world.size - 1)

    # ---- together -----------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.world.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The block runs on rank 0 first, then on the others. Collective.

        When rank 0 raises in it, the others do not run it: they wait for rank 0, and raise
        when it fails or does something else.
        """
        with self._first(bool(self.is_main_process)):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The block runs on the first rank of each machine first, then on the others."""
        with self._first(bool(self.is_local_main_process)):
            yield

    @contextmanager
    def _first(self, first: bool) -> Iterator[None]:
        # One label for both: blocks may be nested, and ranks meet in other ones then.
        if not first:
            self.world.barrier("main_process_first")
        yield
        if first:
            self.world.barrier("main_process_first")

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of `inputs`: a list, tuple, tensor or another sequence, or a dict
        of those with equal lengths. The first ranks get one element more where it does not
        divide evenly; with `apply_padding` the last element is repeated instead until all
        have equally many. `inputs` is not modified. Not collective.

        Raises ValueError for a dict with lengths that differ.
        """
        yield split(inputs, self.process_index, self.num_processes, apply_padding)

    # ---- only somewhere -----------------------------------------------------

    def on_main_process(self, function: F | None = None) -> Any:
        """A decorator: the function runs on rank 0 and does nothing, returning None,
        elsewhere."""
        return _only(function, lambda: bool(self.is_main_process))

    def on_local_main_process(self, function: F | None = None) -> Any:
        """A decorator: the function runs on the first rank of each machine only."""
        return _only(function, lambda: bool(self.is_local_main_process))

    def on_last_process(self, function: F | None = None) -> Any:
        """A decorator: the function runs on the rank with the highest number only."""
        return _only(function, lambda: bool(self.is_last_process))

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """A decorator: the function runs on rank `process_index` only."""
        if process_index is None and not callable(function):
            function, process_index = None, function
        return _only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: F | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator: the function runs on that rank of each machine only."""
        if local_process_index is None and not callable(function):
            function, local_process_index = None, function
        return _only(function, lambda: self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """print() on the first rank of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    # ---- the end ------------------------------------------------------------

    def destroy_process_group(self) -> None:
        """Leave torch.distributed, where accel initialised it. It happens at the end of
        the program anyway."""
        group.close()

    @property
    def default_device(self) -> torch.device:
        """The device a process would get that is alone."""
        return _alone_device()


def _only(function: F | None, here: Callable[[], bool]) -> Any:
    if function is None:
        return lambda f: _only(f, here)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return call


class AcceleratorState(PartialState):
    """PartialState, and the precision the program trains in: `mixed_precision` is "no",
    "fp16" or "bf16", by default what ACCEL_MIXED_PRECISION or ACCELERATE_MIXED_PRECISION
    says, else "no".

    Raises ValueError for another, InvalidError where a later instance asks for one that
    differs from the first.
    """

    mixed_precision: str

    def __init__(
        self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(cpu, **kwargs)
        asked = None if mixed_precision is None else precision(mixed_precision, "mixed_precision")
        have = self._shared_state.get("mixed_precision")
        if have is None:
            self.mixed_precision = asked or default_precision()
        elif asked not in (None, have):
            raise InvalidError(
                f"the program trains with mixed_precision={have!r} already, and {asked!r} is asked "
                "for: say it where it makes its first Accelerator"
            )

    def __repr__(self) -> str:
        return super().__repr__() + f"Mixed precision type: {self.mixed_precision}\n"

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = True) -> None:
        """Forget the precision, and by default everything; for tests."""
        cls._shared_state.pop("mixed_precision", None)
        if reset_partial_state:
            PartialState._reset_state()


PRECISIONS = ("no", "fp16", "bf16")


def precision(value: object, source: str) -> str:
    """`value` as one of PRECISIONS. False, as YAML reads a bare `no`, is "no".

    Raises ValueError with `source` otherwise.
    """
    text = "no" if value is False else str(value).lower()
    if text not in PRECISIONS:
        raise ValueError(f"{source} is {value!r}: use one of {', '.join(PRECISIONS)}")
    return text


def default_precision() -> str:
    """What the launcher says, else "no"."""
    for name in ("ACCEL_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"):
        if os.environ.get(name):
            return precision(os.environ[name], name)
    return "no"


# ---- devices ---------------------------------------------------------------


def choose_device(world: World, cpu: bool = False) -> torch.device:
    """Where this rank computes.

    The CPU with `cpu` or ACCELERATE_USE_CPU; what ACCEL_DEVICE says; else the CUDA device
    of the local rank, XLA's where torch_xla is set up for one, MPS for a process that is
    alone, or the CPU.

    Raises InvalidError where the ranks are more than the devices.
    """
    if cpu or env_flag("ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    chosen = os.environ.get("ACCEL_DEVICE") or os.environ.get("ACCELERATE_TORCH_DEVICE")
    if chosen:
        return _device_named(chosen)
    if torch.cuda.is_available():
        return torch.device("cuda", _cuda_index(world))
    if _xla_is_there():
        return _xla_device()
    return _alone_device() if world.size == 1 else torch.device("cpu")


def _device_named(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InvalidError(
            f"ACCEL_DEVICE is {text!r}, which is no device: say cpu, cuda:0 or the like"
        ) from None
    if device.type == "xla":
        return _xla_device()
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise InvalidError(
            f"this rank is to compute on {text}, and torch {torch.__version__} sees no CUDA "
            "device: install a torch with CUDA, or launch with --cpu"
        )
    n = torch.cuda.device_count()
    index = device.index or 0
    if index >= n:
        # One visible device for each rank: the program knows it as number 0.
        if n > 1:
            raise InvalidError(f"this rank is to compute on {text}, and {n} CUDA devices are here")
        index = 0
    return torch.device("cuda", index)


def _cuda_index(world: World) -> int:
    n = torch.cuda.device_count()
    if n >= world.local_size:
        return world.local_rank
    # Launchers may show each rank only its own device: then there are enough of them.
    own = str(getattr(torch.cuda.get_device_properties(world.local_rank % n), "uuid", ""))
    used = world.all_gather_object((os.uname().nodename, own), "CUDA devices of the ranks")
    if own and len(set(used)) == len(used):
        return world.local_rank % n
    raise InvalidError(
        f"{world.local_size} ranks on this machine, and {n} CUDA device{'s' if n > 1 else ''}: "
        f"start at most {n} here, or compute on the CPU with Accelerator(cpu=True) or "
        "ACCELERATE_USE_CPU=true"
    )


def _xla_is_there() -> bool:
    if not (os.environ.get("PJRT_DEVICE") or os.environ.get("TPU_ACCELERATOR_TYPE")):
        return False
    from importlib.util import find_spec

    return find_spec("torch_xla") is not None


def _xla_device() -> torch.device:
    import torch_xla

    return torch_xla.device()


def _alone_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def _distributed_type(world: World, device: torch.device) -> DistributedType:
    if device.type == "xla":
        return DistributedType.XLA
    if world.size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if device.type == "cuda" else DistributedType.MULTI_CPU


# ---- parts -----------------------------------------------------------------


def split(inputs: Any, rank: int, size: int, apply_padding: bool = False) -> Any:
    """What rank `rank` of `size` gets of `inputs`: see split_between_processes()."""
    if isinstance(inputs, Mapping):
        lengths = {k: len(v) for k, v in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"all values must be equally long to be split, and are {lengths}")
        return {k: split(v, rank, size, apply_padding) for k, v in inputs.items()}
    if size == 1:
        return inputs
    each, more = divmod(len(inputs), size)
    start = rank * each + min(rank, more)
    end = start + each + (rank < more)
    missing = each + (more > 0) - (end - start) if apply_padding else 0
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        # A Dataset of Hugging Face: slicing one gives columns, not a dataset.
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    part = inputs[start:end]
    return _padded(part, inputs, missing) if missing else part


def _padded(part: Any, inputs: Any, missing: int) -> Any:
    """`part` with the last element of `inputs` repeated behind it."""
    if isinstance(inputs, Tensor):
        return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])])
    if isinstance(inputs, (list, tuple)):
        return honor_type(inputs, [*part, *[inputs[-1]] * missing])
    if type(inputs).__module__ == "numpy":
        numpy = sys.modules["numpy"]
        return numpy.concatenate([part, numpy.repeat(inputs[-1:], missing, axis=0)])
    return [*part, *[inputs[-1]] * missing]
