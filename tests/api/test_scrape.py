"""Claims about ``api.scrape``: one exposition of two sources, protected as the engine's is."""

import asyncio

import pytest
from test_metrics import documented, parsed

from api.rig import CHAT, chat, until
from polykv_proxy.api import status
from polykv_proxy.api.scrape import merged
from polykv_proxy.metrics import CONTENT_TYPE

ENGINE = b"llamacpp:requests_processing"
OURS = b"opencoti_polykv:engine_up"


async def test_the_engines_series_and_ours(rig):
    """Valid together; a compressed form is not asked for."""
    answer = await rig.ask("/metrics", Accept_Encoding="gzip")
    assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
    assert answer.body.startswith(rig.engine.metrics.encode())
    found = parsed(answer.body)
    assert found["llamacpp:requests_processing",] == 0
    assert found["opencoti_polykv:engine_up",] == 1
    assert rig.engine.of("/metrics")[-1].header("accept-encoding") is None
    assert answer.headers["Process-Start-Time-Unix"] == "1700000000"
    assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_an_engines_text_without_a_last_line_end(rig):
    """Ours begin on a line of their own all the same."""
    rig.engine.metrics = rig.engine.metrics.rstrip("\n")
    assert parsed((await rig.ask("/metrics")).body)["opencoti_polykv:engine_up",] == 1


@pytest.mark.parametrize("code", [404, 500, 501, 503])
async def test_an_engine_without_metrics(rig, code):
    """It has none, or loads its model again and nobody noticed yet: ours alone."""
    rig.engine.broken["/metrics"] = (code, b'{"error":{}}')
    answer = await rig.ask("/metrics")
    assert answer.status == 200
    assert answer.body.startswith(b"# HELP opencoti_polykv:")


async def test_no_engine(rig):
    """Ours alone, at once, and they say so."""
    rig.down()
    answer = await rig.ask("/metrics")
    assert (answer.status, parsed(answer.body)["opencoti_polykv:engine_up",]) == (200, 0)
    assert not rig.engine.of("/metrics")


async def test_an_engine_that_does_not_answer(rig, monkeypatch):
    """It is waited for only so long."""
    monkeypatch.setattr(status, "CONTROL_TIMEOUT_S", 0.1)
    rig.engine.slow["/metrics"] = hang = asyncio.Event()
    answer = await rig.ask("/metrics")
    assert (answer.status, ENGINE in answer.body, OURS in answer.body) == (200, False, True)
    hang.set()


async def test_the_engines_refusal_is_the_answer(rig):
    """Who may not see its series does not see ours."""
    rig.engine.broken["/metrics"] = (401, b'{"error":{"message":"no"}}')
    answer = await rig.ask("/metrics")
    assert (answer.status, answer.body) == (401, b'{"error":{"message":"no"}}')


async def test_the_engines_key_is_checked_while_it_is_down(proxies):
    """By us, in its place; the admin key opens it too."""
    rig = await proxies(engine={"api_key": "secret"}, admin="boss")
    rig.down()
    for headers, expected in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"X-Api-Key": "secret"}, 200),
        ({"X-PolyKV-Admin-Key": "boss"}, 200),
    ):
        assert (await rig.ask("/metrics", **headers)).status == expected


async def test_the_admin_key_stands_for_the_engines(proxies):
    """Each engine gets its own; of everybody else, what the client sent."""
    rig = await proxies(engine={"api_key": "secret"}, admin="boss")

    async def sent(**headers):
        assert (await rig.ask("/metrics", **headers)).status == 200
        seen = rig.engine.of("/metrics")[-1]
        return [seen.header(name) for name in ("authorization", "x-api-key", "x-polykv-admin-key")]

    assert await sent(X_Polykv_Admin_Key="boss", X_Api_Key="mine") == ["Bearer secret", None, None]
    assert await sent(Authorization="Bearer boss") == ["Bearer secret", None, None]
    assert await sent(Authorization="Bearer mine") == ["Bearer mine", None, None]
    assert await sent(X_Api_Key="mine") == [None, "mine", None]


