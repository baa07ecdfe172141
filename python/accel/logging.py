"""Loggers that speak once for all ranks, or for each in turn."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from .state import PartialState


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take two arguments more.

    main_process_only: log on rank 0 only, the default.
    in_order: with main_process_only=False, each rank logs in turn. Collective.

    Raises RuntimeError before the program has made an Accelerator or a PartialState.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log with a level of the logging module, and %-format `args`, as Logger.log()."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        state = _state()
        if main_only or not in_order:
            if state.is_main_process or not main_only:
                self._log_here(level, msg, args, kwargs)
            return
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self._log_here(level, msg, args, kwargs)
            state.world.barrier("log in order")

    def _log_here(
        self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]
    ) -> None:
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)
            # The frames of log() and this function are not the program's.
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2
            self.logger.log(level, msg, *args, **kwargs)

    @functools.cache  # noqa: B019 - loggers live as long as the program
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """warning(), once for the same arguments."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.warning(*args, **kwargs)


def _state() -> PartialState:
    if "world" not in PartialState._shared_state:
        raise RuntimeError(
            "a logger of accel has to know which rank this is: make an Accelerator or a "
            "PartialState before the first message"
        )
    return PartialState()


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """A RankLogger of that name. `log_level`, e.g. "INFO", is by default what
    ACCELERATE_LOG_LEVEL says; without one the level is left alone."""
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
    return RankLogger(logger, {})
