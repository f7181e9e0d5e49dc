"""Requests whose reuse is looked at, on a fake engine whose slots keep what a next prompt agrees with."""

from __future__ import annotations

from api.rig import CHAT, until

HISTORY = ("First question.", "A second one.", "And a third.")
COUNT = "/v1/chat/completions/input_tokens"
ALONE = {"auto_pools": False, "auto_match": False}
"""Settings under which nothing is reused but a slot's own."""


def last(rig):
    """The last request's record."""
    return rig.journal.book.latest(None, session_id=None, limit=1)[0]


async def explained(rig, body, path=CHAT, **options):
    """What the record says of a request when nothing is asked for any more."""
    answer = await rig.ask(path, body, **options)
    assert answer.status == 200, answer.body
    await rig.quiet()
    await until(lambda: not any(each.inference._recall.refining for each in rig.handlers))
    return last(rig).divergence


async def twice(rig, one, other, path=CHAT):
    """The divergence of the second of two requests."""
    await explained(rig, one, path)
    return await explained(rig, other, path)


def agreed(rig, one, other):
    """Where two prompts part."""
    first, second = rig.engine.renders(one), rig.engine.renders(other)
    return next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


def plain(body):
    """Without our members."""
    return {key: value for key, value in body.items() if key != "session_id"}
