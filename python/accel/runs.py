"""Notices when backward runs, so that no gradient stays unaveraged.

A program may call loss.backward() instead of accelerator.backward(loss); whoever uses the
gradients next has to know.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd

if TYPE_CHECKING:
    from .reducer import Reducer


class _Runs(threading.local):
    """Notices calls of torch.autograd.backward(), once watch() was called.

    `count` is how many there were. Those that accelerator.backward() has not announced
    are noted by the reducers whose gradients they changed.
    """

    count = 0
    is_announced = False

    def watch(self, reducer: Reducer | None = None) -> None:
        if reducer is not None:
            _watching.add(reducer)
        if getattr(torch.autograd.backward, "_accel_watches", False):
            return
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            # Announced, or called by a backward that runs already.
            if self.is_announced:
                return original(*args, **kwargs)
            before = [(r, r.gradients_now()) for r in _watching]
            self.is_announced = True
            try:
                return original(*args, **kwargs)
            finally:
                self.is_announced = False
                for r, gradients in before:
                    r.note_if_changed(gradients)

        backward.__dict__["_accel_watches"] = True
        torch.autograd.backward = backward


_watching: weakref.WeakSet[Reducer] = weakref.WeakSet()
runs = _Runs()
