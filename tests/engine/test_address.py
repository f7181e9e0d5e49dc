"""Engine addresses."""

from pathlib import Path

import pytest

from polykv_proxy.engine.address import EngineAddress
from polykv_proxy.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "base_url", "socket"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080", None),
        ("http://[::1]:8080/", "http://[::1]:8080", None),
        ("https://gpu/prefix/", "https://gpu/prefix", None),
        ("unix:/run/e.sock", "http://localhost", Path("/run/e.sock")),
        ("unix:///run/e.sock", "http://localhost", Path("/run/e.sock")),
    ],
)
def test_both_forms_are_read(url, base_url, socket):
    """TCP by URL, Unix by path."""
    address = EngineAddress.parse(url)
    assert (address.base_url, address.socket) == (base_url, socket)
    assert EngineAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "url", ["", "8080", "localhost:8080", "ftp://x", "http://", "http://x?y", "unix:run/e.sock"]
)
def test_anything_else_is_refused_by_key(url):
    """The message names the setting."""
    with pytest.raises(ConfigError, match=r"^engine\.url: "):
        EngineAddress.parse(url)


def test_path_must_fit_the_kernels_field():
    """107 bytes, not characters."""
    EngineAddress.of_socket(Path("/" + "x" * 106))
    for path in ("/" + "x" * 107, "/" + "é" * 54):
        with pytest.raises(ConfigError, match=r"^runtime_dir: .* longer than 107 bytes"):
            EngineAddress.of_socket(Path(path))
