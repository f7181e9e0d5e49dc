"""Conversations that their clients say begin alike, and what they were seen to begin with.

Rule 1: a group's name is a hint. What its prompts have in common is found in their tokens, never assumed.
Rule 2: one conversation is no group: turns of it, under whatever name, tell nothing about others.
Rule 3: bounded, in groups and in tokens; the group that was met longest ago is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polykv_proxy.core.slots import SAME_CONVERSATION_LINKS
from polykv_proxy.core.types import common_prefix

if TYPE_CHECKING:
    from polykv_proxy.core.slots import Chain
    from polykv_proxy.core.types import Scope, Tokens

MAX_GROUPS = 64
MAX_TOKENS = 65_536
"""Leading tokens kept of a group's prompt: a quarter of a mebibyte."""


@dataclass(slots=True)
class _Group:
    chain: Chain
    tokens: Tokens
    """What all conversations of it had in common; of a group of one, its prompt."""


class GroupBook:
    """All groups of one engine's clients."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Scope, str], _Group] = OrderedDict()

    def __len__(self) -> int:
        """Groups that are known."""
        return len(self._groups)

    def meet(self, scope: Scope, name: str, chain: Chain, tokens: Tokens) -> int:
        """A conversation of a group begins; leading tokens that it shares with all before it.

        1. The first of its group, or nothing in common with it: the group begins anew. 0.
        2. The same conversation again: 0.
        3. Another one: the group is what they have in common, and so is the answer.

        Args:
            scope: whose conversation it is.
            name: the group's name, as the client gave it.
            chain: the conversation's fingerprint.
            tokens: its prompt.
        """
        group = self._groups.pop((scope, name), None)
        shared = 0 if group is None else common_prefix(group.tokens, tokens)
        if group is None or not shared:
            group = _Group(chain, tokens[:MAX_TOKENS])  # 1
            shared = 0
        elif _same_conversation(group.chain, chain):
            shared = 0  # 2
        else:
            group.tokens = group.tokens[:shared]  # 3
        self._groups[scope, name] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return shared


def _same_conversation(one: Chain, other: Chain) -> bool:
    return len(one) >= SAME_CONVERSATION_LINKS <= len(other) and (
        one[:SAME_CONVERSATION_LINKS] == other[:SAME_CONVERSATION_LINKS]
    )
