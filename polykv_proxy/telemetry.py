"""What the proxy tells about itself: the structured log.

Events with fields, one line per committed decision, roles and counts but never content.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, cast

import structlog

if TYPE_CHECKING:
    from polykv_proxy.settings import LogSettings


class _Unread:
    """A stream to which nothing need get: whoever reads it may be gone, and the proxy goes on, and ends.

    Args:
        stream: the one behind it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """What cannot be written is lost."""
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Nor is that an error."""
        with suppress(OSError):
            self._stream.flush()


def configure_logging(settings: LogSettings) -> None:
    """Log to standard error, in the form and from the level that the settings name."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor]
    if settings.format == "json":
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        renderer = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Unread(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, force=True)
