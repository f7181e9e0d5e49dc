"""The patch series: applies without fuzz, survives a round trip, stays within its budget."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from polykv_proxy.engine import source

FOLDER = Path(__file__).parents[2] / "engine_patch"
SCRIPT = FOLDER / "series.sh"
MAX_LINES = 80
MAX_FILES = 9


def series_sh(*args, folder=FOLDER):
    """Run the script as an editor of the patches would."""
    return subprocess.run([folder / "series.sh", *args], capture_output=True, text=True, check=False)


def git(tree, *args):
    """Output of a git command in a tree, untouched by anybody's configuration."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = subprocess.run(["git", "-C", tree, *args], capture_output=True, text=True, check=True, env=env)
    return done.stdout


@pytest.fixture
def own_series(tmp_path):
    """A copy of the series to change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "engine_patch"))


def counted():
    """Output of ``series.sh budget``: lines and files by patch, and the total."""
    rows = re.findall(r"^ *(\d+) lines +(\d+) files +(\S+)$", series_sh("budget").stdout, re.MULTILINE)
    return {name: (int(lines), int(files)) for lines, files, name in rows}


def test_round_trip_changes_nothing(upstream_tree):
    """Applied to the pin as commits and written back, every byte of the series is the same."""
    done = series_sh("check", str(upstream_tree))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (upstream_tree / ".git").exists()


def test_applies_at_the_exact_lines_of_the_pin(own_tree):
    """No fuzz and no offset: the patches are refreshed against this very source."""
    git(own_tree, "init", "-q")
    for patch in source.read_series().patches:
        done = subprocess.run(
            ["git", "-C", own_tree, "apply", "--verbose", patch], capture_output=True, text=True, check=True
        )
        assert "offset" not in done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("tag", [pin.tag for pin in source.read_series().neighbours])
def test_applies_to_neighbouring_tags(build_cache, tmp_path, tag):
    """Hunks may move, their context may not change."""
    series = source.read_series()
    (pin,) = [pin for pin in series.neighbours if pin.tag == tag]
    source.unpack(pin, build_cache / "downloads", tmp_path / "tree")
    with (tmp_path / "log").open("w") as log:
        source.apply_series(series, tmp_path / "tree", log)
    assert (tmp_path / "tree" / "tools" / "server" / "server-polykv.h").is_file()


def test_two_neighbouring_tags_are_pinned():
    """Both are other versions than the pin, with hashes of their own."""
    series = source.read_series()
    pins = [series.pin, *series.neighbours]
    assert len(pins) >= 3
    assert len({pin.tag for pin in pins}) == len({pin.sha256 for pin in pins}) == len(pins)


def test_budget_holds():
    """The patch earns every upstream line it touches."""
    lines, files = counted()["total"]
    assert lines <= MAX_LINES
    assert files <= MAX_FILES


def test_readme_records_the_budget():
    """The table tells the lines of every patch in order, and the total."""
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|.*\| (\d+) \|$", text, re.MULTILINE)
    total = re.search(
        r"^\| \*\*total\*\* .*\*\*(\d+) upstream files\*\* \| \*\*(\d+)\*\* \|$", text, re.MULTILINE
    )
    budget = counted()
    lines, files = budget.pop("total")
    assert [(name + ".patch", int(number)) for name, number in rows] == [
        (name, lines) for name, (lines, _) in budget.items()
    ]
    assert (int(total[2]), int(total[1])) == (lines, files)


def test_budget_counts_what_git_counts(own_tree):
    """The script's count agrees with the commits themselves."""
    assert series_sh("apply", str(own_tree)).returncode == 0
    upstream = set(git(own_tree, "ls-tree", "-r", "--name-only", "upstream-base").splitlines())
    commits = git(own_tree, "rev-list", "--reverse", "upstream-base..HEAD").split()
    expected = []
    for commit in commits:
        touched = [
            name
            for name in git(own_tree, "show", "--format=", "--name-only", commit).split()
            if name in upstream
        ]
        diff = git(own_tree, "show", "--format=", "-U0", commit, "--", *touched) if touched else ""
        runs = re.findall(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", diff, re.MULTILINE)
        lines = sum(max(int(old or 1), int(new or 1)) for old, new in runs)
        expected.append((lines, len(touched)))
    budget = counted()
    budget.pop("total")
    assert list(budget.values()) == expected


def test_new_behaviour_is_in_new_files(own_tree):
    """Files that the series adds carry our name, so that a re-sync cannot collide with upstream's."""
    assert series_sh("apply", str(own_tree)).returncode == 0
    added = git(own_tree, "diff", "--diff-filter=A", "--name-only", "upstream-base", "HEAD").split()
    assert added
    assert all(Path(name).name.startswith("server-polykv") for name in added)


def test_build_applies_what_git_commits(own_tree, tmp_path):
    """``engine build`` and ``series.sh apply`` make the same tree."""
    series = source.read_series()
    plain = Path(shutil.copytree(own_tree, tmp_path / "plain", symlinks=True))
    assert series_sh("apply", str(own_tree)).returncode == 0
    with (tmp_path / "log").open("w") as log:
        source.apply_series(series, plain, log)
    assert source.tree_digest(plain) == source.tree_digest(own_tree)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "patches" / "stray.patch").write_text("x"), "stray.patch is not in series"),
        (lambda f: (f / "series").write_text("gone.patch\n"), "gone.patch is listed and missing"),
        (lambda f: (f / "series").write_text((f / "series").read_text() * 2), "listed twice"),
        (lambda f: edit_first(f, r"^Kind: .*$", "Kind: maybe"), "Kind must be backport, pending or ours"),
        (lambda f: edit_first(f, r"^Signed-off-by: .*\n", ""), "has no Signed-off-by: line"),
        (lambda f: edit_first(f, r"^Upstream: .*\n", ""), "has no Upstream: line"),
        (lambda f: edit_first(f, r"^(@@ -)(\d+)", r"\g<1>1\2"), "refresh changes the series"),
    ],
)
def test_check_finds_what_is_wrong(own_series, own_tree, spoil, message):
    """A list that lies, a header that says too little, a patch that is not as refresh writes it."""
    spoil(own_series)
    done = series_sh("check", str(own_tree), folder=own_series)
    assert done.returncode != 0
    assert message in done.stderr


