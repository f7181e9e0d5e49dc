"""Claims about ``core.records``: what is kept of requests, for whom, and for how long."""

from polykv_proxy.core.records import PATH_CHARS, RecordBook, RequestState
from polykv_proxy.core.types import Scope, SessionId

MINE, OTHER = Scope("mine"), Scope("other")


def book_of(*sessions, keep=10, scope=MINE):
    """A book with a request of each of these sessions."""
    book = RecordBook(keep, "a")
    for at, session in enumerate(sessions):
        book.begin("/completion", scope, 100.0 + at).session_id = session and SessionId(session)
    return book


def ids(records):
    """Numbers of records."""
    return [int(record.request_id.rpartition("-")[2]) for record in records]


def test_a_request_has_a_record_from_its_arrival_on():
    """It runs, and nothing else is known yet."""
    record = RecordBook(10, "a").begin("/completion", MINE, 100.0)
    assert (record.state, record.started_ts, record.path) == (RequestState.RUNNING, 100.0, "/completion")
    assert record.session_id is record.cached_tokens is record.computed_tokens is record.divergence is None


def test_ids_are_unique_over_runs_too():
    """The run is part of them."""
    one, other = RecordBook(2, "a"), RecordBook(2, "b")
    found = {book.begin("/", MINE, 0.0).request_id for book in (one, one, one, other)}
    assert found == {"req-a-1", "req-a-2", "req-a-3", "req-b-1"}


def test_the_oldest_record_goes_first():
    """The book keeps so many, whatever their state; who holds one may go on with it."""
    book = RecordBook(2, "a")
    first = book.begin("/", MINE, 0.0)
    book.begin("/", MINE, 1.0)
    assert book.get(first.request_id, MINE) is first
    book.begin("/", MINE, 2.0)
    assert len(book) == 2
    assert book.get(first.request_id, MINE) is None
    first.end(RequestState.DONE)
    assert ids(book.latest(None, session_id=None, limit=10)) == [3, 2]


def test_a_book_may_keep_nothing():
    """Requests get their records all the same."""
    book = RecordBook(0, "a")
    assert book.begin("/", MINE, 0.0).state is RequestState.RUNNING
    assert len(book) == 0


def test_a_long_path_is_cut():
    """A record is bounded."""
    assert len(RecordBook(1, "a").begin("/" * 5000, MINE, 0.0).path) == PATH_CHARS


def test_records_are_listed_latest_first():
    """All, those of one session, at most so many."""
    book = book_of("one", "two", None, "one", "one")
    assert ids(book.latest(MINE, session_id=None, limit=10)) == [5, 4, 3, 2, 1]
    assert ids(book.latest(MINE, session_id="one", limit=2)) == [5, 4]
    assert book.latest(MINE, session_id="none", limit=10) == []


def test_records_are_the_scopes_own():
    """Another key sees none of them, an administrator all."""
    book = book_of("one")
    (record,) = book.latest(None, session_id=None, limit=1)
    assert book.latest(OTHER, session_id=None, limit=10) == []
    assert book.get(record.request_id, OTHER) is None
    assert book.get(record.request_id, MINE) is book.get(record.request_id, None) is record
    assert [book.hidden_from(scope) for scope in (OTHER, MINE, None)] == [1, 0, 0]


def test_a_request_ends_once():
    """What was found first stays."""
    record = RecordBook(1, "a").begin("/", MINE, 0.0)
    record.end(RequestState.FAILED, "queue_full")
    record.end(RequestState.DONE)
    assert (record.state, record.error_code) == (RequestState.FAILED, "queue_full")


def test_computed_is_what_was_not_cached():
    """And unknown where either is."""
    record = RecordBook(1, "a").begin("/", MINE, 0.0)
    record.prompt_tokens = 100
    assert record.computed_tokens is None
    record.cached_tokens = 90
    assert record.computed_tokens == 10


def test_a_name_finds_all_conversations_under_it():
    """A request whose history was edited away is another conversation under the same name."""
    book = RecordBook(10, "x")
    for session in ("A", "A#2", "B", "AB", None):
        book.begin("/p", MINE, 0.0).session_id = session
    assert [record.session_id for record in book.latest(MINE, session_id="A", limit=10)] == ["A#2", "A"]
    assert [record.session_id for record in book.latest(MINE, session_id="A#2", limit=10)] == ["A#2"]
