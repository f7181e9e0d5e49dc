"""A build world in miniature: a pinned archive of three files, tools that play a script, real pip and git.

Files in ``script`` change what the tools do:

    cmake_fails, ninja_fails   printed, exit status 1
    ninja_hangs                ninja waits to be ended
    crashes                    one word a line; an engine configured with an option that holds it dies
                               of SIGILL
    boot_error                 printed by the built engine, exit status 1

``ninja`` notes each run in ``runs``.
"""

import hashlib
import os
import shutil
import stat
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest

from polykv_proxy import cli
from polykv_proxy.engine import build, model, source

SERVER_CMAKE = "add_executable(llama-server server.cpp)\n"
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: t <t@invalid>
Date: Mon, 1 Jan 2024 00:00:00 +0000
Subject: [PATCH] server: say so

Kind: ours
Upstream: not-needed
Signed-off-by: t <t@invalid>

diff --git a/tools/server/CMakeLists.txt b/tools/server/CMakeLists.txt
--- a/tools/server/CMakeLists.txt
+++ b/tools/server/CMakeLists.txt
@@ -1 +1,2 @@
 add_executable(llama-server server.cpp)
+# patched
"""
CMAKE = """
    import sys
    from pathlib import Path
    note("cmake_fails", fail=True)
    objects = Path(sys.argv[sys.argv.index("-B") + 1])
    objects.mkdir()
    (objects / "source").write_text(sys.argv[sys.argv.index("-S") + 1])
    (objects / "options").write_text("\\n".join(sys.argv))
"""
NINJA = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    objects = Path(sys.argv[sys.argv.index("-C") + 1])
    with (SCRIPT / "runs").open("a") as runs:
        runs.write(f"{os.getpid()} {' '.join(sys.argv[1:])}\\n")
    print("[1/2] compiling", flush=True)
    note("ninja_fails", fail=True)
    while (SCRIPT / "ninja_hangs").exists():
        time.sleep(0.05)
    tree = Path((objects / "source").read_text())
    patched = "patched" in (tree / "tools/server/CMakeLists.txt").read_text()
    options = (objects / "options").read_text()
    (objects / "bin").mkdir(exist_ok=True)
    binary = objects / "bin" / "llama-server"
    binary.write_text(ENGINE.replace("@OPTIONS@", repr(options)).replace("@PATCHED@", repr(patched)))
    binary.chmod(0o755)
    print("[2/2] linking", flush=True)
"""
ENGINE = """
    import json, os, signal, socketserver, sys, threading
    from http.server import BaseHTTPRequestHandler
    OPTIONS = @OPTIONS@
    PATCHED = @PATCHED@

    class Handler(BaseHTTPRequestHandler):
        def address_string(self):
            return "unix"
        def log_message(self, *args):
            pass
        def answer(self, body):
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            self.answer({"status": "ok"})
        def do_POST(self):
            words = (SCRIPT / "crashes").read_text().split() if (SCRIPT / "crashes").exists() else []
            if any(word in OPTIONS for word in words):
                signal.raise_signal(signal.SIGILL)
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = asked["n_predict"] - (SCRIPT / "short").exists()
            self.answer({"tokens_predicted": tokens, "timings": {"predicted_per_second": 100.0}})

    note("boot_error", fail=True)
    server = socketserver.ThreadingUnixStreamServer(sys.argv[sys.argv.index("--host") + 1], Handler)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever(poll_interval=0.02)
"""
PRELUDE = """\
#!{python}
import os, sys
from pathlib import Path
SCRIPT = Path({script!r})

def note(name, fail):
    file = SCRIPT / name
    if file.exists():
        print(file.read_text(), flush=True)
        sys.exit(1)

"""
BACKEND = """\
from pathlib import Path
def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "tiny_engine-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-engine\\nVersion: 1.0\\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\n")
    return info.name
def build_wheel(*args, **kwargs):
    raise NotImplementedError
"""


