"""The command: arguments in, one call out, errors as one line."""

import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
from durable.files import saved, state

import polykv_proxy
from polykv_proxy import cli
from polykv_proxy.durable.store import Store
from polykv_proxy.engine import build, foreground, model, prove
from polykv_proxy.errors import BuildError, ConfigError, UnavailableError


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


def test_version(run):
    """The package's."""
    assert run("--version") == (0, f"polykv-proxy {polykv_proxy.__version__}\n", "")


def test_serve_without_arguments_is_a_complete_system(run, calls, tmp_path):
    """Built-in model, patched engine, default address."""
    assert run("serve")[0] == 0
    name, (settings,), _ = calls[-1]
    assert name == "app.run"
    assert settings.listen == "127.0.0.1:8090"
    assert settings.engine.model == tmp_path / "built-in.gguf"
    assert settings.engine.binary == tmp_path / "engine" / "bin" / "llama-server"


def test_serve_arguments_become_settings(run, calls, tmp_path):
    """Each flag is a key; arguments for the engine keep their order."""
    model_file = tmp_path / "m.gguf"
    model_file.touch()
    status, *_ = run(
        *("serve", "--listen", "[::1]:1", "--model", str(model_file), "--parallel", "2", "--ctx-size", "512"),
        *("--max-pools", "3", "--engine-arg", "-ngl", "--engine-arg=99"),
    )
    assert status == 0
    settings = calls[-1][1][0]
    assert settings.listen == "[::1]:1"
    assert settings.engine.model == model_file
    assert (settings.engine.parallel, settings.engine.ctx_size, settings.engine.max_pools) == (2, 512, 3)
    assert settings.engine.args == ("-ngl", "99")
    assert [name for name, *_ in calls] == ["build.ensure", "app.run"]


def test_serve_that_attaches_needs_no_engine(run, calls):
    """Nothing is built or fetched."""
    assert run("serve", "--engine-url", "http://127.0.0.1:8080")[0] == 0
    assert [name for name, *_ in calls] == ["app.run"]


def test_serve_attaches_to_several_engines(run, calls, monkeypatch):
    """Who names engines means these and no others."""
    monkeypatch.setenv("POLYKV_ENGINES", '[{"name": "other"}]')
    assert run("serve", "--engine-url", "http://a:1", "--engine-url", "http://b:1")[0] == 0
    assert [each.url for each in calls[-1][1][0].fleet] == ["http://a:1", "http://b:1"]
    assert run("serve", "--engine-url", "http://a:1")[0] == 0
    (only,) = calls[-1][1][0].fleet
    assert (only.name, only.url) == ("engine-0", "http://a:1")
    assert [name for name, *_ in calls] == ["app.run", "app.run"]


def test_serve_completes_every_engine_that_it_starts(run, calls, monkeypatch, tmp_path):
    """What is missing is built and fetched; a file that is not there is told with its key."""
    model_file = tmp_path / "m.gguf"
    model_file.touch()
    monkeypatch.setenv("POLYKV_ENGINES", f'[{{"model": "{model_file}"}}, {{}}, {{"url": "http://a:1"}}]')
    assert run("serve")[0] == 0
    first, second, third = calls[-1][1][0].fleet
    assert first.model == model_file
    assert None not in (first.binary, second.model, second.binary)
    assert (third.model, third.binary) == (None, None)
    monkeypatch.setenv("POLYKV_ENGINES", '[{}, {"model": "/nowhere/file"}]')
    status, _, complaint = run("serve")
    assert status == 2
    assert "engines.engine-1.model: /nowhere/file: no such file" in complaint


def test_engine_run_becomes_the_engine_of_the_settings(run, calls, monkeypatch, tmp_path):
    """Completed as for serve; the socket where it is asked for."""
    became = []
    monkeypatch.setattr(foreground, "become", became.append)
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "state"))
    run("engine", "run", "--socket", str(tmp_path / "e.sock"), "--parallel", "2", "--engine-arg", "-v")
    (spec,) = became
    assert (spec.socket, spec.slot_dir) == (tmp_path / "e.sock", tmp_path / "state" / "slots-0")
    assert spec.binary == tmp_path / "engine" / "bin" / "llama-server"
    assert spec.argv[-1] == "-v"
    assert spec.argv[spec.argv.index("--parallel") + 1] == "2"
    assert [name for name, *_ in calls] == ["model.ensure", "build.ensure"]


