"""Fixtures of the command: run it in this process, with nothing built and nothing served."""

import os
import sys
import types

import pytest

import polykv_proxy
from polykv_proxy import cli
from polykv_proxy.engine import build, model, prove


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No variable of the machine reaches a test, and the cache is empty."""
    for name in list(os.environ):
        if name.upper().startswith("POLYKV_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("POLYKV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def run(capsys):
    """Run the command; returns its status, output and error output."""

    def run(*argv):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        return caught.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What reached the modules that do the work; nothing is built or served."""
    calls = []

    def take(name, result):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            return result

        return call

    home = tmp_path / "engine"
    manifest = build.Manifest(tag="b1", series="x", source=None, flags="AVX2", cmake_args=(), checked=True)
    engine = build.Engine(home, manifest)
    for module, name, result in [
        (build, "build", engine),
        (build, "ensure", engine),
        (build, "installed", engine),
        (model, "ensure", tmp_path / "built-in.gguf"),
        (prove, "prove", prove.Proof(tokens=8, decode_tps=42.4)),
    ]:
        monkeypatch.setattr(module, name, take(f"{module.__name__.rpartition('.')[2]}.{name}", result))
    for name in ("app", "demo"):
        fake = types.ModuleType(f"polykv_proxy.{name}")
        fake.run = take(f"{name}.run", 0)
        monkeypatch.setitem(sys.modules, f"polykv_proxy.{name}", fake)
        monkeypatch.setattr(polykv_proxy, name, fake, raising=False)
    return calls
