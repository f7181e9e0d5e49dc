"""Which routes the proxy has of its own: what each reads and answers, and how it refuses. See ``openapi``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polykv_proxy.api import shapes, shapes_kept
from polykv_proxy.api.admission import Places
from polykv_proxy.api.prefixes import ForkRequest, PoolRequest
from polykv_proxy.api.sessions import Migration

if TYPE_CHECKING:
    from collections.abc import Mapping

    Json = dict[str, Any]
    Codes = Mapping[int, str]


def reference(name: str) -> Json:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


# -- how routes refuse -------------------------------------------------------------------------------------

ALWAYS: Codes = {401: "admin_key_required", 403: "foreign_host foreign_origin"}
CHANGES: Codes = {413: "body_too_large", 415: "json_required"}
"""Of what has a body."""
ANYWHERE = "internal_error stopping engine_gone head_too_large malformed_http"
"""Of the proxy as such."""

_POOLS: Codes = {501: "polykv_disabled", 503: "engine_loading"}
_POOL: Codes = {404: "pool_not_found", **_POOLS}
_SESSION: Codes = {404: "session_not_found", 409: "session_ambiguous"}
_ASKS: Codes = {
    400: "engine_refused",
    429: "queue_full",
    503: "engine_down engine_unavailable engine_failed engine_refused engine_timeout engine_gone engine_auth "
    "engine_protocol engine_loading cells_exhausted",
}
"""Of what has the engine do something."""
_READS: Codes = {400: "invalid_request"}
_TOKENS: Codes = {400: "invalid_request no_such_engine prefix_too_short"}
_MAKES: Codes = {
    400: "pool_too_long",
    404: "session_not_found",
    409: "pool_capacity_exhausted pool_lost session_ambiguous session_not_resident slot_busy tokens_unknown "
    "state_is_whole",
    501: "copy_ineffective",
    503: "pool_given_up slot_file slot_file_unreadable",
}
_IN_USE: Codes = {409: "pool_has_children pool_materializing"}
_OF_ENGINE: Codes = {
    400: "no_such_engine",
    502: "engine_gone",
    503: "engine_loading engine_down engine_gone engine_timeout",
}
"""Of the engine's own documents and actions."""
_SATURATED: Codes = {429: "pool_saturated", 503: "cannot_tell"}


def _codes(*sets: Codes) -> dict[int, list[str]]:
    """All of them, by status."""
    found: dict[int, list[str]] = {}
    for each in sets:
        for status, codes in each.items():
            known = found.setdefault(status, [])
            known += [code for code in codes.split() if code not in known]
    return dict(sorted(found.items()))


# -- routes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    says: str
    answer: Any
    """The type of its answer, or its schema."""
    body: Any = None
    statuses: tuple[int, ...] = (200,)
    query: Json = field(default_factory=dict)
    """Its parameters and what they are."""
    headers: Json = field(default_factory=dict)
    refuses: tuple[Codes, ...] = ()
    streams: bool = False
    guarded: bool = True
    """Whether it is behind the guard of the control routes."""

    @property
    def codes(self) -> dict[int, list[str]]:
        """Codes of its refusals, by status."""
        guard = (ALWAYS, *((CHANGES,) if self.method == "post" else ())) if self.guarded else ()
        return _codes(*guard, *self.refuses)

    @property
    def name(self) -> str:
        """Says which it is."""
        words = [word for word in re.split(r"[/.]", self.path) if word and "{" not in word]
        one = ["one"] if self.path.endswith("}") else []
        return "_".join([self.method, *words, *one])


def _get(path: str, says: str, answer: Any, *refuses: Codes, **more: Any) -> Operation:
    return Operation(method="get", path=path, says=says, answer=answer, refuses=refuses, **more)


def _post(path: str, says: str, answer: Any, *refuses: Codes, **more: Any) -> Operation:
    return Operation(method="post", path=path, says=says, answer=answer, refuses=refuses, **more)


def _delete(path: str, says: str, answer: Any, *refuses: Codes, **more: Any) -> Operation:
    return Operation(method="delete", path=path, says=says, answer=answer, refuses=refuses, **more)


