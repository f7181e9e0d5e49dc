"""Claims about ``engine.rendering``: a Responses body as the chat that the engine makes of it, or None."""

import json

import pytest

from polykv_proxy.engine.rendering import chat_of_responses, text_of_plain


def converted(**body):
    """What becomes of a body."""
    chat = chat_of_responses(json.dumps(body).encode())
    return None if chat is None else json.loads(chat)


def test_a_plain_text_is_a_users_message():
    """After the instructions; everything else stays."""
    assert converted(instructions="Be brief.", input="Hi", chat_template_kwargs={"a": 1}) == {
        "chat_template_kwargs": {"a": 1},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    }


def test_items_are_messages():
    """As text or as parts, with or without their type."""
    given = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    assert converted(input=given)["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 3},
        {"input": "Hi", "tools": [{"type": "function"}]},
        {"input": ["Hi"]},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"role": "user", "content": 3}]},
        {"input": [{"role": "user", "content": ["a"]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    ],
)
def test_what_is_more_than_text_is_left_to_the_engine(body):
    """Nothing is guessed."""
    assert converted(**body) is None


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b"[" * 100_000])
def test_what_is_no_object_is_left_to_the_engine(raw):
    """It refuses in its own words."""
    assert chat_of_responses(raw) is None


def test_a_multimodal_prompt_has_a_text():
    """Where it is one; what has messages is a chat."""
    plain = {"prompt": {"prompt_string": "a<m>", "multimodal_data": [""]}}
    assert text_of_plain(json.dumps(plain).encode()) == "a<m>"
    for other in ({"prompt": "a"}, {"prompt": [1, "a"]}, {"messages": []}, plain | {"messages": []}, []):
        assert text_of_plain(json.dumps(other).encode()) is None
    assert text_of_plain(b"[" * 100_000) is None