class World:
    """Everything that a build touches, in one folder."""

    def __init__(self, folder):
        """Name the places; ``create`` makes them."""
        self.folder = folder
        self.cache = folder / "cache"
        self.script = folder / "script"
        self.tools = folder / "tools"
        self.index = folder / "index"
        self.patches = folder / "engine_patch"
        self.archive = self.index / "tiny_engine-1.0.tar.gz"

    def create(self):
        """Make archive, series and tools."""
        for each in (self.script, self.tools, self.index, self.patches / "patches"):
            each.mkdir(parents=True)
        self.write_archive()
        self.write_series(hashlib.sha256(self.archive.read_bytes()).hexdigest())
        engine = self.program_text(ENGINE)
        self.add_tool("cmake", self.program_text(CMAKE))
        self.add_tool(
            "ninja", self.program_text(NINJA).replace('note("ninja', f'ENGINE = {engine!r}\nnote("ninja', 1)
        )
        for compiler in ("cc", "c++"):
            self.add_tool(compiler, "#!/bin/sh\n")
        (self.tools / "git").symlink_to(shutil.which("git"))
        (self.folder / "cpuinfo").write_text(
            "flags\t\t: avx avx2 fma f16c bmi2 avx512f avx512cd avx512bw avx512dq avx512vl\n"
        )

    @property
    def environment(self):
        """Variables that keep tools and pip inside this world."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "POLYKV_", "GIT_"))
        }
        mine = {
            "PATH": str(self.tools),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "PIP_CONFIG_FILE": os.devnull,
        }
        return {**{k: v for k, v in kept.items() if k not in ("CC", "CXX")}, **mine}

    def program_text(self, body):
        """A tool in Python that knows where the script is."""
        return PRELUDE.format(python=sys.executable, script=str(self.script)) + textwrap.dedent(body)

    def add_tool(self, name, text):
        """Put a program on the only folder of PATH."""
        file = self.tools / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def put(self, name, text=""):
        """Write a file of the script."""
        (self.script / name).write_text(text)

    def runs(self):
        """Command lines that ninja was called with, each preceded by its pid."""
        file = self.script / "runs"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def write_checkout(self, root):
        """A llama.cpp of three files."""
        server = root / "tools" / "server"
        server.mkdir(parents=True)
        (root / "CMakeLists.txt").write_text("project(llama)\n")
        (server / "CMakeLists.txt").write_text(SERVER_CMAKE)
        (server / "server.cpp").write_text("int main() {}\n")

    def write_archive(self):
        """An sdist that pip accepts without the network, with llama.cpp in a subtree."""
        top = self.folder / "tiny_engine-1.0"
        self.write_checkout(top / "llama.cpp")
        (top / "elsewhere.txt").write_text("not llama.cpp\n")
        (top / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-engine\nVersion: 1.0\n")
        (top / "backend.py").write_text(BACKEND)
        (top / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        with tarfile.open(self.archive, "w:gz") as archive:
            archive.add(top, arcname=top.name)

    def write_series(self, sha256):
        """Pin the archive and list one patch."""
        pin = f"tag=b1\npackage=tiny-engine==1.0\nsha256={sha256}\nsubtree=llama.cpp/\nneighbours=\n"
        (self.patches / "UPSTREAM").write_text(pin)
        (self.patches / "series").write_text("# order\nsay-so.patch\n")
        (self.patches / "patches" / "say-so.patch").write_text(PATCH)

    def enter(self, monkeypatch):
        """Make this process live here."""
        for name in list(os.environ):
            if name not in self.environment:
                monkeypatch.delenv(name)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        model_file = self.folder / "model.gguf"
        model_file.write_text("model")
        monkeypatch.setattr(source, "series_folder", lambda: Path(self.patches))
        monkeypatch.setattr(model, "ensure", lambda cache, progress=None: model_file)
        monkeypatch.setattr(build, "_CPUINFO", self.folder / "cpuinfo")
        monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")


def build_in(folder):
    """Run the command in a world that another process created."""
    world = World(Path(folder))
    world.enter(pytest.MonkeyPatch())
    os.environ["POLYKV_CACHE_DIR"] = str(world.cache)
    cli.main(["engine", "build"])
