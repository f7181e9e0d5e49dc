"""Claims about ``api.reply``: one form for all documents of the control routes."""

from polykv_proxy.api.reply import json_reply


def test_a_document_is_json_in_utf_8():
    """With its status, 200 unless told otherwise."""
    answer = json_reply({"name": "é", "nothing": None})
    assert (answer.status, answer.body) == (200, '{"name":"é","nothing":null}'.encode())
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert json_reply({}, status=201).status == 201
