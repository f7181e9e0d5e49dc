"""Requests of every API, and what became of them."""

from api.rig import CHAT, SYSTEM, chat

PROMPT = "Once upon a time there was a proxy. " * 3


def text(**more):
    """A plain completion."""
    return {"prompt": PROMPT, **more}


APIS = {
    "/completion": text(),
    "/v1/completions": text(),
    CHAT: chat("hi"),
    "/v1/responses": {"instructions": SYSTEM, "input": "hi"},
    "/v1/messages": {"system": SYSTEM, "messages": [{"role": "user", "content": "hi"}]},
}
"""A body for every API."""

LAST = {
    "/completion": lambda name, event: event.get("stop") is True,
    "/v1/completions": lambda name, event: event["choices"] and event["choices"][0]["finish_reason"],
    CHAT: lambda name, event: event["choices"] and event["choices"][0]["finish_reason"],
    "/v1/responses": lambda name, event: name == "response.completed",
    "/v1/messages": lambda name, event: name == "message_delta",
}
"""The event that carries the block, in a stream without a usage chunk."""


async def pool_for(rig, path):
    """A pool of the start of the API's body; its id and length."""
    rendered = PROMPT if "prompt" in APIS[path] else rig.engine.renders(APIS[path])
    made = await rig.pool({"tokens": rig.engine.tokens_of(rendered)[:60]})
    return made["pool_id"]


def spy(rig):
    """The last generation that the engine saw."""
    return rig.engine.work[-1]
