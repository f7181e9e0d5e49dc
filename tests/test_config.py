"""Claims about ``config``: precedence, refusals with the key path, and the two files that describe them."""

import json
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from polykv_proxy import config
from polykv_proxy.errors import ConfigError

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "config" / "polykv.yaml"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the machine reaches a test."""
    for name in ("LLAMA_API_KEY", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in list(config.os.environ):
        if name.upper().startswith("POLYKV_"):
            monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and return its path."""

    def write(text):
        file = tmp_path / "polykv.yaml"
        file.write_text(text)
        return file

    return write


def test_example_file_equals_the_defaults():
    """The commented example tells the truth about every default."""
    assert config.load(EXAMPLE) == config.load()


def test_example_file_names_every_key():
    """A key that is added to the settings must be documented there."""

    def keys(values, prefix=""):
        for key, value in values.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")

    assert set(keys(yaml.safe_load(EXAMPLE.read_text()))) == set(keys(config.load().model_dump()))


def test_example_file_comments_every_key():
    """No key of the example stands without a word above it."""
    previous = ""
    for line in EXAMPLE.read_text().splitlines():
        is_key = line.strip() and not line.strip().startswith("#")
        is_section = line.endswith(":")
        if is_key and not is_section:
            assert previous.strip().startswith("#"), line
        previous = line


def test_schema_file_is_current():
    """Regenerate with ``python -m polykv_proxy.config > config/schema.json``."""
    assert (ROOT / "config" / "schema.json").read_text() == config.json_schema()


def test_schema_describes_every_key():
    """Editors show the docstrings."""
    schema = json.loads(config.json_schema())
    sections = [schema, *schema["$defs"].values()]
    undescribed = [
        key
        for section in sections
        for key, entry in section["properties"].items()
        if "description" not in entry and "$ref" not in entry
    ]
    assert undescribed == []


def test_command_line_beats_environment_beats_file_beats_default(write, monkeypatch):
    """One precedence, key by key, inside sections too."""
    file = write("engine: {parallel: 2, max_pools: 2, ctx_size: 512}\nqueue: {max_depth: 7}\n")
    monkeypatch.setenv("POLYKV_ENGINE__PARALLEL", "3")
    monkeypatch.setenv("POLYKV_ENGINE__MAX_POOLS", "3")
    settings = config.load(file, {"engine": {"parallel": 5}})
    assert settings.engine.parallel == 5
    assert settings.engine.max_pools == 3
    assert settings.engine.ctx_size == 512
    assert settings.queue.max_depth == 7
    assert settings.queue.max_wait_s == 600.0


def test_lists_from_the_environment_are_json(monkeypatch):
    """One way to write a list in a variable."""
    monkeypatch.setenv("POLYKV_ENGINE__ARGS", '["-ngl", "99"]')
    assert config.load().engine.args == ("-ngl", "99")
    monkeypatch.setenv("POLYKV_ENGINE__ARGS", "-ngl 99")
    with pytest.raises(ConfigError, match=r"^environment: .*JSON"):
        config.load()


def test_file_named_by_the_environment(write, monkeypatch):
    """``POLYKV_CONFIG`` stands in for ``--config``, as a unit file needs it."""
    monkeypatch.setenv("POLYKV_CONFIG", str(write("drain_s: 3\n")))
    assert config.load().drain_s == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listne: x", "listne: unknown key"),
        ("engine: {paralel: 4}", "engine.paralel: unknown key"),
        ("engine: {parallel: many}", "engine.parallel: Input should be a valid integer"),
        (
            "engine: {parallel: 200, max_pools: 57}",
            r"engine: parallel \(200\) \+ max_pools \(57\) must be at most 256",
        ),
        ("engine: {url: 'http://h:1/v1'}", "engine.url: must be http://host:port, without a path"),
        ("engine: {url: 'ftp://x'}", "engine.url: must be http://host:port or unix:/path"),
        ("engine: {restart_backoff_s: 90}", "engine: restart_backoff_s must not exceed"),
        ("queue: {max_wait_s: -1}", "queue.max_wait_s: Input should be greater than or equal to 0"),
        ("queue: {max_wait_s: .inf}", "queue.max_wait_s: Input should be a finite number"),
        ("listen: '8090'", "listen: must be host:port"),
        ("listen: '::1:8090'", "listen: must be host:port, with an IPv6 host in brackets"),
        ("listen: localhost:99999", "listen: port '99999' is not a number from 0 to 65535"),
        ("log: {format: xml}", "log.format: Input should be 'console' or 'json'"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_what_cannot_work_is_refused_with_the_key(write, text, message):
    """One line that starts with the key path, or with the file where there is no key."""
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(write(text))
    assert "\n" not in caught.value.message


def test_several_problems_are_told_at_once(write):
    """Nobody should have to start a proxy five times to find five typos."""
    file = write("x: 1\nqueue: {y: 2}")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert caught.value.message == f"{file}: queue.y: unknown key; x: unknown key"


def test_a_problem_of_the_environment_is_not_blamed_on_the_file(write, monkeypatch):
    """The file is named where it has the key."""
    monkeypatch.setenv("POLYKV_ENGINE__PARALLEL", "many")
    with pytest.raises(ConfigError) as caught:
        config.load(write("queue: {max_wait_s: 3}"))
    assert caught.value.message.startswith("engine.parallel: ")


def test_missing_file_is_refused(tmp_path):
    """A file that was asked for must be there."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["POLYKV_LISTNE", "POLYKV_ENGINE_PARALLEL", "polykv_foo"])
def test_unknown_variables_are_refused(monkeypatch, name):
    """A misspelt variable must not be ignored; one underscore too few is the usual way."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} is not a known setting"):
        config.load()


