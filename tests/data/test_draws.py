import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.data.transform import GAMMA, bits, integers, mix


def test_mix_is_splitmix64() -> None:
    """Known outputs of the reference implementation for the seed 1234567."""
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * GAMMA
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.integers(-3, 3), st.integers(0, 9))
def test_a_draw_depends_on_its_own_index_only(indices: list[int], seed: int, epoch: int) -> None:
    together = bits(seed, epoch, np.array(indices), "test")
    alone = [bits(seed, epoch, np.array([index]), "test")[0] for index in indices]
    np.testing.assert_array_equal(together, alone)


def test_seed_epoch_and_purpose_each_change_the_draws() -> None:
    indices = np.arange(100)
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (11, 1, "a"), (1, 11, "a")]
    drawn = np.array([integers(seed, epoch, indices, what, 5) for seed, epoch, what in keys])
    for i in range(len(keys)):
        for j in range(i):
            assert 0.05 < np.mean(drawn[i] == drawn[j]) < 0.4  # one in five agrees by chance


def test_numbers_are_uniform_and_in_range() -> None:
    n = 50_000
    for high in (1, 2, 5, 9):
        counts = np.bincount(integers(0, 0, np.arange(n), "test", high), minlength=high)
        assert len(counts) == high
        assert np.abs(counts - n / high).max() < 5 * np.sqrt(n / high)


def test_neighbours_are_independent() -> None:
    drawn = integers(0, 0, np.arange(50_000), "test", 2)
    assert abs(np.mean(drawn[1:] == drawn[:-1]) - 0.5) < 0.015


def test_no_index_gives_no_draw() -> None:
    assert integers(0, 0, np.array([], np.int64), "test", 5).shape == (0,)
