"""Claims about ``api.asked``: our members are read strictly and stripped, everything else keeps its bytes."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.api.asked import (
    MOST_TEXT_LINKS,
    OUR_KEYS,
    TEXT_LINK_BYTES,
    odd_prompt,
    pinner,
    prompt_tokens,
    read,
    without,
)
from polykv_proxy.api.families import INFERENCE
from polykv_proxy.api.members import MOST_COMMAS, MOST_ITEMS
from polykv_proxy.core.types import as_tokens
from polykv_proxy.errors import BadRequestError

CHAT = INFERENCE["/v1/chat/completions"]
TEXT = INFERENCE["/completion"]
MESSAGES = INFERENCE["/v1/messages"]
RESPONSES = INFERENCE["/v1/responses"]
OTHER = INFERENCE["/infill"]


def asked(body, family=CHAT, **headers):
    """What a body asks for; keywords are header names behind ``x-polykv-``."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read(raw, family, {f"x-polykv-{name}": value for name, value in headers.items()})


def raw_members(body):
    """Members of a JSON object as raw bytes."""
    return {
        key: bytes(value) for key, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()
    }


# -- bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b'{ "a" : 1 }', b"[1]", b"no JSON", b"", b'{"a":"\xff"}', b"[" * 5000, b'{"n":' + b"9" * 5000 + b"}"],
)
def test_a_body_without_our_members_is_not_touched(body):
    """Every byte stays, also of what is no JSON: the engine refuses it in its own words."""
    assert asked(body).body == body
    assert not asked(body).ours


def test_our_members_are_stripped_and_the_rest_keeps_its_bytes():
    """Numbers, escapes and order of the others stay as they were written."""
    body = b'{"x": 1.50, "pool_id":"p", "y":"\\u0041\\/", "opencoti":{"report":false}, "z":[1,  2]}'
    wanted = asked(body)
    assert wanted.ours
    assert wanted.body == b'{"x":1.50,"y":"\\u0041\\/","z":[1,  2]}'


def test_a_body_whose_names_are_no_text_cannot_be_stripped():
    """That is the client's error, not ours."""
    with pytest.raises(BadRequestError, match="not valid JSON"):
        asked(b'{"pool_id":"p","\xff":1}')


def test_members_can_be_taken_out_by_name():
    """``without`` leaves the others alone; absent names do not matter."""
    assert without(b'{"id_slot":3,"a":1}', ("id_slot", "b")) == b'{"a":1}'


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KNOWN = [
    *OUR_KEYS,
    "id_slot",
    "stream",
    "stream_options",
    "n",
    "prompt",
    "messages",
    "input",
    "system",
    "metadata",
]
BODIES = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=6), JSON_VALUES, max_size=8)


@settings(max_examples=300)
@given(BODIES, st.sampled_from([CHAT, TEXT, MESSAGES, RESPONSES, OTHER]), st.booleans())
def test_any_object_is_read_or_is_a_bad_request(body, family, spaced):
    """No object raises anything else; of the rest nothing is lost and nothing changes."""
    raw = json.dumps(body, separators=(", ", ": ") if spaced else (",", ":")).encode()
    try:
        wanted = read(raw, family, {})
    except BadRequestError as error:
        at_fault = error.param
    else:
        at_fault = None
    if at_fault is not None:
        assert at_fault in body.keys() & set(OUR_KEYS)
        return
    others = {key: value for key, value in raw_members(raw).items() if key not in OUR_KEYS}
    assert raw_members(wanted.body) == others
    if not body.keys() & set(OUR_KEYS):
        assert wanted.body == raw


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_are_a_bad_request(body):
    """Garbage is the engine's to refuse."""
    assert read(body, CHAT, {}).body == body


# -- our members ------------------------------------------------------------------------------------------


def test_the_object_comes_before_the_shorthands_and_they_before_headers():
    """Each member is taken from the first place that has it."""
    both = asked({"opencoti": {"pool_id": "a"}, "pool_id": "b", "session_id": "s"}, pool="c")
    assert (both.pool_id, both.session) == ("a", "s")
    assert asked({"pool_id": "b"}, pool="c").pool_id == "b"
    header = asked({}, pool="c")
    assert (header.pool_id, header.ours) == ("c", True)
    assert asked({"shared_prefix_n_tokens": 7}).shared_prefix_tokens == 7


