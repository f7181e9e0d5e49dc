"""Policy files: what they put in force, refusals with the key path, and the files that describe them."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from polykv_proxy import cli, policy
from polykv_proxy.core.policies import CellPolicy, Mode, OnSaturation, Policy, PolicySet, effective
from polykv_proxy.errors import BadRequestError, ConfigError
from polykv_proxy.policy import AdmissionKeys, CellKeys, PolicyDocument, PolicyFile

EXAMPLES = sorted((Path(__file__).parents[1] / "config" / "policies").glob("*.yaml"))
FULL = next(file for file in EXAMPLES if file.name == "gpu-24gb.yaml")


@pytest.fixture
def write(tmp_path):
    """Write a policy file and return its path."""

    def write(text, name="policy.yaml"):
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


def test_there_are_examples_for_three_machines():
    """A small card, a large one, none."""
    assert [file.name for file in EXAMPLES] == ["cpu.yaml", "gpu-24gb.yaml", "gpu-96gb.yaml"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_load_and_promise_something(file):
    """Each enforces a floor."""
    base = policy.load(file).base(None)
    assert base.enforced
    assert base.target_tps_per_session > 0


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_key_of_an_example_is_commented(file):
    """No key stands without a word above it."""
    previous = ""
    for line in file.read_text().splitlines():
        if line.strip() and not line.strip().startswith("#"):
            assert previous.strip().startswith("#"), line
        previous = line


def test_one_example_names_every_key_and_tells_the_true_defaults():
    """In brackets, at the end of the comment."""
    values = yaml.safe_load(FULL.read_text())
    assert set(values) == set(PolicyDocument.model_fields)
    assert set(values["default"]) == set(AdmissionKeys.model_fields)
    assert set(values["cells"]) == set(CellKeys.model_fields)
    lines = FULL.read_text().splitlines()
    told = {}
    for comment, line in pairwise(lines):
        if comment.strip().startswith("#") and comment.endswith("]"):
            told[line.split(":")[0].strip()] = yaml.safe_load(comment.rsplit("[", 1)[1][:-1])
    defaults = {**policy.document(Policy()), **dict(CellKeys())}
    assert told == json.loads(json.dumps(defaults))


def test_an_empty_file_is_the_defaults(write):
    """And so is one with empty sections."""
    assert policy.load(write("")) == PolicySet()
    assert policy.load(write("default:\nlabels:\n  chat:\n")).labels == {"chat": {}}


def test_the_core_gets_what_was_set_and_nothing_else(write):
    """A key that is left out stays open, so that it is inherited; null is a value."""
    text = """
    default: {mode: enforced, settle_max_ms: 1500}
    models: {big: {target_tps_per_session: 5}}
    labels: {eval: {target_tps_per_session: null, on_saturation: warn}}
    cells: {overcommit: false}
    """
    policies = policy.load(write(text))
    assert policies.default == {"mode": Mode.ENFORCED, "settle_max_s": 1.5}
    assert policies.models == {"big": {"target_tps_per_session": 5.0}}
    assert policies.labels == {"eval": {"target_tps_per_session": None, "on_saturation": OnSaturation.WARN}}
    assert policies.cells == CellPolicy(overcommit=False)
    in_force = effective(policies, policies.base("big"), [("eval", {})])
    assert (in_force.target_tps_per_session, in_force.settle_max_s) == (None, 1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defualt: {}", "defualt: unknown key"),
        ("default: {target_tps: 4}", "default.target_tps: unknown key"),
        (
            "default: {target_tps_per_session: 0}",
            "default.target_tps_per_session: Input should be greater than 0",
        ),
        ("default: {mode: strict}", "default.mode: Input should be 'advisory' or 'enforced'"),
        ("labels: {chat: {priority: high}}", "labels.chat.priority: Input should be a valid integer"),
        (
            "models: {big: {kv_headroom_ratio: 1}}",
            "models.big.kv_headroom_ratio: Input should be less than 1",
        ),
        ("cells: {quantile: 1}", "cells.quantile: Input should be less than 1"),
        ("labels: [chat]", "labels: Input should be a valid dictionary"),
        ("[1]", "must be a mapping"),
        ("default: {", "not valid YAML"),
    ],
)
def test_what_cannot_work_is_refused_with_file_and_key(write, text, message):
    """One line."""
    file = write(text)
    with pytest.raises(ConfigError, match=message) as caught:
        policy.load(file)
    assert caught.value.message.startswith(f"{file}: ")
    assert "\n" not in caught.value.message


def test_a_posted_policy_is_held_to_the_same_keys():
    """Its error is the client's, and names the key."""
    assert policy.posted({"mode": "enforced", "settle_max_ms": 500}) == {
        "mode": Mode.ENFORCED,
        "settle_max_s": 0.5,
    }
    with pytest.raises(BadRequestError) as caught:
        policy.posted({"mode": "enforced", "target_tps_per_session": -1})
    assert (caught.value.code, caught.value.param) == ("invalid_policy", "target_tps_per_session")
    with pytest.raises(BadRequestError):
        policy.posted([])


