"""Claims about ``core.texts``: what is reused is what the tokenizer would have said, in bounded memory."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polykv_proxy.core.texts import MARGIN_BYTES, Seam, Texts, choose_seam
from polykv_proxy.core.types import Scope, as_tokens

ME, YOU = Scope("me"), Scope("you")
START, END, LONG = "<s>", "<e>", "<e><s>"
SPECIAL = {START: 1, END: 2, LONG: 3}
PIECES = re.compile("|".join(map(re.escape, sorted(SPECIAL, key=len, reverse=True))))


def encode(text: str, *, bos: bool = False) -> list[int]:
    """A tokenizer that cuts at special tokens, longest first, and whose pieces depend on all of a piece."""
    tokens, at = [1] if bos else [], 0
    for found in [*PIECES.finditer(text), None]:
        piece = text[at : len(text) if found is None else found.start()]
        # the same letters are other tokens in another piece: nothing but whole pieces can be reused
        tokens += [
            100 + (ord(letter) * 31 + len(piece) * 7 + place) % 900 for place, letter in enumerate(piece)
        ]
        if found is not None:
            tokens.append(SPECIAL[found.group()])
            at = found.end()
    return tokens


def read(texts: Texts, text: str, *, bos: bool = False, scope: Scope = ME) -> tuple[list[int], int]:
    """Tokens of a prompt, as a reader makes them, and how many of them were known."""
    raw = text.encode()
    start = texts.start(scope, raw)
    rest = raw[start.offset :].decode()
    tokens = list(start.tokens) + encode(rest, bos=bos and not start.offset)
    texts.learn(scope, raw, as_tokens(tokens))
    return tokens, len(start.tokens)


message = st.builds(
    lambda role, text: f"{START}{role}\n{text}{END}\n",
    st.sampled_from(["user", "bot"]),
    st.text(st.sampled_from("ab é<s>e|"), max_size=120),
)


@settings(max_examples=300)
@given(st.lists(st.lists(message, max_size=6), min_size=1, max_size=5), st.booleans(), st.data())
def test_a_prompt_read_in_parts_is_the_prompt_read_whole(chats, bos, data):
    """Whatever was read before it, also texts that contain special tokens and halves of them."""
    texts = Texts(Seam(START.encode(), SPECIAL[START], added=int(bos)), 1 << 20)
    head = f"{START}system\n" + "Be brief. " * 20 + f"{END}\n"
    for chat in chats:
        for turns in range(len(chat) + 1):
            text = (
                head + "".join(chat[:turns]) + data.draw(st.sampled_from([f"{START}bot\n", "", "x", START]))
            )
            assert read(texts, text, bos=bos)[0] == encode(text, bos=bos)


def turn(number: int) -> str:
    """A message that is longer than the margin."""
    return f"{START}user\nThis is turn {number}. {'It goes on and on. ' * 5}{END}\n"


def test_the_budget_is_what_it_takes_in_memory():
    """Also of texts that are little more than seams, each of which is remembered."""
    budget = 2 << 20
    texts = Texts(Seam(b"<e>", 2), budget)
    tracemalloc.start()
    try:
        for number in range(8):
            raw = b"%06d" % number + b"<e>" * 30_000
            texts.learn(ME, raw, as_tokens([9] * 6 + [2] * 30_000))
            del raw
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(texts) > 1
    assert taken <= budget
    assert taken <= 1.01 * texts.used_bytes


def test_a_turn_more_costs_a_turn():
    """All but the last message is known; the answer's start is another message's."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 1 << 20)
    text = "".join(map(turn, range(10)))
    assert read(texts, text + f"{START}bot\n")[1] == 0
    tokens, known = read(texts, text + turn(10) + f"{START}bot\n")
    assert known >= len(encode("".join(map(turn, range(9)))))
    assert tokens == encode(text + turn(10) + f"{START}bot\n")


def test_others_prompts_are_not_looked_at():
    """A scope is a wall."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 1 << 20)
    text = "".join(map(turn, range(10)))
    read(texts, text)
    assert read(texts, text, scope=YOU)[1] == 0
    assert read(texts, text)[1] > 0


def test_a_conversation_that_goes_on_takes_its_own_place():
    """A thousand turns are remembered once."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 1 << 20)
    text = ""
    for number in range(20):
        text += turn(number)
        read(texts, text)
    assert len(texts) == 1
    read(texts, text[: len(text) // 2] + "another way")
    assert len(texts) == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=40))
def test_memory_has_a_bound(asked):
    """Over any number of prompts; nothing is left of what was forgotten."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 8000)
    for who, turns in asked:
        text = f"I am {who}. " + "".join(map(turn, range(who, who + turns)))
        assert read(texts, text, scope=Scope(str(who)))[0] == encode(text)
        kept = [known for those in texts._known.values() for known in those.values()]
        assert texts.used_bytes == sum(known.cost for known in kept) <= 8000
        assert len(texts) == len(kept) == len(texts._ages)
        assert all(texts._known.values())


def test_tokens_that_do_not_show_the_seams_are_not_used():
    """A longer special token took one of them."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 1 << 20)
    text = turn(1) + turn(2).replace("\n", "") + turn(3) + turn(4)
    assert LONG in text
    read(texts, text)
    assert len(texts) == 0


def test_a_seam_is_not_used_at_the_very_end_of_what_agrees():
    """A longer special token might lie across it."""
    texts = Texts(Seam(START.encode(), SPECIAL[START]), 1 << 20)
    text = turn(1) + turn(2)
    read(texts, text + START + "x" * (MARGIN_BYTES - 1) + "a")
    assert read(texts, text + START + "x" * (MARGIN_BYTES - 1) + "b")[1] == len(encode(turn(1)))
    assert read(texts, text + START + "x" * MARGIN_BYTES + "c")[1] == len(encode(turn(1)))
    read(texts, text + START + "y" * MARGIN_BYTES + "a")
    assert read(texts, text + START + "y" * MARGIN_BYTES + "b")[1] == len(encode(text))


@pytest.mark.parametrize(
    ("pieces", "plain", "seam"),
    [
        ([(1, "<s>"), (50, "hi"), (2, "<e>"), (1, "<s>"), (51, "a")], [50, 51, 60], Seam(b"<s>", 1, 1)),
        ([(1, "<s>"), (50, "hi"), (1, "<s>")], [1, 50], None),
        ([(1, "<s>"), (50, "hi")], [50], None),
        ([(50, "hi"), (50, "hi")], [50], None),
        ([(1, ""), (1, "")], [50], None),
        ([(1, "x" * 65), (1, "x" * 65)], [50], None),
        ([], [], None),
    ],
)
def test_the_seam_is_the_special_token_that_comes_most_often(pieces, plain, seam):
    """And twice at least; what is a token of plain text, too, divides nothing."""
    assert choose_seam(pieces, plain, added=1) == seam
