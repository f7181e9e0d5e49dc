"""Claims about the tree: tests mirror the code, the core stays pure, the example is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "polykv_proxy"

EXCEPTIONS = {
    "__main__.py": "two lines",
    "demo.py": "its test is `make demo`",
    "errors.py": "declarations; every test of a refusal looks at them",
    "telemetry.py": "set-up of a library",
}
"""Modules without a test file of their own, and why."""

MODULES = sorted(
    str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"
)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in EXCEPTIONS])
def test_every_module_has_its_test_file(module):
    """The tests of ``a/b.py`` are in ``tests/a/test_b.py``."""
    path = Path(module)
    assert (ROOT / "tests" / path.parent / f"test_{path.name}").is_file()


def test_no_exception_is_out_of_date():
    """A module that is gone needs none."""
    assert set(EXCEPTIONS) <= set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("core/")])
def test_the_core_opens_nothing_and_waits_for_nothing(module):
    """No file, no coroutine, no clock."""
    source = (PACKAGE / module).read_text()
    assert not re.search(r"\bopen\(|\basync def\b|\bawait\b|\bimport time\b|\bmonotonic\(", source)


def test_the_example_configuration_exists():
    """Both files that the documentation points at."""
    assert (ROOT / "config" / "polykv.yaml").is_file()
    assert (ROOT / "config" / "schema.json").is_file()


NOT_FOR_CLIENTS = {
    "not_found",  # of calls to the engine; what clients get names what was not found
    "forbidden",  # of the base class; each refusal says which
    "conflict",
    "pool_in_use",
    "config_error",  # of the command line
    "engine_build_failed",
    "engine_crashed",
    "engine_not_started",
}


def test_every_error_code_is_explained():
    """Each code that the package has is a row of the reference, and the reference has no others."""
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    codes = set(re.findall(r'\bcode(?:: str)? ?= ?"([a-z_]+)"', source))
    codes |= set(re.findall(r'Reject\("([a-z_]+)"', source)) | {"engine_failed", "method_not_allowed"}
    rows = [
        row for row in (ROOT / "docs/reference/errors.md").read_text().splitlines() if row.startswith("| ")
    ]
    explained = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row.split("|")[2])}
    assert codes - NOT_FOR_CLIENTS - explained == set()
    assert explained - codes == set()
    assert codes >= NOT_FOR_CLIENTS


def test_every_package_says_what_it_is():
    """A docstring at its top."""
    for package in PACKAGE.rglob("__init__.py"):
        assert package.read_text().startswith('"""'), package