@pytest.mark.parametrize("keys", [AdmissionKeys, CellKeys])
def test_what_only_reads_like_a_value_is_none(write, keys):
    """A number is no ``yes`` and no text, and a truth is no number: in a file as in a request."""
    section = "default" if keys is AdmissionKeys else "cells"
    for key, value in {**policy.document(Policy()), **dict(CellKeys())}.items():
        if key not in keys.model_fields:
            continue
        for wrong in ("1",) if isinstance(value, bool) else ("yes", "'1'", "[1]"):
            with pytest.raises(ConfigError, match=rf"{section}\.{key}: "):
                policy.load(write(f"{section}: {{{key}: {wrong}}}"))
    with pytest.raises(BadRequestError) as caught:
        policy.posted({"settle_tokens": True})
    assert caught.value.param == "settle_tokens"


def test_a_policy_is_told_with_the_keys_it_is_given_by():
    """What is echoed can be posted."""
    told = policy.document(Policy(target_tps_per_session=4.0, settle_max_s=0.25))
    assert told["settle_max_ms"] == 250
    assert Policy(**policy.posted(told)) == Policy(target_tps_per_session=4.0, settle_max_s=0.25)


def touch(file, text):
    """Change a file so that its time differs even where the clock is coarse."""
    before = file.stat().st_mtime_ns
    file.write_text(text)
    os.utime(file, ns=(before + 1_000_000, before + 1_000_000))


def test_a_changed_file_is_in_force_once_it_is_polled(write):
    """Whole, and only when it changed."""
    file = write("default: {priority: 1}")
    source = PolicyFile(file)
    before = source.current
    assert not source.poll()
    touch(file, "default: {priority: 2}")
    assert source.poll()
    assert source.current.base(None).priority == 2
    assert before.base(None).priority == 1
    assert not source.poll()
    touch(file, "default: {priority: 2} # a comment")
    assert not source.poll()


def test_a_bad_file_keeps_the_old_policy_and_says_why(write):
    """Until it is right again; a file that is gone is one too."""
    file = write("default: {priority: 1}")
    source = PolicyFile(file)
    touch(file, "default: {priority: very}")
    assert not source.poll()
    assert not source.poll()
    assert "default.priority" in source.error
    assert source.current.base(None).priority == 1
    file.unlink()
    assert not source.poll()
    assert "cannot be read" in source.error
    file.write_text("default: {priority: 1}")
    assert not source.poll()
    assert source.error is None


def test_a_reload_that_was_asked_for_reads_in_any_case(write):
    """As after SIGHUP; without a file there is nothing to read."""
    file = write("default: {priority: 1}")
    source = PolicyFile(file)
    stat = file.stat()
    file.write_text("default: {priority: 7}")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not source.poll()
    assert source.reload()
    assert source.current.base(None).priority == 7
    assert not PolicyFile(None).reload()
    assert not PolicyFile(None).poll()


def test_a_proxy_does_not_start_on_a_bad_file(write):
    """Nothing is in force yet that could stay."""
    with pytest.raises(ConfigError, match=r"default\.x: unknown key"):
        PolicyFile(write("default: {x: 1}"))


def test_schema_file_is_current():
    """Regenerate with ``python -m polykv_proxy.policy > config/policies/schema.json``."""
    assert FULL.with_name("schema.json").read_text() == policy.json_schema()


def test_schema_describes_every_key():
    """Editors show the docstrings."""
    schema = json.loads(policy.json_schema())
    sections = [schema, *(each for each in schema["$defs"].values() if "properties" in each)]
    undescribed = [
        key
        for section in sections
        for key, entry in section["properties"].items()
        if "description" not in entry and "$ref" not in entry
    ]
    assert undescribed == []


def test_the_command_says_what_is_in_force(write, capsys):
    """Every key of every section, with what was left out filled in."""
    file = write("default: {priority: 3}\nlabels: {chat: {mode: enforced}}")
    with pytest.raises(SystemExit) as ended:
        cli.main(["policy", "check", str(file)])
    assert ended.value.code == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert set(told["default"]) == set(AdmissionKeys.model_fields)
    assert told["labels"]["chat"]["mode"] == "enforced"
    assert told["labels"]["chat"]["priority"] == 3
    assert told["cells"] == dict(CellKeys())


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("default: {mode: enforced}", ["default"]),
        ("default: {mode: enforced, kv_headroom_ratio: 0.1}", []),
        ("default: {mode: enforced, target_tps_per_session: 5}\nlabels: {chat: {priority: 3}}", []),
        ("default: {mode: enforced}\nlabels: {chat: {target_tps_per_session: 5}}", []),
        ("labels: {chat: {mode: enforced}}\nmodels: {m: {mode: enforced}}", ["models.m", "labels.chat"]),
        ("labels: {chat: {mode: enforced}}\nmodels: {m: {target_tps_per_session: 5}}", []),
        (
            "default: {mode: enforced}\nmodels: {m: {priority: 1}, n: {target_tps_per_session: 5}}",
            ["models.m"],
        ),
        ("default: {mode: advisory}", []),
    ],
)
def test_the_command_warns_of_an_enforced_policy_that_judges_nobody(write, capsys, text, sections):
    """It is no error, but hardly what was meant: the section is named on standard error."""
    file = write(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["policy", "check", str(file)])
    assert ended.value.code == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix(f"{file}: ").partition(":")[0] for line in lines] == sections
    assert all("judges nobody" in line for line in lines)


def test_the_command_says_what_is_wrong(write, capsys):
    """One line on standard error, and the status of a bad configuration."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["policy", "check", str(write("defualt: {}"))])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("policy.yaml: defualt: unknown key\n")
