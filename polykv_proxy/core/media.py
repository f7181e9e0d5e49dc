"""Whether a request carries anything but text.

A medium has no tokens that tell it from others: nothing that holds one can be found by tokens, and so be a
pool or a saved state.
"""

from __future__ import annotations

import re

_KINDS = (
    "image",
    "image_url",
    "input_image",
    "input_audio",
    "audio",
    "video",
    "input_video",
    "video_url",
)


def _spelt(word: str) -> str:
    """A name in JSON, with or without escapes in it: the engine reads both."""
    return '"' + "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):02x}))" for letter in word) + '"'


_MEDIA = re.compile(
    rf"{_spelt('type')}\s*:\s*(?:{'|'.join(map(_spelt, _KINDS))})|{_spelt('multimodal_data')}\s*:".encode()
)


def has_media(body: bytes) -> bool:
    """Whether a body, or a part of one, carries an image or a sound; quotes in its texts are escaped.

    A megabyte of text takes a millisecond.
    """
    return _MEDIA.search(body) is not None


def media_parts(body: bytes) -> int:
    """How many images and sounds a body carries."""
    return sum(1 for _ in _MEDIA.finditer(body))
