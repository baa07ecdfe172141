"""The environment of child processes that are no ranks."""

from __future__ import annotations

import os

# What launchers tell a rank: with these prefixes, and by these names.
_PREFIXES = (
    "TORCHELASTIC_",
    "ACCEL_CONTROL_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "SLURM_STEP",
)
_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "ACCEL_JOB",
        "ACCEL_SOCKET",
        "ACCEL_NODE",
        "ACCEL_ATTEMPT",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    }
)


def clean_environment() -> dict[str, str]:
    """A copy of os.environ without what makes a child process a rank of this job:

        subprocess.run([sys.executable, "prepare.py"], env=accel.utils.clean_environment())

    In there, accel finds a world of one, and torch.distributed nobody.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _NAMES and not name.startswith(_PREFIXES)
    }
