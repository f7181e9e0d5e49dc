"""Claims about ``engine.claims``: folders belong to one who lives, and come back when it is gone."""

import os

import pytest

from polykv_proxy.engine import claims
from polykv_proxy.engine.filelock import is_locked, try_lock
from polykv_proxy.engine.launch import spec_from
from polykv_proxy.errors import ConfigError
from polykv_proxy.settings import Settings


def spec(folder, run="run", binary="/opt/llama-server"):
    """An engine with its folders below one."""
    engine = {"binary": binary, "model": "/srv/m.gguf"}
    return spec_from(Settings(state_dir=folder / "state", runtime_dir=folder / run, engine=engine))


def test_folders_are_made_for_their_owner_alone(tmp_path):
    """Nobody else may look into them."""
    held = claims.claim_folders(spec(tmp_path))
    for folder in ("state", "state/slots-0", "run"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700
    claims.drop(held)
    assert held == []


def test_a_second_owner_is_refused_until_the_first_is_gone(tmp_path):
    """By the folder that both want; what it had claimed already is given up again."""
    first = claims.claim_folders(spec(tmp_path))
    with pytest.raises(ConfigError, match=r"state_dir: .*state is in use by another"):
        claims.claim_folders(spec(tmp_path))
    elsewhere = tmp_path / "other"
    (elsewhere).mkdir()
    (elsewhere / "run").symlink_to(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"runtime_dir: .*run is in use by another"):
            claims.claim_folders(spec(elsewhere))
    claims.drop(first)
    claims.drop(claims.claim_folders(spec(elsewhere)))


def test_a_copy_of_a_claim_keeps_it(tmp_path):
    """As an engine's own, which it inherits."""
    held = claims.claim_folders(spec(tmp_path))
    copies = [os.dup(each) for each in held]
    claims.drop(held)
    with pytest.raises(ConfigError, match="in use"):
        claims.claim_folders(spec(tmp_path))
    claims.drop(copies)
    claims.drop(claims.claim_folders(spec(tmp_path)))


def test_saved_states_are_one_proxys(tmp_path):
    """An engine that runs by itself leaves them to who attaches to it; while that has them nobody starts."""
    engine = claims.claim_folders(spec(tmp_path), store=False)
    assert claims.store_lock(spec(tmp_path).slot_dir).stat().st_mode & 0o777 == 0o600
    proxy = try_lock(claims.store_lock(spec(tmp_path).slot_dir))
    assert proxy is not None
    claims.drop(engine)
    with pytest.raises(ConfigError, match=r"state_dir: .*state is in use by another"):
        claims.claim_folders(spec(tmp_path))
    os.close(proxy)
    own = claims.claim_folders(spec(tmp_path))
    assert try_lock(claims.store_lock(spec(tmp_path).slot_dir)) is None
    claims.drop(own)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """With the system's own words."""
    (tmp_path / "state").touch()
    with pytest.raises(ConfigError, match=r"state_dir: .*/state.*: (File exists|Not a directory)"):
        claims.claim_folders(spec(tmp_path))


def test_a_binary_is_claimed_together_with_others(tmp_path):
    """Several engines run from one; it is free when the last of them is over."""
    binary = tmp_path / "llama-server"
    binary.touch()
    both = [claims.claim_folders(spec(tmp_path / name, binary=binary)) for name in ("one", "two")]
    for each in both:
        assert is_locked(binary)
        claims.drop(each)
    assert not is_locked(binary)
