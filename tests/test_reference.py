"""Claims about ``reference``: what people read about the settings is what the settings are."""

import json
import re
from pathlib import Path

import pytest
import yaml

from polykv_proxy import config, reference
from polykv_proxy.settings import NamedEngine, Settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]
VARIABLES = {row[3].strip("`"): row for row in ROWS if row[3].startswith("`POLYKV_")}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the machine reaches a test."""
    for name in list(config.os.environ):
        if name.upper().startswith("POLYKV_") or name == "LLAMA_API_KEY":
            monkeypatch.delenv(name)


def test_the_files_are_current():
    """Regenerate them as the module says."""
    assert (ROOT / "config" / "polykv.yaml").read_text() == reference.example()
    assert PAGE.read_text() == reference.configuration()


def keys(values, prefix="POLYKV_"):
    """The variables of a document's keys, sections left out."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from keys(value, f"{prefix}{key.upper()}__")
        else:
            yield prefix + key.upper()


def test_every_key_has_a_row():
    """And nothing else has one."""
    assert sorted(VARIABLES) == sorted(keys(Settings().model_dump(mode="json")))


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_and_defaults_are_those_that_are_read(variable, monkeypatch):
    """A default said by its variable changes nothing; nonsense is refused where a value can be nonsense."""
    kind, default = VARIABLES[variable][1:3]
    said = None if default == "unset" else yaml.safe_load(default.partition("` (")[0].strip("`"))
    plain = said if isinstance(said, str) else json.dumps(said)
    if said is not None:
        monkeypatch.setenv(variable, plain)
        assert config.load() == Settings()
    if kind.partition(",")[0] not in ("text", "path"):
        monkeypatch.setenv(variable, "nonsense")
        with pytest.raises(config.ConfigError):
            config.load()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            "| `max_body_bytes` |",
            "| bytes, at least 1024 | `268435456` (256 MiB) | `POLYKV_MAX_BODY_BYTES` |",
        ),
        ("| `while_rebuilding` |", "| `hold`, `plain` | `hold` | `POLYKV_DURABLE__WHILE_REBUILDING` |"),
        ("| `orphan_ttl_s` |", "| seconds, more than 0 | unset | `POLYKV_POOLS__ORPHAN_TTL_S` |"),
        ("| `mode` |", "| `advisory`, `enforced` | `advisory` | `advisory`: nobody is refused"),
        ("| `settle_max_ms` |", "| milliseconds, at least 0, at most 60000 |"),
        ("| `admin_api_key` |", "| text, secret | unset |"),
        ("| `args` |", "Such as `[-ngl, '99']`. |"),
    ],
)
def test_a_row_tells_type_unit_bounds_and_default(row, said):
    """From the types and names of the code."""
    (line,) = (line for line in reference.configuration().splitlines() if line.startswith(row))
    assert said in line


def test_what_an_item_of_a_list_adds_is_told_once():
    """A further engine has the keys of ``engine``; only its own stand in its table."""
    section = reference.configuration().partition("## An item of `engines`")[2].partition("\n## ")[0]
    own = set(NamedEngine.model_fields) - set(type(Settings().engine).model_fields)
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == own


def test_samples_are_values_that_work(monkeypatch):
    """What follows "such as" can be used."""
    for section, model in (("", Settings), ("ENGINE__", type(Settings().engine))):
        for key, field in model.model_fields.items():
            for sample in field.examples or ():
                monkeypatch.setenv(f"POLYKV_{section}{key.upper()}", json.dumps(sample))
    loaded = config.load()
    assert loaded.engine.args == ("-ngl", "99")
    assert [each.name for each in loaded.engines] == ["left", "right"]
