"""What operators install: a unit that systemd accepts, alerts and a dashboard that ask for what there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

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


# -- Prometheus and Grafana -------------------------------------------------------------------------------

RULES = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
ALERTS = {rule["alert"]: rule for group in RULES for rule in group["rules"]}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
ASKED = {name: [rule["expr"]] for name, rule in ALERTS.items()} | {
    title: [target["expr"] for target in panel["targets"]] for title, panel in PANELS.items()
}

DOCUMENTED = {
    name: (kind, row)
    for row in (ROOT / "docs/reference/metrics.md").read_text().splitlines()
    for name, kind in re.findall(r"^\| `(opencoti_polykv:\w+)` \| (\w+)", row)
}
"""Kind and row of each series in the reference, which a test holds to what a scrape has."""


def series_of(expression):
    """The series that an expression reads: name, and the text of its selector."""
    return re.findall(r"(opencoti_polykv:\w+)(\{[^}]*\})?", expression)


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked_for_is_there(asked):
    """Alerts and panels read series of the reference, counters as rates, by labels that they have."""
    for expression in ASKED[asked]:
        series = series_of(expression)
        assert series or expression == 'up{job="polykv-proxy"} == 0'
        for name, selector in series:
            base = re.sub(r"_(bucket|sum|count)$", "", name) if "_bucket" in name else name
            kind, row = DOCUMENTED[base]
            assert ("_bucket" in name) == (kind == "histogram")
            if kind in {"counter", "histogram"}:
                assert re.search(rf"(rate|increase)\({name}", expression)
            for label, value in re.findall(r'(\w+)=~?"([^"$]*)"', selector):
                assert f"`{label}`" in row
                assert all(f"`{each}`" in row for each in value.split("|"))
        for label in re.findall(r"by \(([^)]*)\)", expression):
            known = {"instance", "le"} | set(re.findall(r"`(\w+)`", DOCUMENTED[base][1]))
            assert {each.strip() for each in label.split(",")} <= known


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name):
    """A summary that names the host, and where to look; how much it matters."""
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    said = rule["annotations"]["description"]
    assert all((ROOT / path).is_file() for path in re.findall(r"docs/\S+\.md", said))
    routes = (ROOT / "docs/reference/http-api.md").read_text() + (ROOT / "README.md").read_text()
    assert all(path in routes for path in re.findall(r"`GET (/[\w/]+)", said))


def test_the_dashboard_can_be_imported():
    """Numbers and places of panels are their own; all read the data source that the user chooses."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) == len(PANELS)
    assert {panel["datasource"]["uid"] for panel in PANELS.values()} == {"${datasource}"}
    assert {each["name"] for each in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS.values()]
    assert len(set(places)) == len(places)
