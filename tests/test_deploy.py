"""The unit file: systemd accepts it, its sandbox is tight, its times fit the proxy's."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polykv_proxy import config
from polykv_proxy.cli import _parser
from polykv_proxy.settings import Settings

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy" / "polykv-proxy.service"
MAX_EXPOSURE = 2.5


@pytest.fixture(scope="module")
def service():
    """Options of the ``[Service]`` section; of one that is given several times, the last."""
    section = UNIT.read_text().partition("[Service]\n")[2].partition("\n[")[0]
    return dict(line.split("=", 1) for line in section.splitlines() if line and not line.startswith("#"))


def systemd_analyze(*args):
    """Run systemd-analyze; `make test` installs it, and without it there is nothing to prove here."""
    tool = shutil.which("systemd-analyze")
    assert tool, "systemd-analyze is missing; install it (Debian: apt install systemd)"
    return subprocess.run([tool, *args], capture_output=True, text=True, check=False)


def test_systemd_accepts_the_unit(tmp_path):
    """No unknown option, no value that systemd would ignore."""
    program = tmp_path / "polykv-proxy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/polykv-proxy/venv/bin/polykv-proxy", str(program)))
    done = systemd_analyze("verify", "--man=no", str(unit))
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, complaints) == (0, [])


def test_sandbox_is_tight():
    """Systemd's own rating, 0 (best) to 10."""
    done = systemd_analyze("security", "--offline=true", "--no-pager", str(UNIT))
    rating = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert rating, done.stdout + done.stderr
    assert float(rating[1]) <= MAX_EXPOSURE


def test_only_the_proxy_is_asked_to_stop_and_has_the_time_for_it(service):
    """The engine is the proxy's to stop, after the drain."""
    settings = Settings()
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > (
        settings.drain_s + settings.durable.drain_s + settings.engine.stop_deadline_s
    )


def test_unit_runs_a_command_that_exists(service):
    """The arguments in the unit are arguments of this version."""
    program, *args = service["ExecStart"].split()
    assert program.endswith("/bin/polykv-proxy")
    assert _parser().parse_args(args).config == Path("/etc/polykv-proxy/polykv.yaml")


def test_unit_sets_only_known_variables(service, monkeypatch):
    """A variable that the proxy refuses would keep the service from starting."""
    name, _, value = service["Environment"].partition("=")
    monkeypatch.setenv(name, value)
    assert config.load().cache_dir == Path(value)


def test_guide_and_unit_agree(service):
    """The guide names the paths that the unit uses."""
    guide = (ROOT / "docs" / "how-to" / "deploy-systemd.md").read_text()
    assert service["ExecStart"].split()[0] in guide
    assert "/etc/polykv-proxy/polykv.yaml" in guide
    assert service["EnvironmentFile"].lstrip("-") in guide
    assert f"/var/cache/{service['CacheDirectory']}" in guide
    assert f"/var/lib/{service['StateDirectory']}/engine-0.log" in guide