async def test_labels_of_pools_are_not_for_everybody(proxies):
    """Where there is an admin key; without it the series stay, by the classes of the pools."""
    rig = await proxies(admin="boss")
    body = {"messages": [{"role": "system", "content": "x" * 300}], "label": "secret"}
    admin = {"X_Polykv_Admin_Key": "boss"}
    assert (await rig.ask("/polykv/pools", body, **admin)).status == 201
    await rig.fleet.sample()
    open_to_all = await rig.ask("/metrics", Authorization="Bearer mine")
    assert b"secret" not in open_to_all.body
    of_class = parsed(open_to_all.body)["opencoti_polykv:pool_kv_bytes", ("pool", "explicit")]
    for headers in (admin, {"Authorization": "Bearer boss"}):
        found = parsed((await rig.ask("/metrics", **headers)).body)
        assert found["opencoti_polykv:pool_kv_bytes", ("pool", "secret")] == of_class > 0


async def test_several_engines_in_one_exposition(proxies):
    """Each series once, with the engine's name; one that is down is missing from its own, not from ours."""
    rig = await proxies(models=("one", "two"))
    rig.engines[1].metrics = rig.engines[1].metrics.replace("processing 0", "processing 5")
    answer = await rig.ask("/metrics")
    assert "Process-Start-Time-Unix" not in answer.headers
    found = parsed(answer.body)
    assert found["llamacpp:requests_processing", ("engine", "engine-0")] == 0
    assert found["llamacpp:requests_processing", ("engine", "engine-1")] == 5
    assert found["opencoti_polykv:engine_up", ("engine", "engine-1")] == 1
    rig.down()
    found = parsed((await rig.ask("/metrics")).body)
    assert ("llamacpp:requests_processing", ("engine", "engine-0")) not in found
    assert found["llamacpp:requests_processing", ("engine", "engine-1")] == 5
    assert found["opencoti_polykv:engine_up", ("engine", "engine-0")] == 0


async def test_they_can_be_turned_off(proxies):
    """Then the route is the engine's, byte for byte."""
    rig = await proxies(telemetry={"metrics": False})
    assert (await rig.ask("/metrics")).body == rig.engine.metrics.encode()


async def test_traffic_shows(rig):
    """Requests with and without a pool, streamed or not, waiting or refused, and overflows."""
    pool = await rig.pool({"messages": [{"role": "system", "content": "x" * 300}], "label": "docs"})
    body = {"messages": [{"role": "system", "content": "x" * 300}, {"role": "user", "content": "hi"}]}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    await rig.ask(CHAT, body | usage | {"pool_id": pool["pool_id"]})
    await rig.ask(CHAT, chat("a"))
    rig.engine.gate.clear()
    running = [rig.start(CHAT, chat(f"hold {number}", stream=True)) for number in range(3)]
    await until(lambda: rig.waiting == 1)
    during = parsed((await rig.ask("/metrics")).body)
    rig.engine.gate.set()
    await asyncio.gather(*running)
    words = "request (3000 tokens) exceeds the available context size (1024 tokens), try increasing it"
    refused = {"error": {"type": "exceed_context_size_error", "message": words, "n_ctx": 1024}}
    rig.engine.script.fault, rig.engine.script.status = "error", 400
    rig.engine.script.error_body = refused
    assert (await rig.ask(CHAT, chat("long"))).error["type"] == "exceed_context_size_error"
    await asyncio.sleep(0.3)
    found = {
        (key[0].removeprefix("opencoti_polykv:"), *key[1:]): value
        for key, value in parsed((await rig.ask("/metrics")).body).items()
    }
    assert during["opencoti_polykv:queue_depth",] == 1
    assert found["queue_depth",] == 0
    assert found["admissions_total", ("outcome", "queued")] == 1
    assert found["queries_total", ("pool", "docs")] == 1
    assert found["queries_total", ("pool", "none")] == 4
    assert found["prefix_cache_hits_total", ("pool", "docs")] == 1
    assert found["tokens_saved_total", ("pool", "docs")] == pool["prefix_len"]
    assert found["pool_kv_bytes", ("pool", "docs")] == 10 * pool["prefix_len"]
    assert found["overflow_total", ("class", "sequence_cap")] == 1
    assert found["ttft_seconds_count",] == 4
    assert found["generated_tokens_total",] >= 8
    assert {key[0] for key in found} >= {"kv_cells_used", "aggregate_tps"}
    assert documented() >= {"tokens_saved_total"}


