"""What the documents tell users to type works as written."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from e2e.harness import PATIENCE_S, Served, bare_engine, serve
from e2e.tiny_models import llama

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def shell_blocks(page: str) -> list[str]:
    """The ``sh`` blocks of a page, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def steps_of(page: str) -> list[tuple[str, str]]:
    """The ``sh`` blocks of a page, each with what it prints by the block behind it; empty if it has none."""
    step = re.compile(r"^```sh\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
    return step.findall((DOCS / page).read_text())


def blocks_of(page: str, kind: str = "") -> list[str]:
    """The blocks of a page of one kind, in order; by default those without."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == kind]


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


async def test_troubleshooting_how_to(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Every command of the page works, those in its tables too; its messages are tested elsewhere."""
    page = "how-to/troubleshooting.md"
    (first,) = shell_blocks(page)
    asked = set(re.findall(r"`(curl [^`]*)`", (DOCS / page).read_text()))
    assert len(asked) >= 5
    async with serve(tmp_path) as served:
        looked = await run(f"cd {ROOT}\n{first}", served)
        assert looked.startswith('{"status":"ok"}')
        assert '"capability": "zero_copy"' in looked
        assert "max_depth: 1024" in looked
        for command in asked:
            assert "error" not in json.loads(await run(command, served))


async def test_several_engines_how_to(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """Every command prints what the page says, with its own configuration; units have tests of their own."""
    page = "how-to/several-engines.md"
    (tmp_path / "two.yaml").write_text(blocks_of(page, "yaml")[0])
    (line,) = re.findall(r"^\.venv/bin/polykv-proxy serve(.*)$", (DOCS / page).read_text(), re.MULTILINE)
    assert line.split() == ["--config", "two.yaml"]
    async with serve(tmp_path, "--config", str(tmp_path / "two.yaml"), engines=2) as served:
        steps = [step for step in steps_of(page) if "sudo" not in step[0]]
        assert [bool(printed) for _, printed in steps] == [True] * 3
        for command, printed in steps:
            assert await run(command, served) == printed


async def test_attaching_how_to_patched(patched: Path, smollm: Path, tmp_path: Path) -> None:
    """The command that is printed starts an engine, and the page says what the proxy finds."""
    page = "how-to/attach-to-an-engine.md"
    look, printing = shell_blocks(page)
    socket = tmp_path / "engine.sock"
    script = printing.replace("/tmp/polykv/engine.sock", str(socket))
    env = {**os.environ, "POLYKV_STATE_DIR": str(tmp_path / "engine"), "POLYKV_ENGINE__BINARY": str(patched)}
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    with (tmp_path / "engine.log").open("wb") as log:
        engine = await asyncio.create_subprocess_exec(*shlex.split(done.stdout), stdout=log, stderr=log)
    try:
        async with serve(tmp_path, "--engine-url", f"unix:{socket}") as served:
            assert await run(look, served) == blocks_of(page)[1]
    finally:
        engine.terminate()
        await engine.wait()


@pytest.mark.parametrize("left_out", ["", "--slot-save-path", "--parallel --cache-ram"])
async def test_attaching_how_to_stock(stock: Path, smollm: Path, tmp_path: Path, left_out: str) -> None:
    """The command of the page, whole and without each option whose absence the page explains."""
    page = "how-to/attach-to-an-engine.md"
    words = blocks_of(page)[2].split()[3:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    del options["--port"]
    options["--slot-save-path"] = str(tmp_path)
    reasons = dict(
        re.findall(r"^\| `(--[\w -]+)` \| `(and slot files .*)` \|$", (DOCS / page).read_text(), re.MULTILINE)
    )
    assert set(reasons) == {"--slot-save-path", "--parallel --cache-ram"}
    for option in left_out.split():
        del options[option]
    arguments = [word for option in options.items() for word in option]
    llama(tmp_path / "my.gguf", smollm)
    async with (
        bare_engine(stock, tmp_path / "my.gguf", tmp_path / "engine", *arguments) as engine,
        serve(tmp_path, "--engine-url", engine.base) as served,
    ):
        out = await run(shell_blocks(page)[0], served)
        if left_out:
            assert out.startswith("relay - ")
            assert reasons[left_out] in out
        else:
            assert out == blocks_of(page)[3]


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