def test_unknown_nested_variable_is_refused(monkeypatch):
    """Nested names are checked as keys."""
    monkeypatch.setenv("POLYKV_ENGINE__PARALEL", "1")
    with pytest.raises(ConfigError) as caught:
        config.load()
    assert caught.value.message == "engine.paralel: unknown key (environment: POLYKV_ENGINE__PARALEL)"


def test_a_problem_names_the_variable_that_it_is_from(write, monkeypatch):
    """As it is spelt there, a section as JSON too; and only where the command line does not have the key."""
    monkeypatch.setenv("polykv_engine", '{"paralel": 2}')
    monkeypatch.setenv("POLYKV_QUEUE__MAX_DEPTH", "-1")
    file = write("queue: {max_depth: 3, max_wait_s: -2}\nengine: {nothing: 1}")
    with pytest.raises(ConfigError) as caught:
        config.load(file, {"pools": {"nosuch": 1}})
    told = caught.value.message
    assert told.startswith(f"{file}: ")
    assert told.count("environment") == 2
    assert "engine.paralel: unknown key (environment: polykv_engine)" in told
    assert "(environment: POLYKV_QUEUE__MAX_DEPTH)" in told
    monkeypatch.delenv("polykv_engine")
    with pytest.raises(ConfigError) as caught:
        config.load(write("queue: {max_depth: 3}"))
    assert caught.value.message.startswith("queue.max_depth: "), "the file's value is not in force"
    with pytest.raises(ConfigError) as caught:
        config.load(None, {"queue": {"max_depth": -5}})
    assert "environment" not in caught.value.message


def test_an_empty_section_means_its_defaults(write):
    """All keys of a section commented out leave ``queue:`` standing alone."""
    assert config.load(write("queue:\n")) == config.load()
    assert config.load(write("")) == config.load()


def test_secrets_show_nowhere():
    """Neither the shown configuration nor a repr tells a key or a variable's value."""
    settings = config.load(
        overrides={
            "admin_api_key": "s3cret-a",
            "engine": {"api_key": "s3cret-b", "env": {"HF_TOKEN": "s3cret-c"}},
        }
    )
    assert "s3cret" not in config.shown(settings) + repr(settings) + str(settings)
    assert settings.engine.env["HF_TOKEN"].get_secret_value() == "s3cret-c"
    assert "HF_TOKEN" in config.shown(settings)


def test_shown_settings_load_again(write):
    """What is printed is a valid file (but for the masked secrets)."""
    shown = config.shown(config.load())
    assert config.shown(config.load(write(shown))) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: [{name: a}, {name: a}]", "each needs a name of its own"),
        ("engines: [{name: a}, {name: a/b}]", "engines.1.name"),
        ("engines: [{paralel: 2}]", "engines.0.paralel: unknown key"),
        ("engines: [3]", "engines.0"),
        ("engine: 3\nengines: [{}]", "engine"),
        ("engines: 3", "engines"),
    ],
)
def test_engines_that_cannot_work_are_refused(write, text, message):
    """With the key."""
    with pytest.raises(ConfigError) as caught:
        config.load(write(text))
    assert message in str(caught.value)


def test_llama_api_key_is_for_every_engine_without_one(write, monkeypatch):
    """One that has its own keeps it."""
    monkeypatch.setenv("LLAMA_API_KEY", "env")
    settings = config.load(write("engines: [{}, {api_key: own}]"))
    assert [each.api_key.get_secret_value() for each in settings.fleet] == ["env", "own"]


def test_llama_api_key_is_the_engines_key_unless_one_is_set(monkeypatch):
    """Who protected llama-server by its own variable stays protected."""
    monkeypatch.setenv("LLAMA_API_KEY", "one,two")
    assert config.load().engine.api_key == SecretStr("one")
    assert config.load(overrides={"engine": {"api_key": "mine"}}).engine.api_key == SecretStr("mine")
