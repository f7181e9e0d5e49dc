"""Claims about ``distribution``: many values at once count as each of them."""

from polykv_proxy.distribution import Distribution


def test_a_distribution_takes_many_at_once():
    """As if each had come by itself; what is beyond the last bound counts too."""
    many, each = Distribution((1.0, 2.0)), Distribution((1.0, 2.0))
    for value, times in ((0.5, 3), (1.0, 1), (2.5, 2)):
        many.observe(value, times)
        for _ in range(times):
            each.observe(value)
    assert (many._counts, many._sum) == (each._counts, each._sum) == ([4, 0, 2], 7.5)
