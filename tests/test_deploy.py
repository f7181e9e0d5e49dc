"""What operators install: a unit that systemd accepts, alerts and a dashboard that ask for what there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from polykv_proxy import config
from polykv_proxy.cli.main import parser
from polykv_proxy.core.types import PoolNumber
from polykv_proxy.engine.launch import slot_folder
from polykv_proxy.engine.poolfiles import CopyLimits, PoolFiles
from polykv_proxy.settings import Settings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "polykv-proxy.service"
ENGINE_UNIT = DEPLOY / "polykv-engine@.service"
UNITS = (UNIT, ENGINE_UNIT)
TMPFILES = DEPLOY / "polykv-proxy.tmpfiles.conf"
MAX_EXPOSURE = 2.5
PROGRAM = "/opt/polykv-proxy/venv/bin/polykv-proxy"
SPECIFIERS = {"%i": "0", "%t": "/run", "%C": "/var/cache", "%S": "/var/lib"}


def options(unit):
    """Options of a unit's ``[Service]`` section with all that each is given; of a template, instance 0."""
    section = unit.read_text().partition("[Service]\n")[2].partition("\n[")[0]
    found = {}
    for line in section.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("=", 1)
            for specifier, text in SPECIFIERS.items():
                value = value.replace(specifier, text)
            found.setdefault(name, []).append(value)
    return found


def systemd(tool, *args):
    """Run one of its tools; `make test` installs them, and without them there is nothing to prove here."""
    path = shutil.which(tool)
    assert path, f"{tool} is missing; install it (Debian: apt install systemd)"
    return subprocess.run([path, *args], capture_output=True, text=True, check=False)


