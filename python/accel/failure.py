"""An exception that ends the program is reported to the runtime before anything else.

The supervisor shows it as the first failure, and the ranks that wait for this one get
it as their error, at once: they wait neither for this process to end nor, where threads
keep it alive, for ever.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from . import group
from .errors import LostError

if TYPE_CHECKING:
    from .world import World

_world: World | None = None
_installed = False


def report_to(world: World | None) -> None:
    """Report exceptions nobody caught to `world` from here on, then do what was done
    about them before."""
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
        ends = not (sys.flags.interactive or hasattr(sys, "ps1"))
        if ends:
            _report(kind, error, trace)
        before(kind, error, trace)
        if ends:
            group.program_failed()

    sys.excepthook = report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # Ctrl-C reaches all ranks and is nobody's failure; a rank that lost another one is
    # not the first to fail.
    if _world is None or issubclass(kind, (KeyboardInterrupt, LostError)):
        return
    try:
        _world.fail("".join(traceback.format_exception(kind, error, trace)))
    except Exception:  # whatever is wrong with the report, the traceback must be printed
        pass
