"""Becoming an engine: for a service manager that runs engines by themselves, to which a proxy attaches.

Rule 1: it is the engine that a proxy of these settings would start: same binary, arguments and environment.
Rule 2: this process becomes the engine, so that its owner's signals reach it and nothing stands in between.
Rule 3: the folders are claimed for as long as it lives; a second one with the same folders does not start.
What it saves is for the proxy that attaches to claim.
Rule 4: what it is started with is written down beside its socket (``started``), for that proxy.
"""

from __future__ import annotations

import os
import shlex
import signal
from typing import TYPE_CHECKING, NoReturn

from polykv_proxy.engine import started
from polykv_proxy.engine.claims import claim_folders
from polykv_proxy.errors import EngineStartError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from polykv_proxy.engine.launch import EngineSpec


def command_line(spec: EngineSpec) -> str:
    """The engine's command as a shell would take it.

    With pools in its cache, without the folder where it saves, which has to be there: nothing is saved of an
    engine that is started by hand. Where pools are files, that folder is what they are in.
    """
    words = list(spec.argv)
    if "--polykv-max-pools" in words:
        saves = words.index("--slot-save-path")
        del words[saves : saves + 2]
    return shlex.join([str(spec.binary), *words])


def become(spec: EngineSpec, shards: Iterable[Path]) -> NoReturn:
    """Replace this process by the engine.

    Args:
        spec: the engine.
        shards: all files of its model.

    Raises:
        ConfigError: a folder cannot be made, or another engine has it.
        EngineStartError: the binary cannot be run, or the record not be written.
    """
    for claim in claim_folders(spec, store=False):
        os.set_inheritable(claim, True)
    spec.socket.unlink(missing_ok=True)  # llama-server does not replace an existing one
    started.write(spec, shards)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # what Python ignores stays ignored otherwise
    try:
        os.execve(spec.binary, [str(spec.binary), *spec.argv], dict(spec.env))  # noqa: S606 - no shell
    except OSError as error:
        raise EngineStartError(f"cannot start {spec.binary}: {error.strerror or error}") from None