def test_all_wishes_are_read():
    """Every member of the object has its effect."""
    wanted = asked(
        {
            "opencoti": {
                "session_id": "s",
                "shared_prefix_n_tokens": 3,
                "strict": True,
                "cache": False,
                "report": False,
            }
        }
    )
    assert (wanted.session, wanted.shared_prefix_tokens, wanted.strict) == ("s", 3, True)
    assert (wanted.cache, wanted.report) == (False, False)
    assert asked({"cache_prompt": False}).cache is False
    assert asked({}).cache is True


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"pool_id": 1}, "pool_id"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"session_id": "x" * 256}, "session_id"),
        ({"shared_prefix_n_tokens": -1}, "shared_prefix_n_tokens"),
        ({"shared_prefix_n_tokens": "3"}, "shared_prefix_n_tokens"),
        ({"opencoti": {"nonsense": 1}}, "opencoti"),
        ({"opencoti": []}, "opencoti"),
        ({"opencoti": {"strict": "yes"}}, "opencoti"),
    ],
)
def test_a_wrong_member_of_ours_is_named(body, param):
    """400 with the field, before anything happened."""
    with pytest.raises(BadRequestError) as caught:
        asked(body)
    assert caught.value.param == param


# -- the engine's members ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, (True, True)),
        ({"stream": True, "stream_options": {"include_usage": False}}, (True, False)),
        ({"stream": "true", "stream_options": ["include_usage"]}, (False, False)),
        ({}, (False, False)),
    ],
)
def test_streams_are_told_from_whole_answers(body, expected):
    """A stream is what says exactly ``true``; so is a usage chunk."""
    wanted = asked(body)
    assert (wanted.stream, wanted.include_usage) == expected


def test_odd_numbers_in_stream_options_do_no_harm():
    """What does not decode is the engine's to refuse."""
    assert asked(b'{"stream_options":{"include_usage":true,"x":1e999}}').include_usage is False


@pytest.mark.parametrize(
    ("body", "completions"),
    [
        ({"n": 3}, 3),
        ({"n_cmpl": 2}, 2),
        ({"n": 1, "n_cmpl": 3}, 3),
        ({"n": 3, "n_cmpl": None}, 3),
        ({"n": 0}, 1),
        ({"n": -1}, 1),
        ({"n": "3"}, 1),
        ({"n": True}, 1),
        ({"n": 1e3}, 1000),
        ({"n": 3.9}, 3),
        ({"n": 2**32 + 3}, 3),
        ({"n": 2**31}, 1),
        (b'{"n":1e999}', 1),
    ],
)
def test_completions_are_counted_as_the_engine_counts_them(body, completions):
    """It casts numbers, and ``n_cmpl`` comes first; what it refuses counts as one."""
    assert asked(body).completions == completions


@pytest.mark.parametrize("around", [b"\xef\xbb\xbf%b", b"%b\0", b"%b\0 more", b"\xef\xbb\xbf%b\0"])
def test_what_the_engines_parser_skips_hides_nothing(around):
    """A byte order mark, and whatever follows a NUL: such a body runs, so it is read."""
    wanted = asked(around % b'{"n":3,"prompt":["a","b"]}', TEXT)
    assert (wanted.completions, wanted.many_prompts) == (3, True)
    assert asked(around % b'{"pool_id":"p","n":1}').body == b'{"n":1}'


@pytest.mark.parametrize("ours", [b"", b'"pool_id":"p",'])
@pytest.mark.parametrize("depth", [*range(980, 1004), 100_000])
def test_a_body_nested_out_of_all_reason_is_refused(ours, depth):
    """The engine would run it, but nobody could say in how many slots."""
    with contextlib.suppress(BadRequestError):
        assert asked(b'{%b"n":3,"x":%b}' % (ours, b"[" * depth + b"]" * depth)).completions == 3
    if depth > 1000:
        with pytest.raises(BadRequestError, match="nested too deeply"):
            asked(b'{%b"n":3,"x":%b}' % (ours, b"[" * depth + b"]" * depth))


@pytest.mark.parametrize(
    ("prompt", "many"),
    [
        ("a", False),
        ([1, 2], False),
        (["a"], False),
        ([[1, 2]], False),
        (["a", "b"], True),
        ([[1], [2]], True),
        ([1, "a"], False),
        ([], False),
        ({"prompt_string": "a"}, False),
    ],
)
def test_a_list_of_prompts_is_told_from_one_prompt(prompt, many):
    """Ids, ids mixed with text, and a list of one are one prompt; in a chat nobody looks at it."""
    assert asked({"prompt": prompt}, TEXT).many_prompts is many
    assert asked({"prompt": prompt}, CHAT).many_prompts is False


@pytest.mark.parametrize("item", [b"1", b"{}", b'""'])
def test_what_no_window_holds_is_not_taken_apart(item):
    """All others would wait for it. It may be several prompts, and is no conversation to go on with."""
    text = b"[" + (item + b",") * MOST_COMMAS + item + b"]"
    chat = asked(b'{"messages":%b}' % text)
    assert (len(chat.chain), chat.body) == (2, b'{"messages":%b}' % text)
    assert asked(b'{"prompt":%b}' % text, TEXT).many_prompts is True
    assert prompt_tokens(text) is odd_prompt(text) is None


