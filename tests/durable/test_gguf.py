"""Claims about ``durable.gguf``: any change before the weights is another file, and nothing else is read."""

import contextlib

import pytest

from durable.files import PAIRS, TENSORS, gguf_bytes
from polykv_proxy.durable import gguf


def identity(tmp_path, raw):
    """Of a file with these bytes."""
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    return gguf.read(path).identity


def test_a_file_is_what_it_is(tmp_path):
    """Size, header and table."""
    raw = gguf_bytes()
    assert identity(tmp_path, raw) == identity(tmp_path, raw)
    assert identity(tmp_path, raw).size == len(raw)


def test_every_byte_before_the_weights_counts(tmp_path):
    """Flipped, it is another file, or none at all."""
    raw = gguf_bytes()
    head = len(raw) - 256 - 64
    right = identity(tmp_path, raw)
    for at in range(head):
        changed = bytearray(raw)
        changed[at] ^= 1
        with contextlib.suppress(gguf.NotGgufError):
            assert identity(tmp_path, bytes(changed)) != right, at


@pytest.mark.parametrize("at", [0.0, 0.1, 0.31, 0.5, 0.77, 1.0])
def test_other_weights_are_another_model(tmp_path, at):
    """Trained on from the same one, with nothing else changed; not every byte has to be read for that."""
    raw, size = gguf_bytes(), 2_000_000
    head, weights = raw[:-320], bytearray(size)
    right = identity(tmp_path, head + weights)
    for byte in range(int((size - 70_000) * at), int((size - 70_000) * at) + 70_000):
        weights[byte] = 1
    other = identity(tmp_path, head + weights)
    assert (other.size, other.header, other.tensors) == (right.size, right.header, right.tensors)
    assert other.weights != right.weights


@pytest.mark.parametrize("alignment", [None, 128])
def test_other_weights_in_any_one_tensor_are_another_model(tmp_path, alignment):
    """A layer that was trained on, of many; a small one, the first and the last."""
    sizes = [40_000, 64, 4096, 100_000, 32, 1 << 20, 9000]
    grid = alignment or 32
    starts = [sum(-(-size // grid) * grid for size in sizes[:number]) for number in range(len(sizes))]
    pairs = PAIRS if alignment is None else [*PAIRS, ("general.alignment", alignment)]
    tensors = [(f"blk.{number}.weight", (4,), 0, start) for number, start in enumerate(starts)]
    head = gguf_bytes(pairs, tensors)[:-320]
    head += bytes(-len(head) % grid)
    raw = head + bytes(starts[-1] + sizes[-1])
    right = identity(tmp_path, raw)
    for start, size in zip(starts, sizes, strict=True):
        changed = bytearray(raw)
        changed[len(head) + start : len(head) + start + size] = b"\1" * size
        other = identity(tmp_path, bytes(changed))
        assert (other.size, other.header, other.tensors) == (right.size, right.header, right.tensors)
        assert other.weights != right.weights, start


def test_only_little_of_a_model_is_read(tmp_path):
    """Some pieces, and one of each tensor, however large they are."""
    path, count = tmp_path / "m.gguf", 300
    tensors = [(f"blk.{number}.weight", (4,), 0, number << 24) for number in range(count)]
    head = gguf_bytes(tensors=tensors)[:-320]
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + (count << 24))  # holes take no room
    digests = []
    real = gguf.sha256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "sha256", lambda *args: digests.append(Counting(real(*args))) or digests[-1])
        assert gguf.read(path).identity.size == len(head) + (count << 24)
    assert sum(each.bytes for each in digests) <= 32 * 16384 + count * 4096


class Counting:
    """A digest that knows how much went into it."""

    def __init__(self, digest):
        self.digest, self.bytes = digest, 0

    def update(self, data):
        """Some more."""
        self.bytes += len(data)
        self.digest.update(data)

    def hexdigest(self):
        """What it is."""
        return self.digest.hexdigest()


@pytest.mark.parametrize("cut", [0, 3, 10, 23, 60, 150, 300])
def test_a_file_that_ends_early_is_none(tmp_path, cut):
    """Within its header or table."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes()[:cut])
    with pytest.raises((gguf.NotGgufError, ValueError)):
        gguf.read(path)


def test_the_window_is_found(tmp_path):
    """Of one layer kind or several."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([*PAIRS, ("gemma2.attention.sliding_window", 4096)]))
    assert gguf.read(path).window == 4096
    path.write_bytes(gguf_bytes([*PAIRS, ("gemma3.attention.sliding_window", [512, 1024])]))
    assert gguf.read(path).window == 1024
    path.write_bytes(gguf_bytes())
    assert gguf.read(path).window is None


def test_a_tensor_of_unlikely_shape_is_refused(tmp_path):
    """Rather than read for ever."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=[*TENSORS, ("x", (1,) * 17, 0, 0)]))
    with pytest.raises(gguf.NotGgufError, match="dimensions"):
        gguf.read(path)


def test_all_shards_are_the_model(tmp_path):
    """Of which any one may be named."""
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert [path.name for path in gguf.shards(tmp_path / names[1])] == names
    assert gguf.shards(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