_FLAG = {"enum": ["0", "1", "false", "true"], "default": "0"}
_LARGEST = {"maximum": 999_999_999}
"""Of a number in a query: nine digits are read."""
_COUNT = {"type": "integer", "minimum": 1}
_SCOPE = {
    "scope": {"type": "string", "description": "With the admin key: as the API key of this scope sees it."}
}
_ENGINE = {"engine": {"type": "string", "description": "An engine's name; else the first."}}
_RECURSIVE = {"recursive": {**_FLAG, "description": "With all that is below it."}}
_PAGE = {
    "limit": {**_COUNT, "maximum": 200, "default": 100},
    "after": {"type": "string", "description": "What `next` was in the page before."},
    **_SCOPE,
}
_EXPECTED = {
    "expected_tokens": {
        "type": "integer",
        "minimum": 0,
        **_LARGEST,
        "description": "That it is going to need.",
    }
}
_EFFECTIVE = {
    "description": "What is in force for the sessions of a pool, or for those that name none.",
    "type": "object",
    "properties": {
        "engine": {"type": "string"},
        "pool_id": {"type": ["string", "null"]},
        "effective": reference("Effective"),
        "sources": {
            "description": "Where each value is from: `built_in`, a section of the policy file, or a pool.",
            "type": "object",
            "additionalProperties": {"type": "string"},
        },
    },
    "required": ["engine", "pool_id", "effective", "sources"],
}
_ENGINES_OWN = {"type": "object", "additionalProperties": True, "description": "The engine's own."}


def _with_member(kind: str) -> Json:
    return {**_ENGINES_OWN, "properties": {"opencoti": reference(kind)}, "required": ["opencoti"]}


_HEALTH = {
    **_ENGINES_OWN,
    "description": "The engine's own; of several engines this.",
    "properties": {
        "status": {"type": "string"},
        "engines": {"type": "array", "items": reference("EngineHealth")},
    },
}

