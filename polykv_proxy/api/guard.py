"""Who may drive the control plane.

A service on a loopback address is reachable from every web page that its user opens. So the ``/polykv``
routes look at the Host that was asked for (a page can point a name of its own at 127.0.0.1), at the Origin
of the page, and, before anything changes, at the content type (a form cannot send JSON).
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from polykv_proxy.errors import ForbiddenError, PolyKVError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ADMIN_HEADER = "X-PolyKV-Admin-Key"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class UnauthorizedError(PolyKVError):
    """The control routes demand a key."""

    status = 401
    type = "authentication_error"
    code = "admin_key_required"


class WrongContentTypeError(PolyKVError):
    """Something else than JSON where state would change."""

    status = 415
    type = "invalid_request_error"
    code = "json_required"


class Guard:
    """Decides about one request from its method and headers.

    Args:
        admin_key: the key that is demanded, if any.
        hosts: names, besides localhost and IP addresses, that are ours.
    """

    def __init__(self, admin_key: str | None, hosts: Iterable[str]) -> None:
        self._admin_key = admin_key
        self._hosts = frozenset(host.lower() for host in hosts) | {"localhost"}

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Let the request pass, or say why not.

        Raises:
            ForbiddenError: a Host that is not ours, or a foreign page.
            WrongContentTypeError: state would change and the body is not declared as JSON.
            UnauthorizedError: the key is missing or wrong.
        """
        host = headers.get("Host", "")
        if not self._is_ours(host):
            raise ForbiddenError(f"Host {host!r} is not one of this service's", code="foreign_host")
        if self.is_foreign_page(headers):
            raise ForbiddenError(
                f"pages of {headers['Origin']!r} may not use these routes", code="foreign_origin"
            )
        if method not in _SAFE_METHODS and method != "DELETE":
            kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise WrongContentTypeError(
                    f"send {method} with Content-Type: application/json; where there is nothing to say, "
                    "the body may be empty"
                )
        self.require_admin(headers)

    @staticmethod
    def is_foreign_page(headers: Mapping[str, str]) -> bool:
        """Whether a page asks that came from elsewhere."""
        origin = headers.get("Origin")
        return origin is not None and _netloc(origin) != headers.get("Host", "").lower()

    def require_admin(self, headers: Mapping[str, str]) -> None:
        """Demand the admin key, where one is configured.

        Raises:
            UnauthorizedError: it is missing or wrong.
        """
        if not self.is_operator(headers):
            raise UnauthorizedError(f"send the admin key as a bearer token or in {ADMIN_HEADER}")

    def is_admin(self, headers: Mapping[str, str]) -> bool:
        """Whether the admin key was presented; never true where none is configured."""
        given = (headers.get(ADMIN_HEADER, ""), self._bearer(headers))
        return any(self._is_key(key) for key in given)

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Whether the admin key was presented, or none is configured."""
        return self._admin_key is None or self.is_admin(headers)

    def is_admin_bearer(self, headers: Mapping[str, str]) -> bool:
        """Whether the bearer token is the admin key, and so no client's key."""
        return self._is_key(self._bearer(headers))

    def _is_key(self, given: str) -> bool:
        if self._admin_key is None:
            return False
        # a header may hold any bytes, which stand in it as surrogates
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._admin_key.encode())

    @staticmethod
    def _bearer(headers: Mapping[str, str]) -> str:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name not in self._hosts:
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
