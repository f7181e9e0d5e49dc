"""Media in bodies, of whatever API."""

from __future__ import annotations

import json

import pytest

from polykv_proxy.core.media import has_media, media_parts

PARTS = [
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "input_image", "image_url": "data:,"},
    {"type": "image", "source": {}},
    {"type": "input_audio", "input_audio": {}},
    {"type": "input_video", "input_video": {}},
    {"type": "video_url", "video_url": {}},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_media_in_a_body_are_seen(part, separators):
    """However it is written."""
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert has_media(json.dumps(body, separators=separators).encode())


def test_a_plain_prompt_has_them_beside_it():
    """In a list of its own."""
    assert has_media(b'{"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["x"]}}')


def test_a_text_that_speaks_of_media_is_none():
    """Quotes in it are escaped."""
    text = json.dumps({"content": '{"type": "image"} and "multimodal_data": 1'})
    assert not has_media(json.dumps({"messages": [text]}).encode())


def test_media_whose_kind_is_spelt_with_escapes_are_seen():
    """The engine reads them all the same; what says so in a text is none."""
    for part in (*PARTS, {"multimodal_data": ["x"]}):
        kind = part.get("type", "multimodal_data")
        for letter in set(kind):
            raw = json.dumps([part]).replace(kind, kind.replace(letter, f"\\u{ord(letter):04x}"))
            assert json.loads(raw) == [part]
            assert has_media(raw.encode())
            assert media_parts(raw.encode()) == 1
            assert not has_media(json.dumps({"content": raw}).encode())
    assert not has_media(rb'{"type": "image\u005furl')
    assert has_media(rb'{"t\u0079pe": "image"}')


def test_media_are_counted_once_each():
    """Though a part names its kind twice."""
    for part in PARTS:
        content = [part, {"type": "text", "text": "x"}, part]
        assert media_parts(json.dumps({"content": content}).encode()) == 2
