"""Claims about ``core.advice``: what is found in how conversations open, and how much of it is kept."""

import json

import pytest

from polykv_proxy.core import advice
from polykv_proxy.core.advice import AdviceBook, Opening
from polykv_proxy.core.types import Scope
from polykv_proxy.core.volatile import VolatileKind

MINE, THEIRS = Scope("mine"), Scope("theirs")
RULES = " ".join(f"Rule {number} of the house is long." for number in range(40))
TOOLS = json.dumps([{"name": "a"}, {"name": "b"}]).encode()


def opening(system=RULES, tools=TOOLS, api="openai_chat"):
    """An opening with these parts."""
    return Opening(api, system.encode(), tools)


def clock(time, rest=RULES):
    """A system prompt with a clock in front."""
    return f"It is 2026-11-30T06:26:{time}Z. {rest}"


class Book(AdviceBook):
    """A book that is told one opening after the other."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def tell(self, one, scope=MINE, now=0.0):
        """The next opening."""
        self.count += 1
        return self.look(scope, self.count, one, now=now, now_ts=1000.0 + now)


def test_a_clock_before_the_same_prompt_is_found():
    """News at first; then it is counted, with the latest two texts."""
    book = Book()
    assert book.tell(opening(clock("00"))) is None
    finding, news = book.tell(opening(clock("01")), now=5.0)
    assert (finding.kind, finding.section, finding.api, news) == (
        VolatileKind.CLOCK,
        "system",
        "openai_chat",
        True,
    )
    assert (finding.old, finding.new) == ("2026-11-30T06:26:00Z", "2026-11-30T06:26:01Z")
    assert (finding.shared_bytes, finding.shared_bytes + finding.lost_bytes) == (24, len(clock("01")))
    again, news = book.tell(opening(clock("02")), now=9.0)
    assert (again.times, again.first_seen_ts, again.last_seen_ts, news) == (2, 1005.0, 1009.0, False)
    assert again.old == finding.new
    assert book.findings(MINE) == [again]


def test_tools_in_another_order_are_found():
    """Behind an equal system prompt."""
    book = Book()
    book.tell(opening())
    finding, _ = book.tell(opening(tools=json.dumps([{"name": "b"}, {"name": "a"}]).encode()))
    assert (finding.kind, finding.section, finding.old, finding.new) == (
        VolatileKind.TOOLS_REORDERED,
        "tools",
        "a",
        "b",
    )


@pytest.mark.parametrize(
    "other",
    [
        opening(RULES + " And one more."),
        opening(clock("01", "Something else entirely is the matter here, at length. " * 20)),
        opening("It is 2026-11-30T06:26:01Z."),
        opening(clock("01"), api="anthropic"),
        opening("", b""),
    ],
    ids=["another prompt", "another prompt with a clock", "a short one", "another API", "nothing"],
)
def test_what_loses_nothing_is_not_reported(other):
    """A meant difference, and one that has nothing equal behind it."""
    book = Book()
    book.tell(opening(clock("00")))
    assert book.tell(other) is None
    assert book.findings(None) == []


def test_other_keys_prompts_are_not_compared():
    """Nor shown, but to an administrator."""
    book = Book()
    book.tell(opening(clock("00")))
    assert book.tell(opening(clock("01")), THEIRS) is None
    book.tell(opening(clock("02")))
    assert book.findings(THEIRS) == []
    assert len(book.findings(MINE)) == len(book.findings(None)) == 1


def test_an_opening_is_looked_at_once():
    """And after a look that brought nothing new, the scope has a rest."""
    book = Book()
    assert book.wants(MINE, 1, 0.0)
    book.tell(opening(clock("00")))
    assert not book.wants(MINE, 1, 0.0)
    assert book.wants(THEIRS, 1, 0.0)
    book.tell(opening(clock("01")))
    assert book.wants(MINE, 9, 0.0)
    book.tell(opening(clock("02")))
    assert not book.wants(MINE, 9, advice.PAUSE_S / 2)
    assert book.wants(MINE, 9, advice.PAUSE_S)
    assert book.wants(THEIRS, 9, 0.0)


def test_nothing_grows_without_bound(monkeypatch):
    """The oldest openings, findings and hashes are forgotten; long parts are kept to a bound."""
    monkeypatch.setattr(advice, "MAX_FINDINGS", 3)
    book = Book()
    for number in range(advice.MAX_SEEN + 5):
        book._remember(MINE, number, opening("x" * (advice.MAX_PART_BYTES + 1)))
    assert len(book._seen) == advice.MAX_SEEN
    assert len(book._openings) == advice.MAX_OPENINGS
    assert {len(each.system) for each in book._openings.values()} == {advice.MAX_PART_BYTES}
    assert book.wants(MINE, 0, 0.0)
    for number in range(5):
        for time in ("00", "01"):
            book.tell(opening(clock(time)), Scope(f"s{number}"))
    assert [finding.times for finding in book.findings(None)] == [1, 1, 1]
    assert book.findings(Scope("s0")) == []


def test_long_tools_are_not_kept_in_part():
    """Half a list would compare as another list."""
    book = Book()
    long = json.dumps([{"name": "a", "d": "x" * advice.MAX_PART_BYTES}, {"name": "b"}]).encode()
    book.tell(opening(tools=long))
    assert next(iter(book._openings.values())).tools == b""
    assert book.tell(opening(tools=TOOLS)) is None


def test_masked_requests_are_counted_by_scope(monkeypatch):
    """The first one of a scope is news; scopes are bounded too."""
    monkeypatch.setattr(advice, "MAX_SEEN", 2)
    book = AdviceBook()
    assert [book.on_masked(scope) for scope in (MINE, MINE, THEIRS)] == [True, False, True]
    assert (book.masked_in(MINE), book.masked_in(THEIRS), book.masked_in(None)) == (2, 1, 3)
    book.on_masked(Scope("third"))
    assert (book.masked_in(MINE), book.masked_in(None)) == (0, 2)
