"""The launch profile: what an engine is started with, and what a user may not add."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from polykv_proxy.engine import profile
from polykv_proxy.engine.profile import LaunchProfile, child_environment
from polykv_proxy.errors import ConfigError

PLAIN = LaunchProfile(
    model=Path("/m.gguf"),
    socket=Path("/run/engine-0.sock"),
    slot_dir=Path("/state/slots-0"),
    parallel=4,
    ctx_size=8192,
    max_pools=16,
)


def test_arguments_of_a_plain_start():
    """The whole profile, in order."""
    assert " ".join(PLAIN.argv()) == (
        "--model /m.gguf --host /run/engine-0.sock --kv-unified --parallel 4 --ctx-size 8192 "
        "--polykv-max-pools 16 --polykv-prefill-cap 16 "
        "--cache-ram 0 --no-cache-idle-slots --no-context-shift --cache-reuse 0 "
        "--slots --metrics --slot-save-path /state/slots-0 --sse-ping-interval 10 -b 512 --alias m.gguf"
    )


@pytest.mark.parametrize(
    ("model", "extra", "alias"),
    [
        ("/secret/place/m.gguf", (), ["m.gguf"]),
        ("/m.gguf", ("--alias", "mine"), ["mine"]),
        ("/m.gguf", ("-a", "mine"), []),
        ("/a,b.gguf", (), []),
    ],
)
def test_clients_see_the_models_name_and_not_its_path(model, extra, alias):
    """Unless the user chose a name, or the file's would be read as two."""
    argv = replace(PLAIN, model=Path(model), extra=extra).argv()
    assert [value for option, value in pairwise(argv) if option == "--alias"] == alias


def test_without_pools_a_stock_binary_starts_too():
    """The options that only the patch knows are left out."""
    argv = replace(PLAIN, max_pools=0, prefill_cap=64).argv()
    assert not [word for word in argv if word.startswith("--polykv")]


@pytest.mark.parametrize(
    ("cap", "extra", "passed"),
    [
        (None, (), ["16"]),
        (None, ("-ngl", "0"), ["16"]),
        (None, ("-ngl", "99"), []),
        (None, ("-b", "64"), ["16"]),
        (7, ("-ngl", "99"), ["7"]),
        (0, (), []),
    ],
)
def test_prompts_are_capped_on_cpu_hosts_unless_told_otherwise(cap, extra, passed):
    """A number of the user's counts everywhere, 0 is the engine's own default."""
    argv = replace(PLAIN, prefill_cap=cap, extra=extra).argv()
    assert [value for option, value in pairwise(argv) if option == "--polykv-prefill-cap"] == passed


def test_the_users_arguments_come_last():
    """llama-server takes the last of two."""
    assert replace(PLAIN, extra=("--threads", "8")).argv()[-2:] == ("--threads", "8")


@pytest.mark.parametrize(
    ("extra", "has_ours"),
    [
        ((), True),
        (("-ngl", "0"), True),
        (("--device", "none"), True),
        (("-ngl", "99"), False),
        (("--n-gpu-layers", "all"), False),
        (("--gpu_layers", "1"), False),
        (("-dev", "CUDA0"), False),
        (("--batch-size", "1024"), False),
        (("-b", "64"), False),
    ],
)
def test_small_batches_on_cpu_hosts_only(extra, has_ours):
    """512 tokens, unless the user chose a size or a GPU."""
    argv = replace(PLAIN, extra=extra).argv()
    assert (("-b", "512") in pairwise(argv)) is has_ours


@pytest.mark.parametrize(
    "extra",
    [
        ("--no-kv-unified",),
        ("-no-kvu",),
        ("--no_kv_unified",),
        ("--cache-ram", "1"),
        ("-cram", "-1"),
        ("--cache-ram",),
        ("--cache-idle-slots",),
        ("--embedding",),
        ("--reranking",),
        ("--sleep-idle-seconds", "60"),
        ("--threads", "8", "--parallel", "2"),
        ("-np", "2"),
        ("--host", "0.0.0.0"),
        ("--port", "1"),
        ("--slot-save-path", "/x"),
        ("-c", "4096"),
        ("-m", "other.gguf"),
        ("-hf", "a/b"),
        ("--models-dir", "/x"),
        ("--polykv-max-pools", "3"),
        ("--polykv-prefill-cap", "3"),
        ("--api-prefix", "/x"),
        ("--fim-qwen-7b-spec",),
        ("--help",),
    ],
)
def test_refused_arguments_are_named_with_a_reason(extra):
    """One line: the key, the argument, why."""
    with pytest.raises(ConfigError, match=r"^engine\.args: --?[\w-]+ cannot be used: \w"):
        replace(PLAIN, extra=extra).argv()


