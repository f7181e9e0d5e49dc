"""LangChain and LangGraph on the proxy. Needs the extra ``langgraph``.

::

    chat_model      ``ChatPolyKV``, a chat model of LangChain
    middleware      ``PolyKVMiddleware``: agents of ``create_agent`` on pools, which compact themselves
    nodes           the same for graphs of one's own: ``CompactionNode``, ``riding``, ``pre_model_hook``
    compaction      when and how a conversation is compacted; pure
    compactor       those decisions, carried out
    pools           pools of conversations, had again when they are gone
    capacity_gate   a node that waits for room, and what resumes graphs that wait
    fan_out         many workers on one shared context
    pool_tools      pools as tools of an orchestrator
    channels        keys of the state, and their reducers
    session_key     the name of a conversation, from LangGraph's own configuration
    errors          the client's errors as model errors of langchain-core

It stands on ``polykv_proxy.client`` and knows nothing of the server.
"""

from __future__ import annotations

from polykv_proxy.langgraph.capacity_gate import (
    CapacityGate,
    NoCheckpointerError,
    aresume_when_free,
    resume_when_free,
    when_saturated,
)
from polykv_proxy.langgraph.channels import (
    Down,
    PolyKVChannels,
    PolyKVState,
    PoolRef,
    Telemetry,
    last_known,
    newest,
)
from polykv_proxy.langgraph.chat_model import ChatPolyKV, OpencotiChatModel
from polykv_proxy.langgraph.compactor import Compactor
from polykv_proxy.langgraph.errors import ContextOverflowError, PoolNotFoundError, PoolSaturatedError
from polykv_proxy.langgraph.fan_out import FanChannels, FanOut
from polykv_proxy.langgraph.middleware import PolyKVMiddleware
from polykv_proxy.langgraph.nodes import CompactionNode, pre_model_hook, riding
from polykv_proxy.langgraph.pool_tools import polykv_tools
from polykv_proxy.langgraph.pools import Pools
from polykv_proxy.langgraph.session_key import session_key

__all__ = [
    "CapacityGate",
    "ChatPolyKV",
    "CompactionNode",
    "Compactor",
    "ContextOverflowError",
    "Down",
    "FanChannels",
    "FanOut",
    "NoCheckpointerError",
    "OpencotiChatModel",
    "PolyKVChannels",
    "PolyKVMiddleware",
    "PolyKVState",
    "PoolNotFoundError",
    "PoolRef",
    "PoolSaturatedError",
    "Pools",
    "Telemetry",
    "aresume_when_free",
    "last_known",
    "newest",
    "polykv_tools",
    "pre_model_hook",
    "resume_when_free",
    "riding",
    "session_key",
    "when_saturated",
]
