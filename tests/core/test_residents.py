"""Claims about ``core.residents``: what can go, what is needed, and that every cell is counted once."""

from polykv_proxy.core.residents import Residents


def sums(book):
    """All cells, those that are not taken back, and those that last."""
    return book.cells, book.protected, book.lasting


def test_what_is_kept_is_counted_and_what_is_changed_is_counted_anew():
    """By its last figures; nothing holds less than nothing."""
    book = Residents()
    book.keep("slot", 100, value=1.0)
    book.keep("pool", 50)
    book.keep("pinned", 30, lasting=True)
    assert sums(book) == (180, 80, 30)
    book.keep("pool", 70, value=2.0)
    book.keep("pinned", -5)
    assert sums(book) == (170, 0, 0)
    assert (book.cells_of("pool"), book.cells_of("unknown")) == (70, 0)
    book.drop("slot")
    book.drop("slot")
    assert sums(book) == (70, 0, 0)


def test_what_a_request_shares_is_needed_until_the_last_one_is_over():
    """Also while its figures change."""
    book = Residents()
    book.keep("pool", 50, value=1.0)
    assert book.claimed(["pool", "unknown"], None) == 50
    book.hold(["pool"])
    book.hold(["pool"])
    assert sums(book) == (50, 50, 0)
    assert book.claimed(["pool"], None) == 0
    book.keep("pool", 60, value=1.0)
    assert sums(book) == (60, 60, 0)
    book.let_go(["pool"])
    assert book.reclaim(10) == []
    book.let_go(["pool"])
    assert (sums(book), book.reclaim(10)) == ((60, 0, 0), ["pool"])


def test_what_is_dropped_while_it_is_shared_goes_with_its_last_holder():
    """It lasts no longer, but its cells are there."""
    book = Residents()
    book.keep("pool", 50, lasting=True)
    book.hold(["pool"])
    assert book.shared(["pool"]) == 0
    book.drop("pool")
    assert (sums(book), book.shared(["pool"])) == ((50, 50, 0), 50)
    assert "pool" in book
    book.let_go(["pool"])
    assert sums(book) == (0, 0, 0)
    assert "pool" not in book


def test_what_is_taken_over_is_its_requests_unless_others_share_it():
    """Its cells were protected, or not; either way they are no more than the request's."""
    book = Residents()
    book.keep("idle", 40, value=1.0)
    book.keep("fresh", 30)
    book.keep("shared", 20)
    book.hold(["shared"])
    assert (book.claimed([], "idle"), book.claimed([], "fresh"), book.claimed([], "unknown")) == (0, -30, 0)
    for key in ("idle", "fresh", "shared", "unknown"):
        book.take_over(key)
    assert sums(book) == (20, 20, 0)


def test_what_is_taken_back_is_named_once_and_the_least_valuable_first():
    """No more than is short; what holds nothing is of no use; what would not go is named again."""
    book = Residents()
    for key, cells, value in (("dear", 50, 9.0), ("cheap", 50, 1.0), ("empty", 0, 0.0), ("needed", 50, None)):
        book.keep(key, cells, value=value)
    assert (book.reclaim(0), book.going) == ([], False)
    assert (book.reclaim(40), book.going) == (["cheap"], True)
    assert book.reclaim(50) == []  # that one is going
    assert book.reclaim(60) == ["dear"]
    book.drop("dear")
    book.keep("cheap", 50, value=1.0)  # it would not go
    assert not book.going
    assert book.reclaim(500) == ["cheap"]
