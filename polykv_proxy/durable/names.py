"""What the files of saved states are called.

::

    kv-<identity>-<generation>.tmp     what the engine writes
    kv-<identity>-<generation>.bin     the same, checked and on disk
    kv-<identity>.json                 the sidecar: names the .bin that counts
    tombstones.json                    why states are gone

Rule 1: what has no such name is not ours, whatever it looks like.
Rule 2: a sidecar goes by its state's identity: the same for all that take each other's place.
Rule 3: each save has a name of its own, so that whoever reads the file of the one before has it to the end.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import TYPE_CHECKING

from polykv_proxy.durable.identity import canonical

if TYPE_CHECKING:
    from polykv_proxy.core.catalogue import SavedState

TOMBSTONES = "tombstones.json"

_OURS = re.compile(r"^kv-[0-9a-f]{32}(?:-[0-9a-f]{8}\.(?:bin|tmp)|\.json(?:\.tmp)?)$")


def is_ours(name: str) -> bool:
    """Whether a file is of a saved state (rule 1)."""
    return _OURS.match(name) is not None


def temporary_name(identity: tuple[str, ...]) -> str:
    """A name for the engine to save under (rule 3)."""
    return f"kv-{_hash(identity)}-{secrets.token_hex(4)}.tmp"


def final_name(temporary: str) -> str:
    """The name of the same file once it is checked and on disk."""
    return temporary.removesuffix(".tmp") + ".bin"


def sidecar_name(state: SavedState) -> str:
    """File name of a state's sidecar (rule 2)."""
    return f"kv-{_hash(state.identity)}.json"


def is_of(name: str, identity: tuple[str, ...]) -> bool:
    """Whether a slot file has a name of an identity."""
    return name.startswith(f"kv-{_hash(identity)}-")


def stem(name: str) -> str:
    """What the names of all files of one identity begin with."""
    return name[: len("kv-") + 32]


def _hash(identity: tuple[str, ...]) -> str:
    return sha256(canonical(list(identity))).hexdigest()[:32]
