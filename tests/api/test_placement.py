"""Claims about ``api.placement``: a request goes to the engine where its state is."""

from api.rig import CHAT, SYSTEM, chat, until
from polykv_proxy.api import placement

ALIKE = ("a", "a")
LONG = "A scene that is long enough to be worth remembering. " * 30


def of(rig, path=CHAT):
    """How many requests each engine has run."""
    return [len([each for each in engine.work if each.path == path]) for engine in rig.engines]


async def test_a_request_that_names_a_pool_goes_where_it_lives(proxies):
    """And rides on it."""
    rig = await proxies(models=ALIKE)
    made = await rig.pool({"messages": [{"role": "system", "content": SYSTEM}], "engine": "engine-1"})
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]))
    assert of(rig) == [0, 1]
    assert answer.json["opencoti"]["n_pool_shared"] == made["prefix_len"]


async def test_the_same_content_is_one_pool_wherever_it_is_asked_for(proxies):
    """Created on one engine, found from then on."""
    rig = await proxies(models=ALIKE)
    first = await rig.pool({"messages": [{"role": "system", "content": SYSTEM}], "engine": "engine-1"})
    again = await rig.pool({"messages": [{"role": "system", "content": SYSTEM}], "engine": "engine-0"})
    assert (again["pool_id"], again["engine"], again["created"]) == (first["pool_id"], "engine-1", False)
    assert [len(engine.pools) for engine in rig.engines] == [0, 1]


async def test_a_request_without_a_name_finds_its_pool_on_any_engine(proxies):
    """Its tokens are asked for once, wherever it goes."""
    rig = await proxies(models=ALIKE)
    for engine in rig.engines:
        engine.tokens_of = lambda text: [len(word) for word in text.split()]
    made = await rig.pool({"messages": [{"role": "system", "content": LONG}], "engine": "engine-1"})
    body = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "a question"}]}
    answer = await rig.ask(CHAT, body)
    assert of(rig) == [0, 1]
    assert answer.headers["x-pool-id"] == made["pool_id"]
    assert [len(engine.of(f"{CHAT}/input_tokens")) for engine in rig.engines] == [1, 2]  # the pool's probes
    body["messages"][1]["content"] = "another"
    await rig.ask(CHAT, body)
    assert of(rig) == [0, 2]
    assert [len(engine.of(f"{CHAT}/input_tokens")) for engine in rig.engines] == [1, 3]  # the scene is known


async def test_a_conversation_goes_on_where_it_is(proxies):
    """Although the other engine has less to do."""
    rig = await proxies(models=ALIKE)
    await rig.ask(f"{CHAT}?engine=engine-1", chat("one"))
    await rig.quiet()
    await rig.ask(CHAT, chat("one", "two"))
    assert of(rig) == [0, 2]


async def started(rig, bodies):
    """Requests that run all at once, begun one after the other; returns how many each engine got."""
    for engine in rig.engines:
        engine.gate.clear()
    running = []
    for body in bodies:
        running.append(rig.start(CHAT, body))
        await until(lambda: sum(engine.running for engine in rig.engines) == len(running))
    spread = [engine.running for engine in rig.engines]
    for engine in rig.engines:
        engine.gate.set()
    for each in running:
        await each
    return spread


def scene(number):
    """A request with a system prompt that is worth something, and a question of its own."""
    asking = {"role": "user", "content": f"question {number}"}
    return {"messages": [{"role": "system", "content": LONG}, asking]}


async def test_conversations_with_the_same_scene_stay_together_while_there_is_room(proxies):
    """What they share may be a pool there soon; beyond that they spread."""
    rig = await proxies(models=ALIKE, pools={"auto_pools": False})
    assert await started(rig, map(scene, range(2))) == [2, 0]
    assert await started(rig, map(scene, range(2, 5))) == [2, 1]


async def test_without_a_scene_the_load_decides(proxies):
    """Short requests have nothing to share."""
    rig = await proxies(models=ALIKE)
    bodies = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(4)]
    assert await started(rig, bodies) == [2, 2]


async def test_the_model_in_the_body_chooses(proxies):
    """A name that nobody knows goes to whoever has room."""
    rig = await proxies(models=("a", "b"))
    await rig.ask(CHAT, chat("hi", model="b"))
    assert of(rig) == [0, 1]
    await rig.ask(CHAT, chat("there", model="gpt-4o"))
    assert sum(of(rig)) == 2


async def test_an_engine_that_is_down_gets_nothing(proxies):
    """The others carry on; a pool that lived there counts as unknown."""
    rig = await proxies(models=ALIKE)
    made = await rig.pool()
    assert made["engine"] == "engine-0"
    rig.down()
    answer = await rig.ask(CHAT, chat("hi", pool_id=made["pool_id"]))
    assert of(rig) == [0, 1]
    assert answer.json["opencoti"]["pool_unknown"] is True


async def test_a_resumable_stream_is_taken_up_where_it_runs(proxies, monkeypatch):
    """And stopped there; one that is not known is the first engine's to refuse."""
    monkeypatch.setattr(placement, "MAX_STREAMS", 1)
    rig = await proxies(models=ALIKE)
    await rig.ask(f"{CHAT}?engine=engine-1", chat("hi"), X_Conversation_Id="c/1")
    await rig.ask("/v1/stream?conv_id=c%2F1", method="DELETE")
    assert [len(engine.of("/v1/stream")) for engine in rig.engines] == [0, 1]
    await rig.ask(f"{CHAT}?engine=engine-1", chat("there"), X_Conversation_Id="c2")
    await rig.ask("/v1/stream?conv_id=c%2F1", method="DELETE")
    assert [len(engine.of("/v1/stream")) for engine in rig.engines] == [1, 1]


async def test_sessions_have_ids_of_their_own_on_each_engine(proxies):
    """Listings show them together."""
    rig = await proxies(models=ALIKE)
    for engine in ("engine-0", "engine-1"):
        await rig.ask(f"{CHAT}?engine={engine}", chat("hi"))
    listed = (await rig.ask("/polykv/sessions")).json["sessions"]
    assert [(each["engine"], each["session_id"]) for each in listed] == [
        ("engine-0", "auto-1"),
        ("engine-1", "auto-1-1"),
    ]


async def test_the_listing_adds_up_over_all_engines(proxies):
    """Sums at the top, one part for each engine below."""
    rig = await proxies(models=ALIKE)
    for engine in ("engine-0", "engine-1"):
        await rig.pool({"prompt": f"a prompt for {engine}", "engine": engine})
    listing = (await rig.ask("/polykv/pools")).json
    assert [pool["engine"] for pool in listing["pools"]] == ["engine-0", "engine-1"]
    assert listing["kv_cells_used"] == sum(engine.used for engine in rig.engines)
    assert [part["kv_cells_used"] for part in listing["engines"]] == [engine.used for engine in rig.engines]
    assert listing["seq_ids_max"] == 8
    assert listing["unattributed_cells"] == 0
