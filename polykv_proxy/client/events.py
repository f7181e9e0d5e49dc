"""Event streams, from bytes to documents. Pure."""

from __future__ import annotations

import json
from typing import Any

from polykv_proxy.client.errors import ServerError, TruncatedStreamError, error_from_event

DONE = "[DONE]"


class EventReader:
    """Takes the bytes of a ``text/event-stream`` and gives the data of its events.

    Lines may end in LF or CRLF, data may have several lines, comments are skipped. Nothing else of the
    format is used by the servers that are talked to.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that is complete now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
            elif line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
        return events


class ChatEvents:
    """A streamed chat: documents until the end marker; anything else that ends it is an error."""

    def __init__(self) -> None:
        self._reader = EventReader()
        self._done = False

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """The documents that are complete now.

        Raises:
            PolyKVError: an event that is an error, or no JSON object.
        """
        documents = []
        for data in self._reader.feed(piece):
            if data.strip() == DONE:
                self._done = True
                break
            documents.append(_document(data))
        return documents

    def finish(self) -> None:
        """The stream is over.

        Raises:
            TruncatedStreamError: before its end marker.
        """
        if not self._done:
            raise TruncatedStreamError("the stream ended before it was complete")


def _document(data: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServerError(f"an event of the stream is no JSON object: {data[:80]!r}")
    if "error" in document:
        raise error_from_event(document["error"])
    return document
