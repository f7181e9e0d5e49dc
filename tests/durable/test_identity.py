"""Claims about ``durable.identity``: what changes KV bytes changes the id, and nothing else does."""

import json
import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polykv_proxy.durable.identity import (
    CONFIG_PARTS,
    canonical,
    config_hash,
    config_of,
    digest,
    has_control_vector,
    model_id,
    options_of,
    parts_of_model,
    projector_of,
)

GGUF = {"size": 1000, "header": "aa", "tensors": "bb"}


def parts(**change):
    """Those of a model, one changed."""
    given_ = {
        "gguf": [GGUF],
        "projector": None,
        "lora": [[{"size": 1, "header": "l", "tensors": "t"}, 0.5]],
        "reported": {"type_k": "f16", "type_v": "f16"},
        "arguments": ["--rope-freq-base", "10000", "-fa", "on", "--yarn-ext-factor=0.5"],
    }
    return parts_of_model(**(given_ | change))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), values), st.randoms())
def test_the_order_of_keys_is_nothing(value, dice):
    """In any depth."""

    def shuffled(one):
        if isinstance(one, dict):
            keys = list(one)
            dice.shuffle(keys)
            return {key: shuffled(one[key]) for key in keys}
        return [shuffled(each) for each in one] if isinstance(one, list) else one

    assert canonical(value) == canonical(shuffled(value))


@given(values)
def test_it_is_json_of_the_same_value(value):
    """What is read back is what was meant."""
    assert json.loads(canonical(value)) == value


def test_whole_numbers_are_one_number_however_written():
    """``1`` and ``1.0``, and in an argument ``1e4``."""
    assert digest({"scale": 1}) == digest({"scale": 1.0})
    one, other = ["--rope-freq-base", "1e4"], ["--rope-freq-base", "10000.0"]
    assert options_of(one) == options_of(other) == {"rope_freq_base": 10000.0}


def test_the_id_is_the_same_in_another_process():
    """Hashes of this process have no part in it."""
    code = f"from polykv_proxy.durable.identity import model_id; print(model_id({parts()!r}))"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
        )
        assert out.stdout.strip() == model_id(parts())


@pytest.mark.parametrize(
    "change",
    [
        {"gguf": [GGUF | {"size": 1001}]},
        {"gguf": [GGUF | {"header": "ab"}]},
        {"gguf": [GGUF | {"tensors": "bc"}]},
        {"gguf": [GGUF, GGUF]},
        {"projector": GGUF},
        {"lora": []},
        {"lora": [[{"size": 1, "header": "l", "tensors": "t"}, 0.25]]},
        {"lora": [[{"size": 2, "header": "l", "tensors": "t"}, 0.5]]},
        {"reported": {"type_k": "q8_0", "type_v": "f16"}},
        {"reported": {"type_k": "f16", "type_v": "q8_0"}},
        {"arguments": []},
        {"arguments": ["--rope-freq-base", "10001", "-fa", "on", "--yarn-ext-factor=0.5"]},
        {"arguments": ["--rope-freq-base", "10000", "-fa", "off", "--yarn-ext-factor=0.5"]},
        *(
            {
                "arguments": [
                    *parts_arguments,
                    "--rope-freq-base",
                    "10000",
                    "-fa",
                    "on",
                    "--yarn-ext-factor=0.5",
                ]
            }
            for parts_arguments in (
                ["--swa-full"],
                ["--rope-scaling", "yarn"],
                ["--rope-scale", "2"],
                ["--rope-freq-scale", "0.5"],
                ["--yarn-orig-ctx", "4096"],
                ["--yarn-attn-factor", "2"],
                ["--yarn-beta-slow", "2"],
                ["--yarn-beta-fast", "2"],
                ["--override-kv", "llama.rope.freq_base=float:1"],
                ["--grp-attn-n", "2"],
            )
        ),
    ],
)
def test_what_changes_kv_changes_the_id(change):
    """One at a time."""
    assert model_id(parts(**change)) != model_id(parts())


