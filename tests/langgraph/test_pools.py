"""Pools of conversations: had once, had again, given up."""

import asyncio

import pytest
from client.playing import play
from langchain_core.messages import AIMessage, HumanMessage

from polykv_proxy.client import errors
from polykv_proxy.client.results import Pool, Released
from polykv_proxy.langgraph import ChatPolyKV, Pools
from polykv_proxy.langgraph import pools as module

PREFIX = {"system": {"role": "system", "content": "rules"}, "tools": []}
OTHER = {"system": {"role": "system", "content": "other"}, "tools": []}
BRANCH = [HumanMessage("summary?"), AIMessage("short")]
ROOT = Pool(pool_id="root", prefix_len=40)
CHILD = Pool(pool_id="child", prefix_len=60)


@pytest.fixture
def pools():
    """Of a model whose server is never asked."""
    return Pools(ChatPolyKV(base_url="http://127.0.0.1:9", chat_template_kwargs={"k": 1}), {"ttl_s": 60.0})


def test_the_ancestor_is_system_and_tools(pools):
    """With the template's settings; it is asked for once."""
    steps, ref = play(pools._having(PREFIX, ()), ROOT)
    assert [step.path for step in steps] == ["/polykv/pools"]
    assert steps[0].body == {
        "messages": [PREFIX["system"]],
        "chat_template_kwargs": {"k": 1},
        "ttl_s": 60.0,
    }
    assert (ref["id"], ref["root"], ref["n_tokens"]) == ("root", "root", 40)
    assert pools.have(PREFIX) == ref


def test_what_a_compaction_left_is_a_branch_of_it(pools):
    """Both are remembered."""
    steps, ref = play(pools._having(PREFIX, BRANCH), ROOT, CHILD)
    assert [step.path for step in steps] == ["/polykv/pools", "/polykv/pools/root/fork"]
    assert [each["content"] for each in steps[1].body["messages"]] == ["rules", "summary?", "short"]
    assert (ref["id"], ref["root"]) == ("child", "root")
    assert pools.have(PREFIX, BRANCH) == ref
    assert pools.have(PREFIX)["id"] == "root"


def test_a_pool_that_is_gone_is_asked_for_again(pools):
    """Once somebody says so."""
    play(pools._having(PREFIX, ()), ROOT)
    pools.forget("root")
    assert pools._recall(PREFIX, ()) is None


def test_another_prefix_is_another_pool(pools):
    """By content, so two conversations share one."""
    play(pools._having(PREFIX, ()), ROOT)
    assert pools._recall(OTHER, ()) is None
    assert pools._recall({**PREFIX, "tools": [{"function": {"name": "f"}}]}, ()) is None


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (errors.NotFoundError("no route"), True),
        (errors.DisabledError("off"), True),
        (errors.PoolCapacityError("full"), False),
        (errors.BadRequestError("short"), False),
        (errors.UnavailableError("loading"), False),
        (errors.PoolNotFoundError("gone"), False),
    ],
)
def test_without_a_pool_the_conversation_goes_on(pools, error, for_good):
    """A plain engine is not asked again."""
    _, ref = play(pools._having(PREFIX, ()), error)
    assert ref is None
    assert pools._off is for_good
    if for_good:
        assert pools.have(PREFIX) is None


def test_a_wrong_key_is_an_error(pools):
    """Somebody has to know."""
    with pytest.raises(errors.AuthenticationError):
        play(pools._having(PREFIX, ()), errors.AuthenticationError("key"))


def test_a_proxy_that_wants_its_admin_key_is_asked_once(pools, caplog):
    """One warning says what is missing, and what to do; the conversations go on without pools."""
    keyless = errors.AuthenticationError("key", status=401, error={"code": "admin_key_required"})
    _, ref = play(pools._having(PREFIX, ()), keyless)
    assert ref is None
    assert pools.have(OTHER) is None
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "admin_key=" in said.message


def test_what_is_released_is_forgotten(pools):
    """What somebody else still needs is left for later; what is gone is gone."""
    play(pools._having(PREFIX, BRANCH), ROOT, CHILD)
    steps, left = play(
        pools.releasing(["child", "gone", "held", "later"]),
        Released(pool_id="child"),
        errors.NotFoundError("gone"),
        errors.ConflictError("children"),
        errors.UnavailableError("loading"),
    )
    assert [step.path.rpartition("/")[2] for step in steps] == ["child", "gone", "held", "later"]
    assert left == ["held", "later"]
    assert pools._recall(PREFIX, BRANCH) is None


def test_the_memory_is_bounded(pools, monkeypatch):
    """The oldest go."""
    monkeypatch.setattr(module, "REMEMBERED", 2)
    for number in range(4):
        pools.remember(PREFIX, [HumanMessage(str(number))], CHILD, "root")
    assert len(pools._seen) == 2
    assert pools._recall(PREFIX, [HumanMessage("3")]) is not None


async def test_both_ways_to_ask(rig):
    """With threads and with asyncio, against the proxy."""
    long = {"system": {"role": "system", "content": "rules " * 20}, "tools": []}
    model = ChatPolyKV(base_url=rig.url)
    one = await Pools(model).ahave(long)
    pools = Pools(model)
    other = await asyncio.to_thread(pools.have, long)
    assert one == other
    assert await asyncio.to_thread(pools.release, [one["id"]]) == []
    assert await Pools(model).arelease([one["id"]]) == []
    await model.async_client.aclose()
