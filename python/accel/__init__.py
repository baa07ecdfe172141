"""accel: an ordinary PyTorch program on any device and any number of processes.

    from accel import Accelerator

    accelerator = Accelerator()
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for source, targets in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source), targets)
        accelerator.backward(loss)
        optimizer.step()
    predictions = accelerator.gather(model(source))

The same file runs under plain python, accel launch, torchrun, mpirun and srun.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where each public name lives. They are imported when they are asked for, so that a
# program pays for what it uses.
_HOMES = {
    "accelerator": ("Accelerator",),
    "data": ("PreparedLoader", "prepare_data_loader"),
    "errors": (
        "AccelError",
        "BusyError",
        "ForkedError",
        "InvalidError",
        "LibraryNotFoundError",
        "LostError",
        "MismatchError",
        "OutOfMemoryError",
        "OwnedError",
        "UnreachableError",
        "VersionError",
        "WaitTimeoutError",
    ),
    "handlers": (
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GradScalerKwargs",
        "GradientAccumulationPlugin",
        "InitProcessGroupKwargs",
    ),
    "logging": (),
    "operations": (),
    "passes": ("current_batch",),
    "rng": ("set_seed", "synchronize_rng_states"),
    "state": ("AcceleratorState", "DistributedType", "PartialState"),
    "utils": (),
    "world": ("World",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .rng import set_seed as set_seed
    from .rng import synchronize_rng_states as synchronize_rng_states
    from .state import AcceleratorState as AcceleratorState
    from .state import DistributedType as DistributedType
    from .state import PartialState as PartialState


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name in _HOMES:
        value = import_module(f".{name}", __name__)
    else:
        from .absent import of_module

        raise of_module(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_HOMES})
