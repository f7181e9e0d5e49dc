"""Claims about ``api.guard``: who may drive the control plane."""

import pytest

from polykv_proxy.api.guard import Guard, UnauthorizedError, WrongContentTypeError
from polykv_proxy.errors import ForbiddenError

JSON = {"Content-Type": "application/json"}


def check(guard, method="GET", **headers):
    """Ask the guard; underscores in names are dashes."""
    guard.check(
        method, {"Host": "localhost"} | {name.replace("_", "-"): value for name, value in headers.items()}
    )


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8090", "127.0.0.1:8090", "[::1]:8090", "10.0.0.7", "proxy.lan", "Proxy.LAN:1"],
)
def test_our_hosts_pass(host):
    """localhost, addresses and the names that were allowed, with any port."""
    Guard(None, ["proxy.lan"]).check("GET", {"Host": host})
    assert Guard(None, []).is_admin({"Host": host}) is False


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[::1", "[nonsense]", "a b"])
def test_other_hosts_are_refused(host):
    """A page that points a name of its own at us is told so, and so is nonsense."""
    with pytest.raises(ForbiddenError) as caught:
        Guard(None, []).check("GET", {"Host": host})
    assert caught.value.code == "foreign_host"


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "http://[::1", "", "http://\udcff"]
)
def test_pages_of_others_are_refused(origin):
    """An Origin has to be the host that was asked for, port included."""
    with pytest.raises(ForbiddenError) as caught:
        check(Guard(None, []), Origin=origin)
    assert caught.value.code == "foreign_origin"
    assert caught.value.message.encode()  # a header may hold any bytes, an answer only text


def test_our_own_page_passes():
    """Its Origin is our Host."""
    guard = Guard(None, [])
    guard.check("GET", {"Host": "localhost:8090", "Origin": "http://LOCALHOST:8090"})
    with pytest.raises(WrongContentTypeError):
        guard.check("POST", {"Host": "localhost:8090", "Origin": "http://localhost:8090"})


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
)
def test_a_form_cannot_change_anything(kind):
    """What changes state has to be declared as JSON, which a form cannot do."""
    with pytest.raises(WrongContentTypeError):
        check(Guard(None, []), "POST", **({} if kind is None else {"Content_Type": kind}))


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_methods_without_a_body_need_no_type(method):
    """A page cannot send DELETE without asking first."""
    check(Guard(None, []), method)
    with pytest.raises(WrongContentTypeError):
        check(Guard(None, []), "PUT")


def test_the_admin_key_is_demanded_where_there_is_one():
    """As a bearer token or in our header; wrong and missing ones are refused."""
    guard = Guard("s3cret", [])
    check(guard, "POST", Content_Type="application/json; charset=utf-8", Authorization="Bearer s3cret")
    check(guard, X_PolyKV_Admin_Key="s3cret")
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic s3cret"}):
        with pytest.raises(UnauthorizedError):
            check(guard, **headers)


def test_any_bytes_may_be_a_wrong_key():
    """Headers that are no text are refused and break nothing; keys that are no ASCII work."""
    with pytest.raises(UnauthorizedError):
        check(Guard("s3cret", []), Authorization="Bearer \udcff")
    check(Guard("schlüssel", []), Authorization="Bearer schlüssel")


def test_an_administrator_is_known_only_by_the_key():
    """Without a configured key nobody is one, and an empty header is not the empty key."""
    assert not Guard(None, []).is_admin({"X-PolyKV-Admin-Key": ""})
    assert not Guard(None, []).is_admin_bearer({"Authorization": "Bearer "})
    guard = Guard("k", [])
    assert guard.is_admin({"X-PolyKV-Admin-Key": "k"})
    assert guard.is_operator({"X-PolyKV-Admin-Key": "k"})
    assert not guard.is_operator({})
    assert Guard(None, []).is_operator({}), "nobody is set apart"
    assert not guard.is_admin_bearer({"X-PolyKV-Admin-Key": "k"})
    assert guard.is_admin_bearer({"Authorization": "Bearer k"})
