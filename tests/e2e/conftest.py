"""Fixtures of the real-engine tests: binaries, model, and proxies that several tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from e2e.harness import Served, serve
from e2e.hosting import Hosted, hosting
from e2e.tiny_models import llama
from polykv_proxy import config
from polykv_proxy.engine import build, model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the engine; tests that share a proxy share its event loop."""
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def patched() -> Path:
    """The patched llama-server; built if it is not there yet."""
    chosen = os.environ.get("POLYKV_ENGINE__BINARY")
    return Path(chosen) if chosen else build.ensure(config.load().cache_path).binary


@pytest.fixture(scope="session")
def stock(patched: Path) -> Path:
    """llama-server without the patch, built in the same tree."""
    return patched.with_name("llama-server-stock")


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The built-in model."""
    return model.ensure(config.load().cache_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path
) -> AsyncIterator[Served]:
    """A proxy with 4 slots, 8,192 cells and 6 pools, shared by the tests of a module; no grace."""
    assert patched.exists()
    assert smollm.exists()
    sizes = ("--parallel", "4", "--ctx-size", "8192", "--max-pools", "6")
    env = {"POLYKV_POOLS__GRACE_S": "0"}
    async with serve(tmp_path_factory.mktemp("served"), *sizes, env=env) as proxy:
        yield proxy


TOOLS = (
    "--engine-arg",
    "--chat-template-file",
    "--engine-arg",
    str(Path(__file__).with_name("tool_calls.jinja")),
)
"""A chat template with tools, which the built-in model's own leaves out."""


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path) -> Iterator[Hosted]:
    """A proxy for tests that block their thread: without asyncio, or with several loops. It knows tools."""
    assert patched.exists()
    assert smollm.exists()
    sizes = ("--parallel", "6", "--ctx-size", "8192", "--max-pools", "6")
    with hosting(tmp_path_factory.mktemp("hosted"), *sizes, *TOOLS) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def quick_hosted(tmp_path_factory: pytest.TempPathFactory, patched: Path, smollm: Path) -> Iterator[Hosted]:
    """The same, of a model that reads thousands of tokens a second and answers with noise."""
    assert patched.exists()
    folder = tmp_path_factory.mktemp("quick")
    llama(folder / "llama.gguf", smollm, context=16384)
    sizes = (
        "--model",
        str(folder / "llama.gguf"),
        "--parallel",
        "2",
        "--ctx-size",
        "16384",
        "--max-pools",
        "6",
    )
    with hosting(folder, *sizes, *TOOLS) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module")
async def clean(served: Served) -> Served:
    """No pool and nothing in the slots."""
    await served.clear()
    assert await served.cells_used() == 0
    return served