def test_nothing_in_the_folder_is_without_a_test():
    """What operators install is looked at here, file by file."""
    assert {path.name for path in DEPLOY.iterdir()} == {
        *(each.name for each in (*UNITS, TMPFILES)),
        *("alerts.yml", "grafana-dashboard.json"),
    }


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit, tmp_path):
    """No unknown option, no value that systemd would ignore; of a template, an instance."""
    program = tmp_path / "polykv-proxy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    installed = tmp_path / unit.name.replace("@.", "@0.")
    installed.write_text(unit.read_text().replace(PROGRAM, str(program)))
    done = systemd("systemd-analyze", "verify", "--man=no", str(installed))
    complaints = [line for line in done.stderr.splitlines() if installed.name in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_sandbox_is_tight(unit):
    """Systemd's own rating, 0 (best) to 10."""
    done = systemd("systemd-analyze", "security", "--offline=true", "--no-pager", str(unit))
    rating = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert rating, done.stdout + done.stderr
    assert float(rating[1]) <= MAX_EXPOSURE


def test_only_the_proxy_is_asked_to_stop_and_has_the_time_for_it():
    """The engine is the proxy's to stop, after the drain; one by itself is stopped by its unit."""
    settings = Settings()
    proxy, engine = map(options, UNITS)
    assert proxy["KillMode"] == engine["KillMode"] == ["mixed"]
    assert int(proxy["TimeoutStopSec"][0]) > (
        settings.drain_s + settings.durable.drain_s + settings.engine.stop_deadline_s
    )
    assert int(engine["TimeoutStopSec"][0]) > settings.engine.stop_deadline_s
    assert "Before=polykv-proxy.service" in ENGINE_UNIT.read_text()


def test_units_run_commands_that_exist():
    """The arguments in the units are arguments of this version."""
    (command,) = options(UNIT)["ExecStart"]
    program, *args = command.split()
    assert program == PROGRAM
    assert parser().parse_args(args).config == Path("/etc/polykv-proxy/polykv.yaml")
    (command,) = options(ENGINE_UNIT)["ExecStart"]
    program, *args = command.split()
    assert program == PROGRAM
    assert parser().parse_args(args).socket == Path("/run/polykv-engine/0/engine.sock")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_set_only_known_variables(unit, monkeypatch):
    """A variable that is refused would keep the service from starting."""
    given = dict(each.split("=", 1) for each in options(unit)["Environment"])
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert config.load().cache_dir == Path(given["POLYKV_CACHE_DIR"])


def test_an_engines_own_file_may_say_what_the_unit_says_it_may(monkeypatch):
    """The variables that its comment names, as systemd reads them."""
    (line,) = re.findall(r"^# what to serve, and how: (.*)$", ENGINE_UNIT.read_text(), re.MULTILINE)
    given = {"MODEL": "/srv/models/m.gguf", "PARALLEL": "4"}
    for name, value in re.findall(r"(POLYKV_\w+)=(\[.*?\]|\.\.\.)", line):
        monkeypatch.setenv(name, given.get(name.rpartition("_")[2], value))
    engine = config.load().engine
    assert (str(engine.model), engine.parallel, engine.args) == ("/srv/models/m.gguf", 4, ("-ngl", "99"))


def test_both_units_are_one_user_with_one_cache():
    """So that the proxy, and nobody else, reaches the socket, and the engine that was built is there once."""
    proxy, engine = map(options, UNITS)
    for same in ("User", "DynamicUser", "UMask", "CacheDirectory", "CacheDirectoryMode"):
        assert proxy.get(same) == engine.get(same)
    assert proxy["User"] == ["polykv-proxy"]
    assert proxy["DynamicUser"] == ["yes"]
    assert engine["RuntimeDirectoryMode"] == ["0700"]
    socket = options(ENGINE_UNIT)["ExecStart"][0].split()[-1]
    assert Path(socket).parent == Path("/run", *engine["RuntimeDirectory"])
    # what is kept when a unit stops would go where only its own unit sees it
    assert "RuntimeDirectoryPreserve" not in engine


def test_the_engine_saves_where_the_proxy_can_read(monkeypatch):
    """In the proxy's state folder, which both units have, and in one of its own there."""
    proxy, engine = map(options, UNITS)
    for same in ("StateDirectory", "StateDirectoryMode"):
        assert proxy[same] == engine[same]
    given = dict(each.split("=", 1) for each in engine["Environment"])
    monkeypatch.setenv("STATE_DIRECTORY", f"/var/lib/{proxy['StateDirectory'][0]}")
    shared = config.load().state_path
    monkeypatch.setenv("POLYKV_STATE_DIR", given["POLYKV_STATE_DIR"])
    own = slot_folder(config.load(), 0)
    assert own.is_relative_to(shared)
    assert own not in [slot_folder(Settings(state_dir=shared), number) for number in range(9)]
    assert own.parent.parent == shared  # where `cache list` looks


def test_the_engine_is_sandboxed_as_the_proxy_is():
    """And has no network in addition."""
    proxy, engine = map(options, UNITS)
    own = {"PrivateNetwork", "RestrictAddressFamilies", "IPAddressDeny", "IPAddressAllow"}
    tight = {
        name for name in proxy if name.startswith(("Protect", "Restrict", "Private", "System", "Device"))
    }
    tight |= {"NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities", "LockPersonality"}
    assert {name: proxy[name] for name in tight - own} == {name: engine.get(name) for name in tight - own}
    assert (engine["PrivateNetwork"], engine["RestrictAddressFamilies"]) == (["yes"], ["AF_UNIX"])


def test_folders_are_made_and_leftovers_go_at_boot(tmp_path):
    """By systemd itself, below another root; nothing but pools of a stock engine is removed."""
    slots = tmp_path / "var/lib/private/polykv-proxy/unit-0/slots-0"
    slots.mkdir(parents=True)
    for name in ("polykv-pool-ab12cd34-0.bin", "kv-1.bin"):
        (slots / name).touch()
    running = ("systemd-tmpfiles", "--create", "--remove", f"--root={tmp_path}", str(TMPFILES))
    for boot, left in (((), 2), (("--boot",), 1)):
        done = systemd(*running, *boot)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(list(slots.iterdir())) == left
    assert (tmp_path / "etc/polykv-proxy/secrets.env").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "srv/models").stat().st_mode & 0o777 == 0o755
    assert PoolFiles(CopyLimits(1)).name(PoolNumber(0)).startswith("polykv-pool-")


def test_guides_and_units_agree():
    """The guides name the paths that the units use."""
    guide = (ROOT / "docs" / "how-to" / "deploy-systemd.md").read_text()
    service = {name: values[-1] for name, values in options(UNIT).items()}
    assert PROGRAM in guide
    assert "/etc/polykv-proxy/polykv.yaml" in guide
    assert service["EnvironmentFile"].lstrip("-") in guide
    assert f"/var/cache/{service['CacheDirectory']}" in guide
    assert f"/var/lib/{service['StateDirectory']}/engine-0.log" in guide
    guide += (ROOT / "docs" / "how-to" / "several-engines.md").read_text()
    for path in (*UNITS, TMPFILES):
        assert f"deploy/{path.name}" in guide
    own, secrets = options(ENGINE_UNIT)["EnvironmentFile"]
    assert own in guide
    assert secrets.lstrip("-") in guide
    assert options(ENGINE_UNIT)["ExecStart"][0].split()[-1] in guide


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
