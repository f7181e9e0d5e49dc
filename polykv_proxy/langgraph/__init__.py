"""LangChain and LangGraph on the proxy. Needs the extra ``langgraph``."""

from __future__ import annotations

from polykv_proxy.langgraph.chat_model import ChatPolyKV, OpencotiChatModel

__all__ = ["ChatPolyKV", "OpencotiChatModel"]
