"""Claims about ``durable.adapters``: a request that chooses adapters is seen, however it spells that."""

import json

import pytest

from polykv_proxy.durable.adapters import has_adapters

PLAIN = json.dumps({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("key", ["lora", "l\\u006fra", "\\u006Cora", "\\u006c\\u006F\\u0072\\u0061"])
@pytest.mark.parametrize("value", ["[]", "null", '[{"id": 0, "scale": 1.0}]'])
def test_who_names_adapters_has_some(key, value):
    """In any spelling of the key that JSON knows, first or last."""
    for body in (f'{{"{key}": {value}, {PLAIN[1:]}', f'{PLAIN[:-1]}, "{key}" :{value}}}'):
        assert "lora" in json.loads(body)
        assert has_adapters(body.encode())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x"},
        {"prompt": 'the key is "lora"'},
        {"prompt": "lora", "messages": [{"lora": 1}]},
        {"prompt": "\u00e9 and \u0061", "loras": 1},
        {"metadata": {"lora": 1}, "prompt": "\u0006 and \u007f"},
    ],
)
def test_who_only_mentions_them_has_none(body):
    """In a text, or somewhere below."""
    assert not has_adapters(json.dumps(body).encode())
    assert not has_adapters(json.dumps(body, ensure_ascii=False).encode())


@pytest.mark.parametrize("body", [b'{"lora": 1', b'["lora"]', b'{"\\u006cora": ' + b"[" * 100_000])
def test_what_nobody_can_read_is_taken_for_one_that_may(body):
    """Nothing is saved of it, and nothing restored for it."""
    assert has_adapters(body)