@pytest.mark.parametrize("extra", [("--cache-ram", "0"), ("--sleep-idle-seconds", "-1"), ("--seed", "-1")])
def test_harmless_values_of_dangerous_arguments_pass(extra):
    """A value counts, not only the name; a negative number is no option."""
    assert replace(PLAIN, extra=extra).argv()[-2:] == extra


@pytest.mark.parametrize(
    "extra", [("--embedding",), ("--cache-ram", "8192"), ("--no-kv-unified",), ("--cache-idle-slots",)]
)
def test_without_pools_only_what_is_ours_is_refused(extra):
    """A proxy without pools may sit in front of any engine."""
    assert replace(PLAIN, max_pools=0, extra=extra).argv()[-1] == extra[-1]
    with pytest.raises(ConfigError):
        replace(PLAIN, max_pools=0, extra=("--port", "1")).argv()


@pytest.mark.parametrize("extra", [("--context-shift",), ("--cache-reuse", "256"), ("-bs",)])
def test_costly_arguments_pass_with_a_warning(extra):
    """They work, for sessions that share nothing."""
    with_pools = replace(PLAIN, extra=extra)
    assert with_pools.argv()[-1] == extra[-1]
    (warning,) = with_pools.warnings()
    assert warning.startswith(f"engine.args: {extra[0]}: ")
    assert replace(with_pools, max_pools=0).warnings() == ()
    assert PLAIN.warnings() == ()


def test_too_many_sequences_are_refused():
    """Slots and pools share 256 sequence ids."""
    replace(PLAIN, parallel=240).argv()
    with pytest.raises(ConfigError, match=r"^engine\.max_pools: 241 slots and 16 pools"):
        replace(PLAIN, parallel=241).argv()


@pytest.mark.parametrize("path", ["/run/engine", "/run/a,b.sock"])
def test_socket_that_llama_server_would_misread_is_refused(path):
    """Without .sock it is taken for a host name, and a comma separates hosts."""
    with pytest.raises(ConfigError, match=r"^runtime_dir: "):
        replace(PLAIN, socket=Path(path)).argv()


def test_every_refused_option_exists_upstream(upstream_tree):
    """The tables follow the pinned llama-server; an option that it renames must be renamed here."""
    source = (upstream_tree / "common" / "arg.cpp").read_text()
    known = set(re.findall(r'"(--?[a-zA-Z][\w.-]*)"', source)) | {
        "--polykv-max-pools",
        "--polykv-prefill-cap",
    }
    tables = (profile._REFUSED, profile._REFUSED_WITH_POOLS, profile._WARNED_WITH_POOLS)
    named = {option for table in tables for spellings in table for option in spellings}
    assert named | profile._GPU_OPTIONS | profile._BATCH_OPTIONS <= known


def test_every_spelling_of_a_refused_option_is_refused(upstream_tree):
    """No alias of the pinned llama-server is a way around the tables."""
    source = (upstream_tree / "common" / "arg.cpp").read_text()
    groups = [
        set(re.findall(r'"(--?[\w.-]+)"', text))
        for text in re.findall(r"\{\s*((?:\"-[\w.-]+\",?\s*)+)\}", source)
    ]
    for table in (profile._REFUSED, profile._REFUSED_WITH_POOLS, profile._WARNED_WITH_POOLS):
        named = {option for spellings in table for option in spellings}
        for group in groups:
            assert not group & named or group <= named


def test_environment_loses_llama_servers_own_switches():
    """A variable left in a profile must not change the engine."""
    env = child_environment(
        {"PATH": "/bin", "LLAMA_ARG_EMBEDDINGS": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}, api_key=None
    )
    assert env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}


def test_environment_cannot_set_what_arguments_may_not():
    """The checks on arguments cannot be walked around."""
    with pytest.raises(ConfigError, match=r"^engine\.env: LLAMA_ARG_EMBEDDINGS"):
        child_environment({}, {"LLAMA_ARG_EMBEDDINGS": "1"}, api_key=None)


def test_api_key_travels_in_the_environment_beside_the_users_keys():
    """The proxy's key is one of those in force."""
    assert child_environment({}, {}, api_key="a") == {"LLAMA_API_KEY": "a"}
    assert child_environment({"LLAMA_API_KEY": "b,a"}, {}, api_key="a")["LLAMA_API_KEY"] == "a,b"
