"""What can go wrong in the runtime, as exceptions: one for each accel_error of accel.h.

All are AccelError, and those that have a builtin relative are that as well, so that
`except TimeoutError` works.
"""

from __future__ import annotations


class AccelError(RuntimeError):
    """A call of the runtime failed; the message says what, why and what to do."""

    code: int = 0


class InvalidError(AccelError, ValueError):
    """An argument, or the environment the program was started in, is wrong."""

    code = -1


class MismatchError(AccelError):
    """The ranks want different things. Nothing moved, and the world is whole."""

    code = -2


class LostError(AccelError):
    """A rank died, failed or finished while this one waited for it."""

    code = -3


class WaitTimeoutError(AccelError, TimeoutError):
    """A rank did not come in time (ACCEL_TIMEOUT, in seconds)."""

    code = -4


class ForkedError(AccelError):
    """Called in a fork of the process that joined the world."""

    code = -5


class OwnedError(AccelError):
    """Another process is this rank already: a child has the environment of a rank. See
    utils.clean_environment()."""

    code = -6


class VersionError(AccelError):
    """The package, libaccel.so and acceld are not of the same version."""

    code = -7


class UnreachableError(AccelError):
    """There is no way to the other ranks from this process."""

    code = -8


class OutOfMemoryError(AccelError, MemoryError):
    """The machine has no room for what was asked."""

    code = -9


class BusyError(AccelError):
    """Another thread is inside a call of the same world."""

    code = -10


class InterruptedWaitError(AccelError):
    """A wait was given up because its callback said so. A program sees the reason
    instead, which is what a signal handler raised, e.g. KeyboardInterrupt."""

    code = -11


class LibraryNotFoundError(AccelError, ImportError):
    """libaccel.so is not where it was looked for."""


BY_CODE: dict[int, type[AccelError]] = {
    kind.code: kind
    for kind in (
        InvalidError,
        MismatchError,
        LostError,
        WaitTimeoutError,
        ForkedError,
        OwnedError,
        VersionError,
        UnreachableError,
        OutOfMemoryError,
        BusyError,
        InterruptedWaitError,
    )
}