def edit_first(folder, pattern, replacement):
    """Change the first patch of a series."""
    (patch,) = source.read_series(folder).patches[:1]
    patch.write_text(re.sub(pattern, replacement, patch.read_text(), count=1, flags=re.MULTILINE))


def test_patch_that_does_not_apply_says_how_to_go_on(own_series, own_tree):
    """The three commands stand in the message, nothing is fuzzed in."""
    edit_first(own_series, r"^ (\S.*)$", r" changed \1")
    done = series_sh("apply", str(own_tree), folder=own_series)
    assert done.returncode == 1
    assert "does not apply. To go on:" in done.stderr
    assert "series.sh refresh" in done.stderr


def test_refresh_writes_renamed_and_reordered_commits(own_series, own_tree):
    """The series follows the commits; its leading comment stays."""
    assert series_sh("apply", str(own_tree), folder=own_series).returncode == 0
    identity = ["-c", "user.name=t", "-c", "user.email=t@invalid"]
    git(own_tree, *identity, "commit", "-q", "--amend", "-m", "server: another name\n\nKind: ours\n")
    assert series_sh("refresh", str(own_tree), folder=own_series).returncode == 0
    listed = [patch.name for patch in source.read_series(own_series).patches]
    assert listed[-1] == "server-another-name.patch"
    assert listed[:-1] == [patch.name for patch in source.read_series().patches[:-1]]
    assert (own_series / "series").read_text().startswith("#")
