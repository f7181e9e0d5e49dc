"""State: the newest reading wins, the pool flows down and never up."""

from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware.types import AgentMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from polykv_proxy.langgraph.channels import PolyKVChannels, PolyKVState, last_known, newest, told

POOL = {"id": "p", "root": "r", "n_tokens": 9}


def test_the_newest_reading_wins():
    """By its own time, not by the order of arrival; nothing takes nothing away."""
    early, late = {"ts": 1.0, "headroom_sessions": 4}, {"ts": 2.0, "headroom_sessions": 0}
    assert newest(late, early) is late
    assert newest(early, late) is late
    assert newest(None, early) is early
    assert newest(early, None) is early
    assert (last_known(4, None), last_known(None, 0), last_known(4, 0)) == (4, 0, 0)


def test_a_reading_is_told_as_a_whole_and_by_its_figures():
    """Unknown figures are None, which leaves what was known."""
    reading = {"ts": 1.0, "headroom_sessions": 3, "session_tps": 8.5}
    assert told(reading) == {
        "polykv": reading,
        "headroom_sessions": 3,
        "mean_active_tps": None,
        "compaction_pressure": None,
    }


class State(PolyKVChannels):
    """A graph's own."""

    note: Annotated[list[Any], lambda old, new: [*old, *new]]


def test_before_the_first_reading_nothing_is_known():
    """And not 0, which would mean that there is no room."""
    seen = []
    builder = StateGraph(State)
    builder.add_node("look", lambda state: seen.append(dict(state)) or {"note": ["x"]})
    builder.add_edge(START, "look").add_edge("look", END)
    builder.compile().invoke({"note": []})
    assert "headroom_sessions" not in seen[0] or seen[0]["headroom_sessions"] is None


def test_workers_that_read_at_once_do_not_collide():
    """In one step, many writers."""

    def work(state):
        reading = {"ts": float(state["number"]), "headroom_sessions": 10 - state["number"]}
        return {"note": [state["number"]], **told(reading)}

    builder = StateGraph(State)
    builder.add_node("work", work)
    builder.add_conditional_edges(
        START, lambda _: [Send("work", {"number": number}) for number in (3, 1, 2)], ["work"]
    )
    done = builder.compile().invoke({"note": []})
    assert done["polykv"] == {"ts": 3.0, "headroom_sessions": 7}


class Rides(AgentMiddleware):
    """What our middleware does to the state, without a server."""

    state_schema = PolyKVState

    def __init__(self, given):
        super().__init__()
        self.given = given

    def before_model(self, state, runtime):
        """Keep what was given, and take another."""
        self.given.append(state.get("polykv_pool"))
        return {"polykv_pool": {"id": "own", "root": "own", "n_tokens": 1}}


def test_a_sub_agent_is_given_a_pool_and_hands_none_back():
    """Its own stays its own."""
    given = []
    model = GenericFakeChatModel(messages=iter([AIMessage("yes")] * 4))
    agent = create_agent(model, middleware=[Rides(given)])
    answer = agent.invoke({"messages": [("user", "hi")], "polykv_pool": POOL})
    assert given == [POOL]
    assert "polykv_pool" not in answer


def test_parallel_sub_agents_leave_their_parents_pool_alone():
    """Two of them in one step, as nodes of a graph that has a pool itself."""
    given = []
    model = GenericFakeChatModel(messages=iter([AIMessage("yes")] * 4))
    agent = create_agent(model, middleware=[Rides(given)])
    builder = StateGraph(PolyKVState)
    builder.add_node("sub", agent)
    sent = {"messages": [("user", "hi")], "polykv_pool": POOL}
    builder.add_conditional_edges(START, lambda _: [Send("sub", sent) for _ in range(2)], ["sub"])
    done = builder.compile().invoke(sent)
    assert given == [POOL, POOL]
    assert done.get("polykv_pool") in (None, POOL)
