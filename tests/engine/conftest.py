"""Fixtures of the engine tests: the pinned source and what can be built from it."""

import shutil
from pathlib import Path

import pytest
from fake_build import World

from polykv_proxy import config
from polykv_proxy.engine import source


@pytest.fixture(scope="session")
def build_cache():
    """The build cache that `make` fills; tests fetch into it what is missing."""
    return config.load().cache_path


@pytest.fixture(scope="session")
def upstream_tree(build_cache, tmp_path_factory):
    """The pinned llama.cpp, pristine. Shared by all tests: copy it before changing anything."""
    tree = tmp_path_factory.mktemp("upstream") / "llama.cpp"
    source.unpack(source.read_series().pin, build_cache / "downloads", tree)
    return tree


@pytest.fixture
def own_tree(upstream_tree, tmp_path):
    """A copy to change of the part of llama.cpp that patches touch; the whole is 200 MB."""
    tree = tmp_path / "tree"
    for part in ("common", "include", "src", "tools"):
        shutil.copytree(upstream_tree / part, tree / part, symlinks=True)
    return Path(shutil.copy(upstream_tree / "CMakeLists.txt", tree)).parent


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A miniature build world that this process lives in."""
    world = World(tmp_path)
    world.create()
    world.enter(monkeypatch)
    return world