def test_a_conversation_of_very_many_messages_is_known_by_its_first():
    """Two of them that go on otherwise are two."""
    said = [{"role": "user", "content": "a"}] * MOST_ITEMS
    one, other = (asked({"messages": [*said, {"role": "user", "content": text}]}).chain for text in "bc")
    assert len(one) == len(other) == MOST_ITEMS + 1
    assert (one[:-1], one[-1] == other[-1]) == (other[:-1], False)
    text = "a" * ((MOST_TEXT_LINKS + 2) * TEXT_LINK_BYTES)
    assert len(asked({"prompt": text}, TEXT).chain) == MOST_TEXT_LINKS + 1


def test_a_list_that_does_not_decode_is_no_list_of_prompts():
    """The engine refuses it."""
    assert asked(b'{"prompt":["a","\xff"]}', TEXT).many_prompts in (True, False)
    assert asked(b'{"messages":["\xff"]}').chain


@pytest.mark.parametrize(("value", "ignored"), [(0, True), (3, True), (-1, False), (None, False)])
def test_a_chosen_slot_is_noticed(value, ignored):
    """-1 and null choose nothing."""
    assert asked({"id_slot": value}).ignored_slot is ignored


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", "text"),
        ([1, 2], as_tokens([1, 2])),
        ([1, 1 << 40], None),
        ([True], None),
        (["a"], "a"),
        ([[1, 2]], as_tokens([1, 2])),
        ([["a"]], None),
        (["a", "b"], None),
        ([], None),
        ({"a": 1}, None),
    ],
)
def test_prompts_have_text_or_ids(prompt, expected):
    """Anything else is for the engine to make sense of."""
    assert prompt_tokens(json.dumps(prompt).encode()) == expected


def test_a_prompt_that_does_not_decode_has_neither():
    """No exception escapes."""
    assert prompt_tokens(b'"\xff"') is None


@pytest.mark.parametrize(
    ("prompt", "one"),
    [
        ({"prompt_string": "a", "multimodal_data": ["b"]}, True),
        ([{"prompt_string": "a"}], True),
        ([1, "a", -2], True),
        (["a", {"prompt_string": "b"}], False),
        ([{"prompt_string": "a"}, {"prompt_string": "b"}], False),
        ([1, 2], False),
        (["a"], False),
        ([[1]], False),
        ([], False),
        ("a", False),
        (3, False),
    ],
)
def test_a_prompt_of_another_form_is_the_engines_to_count(prompt, one):
    """If it is one; a list of one is that one."""
    raw = odd_prompt(json.dumps(prompt).encode())
    inner = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    assert (None if raw is None else json.loads(raw)) == ({"prompt": inner} if one else None)


def test_no_prompt_and_a_broken_one_are_of_no_form():
    """No exception escapes."""
    assert odd_prompt(b"") is odd_prompt(b"[1,") is None


# -- fingerprints -----------------------------------------------------------------------------------------


def turn(*contents, **more):
    """A chat of these user messages."""
    return {"messages": [{"role": "user", "content": content} for content in contents], **more}


def test_a_longer_conversation_begins_with_the_shorter_ones_chain():
    """One link for what precedes the messages, one for each message."""
    one, two = asked(turn("a")).chain, asked(turn("a", "b")).chain
    assert (len(one), len(two)) == (2, 3)
    assert two[:2] == one


@pytest.mark.parametrize("more", [{"tools": [1]}, {"system": "x"}, {"chat_template_kwargs": {"k": 1}}])
def test_whatever_precedes_the_messages_changes_the_first_link(more):
    """Tools, system prompt and template arguments are part of the prefix, and so of every link."""
    plain, other = asked(turn("a")).chain, asked(turn("a", **more)).chain
    assert len(plain) == len(other)
    assert not set(plain) & set(other)


def test_apis_do_not_share_conversations():
    """The same messages over another API are other tokens."""
    assert asked(turn("a")).chain[0] != asked(turn("a"), MESSAGES).chain[0]


def test_a_bare_input_is_one_message():
    """Responses take a string or a list."""
    assert len(asked({"input": "hi"}, RESPONSES).chain) == 2
    assert len(asked({"input": [1, 2], "instructions": "x"}, RESPONSES).chain) == 3


def test_a_marker_that_changes_with_every_request_does_not_count():
    """Claude Code's billing header is masked, as the engine does."""

    def chain(mark, build="e51"):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.1.{build}; cch={mark};"}
        ]
        return asked(turn("a", system=system), MESSAGES).chain

    assert chain("0a1b2") == chain("fffff")
    assert chain("0a1b2") != chain("0a1b2", "e52")


