"""Claims about ``settings``: they do not change, engines inherit, and folders are found."""

from pathlib import Path

import pytest
import yaml

from polykv_proxy.settings import Settings

SEVERAL = yaml.safe_load("""
engine: {parallel: 2, api_key: common, env: {A: "1", B: "1"}}
engines:
  - {name: left, env: {A: "2"}}
  - {parallel: 8, url: "http://h:1", api_key: own}
""")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the machine reaches a test."""
    for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_settings_do_not_change():
    """Loaded once, the same for everyone."""
    settings = Settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.drain_s = 1
    with pytest.raises(ValueError, match="frozen"):
        settings.engine.parallel = 1


def test_engines_inherit_what_they_leave_out():
    """Key by key, also inside mappings; one without a name goes by its number."""
    settings = Settings(**SEVERAL)
    left, second = settings.fleet
    assert (left.name, left.parallel, left.url) == ("left", 2, None)
    assert {key: value.get_secret_value() for key, value in left.env.items()} == {"A": "2", "B": "1"}
    assert (second.name, second.parallel, second.url) == ("engine-1", 8, "http://h:1")
    assert [each.api_key.get_secret_value() for each in settings.fleet] == ["common", "own"]


def test_settings_of_one_engine_know_no_others():
    """What serves one engine needs not know how many there are."""
    settings = Settings(**SEVERAL)
    one = settings.of_engine(1)
    assert (one.engine.parallel, one.engines) == (8, ())
    assert [each.parallel for each in one.fleet] == [8]
    assert Settings().of_engine(0).engine.parallel == Settings().engine.parallel


def test_without_a_list_the_fleet_is_the_engine():
    """With a name, as all engines have one."""
    (only,) = Settings(engine={"parallel": 3}).fleet
    assert (only.name, only.parallel) == ("engine-0", 3)


def test_engines_can_be_given_as_values():
    """As code does; the result is the same."""
    settings = Settings(**SEVERAL)
    again = Settings(engine=settings.engine, engines=settings.engines)
    assert again.fleet == settings.fleet


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("127.0.0.1:8090", "127.0.0.1", 8090), ("[::1]:0", "::1", 0), ("example:80", "example", 80)],
)
def test_listen_is_split(listen, host, port):
    """Host without brackets, port as a number."""
    settings = Settings(listen=listen)
    assert (settings.listen_host, settings.listen_port) == (host, port)


def test_folders_come_from_the_service_manager(monkeypatch, tmp_path):
    """Under systemd the unit's folders are used without any configuration."""
    monkeypatch.setenv("STATE_DIRECTORY", f"{tmp_path}/state:{tmp_path}/second")
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}/run")
    settings = Settings()
    assert settings.state_path == tmp_path / "state"
    assert settings.runtime_path == tmp_path / "run"
    assert settings.engine_log_path == tmp_path / "state"


def test_folders_default_to_the_users_own(monkeypatch, tmp_path):
    """XDG variables are followed, home is the fallback."""
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings()
    assert settings.cache_path == tmp_path / ".cache" / "polykv-proxy"
    assert settings.state_path == tmp_path / ".local" / "state" / "polykv-proxy"
    assert settings.runtime_path == settings.state_path / "run"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert settings.cache_path == Path("/elsewhere/polykv-proxy")
