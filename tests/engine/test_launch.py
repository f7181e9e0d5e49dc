"""From settings to a start."""

import re
from pathlib import Path

import pytest

from polykv_proxy.engine.launch import slot_folder, spec_from
from polykv_proxy.engine.state import Backoff
from polykv_proxy.errors import ConfigError
from polykv_proxy.settings import Settings


def settings(tmp_path, **engine):
    """Settings of a proxy with folders of its own."""
    chosen = {"binary": "/opt/llama-server", "model": "/srv/m.gguf", **engine}
    return Settings(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", engine=chosen)


def test_every_engine_has_files_of_its_own(tmp_path):
    """Socket, saved KV, log; by number."""
    spec = spec_from(settings(tmp_path), index=1)
    assert spec.socket == tmp_path / "run" / "engine-1.sock"
    assert spec.slot_dir == tmp_path / "state" / "slots-1"
    assert spec.log_dir == spec.state_dir == tmp_path / "state"
    assert str(spec.socket) in spec.argv
    assert str(spec.slot_dir) in spec.argv


def test_a_socket_may_be_somewhere_else(tmp_path):
    """Where a proxy looks for it, say; the rest stays."""
    spec = spec_from(settings(tmp_path), socket=tmp_path / "gpu.sock")
    assert spec.argv[spec.argv.index("--host") + 1] == str(spec.socket) == str(tmp_path / "gpu.sock")
    assert spec.slot_dir == tmp_path / "state" / "slots-0"


def test_what_the_settings_say_reaches_the_engine(tmp_path):
    """Sizes, arguments, variables, key, times."""
    spec = spec_from(
        settings(
            tmp_path,
            parallel=2,
            max_pools=3,
            prefill_cap=9,
            ctx_size=512,
            args=["--context-shift"],
            env={"CUDA_VISIBLE_DEVICES": "1"},
            api_key="k",
            ready_timeout_s=5,
            stop_deadline_s=6,
            restart_backoff_s=1,
            restart_backoff_max_s=9,
        )
    )
    assert re.search(
        r"--parallel 2 --ctx-size 512 --polykv-max-pools 3 --polykv-prefill-cap 9 ", " ".join(spec.argv)
    )
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert spec.env["LLAMA_API_KEY"] == "k"
    assert "k" not in spec.argv
    assert (spec.ready_timeout_s, spec.stop_deadline_s) == (5, 6)
    assert spec.backoff == Backoff(first_s=1, max_s=9)
    assert len(spec.warnings) == 1


def test_a_stock_binary_is_not_asked_for_pools(tmp_path):
    """It does not know the option; its pools are files in the folder that it saves to."""
    one = settings(tmp_path, stock=True, max_pools=3)
    spec = spec_from(one, 2)
    assert "--polykv-max-pools" not in spec.argv
    assert spec.slot_dir == slot_folder(one, 2)


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    """The engine's command line is compared later, from wherever."""
    monkeypatch.chdir(tmp_path)
    spec = spec_from(Settings(state_dir="s", engine={"binary": "b", "model": "m"}))
    assert spec.binary == tmp_path / "b"
    assert spec.socket == tmp_path / "s" / "run" / "engine-0.sock"
    assert str(tmp_path / "m") in spec.argv


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"binary": None}, r"^engine\.binary, engine\.model: "),
        ({"model": None}, r"^engine\.binary, engine\.model: "),
        ({"args": ["--port", "1"]}, r"^engine\.args: --port"),
        ({"env": {"LLAMA_ARG_PORT": "1"}}, r"^engine\.env: LLAMA_ARG_PORT"),
    ],
)
def test_what_cannot_work_is_refused_before_a_start(tmp_path, engine, message):
    """With the key."""
    with pytest.raises(ConfigError, match=message):
        spec_from(settings(tmp_path, **engine))


def test_binary_is_a_path(tmp_path):
    """As the settings gave it."""
    assert spec_from(settings(tmp_path)).binary == Path("/opt/llama-server")