@pytest.mark.parametrize(
    "more",
    [
        ["-v"],
        ["--threads", "8"],
        ["--n-gpu-layers", "99"],
        ["-b", "512"],
        ["--alias", "x"],
        ["--chat-template", "chatml"],
        ["--temp", "0.5"],
        ["--log-verbosity", "3"],
    ],
)
def test_what_does_not_change_kv_does_not(more):
    """Nor do members that the id does not know."""
    plain = parts()
    assert model_id(
        parts(arguments=["--rope-freq-base", "10000", "-fa", "on", "--yarn-ext-factor=0.5", *more])
    ) == model_id(plain)
    assert model_id(plain | {"port": 8080, "ctx_size": 4096}) == model_id(plain)


def test_options_are_found_however_they_are_written():
    """Underscores, an equals sign, either name; of several the last."""
    assert options_of(["--rope_scale", "2", "--flash-attn=off", "-fa", "on", "--swa-full"]) == {
        "rope_scale": 2.0,
        "flash_attn": "on",
        "swa_full": True,
    }
    assert projector_of(["-mm", "a", "--mmproj", "b"]) == "b"
    assert projector_of(["-v"]) is None


def test_a_control_vector_is_noticed():
    """However it is written."""
    assert has_control_vector(["--control-vector", "v.gguf"])
    assert has_control_vector(["--control_vector_scaled=v.gguf:0.5"])
    assert not has_control_vector(["--threads", "2"])


TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": 2}}}, {"name": "b"}]
BODY = {
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
    "tools": TOOLS,
    "chat_template_kwargs": {"think": True},
}


def config(template="T", **change):
    """Of a body, one member changed."""
    return config_of(msgspec.json.encode(BODY | change), template)


@pytest.mark.parametrize(
    ("moved", "change"),
    [
        ("system", {"messages": [{"role": "system", "content": "s"}, *BODY["messages"][1:]]}),
        ("system", {"messages": [{"role": "developer", "content": "S"}, *BODY["messages"][1:]]}),
        ("system", {"system": "more"}),
        ("system", {"instructions": "more"}),
        ("tools", {"tools": TOOLS[::-1]}),
        ("tools", {"tools": [TOOLS[0] | {"strict": True}, TOOLS[1]]}),
        ("tools", {"tools": []}),
        ("template", {"template": "t"}),
        ("kwargs", {"chat_template_kwargs": {"think": False}}),
    ],
)
def test_a_changed_part_is_the_part_that_differs(moved, change):
    """And the hash of all of them does."""
    before, after = config(), config(**change)
    assert [name for name in CONFIG_PARTS if before[name] != after[name]] == [moved]
    assert config_hash(before) != config_hash(after)


def test_turns_are_no_part_of_the_configuration():
    """Nor is the order of a tool's members, or what samples."""
    swapped = [dict(reversed(TOOLS[0].items())), TOOLS[1]]
    turns = [*BODY["messages"], {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}]
    assert config(messages=turns, tools=swapped, temperature=0.5, max_tokens=3) == config()


@pytest.mark.parametrize(
    "body", [b"{not json", b"[]", b'{"prompt": "x"}', b'{"messages": "wrong", "tools": 3}']
)
def test_what_cannot_be_read_still_has_a_configuration(body):
    """The engine refuses it, or it is a plain prompt."""
    assert set(config_of(body, "T")) == set(CONFIG_PARTS)


def test_a_flipped_setting_finds_its_old_hash_again():
    """Random walks between configurations."""
    dice = random.Random(3)
    choices = [{}, {"tools": []}, {"system": "x"}, {"chat_template_kwargs": {"a": 1}}]
    seen = {}
    for _ in range(30):
        at = dice.randrange(len(choices))
        assert seen.setdefault(at, config_hash(config(**choices[at]))) == config_hash(config(**choices[at]))
    assert len(set(seen.values())) == len(seen)


def test_of_what_may_be_given_several_times_all_counts():
    """In any order, each in a word of its own or several in one."""
    one, two, other = "a=int:1", "b=int:2", "a=int:3"
    apart = options_of(["--override-kv", one, "--override-kv", two])
    assert apart == options_of(["--override-kv", two, f"--override-kv={one}"])
    assert apart == options_of(["--override-kv", f"{one},{two}"])
    assert apart != options_of(["--override-kv", other, "--override-kv", two])
    assert apart != options_of(["--override-kv", two])
    assert options_of(["--override-kv", f"{one},{other}"]) != options_of(["--override-kv", f"{other},{one}"])
