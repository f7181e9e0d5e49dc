"""What the documents tell users to type works as written."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from e2e.harness import PATIENCE_S, Served

DOCS = Path(__file__).parents[2] / "docs"


def shell_blocks(page: str) -> list[str]:
    """The ``sh`` blocks of a page, in order."""
    return re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.asyncio(loop_scope="module")
async def test_tutorial(served: Served) -> None:
    """Every command of the tutorial runs, and the figures it explains are there."""
    blocks = shell_blocks("tutorial.md")
    assert len(blocks) == 6
    marker = "echo ---"
    script = "set -eu\n" + f"\n{marker}\n".join(blocks).replace("127.0.0.1:8090", f"127.0.0.1:{served.port}")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await shell.communicate()
    assert shell.returncode == 0, err.decode()
    chat, created, again, agents, listing, deleted = out.decode().split("---\n")
    assert json.loads(chat)["choices"][0]["message"]["content"]
    pool = json.loads(created)
    assert pool["prompt_tokens_computed"] == pool["prefix_len"]
    assert again.strip() == pool["pool_id"]
    assert agents.count(f"'n_pool_shared': {pool['prefix_len']}") == 3
    listed = json.loads(listing)
    assert listed["unattributed_cells"] == 0
    assert json.loads(deleted)["cells_draining"] in (0, pool["prefix_len"])


def test_links_between_documents_lead_somewhere() -> None:
    """No document points at a file that is not there."""
    root = DOCS.parent
    pages = [*DOCS.rglob("*.md"), root / "README.md", root / "engine_patch" / "README.md"]
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