@pytest.mark.parametrize("mask", [False, True])
def test_billing_headers_are_masked_only_where_that_is_wanted(mask):
    """Off: the very bytes. On: those of the engine's and the fingerprint's body; it is told."""
    system = "x-anthropic-billing-header: cc_version=2.1.1.e51; cch=0a1b2;"
    body = json.dumps(turn("a", system=system)).encode()
    read_it = read(body, MESSAGES, {}, mask=mask)
    assert read_it.masked is mask
    assert (read_it.body is body) is not mask
    if mask:
        assert read_it.body == body.replace(b"e51", b"000").replace(b"0a1b2", b"fffff")
        assert read_it.chain == read(body.replace(b"e51", b"e52"), MESSAGES, {}, mask=True).chain
    assert read(json.dumps(turn("a")).encode(), MESSAGES, {}, mask=mask).masked is False


def test_plain_text_is_cut_into_runs():
    """A prompt that goes on keeps the earlier runs; the last partial one does not count."""
    text = "x" * (2 * TEXT_LINK_BYTES)
    short = asked({"prompt": text}, TEXT)
    longer = asked({"prompt": text + "y" * TEXT_LINK_BYTES}, TEXT)
    assert not short.structured
    assert len(longer.chain) > len(short.chain) >= 2
    assert longer.chain[: len(short.chain)] == short.chain


def test_requests_of_other_kinds_have_no_chain():
    """Infill is no conversation."""
    assert asked({"prompt": "x"}, OTHER).chain == ()


def test_null_members_of_ours_ask_for_nothing():
    """Clients serialize what they leave out; the engine does not see it either."""
    found = asked({"opencoti": None, "pool_id": None, "session_id": None, "prompt": "a"}, TEXT)
    assert (found.pool_id, found.session, found.auto_match) == (None, None, True)
    assert b"opencoti" not in found.body


# -- adapters ---------------------------------------------------------------------------------------------

PLAIN = json.dumps({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("key", ["lora", "l\\u006fra", "\\u006Cora", "\\u006c\\u006F\\u0072\\u0061"])
@pytest.mark.parametrize("value", ["[]", "null", '[{"id": 0, "scale": 1.0}]'])
def test_who_names_adapters_has_some(key, value):
    """In any spelling of the key that JSON knows, first or last."""
    for body in (f'{{"{key}": {value}, {PLAIN[1:]}', f'{PLAIN[:-1]}, "{key}" :{value}}}'):
        assert "lora" in json.loads(body)
        assert asked(body.encode()).adapters


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
    assert not asked(body).adapters
    assert not asked(json.dumps(body, ensure_ascii=False).encode()).adapters


@pytest.mark.parametrize("body", [b'{"lora": 1', b'["lora"]', b'{"prompt": "x"', b"no JSON"])
def test_what_nobody_can_read_is_taken_for_one_that_may(body):
    """Nothing is saved of it, and nothing restored for it."""
    assert asked(body).adapters


# -- slots in bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"a": 1}\n', b'{"a": 1,"id_slot":3}\n'),
        (b"{}", b'{"id_slot":3}'),
        (b'{"id_slot":7, "a": [1, {"id_slot": 2}]}', b'{"a":[1, {"id_slot": 2}],"id_slot":3}'),
        (b'{"id_slot":7,"id_slot":8}', b'{"id_slot":3}'),
        (b'{"id\\u005fslot":7}', b'{"id_slot":3}'),
        (b'{"id_slot":null,"a":1}', b'{"a":1,"id_slot":3}'),
    ],
)
def test_a_slot_is_put_at_the_end_of_a_body(body, sent):
    """Every other byte stays; a choice of the client's own is gone."""
    assert pinner(asked(body, TEXT), TEXT)(3) == sent


@pytest.mark.parametrize("body", [b"[1]", b"", b"nonsense", b'{"a":1}\0', b"[" * 100_000])
def test_no_slot_is_put_into_what_is_no_object(body):
    """The engine chooses one, or refuses it."""
    with contextlib.suppress(BadRequestError):
        assert pinner(asked(body, TEXT), TEXT) is None


def test_anthropics_api_takes_no_slot():
    """The engine keeps only the members that it knows there."""
    assert pinner(asked({"messages": []}, MESSAGES), MESSAGES) is None


def test_a_time_limit_is_a_bound_of_its_own():
    """An answer that is shorter than its bound may have been cut by it."""
    assert asked({"prompt": "x", "n_predict": 5}, TEXT).only_bound == 5
    assert asked({"prompt": "x", "n_predict": 5, "t_max_predict_ms": 9}, TEXT).only_bound is None