def test_engine_run_prints_the_command_line(run, calls, monkeypatch, tmp_path):
    """As a shell takes it; nothing is started, and what costs something is said aside."""
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "st ate"))
    status, out, aside = run("engine", "run", "--print", "--engine-arg", "--context-shift")
    words = shlex.split(out)
    assert status == 0
    assert words[0] == str(tmp_path / "engine" / "bin" / "llama-server")
    assert words[words.index("--slot-save-path") + 1] == str(tmp_path / "st ate" / "slots-0")
    assert "--context-shift: sessions that share cells stop" in aside
    assert not (tmp_path / "st ate").exists()


@pytest.mark.parametrize("variable", ["POLYKV_ENGINE__URL=http://a:1", 'POLYKV_ENGINES=[{"name": "a"}]'])
def test_engine_run_runs_one_engine_of_its_own(run, calls, monkeypatch, variable):
    """Not one that runs already, nor one of several."""
    monkeypatch.setenv(*variable.split("=", 1))
    status, _, complaint = run("engine", "run")
    assert (status, calls) == (2, [])
    assert "this runs one engine, that of the section engine" in complaint


@pytest.mark.parametrize("key", ["model", "binary"])
def test_serve_with_a_file_that_is_not_there(run, calls, monkeypatch, key):
    """A typing error is told at once, instead of being waited out."""
    monkeypatch.setenv(f"POLYKV_ENGINE__{key.upper()}", "/nowhere/file")
    assert run("serve") == (2, "", f"polykv-proxy: engine.{key}: /nowhere/file: no such file\n")
    assert calls == []


def test_serve_reads_the_file_beneath_the_flags(run, calls, tmp_path):
    """A flag wins over the file."""
    file = tmp_path / "c.yaml"
    file.write_text("engine: {parallel: 2, max_pools: 2}")
    run("serve", "--config", str(file), "--parallel", "3")
    settings = calls[-1][1][0]
    assert (settings.engine.parallel, settings.engine.max_pools) == (3, 2)


def test_demo(run, calls):
    """Eight agents on a long prompt by default."""
    run("demo")
    assert calls[-1][2] == {"k": 8, "prefix_tokens": 1400, "json_only": False}
    run("demo", "--k", "16", "--prefix-tokens", "300", "--json")
    assert calls[-1][2] == {"k": 16, "prefix_tokens": 300, "json_only": True}


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


def test_engine_path_without_an_engine(run):
    """One line with the next step."""
    status, out, err = run("engine", "path")
    assert (status, out) == (1, "")
    assert err == "polykv-proxy: no engine is installed; build it with `polykv-proxy engine build`\n"


def test_config_show(run, monkeypatch):
    """Effective values, secrets masked."""
    monkeypatch.setenv("POLYKV_ADMIN_API_KEY", "s3cret")
    status, out, _ = run("config", "show")
    assert status == 0
    assert "admin_api_key: '**********'" in out
    assert "s3cret" not in out


def test_arguments_that_cannot_work_are_refused_before_anything_is_built(run, calls):
    """By serve and by config show alike."""
    bad = ("--engine-arg", "--cache-idle-slots")
    status, _, told = run("serve", *bad)
    assert (status, calls) == (2, [])
    assert "engine.args: --cache-idle-slots cannot be used" in told


