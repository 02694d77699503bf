"""Named streams and the counter-based hash: the same everywhere, and as good as random."""

import numpy as np
import pytest

from nnmpi.backend.random import key_pair, random_bits, stream
from nnmpi.base.shard import split


def test_a_stream_depends_on_seed_and_names_alone():
    """And on nothing that was drawn before; parts are not run together, nor are numbers and
    words.
    """
    expected = stream(1, "init", "2.weight").random(4)
    stream(1, "init", "1.weight").random(100)
    np.testing.assert_array_equal(stream(1, "init", "2.weight").random(4), expected)
    others = [
        (2, "init", "2.weight"),
        (1, "init2", ".weight"),
        (1, "init", 2),
        (1, "init", "2"),
        (1,),
        (-1, "init"),
    ]
    draws = {tuple(stream(*other).random(4)) for other in others} | {tuple(expected)}
    assert len(draws) == len(others) + 1


def test_a_stream_stays_the_same_for_ever():
    """Runs of today can be repeated tomorrow, on any machine."""
    result = stream(0, "init", "0.weight")
    assert result.integers(0, 2**32, 3).tolist() == [2923923338, 2438366069, 2144230376]
    # of the system's entropy, for nothing
    assert not isinstance(result.bit_generator.seed_seq, np.random.SeedSequence)
    assert key_pair("dropout", 0, 1, "2") == (1801620607, 657191060)
    assert random_bits(np, 5, 1, 3, (1, 2)).tolist() == [[339193201, 1213590225, 1817610303]]


def test_keys():
    """Two 32-bit numbers that depend on every part."""
    parts = [("a", 1), ("a", "1"), ("a1",), ("a", 2), ("b", 1), (1, "a")]
    keys = [key_pair(*part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= number < 2**32 for key in keys for number in key)


@pytest.mark.parametrize("first_row", [0, 2**32 - 3, 10**12])
def test_rows_know_their_place(first_row):
    """Drawn together or in parts, also where the counter starts over."""
    key = (2**32 - 2, 2**32 - 1)
    full = random_bits(np, first_row, 10, 7, key)
    assert (full.shape, full.dtype) == ((10, 7), np.uint32)
    for parts in (2, 3, 10, 13):
        pieces = [
            random_bits(np, first_row + part.start, len(part), 7, key) for part in split(10, parts)
        ]
        np.testing.assert_array_equal(np.concatenate(pieces), full)
    assert random_bits(np, 0, 0, 5, key).shape == (0, 5)
    assert random_bits(np, 0, 5, 0, key).shape == (5, 0)