OPERATIONS = (
    _get(
        "/polykv/pools",
        "Pools, and where all used cells are.",
        shapes.Pools,
        _READS,
        _POOLS,
        query={"orphans": {**_FLAG, "description": "List only pinned pools that nobody uses."}, **_SCOPE},
    ),
    _post(
        "/polykv/pools",
        "Create a pool: 201, or 200 with the one that holds this content already.",
        shapes.CreatedPool,
        _POOLS,
        _TOKENS,
        _MAKES,
        _ASKS,
        body=PoolRequest,
        query=_SCOPE,
        statuses=(201, 200),
    ),
    _get("/polykv/pools/{pool_id}", "One pool, and what is below it.", shapes.PoolWithSubtree, _POOL),
    _delete(
        "/polykv/pools/{pool_id}",
        "Release a pool: its id is gone at once, its cells when their last holder leaves.",
        shapes.Released,
        _READS,
        _POOL,
        _IN_USE,
        query=_RECURSIVE,
    ),
    _post(
        "/polykv/pools/{pool_id}/release",
        "The same as DELETE.",
        shapes.Released,
        _READS,
        _POOL,
        _IN_USE,
        query=_RECURSIVE,
    ),
    _post(
        "/polykv/pools/{pool_id}/fork",
        "Make a child of a pool: extend it, or branch off anywhere in it.",
        shapes.CreatedPool,
        _POOL,
        _TOKENS,
        _MAKES,
        {409: "prefix_mismatch"},
        _ASKS,
        body=ForkRequest,
        statuses=(201, 200),
    ),
    _post(
        "/polykv/pools/{pool_id}/evict",
        "Give a pool's cells back; its id stays.",
        shapes.Evicted,
        _POOL,
        _IN_USE,
        {409: "pool_pinned"},
    ),
    _post(
        "/polykv/pools/{pool_id}/flush",
        "Evict a pool and all that is below it.",
        shapes.Evicted,
        _POOL,
        _IN_USE,
        {409: "pool_pinned"},
    ),
    _post("/polykv/pools/{pool_id}/pin", "Never evict it unasked.", shapes.Pin, _POOL),
    _post("/polykv/pools/{pool_id}/unpin", "Undo that.", shapes.Pin, _POOL),
    _get(
        "/polykv/pools/{pool_id}/admission",
        "What holds for the sessions of a pool, and where each value is from.",
        _EFFECTIVE,
        _POOL,
    ),
    _get(
        "/polykv/admission",
        "The same for sessions that name no pool.",
        _EFFECTIVE,
        {400: "no_such_engine"},
        query=_ENGINE,
    ),
    _post(
        "/polykv/pools/{pool_id}/admission",
        "Say what holds for the sessions of a pool, in place of what was said before.",
        _EFFECTIVE,
        _POOL,
        {400: "invalid_request invalid_policy"},
        body=reference("AdmissionKeys"),
    ),
    _get(
        "/polykv/pools/{pool_id}/capacity",
        "Whether one more session of a pool would come in.",
        shapes.Capacity,
        _POOL,
        _READS,
        query=_EXPECTED,
    ),
    _post(
        "/polykv/pools/{pool_id}/reserve",
        "Keep places for sessions that will come: all of them, or none.",
        shapes.Leases,
        _POOL,
        _READS,
        _SATURATED,
        body=Places,
        headers={"Idempotency-Key": {"type": "string", "description": "The same one gets the same leases."}},
    ),
    _get(
        "/polykv/capacity",
        "Whether one more session that names no pool would come in.",
        shapes.Capacity,
        {400: "invalid_request no_such_engine"},
        query={**_ENGINE, **_EXPECTED},
    ),
    _post(
        "/polykv/tokenize",
        "Exact token ids of a prompt, or of what chats that begin with messages have in common.",
        shapes.Tokenized,
        _POOLS,
        _TOKENS,
        _ASKS,
        body=PoolRequest,
    ),
    _get("/polykv/sessions", "Sessions, the last used first.", shapes.Sessions, _READS, query=_SCOPE),
    _post(
        "/polykv/sessions/{session_id}/close",
        "End a session; the cells that only it held are free.",
        shapes.Closed,
        _READS,
        _SESSION,
        {409: "session_running"},
        query={"keep": {**_FLAG, "description": "Keep its state on disk."}, **_SCOPE},
    ),
    _post(
        "/polykv/sessions/{session_id}/migrate",
        "Let a session's next request attach to another pool: all of it, or nothing.",
        shapes.Migrated,
        _READS,
        _SESSION,
        _POOL,
        {409: "session_running slot_busy other_engine pool_lost pool_capacity_exhausted"},
        _ASKS,
        body=Migration,
        query=_SCOPE,
    ),
    _get(
        "/polykv/tps",
        "What every session experiences: a stream of documents for `Accept: text/event-stream`, else one.",
        shapes.Rates,
        _READS,
        query={"once": {**_FLAG, "description": "One document in any case."}, **_SCOPE},
        streams=True,
    ),
    _get(
        "/polykv/cache",
        "What KV is on disk, in the order in which it came there, and what went lately.",
        shapes_kept.Cache,
        _READS,
        query=_PAGE,
    ),
    _get(
        "/polykv/cache/{key}",
        "What is on disk under a key, and under those nested below it by `/`.",
        shapes_kept.CacheKey,
        _READS,
        {404: "cache_not_found"},
        query=_PAGE,
    ),
    _delete(
        "/polykv/cache/{key}",
        "Delete what is saved under a key, and under those nested below it.",
        shapes_kept.Deleted,
        _READS,
        {404: "cache_not_found", 409: "cache_in_use", 503: "slot_file"},
        query=_SCOPE,
    ),
    _get(
        "/polykv/requests",
        "What the last requests computed, latest first.",
        shapes_kept.Requests,
        _READS,
        query={
            "session_id": {"type": "string"},
            "request_id": {"type": "string"},
            **_SCOPE,
            "limit": {**_COUNT, **_LARGEST, "default": 100},
        },
    ),
    _get(
        "/polykv/requests/{request_id}",
        "One request.",
        shapes_kept.Request,
        {404: "request_not_found"},
    ),
    _get("/polykv/advice", "What keeps conversations from sharing, the latest first.", shapes_kept.Advice),
    _get("/polykv/openapi.json", "This document.", _ENGINES_OWN | {"description": "OpenAPI 3.1."}),
    _get(
        "/health",
        "Whether an engine serves; of several engines, how each is.",
        _HEALTH,
        {400: "no_such_engine", 502: "engine_gone", 503: "503 engine_gone engine_timeout"},
        query={"engine": {"type": "string", "description": "An engine's name: its own answer."}},
        guarded=False,
    ),
    _get(
        "/props",
        "The engine's properties, with a member of ours.",
        _with_member("Properties"),
        _OF_ENGINE,
        query=_ENGINE,
        guarded=False,
    ),
    _get(
        "/slots",
        "The engine's slots, each with a member of ours.",
        {"type": "array", "items": _with_member("SlotMember")},
        _OF_ENGINE,
        query=_ENGINE,
        guarded=False,
    ),
    _post(
        "/slots/{id_slot}",
        "An action of the engine's on an idle slot, whose conversation is then forgotten.",
        _ENGINES_OWN,
        {400: "no_such_slot", 401: "admin_key_required", 409: "slot_busy", 413: "body_too_large"},
        _OF_ENGINE,
        body=_ENGINES_OWN,
        query={"action": {"enum": ["save", "restore", "erase"]}, **_ENGINE},
        guarded=False,
    ),
)
