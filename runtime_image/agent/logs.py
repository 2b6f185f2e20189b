"""Logs: one JSON object a line on stderr, one event a fact. Never code, output or environment values."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TextIO

import structlog


class _Line:
    """Writes an event's line. A log that cannot be written, as on a full disk, is no reason to end or to refuse."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, message: str) -> None:
        try:
            # In one piece, so that what a full disk cuts is one line.
            self._stream.write(message + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = log = msg


def lines_to(stream: TextIO) -> Callable[..., Any]:
    """What structlog makes its loggers with."""

    def logger(*_: object) -> _Line:
        return _Line(stream)

    return logger


def configure(level: str = "info") -> None:
    """Send structlog's and the library's events to stderr as JSON lines."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lines_to(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
