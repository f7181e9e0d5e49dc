"""Claims about ``cli.starting``: an engine has what it needs before it is started, or nothing begins."""

import pytest


def test_serve_completes_every_engine_that_it_starts(run, calls, monkeypatch, tmp_path):
    """What is missing is built and fetched; a file that is not there is told with its key."""
    model_file = tmp_path / "m.gguf"
    model_file.touch()
    monkeypatch.setenv("POLYKV_ENGINES", f'[{{"model": "{model_file}"}}, {{}}, {{"url": "http://a:1"}}]')
    assert run("serve")[0] == 0
    first, second, third = calls[-1][1][0].fleet
    assert first.model == model_file
    assert None not in (first.binary, second.model, second.binary)
    assert (third.model, third.binary) == (None, None)
    monkeypatch.setenv("POLYKV_ENGINES", '[{}, {"model": "/nowhere/file"}]')
    status, _, complaint = run("serve")
    assert status == 2
    assert "engines.engine-1.model: /nowhere/file: no such file" in complaint


@pytest.mark.parametrize("key", ["model", "binary"])
def test_serve_with_a_file_that_is_not_there(run, calls, monkeypatch, key):
    """A typing error is told at once, instead of being waited out."""
    monkeypatch.setenv(f"POLYKV_ENGINE__{key.upper()}", "/nowhere/file")
    assert run("serve") == (2, "", f"polykv-proxy: engine.{key}: /nowhere/file: no such file\n")
    assert calls == []


def test_arguments_that_cannot_work_are_refused_before_anything_is_built(run, calls):
    """By serve and by config show alike."""
    bad = ("--engine-arg", "--cache-idle-slots")
    status, _, told = run("serve", *bad)
    assert (status, calls) == (2, [])
    assert "engine.args: --cache-idle-slots cannot be used" in told
