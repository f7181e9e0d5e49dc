"""What the documents tell users to type works as written."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from e2e.harness import PATIENCE_S, Served, serve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def shell_blocks(page: str) -> list[str]:
    """The ``sh`` blocks of a page, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def steps_of(page: str) -> list[tuple[str, str]]:
    """The ``sh`` blocks of a page, each with what it prints by the block behind it; empty if it has none."""
    step = re.compile(r"^```sh\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
    return step.findall((DOCS / page).read_text())


def serve_arguments(page: str) -> list[str]:
    """The arguments of ``polykv-proxy serve`` in a page; files are named from the repository's folder."""
    (line,) = re.findall(r"^\.venv/bin/polykv-proxy serve(.*)$", (DOCS / page).read_text(), re.MULTILINE)
    return [str(ROOT / word) if word.startswith("docs/") else word for word in line.split()]


async def run(script: str, served: Served) -> str:
    """What a shell script prints that talks to the proxy."""
    script = "set -eu\n" + script.replace("127.0.0.1:8090", f"127.0.0.1:{served.port}")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await shell.communicate()
    assert shell.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_tutorial(served: Served) -> None:
    """Every command of the tutorial runs, and the figures it explains are there."""
    blocks = shell_blocks("tutorial.md")
    assert len(blocks) == 6
    out = await run("\necho ---\n".join(blocks), served)
    chat, created, again, agents, listing, deleted = out.split("---\n")
    assert json.loads(chat)["choices"][0]["message"]["content"]
    pool = json.loads(created)
    assert pool["prompt_tokens_computed"] == pool["prefix_len"]
    assert again.strip() == pool["pool_id"]
    assert agents.count(f"'n_pool_shared': {pool['prefix_len']}") == 3
    listed = json.loads(listing)
    assert listed["unattributed_cells"] == 0
    assert json.loads(deleted)["cells_draining"] in (0, pool["prefix_len"])


async def test_pool_tree_tutorial(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Every command prints what the page says it prints."""
    page = "tutorial-pool-tree.md"
    steps = steps_of(page)
    assert [bool(printed) for _, printed in steps] == [False, *[True] * 6]
    async with serve(tmp_path, *serve_arguments(page)) as served:
        for command, printed in steps:
            assert await run(command, served) == printed


@pytest.mark.parametrize("page", ["how-to/find-out-why-it-prefilled.md", "how-to/keep-a-floor.md"])
async def test_how_to(page: str, patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Every command of these pages prints what they say, on a proxy without options."""
    async with serve(tmp_path) as served:
        for command, printed in steps_of(page):
            assert await run(f"cd {ROOT}\n{command}", served) == printed


async def test_compaction_how_to(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """CTX-6: every command prints what the page says, but for the numbers; and these keep its promises."""
    page = "how-to/compact-by-refork.md"
    steps = steps_of(page)
    assert [bool(printed) for _, printed in steps] == [False, *[True] * 5]
    numbers: list[list[int]] = []
    async with serve(tmp_path, *serve_arguments(page)) as served:
        for command, printed in steps:
            out = await run(command, served)
            assert re.sub(r"\d+", "#", out) == re.sub(r"\d+", "#", printed)
            numbers.append([int(number) for number in re.findall(r"\d+", out)])
    _, grown, summarised, forked, moved, next_turn = numbers
    context, _, cells = grown
    assert summarised[0] < 40  # only its instruction
    branch_pos, computed, length, both = forked
    assert computed == length - branch_pos < context // 2
    assert both > cells
    assert moved[2] == 0
    assert moved[3] == length < cells
    assert moved[0] + moved[1] == both - length
    assert next_turn[0] < 40
    assert next_turn[1] == length
    assert next_turn[2] - next_turn[3] in (0, 1)  # the last token that was generated is in no cell yet


def test_links_between_documents_lead_somewhere() -> None:
    """No document points at a file that is not there."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "engine_patch" / "README.md"]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
