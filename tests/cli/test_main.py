"""Claims about ``cli.main``: the right status, and errors as one line."""

import subprocess
import sys

import pytest

import polykv_proxy
from polykv_proxy.errors import BuildError, ConfigError, UnavailableError


def test_version(run):
    """The package's."""
    assert run("--version") == (0, f"polykv-proxy {polykv_proxy.__version__}\n", "")


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