def test_config_show_says_what_cannot_work(run, monkeypatch):
    """An operator who looks at the configuration should not learn it at the start."""
    monkeypatch.setenv("POLYKV_ENGINE__ARGS", '["--no-kv-unified"]')
    status, shown, told = run("config", "show")
    assert (status, shown) == (2, "")
    assert "--no-kv-unified cannot be used" in told


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frob"],
        ["serve", "--frob"],
        ["demo", "--k", "0"],
        ["demo", "--k", "many"],
        ["serve", "--parallel", "many"],
        ["serve", "--listen", "nowhere"],
        ["config", "show", "--config", "/nonexistent.yaml"],
    ],
)
def test_wrong_arguments_and_configuration_exit_with_2(run, argv):
    """Whoever finds it, argparse or the settings."""
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("polykv-proxy")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("engine.args: --port cannot be used"), 2),
        (BuildError("no compiler"), 1),
        (UnavailableError("engine gone"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_end_as_a_status(run, calls, monkeypatch, error, status):
    """Ours are one line, an interruption is silent."""

    def fail(settings):
        raise error

    monkeypatch.setattr(polykv_proxy.app, "run", fail)
    code, _, err = run("serve")
    assert code == status
    assert err == ("" if status == 130 else f"polykv-proxy: {error}\n")


def test_reader_that_goes_away_is_no_error_message():
    """As with `polykv-proxy config show | head -1`."""
    command = f"{sys.executable} -m polykv_proxy config show | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_help_answers_without_loading_the_work():
    """No aiohttp, no pydantic: `--help` is instant."""
    code = (
        "import sys\nfrom polykv_proxy import cli\n"
        "try: cli.main(['--version'])\nexcept SystemExit: pass\n"
        "assert not {'aiohttp', 'pydantic', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture
def states(tmp_path, monkeypatch):
    """A state folder with two saved states of one key."""
    monkeypatch.setenv("POLYKV_STATE_DIR", str(tmp_path / "state"))
    folder = tmp_path / "state" / "slots-0"
    store = Store(folder)
    store.open()
    saved(store, state(range(50), "run"))
    saved(store, state(range(80), "run/a"))
    return folder


def test_saved_states_are_listed(run, states):
    """For people, or a line of JSON each; what cannot be used is said beside it."""
    status, out, err = run("cache", "list")
    assert (status, err) == (0, "")
    assert sorted(line.split()[0] for line in out.splitlines()) == ["KEY", "run", "run/a"]
    _, out, _ = run("cache", "list", "--json")
    assert {json.loads(line)["key"] for line in out.splitlines()} == {"run", "run/a"}
    next(states.glob("*.bin")).write_bytes(b"x")
    _, out, err = run("cache", "list")
    assert len(out.splitlines()) == 2
    assert "not to be used" in err


def test_a_slot_file_is_inspected(run, states):
    """Its own tokens; a file that is none is an error."""
    file = max(states.glob("*.bin"), key=lambda path: path.stat().st_size)
    status, out, _ = run("cache", "inspect", str(file), "--tokens")
    assert status == 0
    assert json.loads(out)["tokens"] == list(range(80))
    status, _, err = run("cache", "inspect", str(next(states.glob("*.json"))))
    assert status == cli.EXIT_FAILED
    assert "no slot file" in err


def test_saved_states_are_verified(run, states):
    """The exit status tells, and the output says which."""
    assert run("cache", "verify")[:2] == (0, "2 states, 0 wrong\n")
    file = next(states.glob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    status, out, _ = run("cache", "verify")
    assert status == cli.EXIT_FAILED
    assert file.name in out


def test_saved_states_are_deleted_and_pruned(run, states, monkeypatch):
    """By key, by what may stay, or all."""
    monkeypatch.setenv("POLYKV_DURABLE__MIN_FREE_BYTES", "0")
    monkeypatch.setenv("POLYKV_DURABLE__MAX_IDLE_S", "1e12")
    status, out, _ = run("cache", "prune")
    assert (status, "0 states removed" in out) == (0, True)
    assert run("cache", "delete", "run/a")[:2] == (0, "1 deleted\n")
    status, _, err = run("cache", "delete", "run/a")
    assert status == cli.EXIT_FAILED
    assert "nothing is saved under run/a" in err
    assert "1 states removed" in run("cache", "prune", "--all")[1]
    assert [path.name for path in states.iterdir()] == ["tombstones.json"]
