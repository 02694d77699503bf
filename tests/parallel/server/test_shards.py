"""Shards: every element in one, cut between rows, as equal as rows allow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Linear
from nnmpi.parallel.server.shards import Shard, cut_shards, regions
from nnmpi.tensor.flat import FlatStorage
from nnmpi.tensor.parameter import Parameter

SHAPE = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def storage_of(shapes: list[tuple[int, ...]], groups: int = 1) -> FlatStorage:
    """Return a storage of parameters of these shapes, in turn in so many groups; every element is another number."""
    parameters = {str(i): Parameter(shape, lambda generator, size: np.zeros(size)) for i, shape in enumerate(shapes)}
    values, start = {}, 1
    for name, parameter in parameters.items():
        values[name] = np.arange(start, start + parameter.size, dtype=np.float64).reshape(parameter.declared)
        start += parameter.size
    return FlatStorage(
        parameters, values, np.zeros, group=lambda name, _: f"group {int(name) % groups}", dtype=np.dtype("float64")
    )


def rows_of(storage: FlatStorage) -> int:
    """Return the elements of the longest row."""
    sizes = [
        span.parameter.size // (span.parameter.declared[0] if span.parameter.declared else 1)
        for span in storage.spans
        if span.parameter.size
    ]
    return max(sizes, default=0)


def spread(storage: FlatStorage, shards: list[Shard]) -> list[np.ndarray]:
    """Return how often each element of each buffer is in a shard."""
    counts = [np.zeros(data.shape, int) for data in storage.data]
    for shard in shards:
        for view in shard.views(counts):
            view += 1
    return counts


@settings(max_examples=200)
@given(st.lists(SHAPE, max_size=6), st.integers(1, 3), st.integers(1, 8))
def test_every_element_is_in_one_shard(shapes: list[tuple[int, ...]], groups: int, servers: int) -> None:
    """Gaps too; a shard is contiguous over all buffers, and off its fair share by a row and a gap at each end."""
    storage = storage_of(shapes, groups)
    shards = cut_shards(storage, servers)
    assert [shard.number for shard in shards] == list(range(servers))
    assert all((count == 1).all() for count in spread(storage, shards))
    total = sum(data.size for data in storage.data)
    fair, slack = total / servers, max(rows_of(storage), 7)
    assert all(abs(shard.elements - fair) <= slack for shard in shards)
    flat = np.concatenate([*storage.data, []])
    joined = [view for shard in shards for view in shard.views(storage.data)]
    np.testing.assert_array_equal(np.concatenate([*joined, []]), flat)


@settings(max_examples=200)
@given(st.lists(SHAPE, max_size=6), st.integers(1, 3), st.integers(1, 8))
def test_regions_put_the_parameters_together(shapes: list[tuple[int, ...]], groups: int, servers: int) -> None:
    """Each parameter from its rows in all shards, once; one without elements or axes is in one shard whole."""
    storage = storage_of(shapes, groups)
    found = {number: np.zeros(shape) for number, shape in enumerate(shapes)}
    held = dict.fromkeys(found, 0)
    for shard in cut_shards(storage, servers):
        kept = [np.zeros_like(data) for data in storage.data]
        for mine, view in zip(shard.views(kept), shard.views(storage.data), strict=True):
            mine[...] = view
        for number, region in regions(storage, shard):
            span = storage.spans[number]
            whole = kept[span.buffer][span.start : span.stop].reshape(shapes[number])
            held[number] += 1
            if region is None:
                assert not found[number].any(), "held whole, and by another shard, too"
                found[number][...] = whole
            else:
                assert region.axis == 0
                assert not region.is_whole
                assert not region.take(found[number]).any(), "held twice"
                region.put(found[number], region.take(whole))
    for number, span in enumerate(storage.spans):
        np.testing.assert_array_equal(found[number], span.parameter.data)
        assert held[number] >= 1
        if span.parameter.size == 0 or shapes[number] == ():
            assert held[number] == 1


def test_a_cut_is_at_the_nearest_row() -> None:
    """5 rows of 8 elements for 2 servers: 2 and 3 rows; a bias is cut anywhere."""
    (weight, bias) = storage_of([(5, 8), (10,)]), storage_of([(10,)])
    assert [shard.parts for shard in cut_shards(weight, 2)] == [(slice(0, 24),), (slice(24, 56),)]
    assert regions(weight, cut_shards(weight, 2)[0])[0][1].local_shape == (3, 8)  # type: ignore[union-attr]
    assert [shard.elements for shard in cut_shards(bias, 3)] == [5, 5, 6]  # 16 with the gap


def test_more_servers_than_rows() -> None:
    """Some hold nothing."""
    storage = storage_of([(2, 8)])
    shards = cut_shards(storage, 5)
    assert [shard.elements for shard in shards] == [0, 8, 0, 8, 0]
    assert [len(regions(storage, shard)) for shard in shards] == [0, 1, 0, 1, 0]


def test_a_parameter_without_elements_hides_no_rows() -> None:
    """It begins where the next one does."""
    storage = storage_of([(3, 0), (2, 8)])
    shards = cut_shards(storage, 2)
    assert [shard.elements for shard in shards] == [8, 8]
    assert [[number for number, _ in regions(storage, shard)] for shard in shards] == [[0, 1], [1]]


def test_a_model_without_parameters() -> None:
    """Every shard is empty, of no buffers."""
    storage = storage_of([])
    assert cut_shards(storage, 3) == [Shard(number, ()) for number in range(3)]
    assert [regions(storage, shard) for shard in cut_shards(storage, 3)] == [[], [], []]


def test_a_model_with_two_groups() -> None:
    """Shards go from one buffer on to the next, and know their bytes."""
    model = Sequential(Linear(8, 4), Linear(4, 8)).initialize(group=lambda name, _: name.split(".")[1])
    shards = cut_shards(model.storage, 2)
    assert [data.size for data in model.storage.data] == [64, 32]  # float32: gaps end at multiples of 16 elements
    assert [shard.parts for shard in shards] == [
        (slice(0, 48), slice(0, 0)),
        (slice(48, 64), slice(0, 32)),
    ]
    assert [shard.nbytes(model.storage.data) for shard in shards] == [4 * 48, 4 * 48]
    assert [[number for number, _ in regions(model.storage, shard)] for shard in shards] == [[0, 2], [1, 2, 3]]


@pytest.mark.parametrize("servers", range(1, 9))
def test_shards_of_a_large_layer_are_equal(servers: int) -> None:
    """Each has its fair share, up to one row."""
    storage = storage_of([(784, 30), (30,), (30, 10), (10,)])
    sizes = [shard.elements for shard in cut_shards(storage, servers)]
    assert all(abs(size - sum(sizes) / servers) <= 30 for size in sizes)