async def test_a_restart_and_a_shortfall_show(rig):
    """Also what was computed again for it."""
    pool = await rig.pool()
    rig.engine.damage = "reuse"
    await rig.ask(CHAT, chat("hi", pool_id=pool["pool_id"]))
    rig.engine.damage = None
    rig.down()
    rig.engine.restart()
    await rig.up()
    found = parsed((await rig.ask("/metrics")).body)
    assert found["opencoti_polykv:attach_shortfalls_total",] == 1
    assert (
        found["opencoti_polykv:tokens_recomputed_total", ("cause", "attach_shortfall")] == pool["prefix_len"]
    )
    assert found["opencoti_polykv:engine_restarts_total",] == 1


async def test_what_was_computed_again_shows_with_its_cause(rig):
    """Not what is new: a first turn has nothing to go on from."""
    system = {"role": "system", "content": "You are a clerk. " * 30}
    turn = {"messages": [system, {"role": "user", "content": "hi"}]}
    await rig.ask(CHAT, turn, X_Session_Id="one")
    before = rig.runtime.metrics.recomputed.total()
    system["content"] = "You are a " + system["content"]
    changed = (await rig.ask(CHAT, turn, X_Session_Id="one")).json["timings"]
    found = parsed((await rig.ask("/metrics")).body)
    counted = found["opencoti_polykv:tokens_recomputed_total", ("cause", "system_changed")]
    assert (before, counted) == (0, changed["prompt_n"])


async def test_an_engine_that_tells_nothing_shows(rig):
    """Its counters are missed, one look after the other."""
    rig.engine.broken["/polykv/engine/counters"] = (500, b"{}")
    await until(lambda: rig.runtime.metrics.stale_samples >= 2)
    assert parsed((await rig.ask("/metrics")).body)["opencoti_polykv:stale_samples_total",] >= 2


# -- several expositions as one ----------------------------------------------------------------------------


def test_expositions_of_several_engines_become_one():
    """Samples of a metric stay together, labels and timestamps stay, what was written twice is not."""
    one = b"""# HELP llamacpp:tokens_total n
# TYPE llamacpp:tokens_total counter
llamacpp:tokens_total 5
# HELP llamacpp:per_pos p
# TYPE llamacpp:per_pos gauge
llamacpp:per_pos{pos="0"} 0.5
llamacpp:per_pos{} 1
"""
    other = b"# TYPE llamacpp:tokens_total counter\nllamacpp:tokens_total 7 1700000000000\n# remark\n"
    text = merged({"a": one, 'b"\\': other})
    found = parsed(text)
    assert found["llamacpp:tokens_total", ("engine", "a")] == 5
    assert found["llamacpp:tokens_total", ("engine", 'b"\\')] == 7
    assert found["llamacpp:per_pos", ("engine", "a"), ("pos", "0")] == 0.5
    assert found["llamacpp:per_pos", ("engine", "a")] == 1
    assert text.count(b"# TYPE llamacpp:tokens_total") == 1
    assert merged({}) == b""


def test_a_sample_without_a_head():
    """What no line announces is kept all the same."""
    assert parsed(merged({"a": b"x 1\n", "b": b"x 2\n"})) == {
        ("x", ("engine", "a")): 1,
        ("x", ("engine", "b")): 2,
    }


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_only_a_line_feed_ends_a_line(mark):
    """What else counts as a line end somewhere may stand in a label of an engine's."""
    text = f'x{{path="a{mark}b"}} 1\ny 2\n'.encode()
    assert merged({"a": text}) == f'x{{engine="a",path="a{mark}b"}} 1\ny{{engine="a"}} 2\n'.encode()
