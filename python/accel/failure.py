"""An exception that ends the program is reported to the runtime before anything else.

The supervisor shows it as the first failure, and the ranks that wait for this one get
it as their error, at once: they wait neither for this process to end nor, where threads
keep it alive, for ever.

What is printed leaves out what the program's author cannot change. A rank that only
lost another one says so in one line, so that the traceback of the one that failed is not
buried under those of its peers. ACCEL_TRACEBACK=full prints everything.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from . import _lib, group
from .errors import AccelError, LostError

if TYPE_CHECKING:
    from .world import World

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_world: World | None = None
_installed = False

_ACCEL = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def report_to(world: World | None) -> None:
    """Report exceptions nobody caught to `world` from here on, then do what was done
    about them before; None where there is no world yet."""
    global _world, _installed
    _world = world
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # At an interactive prompt the program goes on.
        if sys.flags.interactive or hasattr(sys, "ps1"):
            before(kind, error, trace)
            return
        text = _short(error, trace)
        _report(error, trace, text)
        _print(before, error, trace, text)
        group.program_failed()

    sys.excepthook = report


def _report(error: BaseException, trace: TracebackType | None, text: str | None) -> None:
    # Ctrl-C reaches all ranks and is nobody's failure.
    if _world is None or isinstance(error, KeyboardInterrupt):
        return
    try:
        if isinstance(error, LostError):
            _leave_word((text or str(error)).strip())
        else:
            _world.fail(text or "".join(traceback.format_exception(type(error), error, trace)))
    except Exception:  # whatever is wrong with the report, the traceback must be printed
        pass


def _leave_word(text: str) -> None:
    """Let the supervisor find out why this rank ended, which is not the first to fail: no
    rank is told."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file):
        return
    _lib.load().accel_fail(None, text.encode("utf-8", "replace"))
    # The time of such a file is when its rank failed, and the earliest one counts. The file of
    # the rank that was lost may be no older by the file system's clock; so this one claims
    # nothing, and the end of the process counts.
    later = time.time() + 3600
    os.utime(file, (later, later))


def _print(
    before: Hook, error: BaseException, trace: TracebackType | None, text: str | None
) -> None:
    # A hook of the program's own prints as it likes.
    if text is None or before is not sys.__excepthook__ or sys.stderr is None:
        before(type(error), error, trace)
    else:
        with suppress(OSError, ValueError):  # nobody reads it any more
            print(text, end="", file=sys.stderr, flush=True)


# ---- what is worth reading -------------------------------------------------------


def _short(error: BaseException, trace: TracebackType | None) -> str | None:
    """What to say about an exception, in whole lines; None where Python says it best."""
    if os.environ.get("ACCEL_TRACEBACK") == "full":
        return None
    try:
        if isinstance(error, KeyboardInterrupt):
            return _interrupted(trace) if _world is not None and _world.size > 1 else None
        if not isinstance(error, AccelError):
            return None
        if isinstance(error, LostError) and _world is not None and not _came_after(error):
            reason = " ".join(str(error).split())
            return f"accel: rank {_world.rank} gives up{_place(trace)}: {reason}\n"
        return _without_accel(error, trace)
    except Exception:  # such as the __str__ of somebody's error, which is then Python's
        return None


def _interrupted(trace: TracebackType | None) -> str:
    assert _world is not None
    return f"accel: rank {_world.rank} was interrupted{_place(trace)}\n"


def _came_after(error: BaseException) -> bool:
    """Whether it was raised while the program dealt with a failure of its own."""
    before = error.__context__
    if before is None or before is error.__cause__ or error.__suppress_context__:
        return False
    return isinstance(before, AccelError) or not _is_internal(before)


def _is_internal(error: BaseException) -> bool:
    """Whether accel itself raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_below(frames[-1], _ACCEL)


def _place(trace: TracebackType | None) -> str:
    """Where in the program: " at train.py:12", the innermost of its lines."""
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if not _is_below(f, _ACCEL) and not _is_below(f, _TORCH)]
    if not own:
        return ""
    file = own[-1].filename
    if os.path.isabs(file):
        near = os.path.relpath(file)
        file = file if near.startswith("..") else near
    return f" at {file}:{own[-1].lineno}"


def _without_accel(error: AccelError, trace: TracebackType | None) -> str:
    """The traceback without the frames of this package, and without what it was made from
    where it says the same."""
    whole = traceback.TracebackException(type(error), error, trace)
    part: traceback.TracebackException | None = whole
    at: BaseException | None = error
    while part is not None and at is not None:
        kept = [frame for frame in part.stack if not _is_below(frame, _ACCEL)]
        part.stack = traceback.StackSummary.from_list(kept)
        inner = at.__cause__ or at.__context__
        if inner is not None and (str(inner) in str(at) or _is_internal(inner)):
            part.__cause__ = part.__context__ = None
        part, at = part.__cause__ or part.__context__, inner
    return "".join(whole.format())


def _is_below(frame: traceback.FrameSummary, folder: str) -> bool:
    return frame.filename.startswith(folder)
