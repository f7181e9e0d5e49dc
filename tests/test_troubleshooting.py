"""What the how-to on troubles quotes is what the proxy says, word by word."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polykv_proxy.engine import claims
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.settings import Settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
START = "It does not start"


def rows(section):
    """The cells of a section's table, without its head."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


QUOTED = [
    (section, message)
    for section in SECTIONS
    if section != START
    for row in rows(section)
    for cell in row[:2]
    for message in cell.split("`")[1::2]
    if " " in message
]
"""Messages of more than a word, wherever they are said to be seen."""


def constants():
    """Every text in the package's source, and every piece of one that something is put into."""
    found = set()
    for path in (ROOT / "polykv_proxy").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(" ".join(node.value.split()))
    return found


CONSTANTS = constants()


@pytest.mark.parametrize(("section", "message"), QUOTED)
def test_messages_are_the_proxys_words(section, message):
    """Each piece between what differs from time to time stands in the code as it stands here."""
    pieces = [piece.strip() for piece in re.split(r"…|: |; |, |\"|\b0\b", message)]
    pieces = [piece for piece in pieces if len(piece) > 2]
    assert pieces
    for piece in pieces:
        assert any(piece in each for each in CONSTANTS), piece


@pytest.mark.parametrize("section", ["503", "429", "401, 403, 415"])
def test_codes_are_in_the_reference(section):
    """Each of them, with a status of its section."""
    explained = set()
    for row in (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines():
        if re.match(r"\| \d", row):
            _, statuses, codes, *_ = row.split("|")
            explained |= {
                (each, code) for each in re.findall(r"\d+", statuses) for code in codes.split("`")[1::2]
            }
    for code, *_ in rows(section):
        assert {(status, code.strip("`")) for status in re.findall(r"\d+", section)} & explained, code


@pytest.fixture
def said(tmp_path):
    """What `serve` says when it does not start, case by case in the order of the page."""
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\necho 'E srv  load_model: failed to load model, /m.gguf'\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "m.gguf").touch()
    (tmp_path / "bad.yaml").write_text("engine: {paralel: 2}\n")
    base = {
        **{name: value for name, value in os.environ.items() if not name.startswith("POLYKV_")},
        "POLYKV_STATE_DIR": str(tmp_path / "state"),
        "POLYKV_ENGINE__BINARY": str(broken),
        "POLYKV_ENGINE__MODEL": str(tmp_path / "m.gguf"),
        "POLYKV_ENGINE__RESTART_BACKOFF_S": "0.01",
        "POLYKV_LISTEN": "127.0.0.1:0",
    }

    def serve(*args, **variables):
        command = [sys.executable, "-m", "polykv_proxy", "serve", *args]
        done = subprocess.run(
            command, env=base | variables, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode in (1, 2)
        return done.stderr.splitlines()[-1].removeprefix("polykv-proxy: ")

    held = claims.claim_folders(
        spec_from(Settings(state_dir=tmp_path / "state", engine={"binary": broken, "model": broken}))
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = [
            serve("--engine-url", "http://127.0.0.1:1", "--listen", address).replace(
                address, "127.0.0.1:8090"
            )
        ]
    told.append(serve())
    claims.drop(held)
    return [
        *told,
        serve("--config", str(tmp_path / "bad.yaml")),
        serve(POLYKV_LISTNE="x"),
        serve("--model", "/srv/models/none.gguf"),
        serve("--engine-arg", "--no-kv-unified"),
        serve(),
    ]


def test_what_is_said_at_the_start_is_what_the_page_says(said):
    """By running each of them."""
    quoted = [re.search(r"`(.+)`", row[0])[1] for row in rows(START)]
    assert len(quoted) == len(said)
    for text, line in zip(quoted, said, strict=True):
        assert re.search(re.escape(text).replace("…", ".+"), line), line
