"""libaccel.so through ctypes: where it is, what its functions take, how they fail.

Every function of accel.h is declared in one table. Calls that wait release the
interpreter's lock; those that only store a number do not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .errors import BY_CODE, AccelError, InterruptedWaitError, LibraryNotFoundError, VersionError

ABI = 1
SONAME = "libaccel.so.0"
MAX_DIMS = 8

# enum accel_dtype
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, INT32, INT64, BOOL = range(1, 11)
# enum accel_op
SUM, MEAN, MIN, MAX = range(1, 5)
# enum accel_prepare_flags
KEEP = 1


class Array(ctypes.Structure):
    """struct accel_array: a dense array in row-major order."""

    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("n_dims", c_int32),
        ("dims", c_uint64 * MAX_DIMS),
    )


class Count(ctypes.Structure):
    """struct accel_count: calls, and the bytes of this rank that took part."""

    _fields_ = (("calls", c_uint64), ("bytes", c_uint64))


class Counters(ctypes.Structure):
    """struct accel_counters."""

    _fields_ = (
        ("barrier", Count),
        ("reduce", Count),
        ("broadcast", Count),
        ("gather", Count),
        ("backward", Count),
        ("steps", c_uint64),
    )


ON_WAIT = ctypes.CFUNCTYPE(c_int, c_void_p)

_WORLD = c_void_p
_MODEL = c_void_p
_ARRAY = POINTER(Array)

# name: (result, arguments), in the order of accel.h
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "accel_init": (c_int, (POINTER(_WORLD),)),
    "accel_finish": (None, (_WORLD,)),
    "accel_rank": (c_int, (_WORLD,)),
    "accel_size": (c_int, (_WORLD,)),
    "accel_local_rank": (c_int, (_WORLD,)),
    "accel_local_size": (c_int, (_WORLD,)),
    "accel_device": (c_char_p, (_WORLD,)),
    "accel_mixed_precision": (c_char_p, (_WORLD,)),
    "accel_error": (c_char_p, ()),
    "accel_abi": (c_int, ()),
    "accel_version": (c_char_p, ()),
    "accel_on_wait": (None, (ON_WAIT, c_void_p)),
    "accel_label": (None, (_WORLD, c_char_p)),
    "accel_barrier": (c_int, (_WORLD,)),
    "accel_reduce": (c_int, (_WORLD, _ARRAY, c_int)),
    "accel_broadcast": (c_int, (_WORLD, _ARRAY, c_int)),
    "accel_gather": (c_int, (_WORLD, _ARRAY, POINTER(c_uint64))),
    "accel_gather_into": (c_int, (_WORLD, c_void_p)),
    "accel_join": (c_int, (_WORLD,)),
    "accel_prepare": (c_int, (_WORLD, _ARRAY, c_size_t, c_int, POINTER(_MODEL))),
    "accel_model_free": (None, (_MODEL,)),
    "accel_backward": (c_int, (_MODEL, POINTER(c_void_p))),
    "accel_missing": (POINTER(c_uint64), (_MODEL,)),
    "accel_alloc": (c_int, (_WORLD, c_uint64, POINTER(c_void_p))),
    "accel_loss_scale": (c_double, (_MODEL,)),
    "accel_unscale": (c_int, (_MODEL, POINTER(c_void_p))),
    "accel_step": (None, (_WORLD,)),
    "accel_should_stop": (c_int, (_WORLD,)),
    "accel_fail": (None, (_WORLD, c_char_p)),
    "accel_counters": (None, (_WORLD, POINTER(Counters))),
}

# They do not wait for anybody: releasing the lock would cost more than the call.
_QUICK = frozenset(
    {
        "accel_rank",
        "accel_size",
        "accel_local_rank",
        "accel_local_size",
        "accel_device",
        "accel_mixed_precision",
        "accel_error",
        "accel_abi",
        "accel_version",
        "accel_on_wait",
        "accel_label",
        "accel_model_free",
        "accel_missing",
        "accel_loss_scale",
        "accel_step",
        "accel_counters",
    }
)


def candidates(package: Path, environ: dict[str, str] | os._Environ[str]) -> list[Path]:
    """Where the library may be, best first, for a package in folder `package`.

    Beside the package; in the build folder of the checkout the package is part of;
    below the prefix it was installed to, be that PREFIX/lib/accel/python/accel or
    PREFIX/lib/python3.x/site-packages/accel.
    """
    found = [package / SONAME]
    checkout = package.parents[1]
    if (checkout / "runtime" / "accel.h").exists():
        build = environ.get("ACCEL_BUILD")
        folders = ([Path(build)] if build else []) + [checkout / "build"]
        found += [folder / "runtime" / SONAME for folder in folders]
    elif len(package.parents) > 3:
        prefix = package.parents[3]
        found += [prefix / "lib" / SONAME, prefix / "lib64" / SONAME]
        found += sorted((prefix / "lib").glob(f"*-linux-*/{SONAME}"))
    return found


class Library:
    """The functions of accel.h as attributes, declared and ready to be called."""

    def __init__(self, path: str) -> None:
        self.path = path
        waiting, quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        self._check_abi(quick)
        for name, (result, arguments) in FUNCTIONS.items():
            try:
                function = getattr(quick if name in _QUICK else waiting, name)
            except AttributeError:
                raise VersionError(
                    f"{path} has no {name}: it is older than this accel package in "
                    f"{Path(__file__).parent}. {_ONE_VERSION}"
                ) from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def _check_abi(self, quick: ctypes.PyDLL) -> None:
        try:
            abi: int = quick.accel_abi()
            quick.accel_version.restype = c_char_p
            version = quick.accel_version().decode()
        except AttributeError:
            raise VersionError(
                f"{self.path} is not accel's library: it has no accel_abi. {_SAY_WHICH}"
            ) from None
        if abi != ABI:
            raise VersionError(
                f"{self.path} (version {version}) has interface {abi}, and this accel package in "
                f"{Path(__file__).parent} needs interface {ABI}. {_ONE_VERSION}"
            )

    # Declared at run time from FUNCTIONS.
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


_SAY_WHICH = "Say in ACCEL_LIBRARY which file to use, or unset it."
_ONE_VERSION = (
    "Install both from one version, or say in ACCEL_LIBRARY where the matching libaccel.so is."
)

_library: Library | None = None


def load() -> Library:
    """The library, loaded once.

    Raises LibraryNotFoundError with the places that were tried, VersionError when what
    is there does not fit this package.
    """
    global _library
    if _library is None:
        _library = _find(Path(__file__).resolve().parent, os.environ)
    return _library


def _find(package: Path, environ: dict[str, str] | os._Environ[str]) -> Library:
    chosen = environ.get("ACCEL_LIBRARY")
    if chosen:
        try:
            return Library(chosen)
        except OSError as error:
            raise LibraryNotFoundError(
                f"ACCEL_LIBRARY says {chosen}, which cannot be loaded: {error}. {_SAY_WHICH}"
            ) from None
    tried = []
    for path in [str(p) for p in candidates(package, environ) if p.exists()] + [SONAME]:
        try:
            return Library(path)
        except OSError as error:
            tried.append(f"  {path}: {error}")
    looked = [f"  {p}: no such file" for p in candidates(package, environ) if not p.exists()]
    raise LibraryNotFoundError(
        "accel's library was not found. These were tried:\n"
        + "\n".join(looked + tried)
        + "\nBuild it (ninja -C build), install it, or say in ACCEL_LIBRARY where it is."
    )


# ---- errors ----------------------------------------------------------------


def check(code: int) -> int:
    """`code`, unless it says that a call failed: then the exception, with the library's
    sentence. What a signal handler raised during the wait comes out as itself."""
    if code >= 0:
        return code
    raise error_of(code)


def error_of(code: int) -> BaseException:
    """The exception for a code of the last failed call in this thread."""
    kind = BY_CODE.get(code, AccelError)
    if kind is InterruptedWaitError:
        raised = signals.take()
        if raised is not None:
            return raised
    text = load().accel_error() or b""
    return kind(text.decode("utf-8", "replace") or f"the runtime failed with {code}")


# ---- signals while a call waits --------------------------------------------


class Signals:
    """Lets Python run its signal handlers while a call waits, and keeps what they raise.

    The callback is the send() of a generator: Python runs the handlers of signals that
    came where a generator resumes, and that is inside its `try`. In a function of its
    own they would run at the first instruction, before any `try`, and ctypes would print
    and drop what they raise.
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._generator = self._answers()
        next(self._generator)
        self.callback = ON_WAIT(self._generator.send)

    def _answers(self) -> Generator[int, Any, None]:
        answer = 0
        while True:
            try:
                while True:
                    yield answer
                    answer = 0
            except GeneratorExit:
                raise
            except BaseException as error:
                self._raised = error
                answer = 1

    def take(self) -> BaseException | None:
        """What a handler raised, once."""
        raised, self._raised = self._raised, None
        return raised

    def watch(self) -> None:
        load().accel_on_wait(self.callback, None)

    def ignore(self) -> None:
        """Remove the callback: a library must not call into an interpreter that ends."""
        load().accel_on_wait(ON_WAIT(), None)


signals = Signals()
