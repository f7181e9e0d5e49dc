"""Claims about ``cli.engines``: arguments reach the build, and a process becomes an engine."""

import shlex
from pathlib import Path

import pytest

from polykv_proxy.engine import build, foreground


def test_engine_build(run, calls, tmp_path):
    """Arguments reach the request; the path of the binary is the output."""
    status, out, _ = run(
        *("engine", "build", "--source", "/src", "--jobs", "3"),
        *("--cmake-arg=-DGGML_CUDA=ON", "--cmake-arg", "-DX=Y", "--no-check"),
    )
    assert (status, out) == (0, f"{tmp_path}/engine/bin/llama-server\n")
    (request,) = calls[-1][1]
    assert request == build.BuildRequest(
        cache=tmp_path / "cache",
        source=Path("/src"),
        jobs=3,
        cmake_args=("-DGGML_CUDA=ON", "-DX=Y"),
        check=False,
    )


def test_engine_path_and_check(run, calls, tmp_path):
    """Both binaries have a path; a check says what it saw."""
    assert run("engine", "path")[1] == f"{tmp_path}/engine/bin/llama-server\n"
    assert run("engine", "path", "--stock")[1] == f"{tmp_path}/engine/bin/llama-server-stock\n"
    assert run("engine", "check")[1] == f"{tmp_path}/engine/bin/llama-server: 8 tokens decoded, 42 tokens/s\n"


def test_engine_prune_lists_and_removes_only_when_told_to(run, tmp_path):
    """With sizes, and why the others stay; what the configuration names is among those."""
    root = tmp_path / "cache" / "engine"
    old, named, now = (f"b1-{digit * 12}" for digit in "abc")
    for name in (old, named, now):
        (root / name / "bin").mkdir(parents=True)
        (root / name / "bin" / "llama-server").write_bytes(b"x" * 2_000_000)
    (root / "current").symlink_to(now)
    config = tmp_path / "polykv.yaml"
    config.write_text(f"engine:\n  binary: {root / named / 'bin' / 'llama-server'}\n")
    prune = ("engine", "prune", "--config", str(config))
    stays = f"{root / named}: stays: the configuration names it\n{root / now}: stays: it is the current one\n"
    status, out, _ = run(*prune)
    assert (status, out) == (
        0,
        f"{stays}{root / old}: engine, 2.0 MB\n1 to remove, 2.0 MB; --yes removes them\n",
    )
    assert (root / old).exists()
    assert run(*prune, "--yes")[1] == f"{stays}{root / old}: engine, 2.0 MB\n1 removed, 2.0 MB\n"
    assert not (root / old).exists()
    assert run(*prune)[1] == f"{stays}0 to remove, 0.0 MB\n"


def test_engine_path_without_an_engine(run):
    """One line with the next step."""
    status, out, err = run("engine", "path")
    assert (status, out) == (1, "")
    assert err == "polykv-proxy: no engine is installed; build it with `polykv-proxy engine build`\n"


def test_engine_run_becomes_the_engine_of_the_settings(run, calls, monkeypatch, tmp_path):
    """Completed as for serve; the socket where it is asked for."""
    became = []
    monkeypatch.setattr(foreground, "become", lambda *given: became.append(given))
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "state"))
    model = tmp_path / "m-00002-of-00002.gguf"
    model.touch()
    run(
        *("engine", "run", "--socket", str(tmp_path / "e.sock"), "--parallel", "2", "--engine-arg", "-v"),
        *("--model", str(model)),
    )
    ((spec, shards),) = became
    assert shards == [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert (spec.socket, spec.slot_dir) == (tmp_path / "e.sock", tmp_path / "state" / "slots-0")
    assert spec.binary == tmp_path / "engine" / "bin" / "llama-server"
    assert spec.argv[-1] == "-v"
    assert spec.argv[spec.argv.index("--parallel") + 1] == "2"
    assert [name for name, *_ in calls] == ["build.ensure"]


def test_engine_run_prints_the_command_line(run, calls, monkeypatch, tmp_path):
    """As a shell takes it; nothing is started, and what costs something is said aside."""
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "st ate"))
    status, out, aside = run("engine", "run", "--print", "--engine-arg", "--context-shift")
    words = shlex.split(out)
    assert status == 0
    assert words[0] == str(tmp_path / "engine" / "bin" / "llama-server")
    assert words[words.index("--model") + 1].endswith(".gguf")
    assert "--slot-save-path" not in words
    assert "--context-shift: sessions that share cells stop" in aside
    assert not (tmp_path / "st ate").exists()


@pytest.mark.parametrize("variable", ["POLYKV_ENGINE__URL=http://a:1", 'POLYKV_ENGINES=[{"name": "a"}]'])
def test_engine_run_runs_one_engine_of_its_own(run, calls, monkeypatch, variable):
    """Not one that runs already, nor one of several."""
    monkeypatch.setenv(*variable.split("=", 1))
    status, _, complaint = run("engine", "run")
    assert (status, calls) == (2, [])
    assert "this runs one engine, that of the section engine" in complaint
