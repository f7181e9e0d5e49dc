"""Whether a request carries anything but text.

A medium has no tokens that tell it from others: nothing that holds one can be found by tokens, and so be a
pool or a saved state.
"""

from __future__ import annotations

import re

_MEDIA = re.compile(
    rb'"type"\s*:\s*"(?:image|image_url|input_image|input_audio|audio|video|input_video|video_url)"'
    rb'|"multimodal_data"\s*:'
)


def has_media(body: bytes) -> bool:
    """Whether a body, or a part of one, carries an image or a sound; quotes in its texts are escaped.

    A megabyte of text takes a millisecond.
    """
    return _MEDIA.search(body) is not None


def media_parts(body: bytes) -> int:
    """How many images and sounds a body carries."""
    return sum(1 for _ in _MEDIA.finditer(body))
