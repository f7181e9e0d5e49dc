"""Where an engine listens: a TCP base URL, or a Unix socket with a base URL that only names it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from polykv_proxy.errors import ConfigError

SOCKET_PATH_BYTES = 107
"""``sockaddr_un.sun_path`` holds 108 bytes, one of them the final NUL."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine's address."""

    base_url: str
    """Scheme and host without a trailing slash; over a socket the host is only a Host header."""
    socket: Path | None = None
    """Unix socket to connect to instead of the host in ``base_url``."""

    @classmethod
    def of_socket(cls, socket: Path) -> EngineAddress:
        """The engine that listens on a Unix socket.

        Raises:
            ConfigError: the path is too long for the kernel.
        """
        if len(bytes(socket)) > SOCKET_PATH_BYTES:
            raise ConfigError(
                f"runtime_dir: the socket path {socket} is longer than {SOCKET_PATH_BYTES} bytes"
            )
        return cls("http://localhost", socket)

    @classmethod
    def parse(cls, url: str) -> EngineAddress:
        """Read ``http://host:port`` or ``unix:/path/to.sock``.

        Raises:
            ConfigError: neither of the two forms.
        """
        if url.startswith("unix:/"):
            # unix:/path and unix:///path mean the same
            return cls.of_socket(Path("/" + url.removeprefix("unix:").lstrip("/")))
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"engine.url: {url!r} is neither http://host:port nor unix:/path/to.sock")
        return cls(url.rstrip("/"))

    def __str__(self) -> str:
        """The form that :meth:`parse` reads."""
        return self.base_url if self.socket is None else f"unix:{self.socket}"
