"""Named streams and the counter-based hash: the same everywhere, and as good as random."""

import numpy as np
import pytest

from nnmpi.backend.random import key_pair, random_bits, stream
from nnmpi.shard import split


def test_a_stream_depends_on_seed_and_names_alone():
    """And on nothing that was drawn before; parts are not run together, nor are numbers and words."""
    expected = stream(1, "init", "2.weight").random(4)
    stream(1, "init", "1.weight").random(100)
    np.testing.assert_array_equal(stream(1, "init", "2.weight").random(4), expected)
    others = [(2, "init", "2.weight"), (1, "init2", ".weight"), (1, "init", 2), (1, "init", "2"), (1,), (-1, "init")]
    draws = {tuple(stream(*other).random(4)) for other in others} | {tuple(expected)}
    assert len(draws) == len(others) + 1


def test_a_stream_stays_the_same_for_ever():
    """Runs of today can be repeated tomorrow, on any machine."""
    found = stream(0, "init", "0.weight")
    assert found.integers(0, 2**32, 3).tolist() == [2923923338, 2438366069, 2144230376]
    assert not isinstance(found.bit_generator.seed_seq, np.random.SeedSequence)  # of the system's entropy, for nothing
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
    whole = random_bits(np, first_row, 10, 7, key)
    assert (whole.shape, whole.dtype) == ((10, 7), np.uint32)
    for parts in (2, 3, 10, 13):
        pieces = [random_bits(np, first_row + part.start, len(part), 7, key) for part in split(10, parts)]
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert random_bits(np, 0, 0, 5, key).shape == (0, 5)
    assert random_bits(np, 0, 5, 0, key).shape == (5, 0)


@pytest.fixture(scope="module")
def bits():
    """Return 32 random bits for each of 1000 x 1000 places, as an array of -1 and 1 of shape (32, 1000, 1000)."""
    drawn = random_bits(np, 0, 1000, 1000, key_pair("test"))
    return np.stack([((drawn >> np.uint32(b)) & np.uint32(1)).astype(np.int8) * 2 - 1 for b in range(32)])


def test_every_bit_is_balanced(bits):
    """Half of a million, within 5 standard deviations; in every row and column, within 6."""
    assert abs(bits.mean((1, 2))).max() < 5 / 1000
    for axis in (1, 2):
        assert abs(bits.mean(axis)).max() < 6 / np.sqrt(1000)


def test_bits_are_not_correlated(bits):
    """Neither with one another, nor with their neighbours in the row, the column, or across."""
    flat = bits.reshape(32, -1).astype(np.float32)
    between = flat @ flat.T / flat.shape[1]
    assert abs(between - np.eye(32)).max() < 5.5 / 1000
    for rows, columns in ((0, 1), (1, 0), (1, 1), (0, 8), (64, 0), (256, 256)):
        one, other = bits[:, rows:, columns:], bits[:, : 1000 - rows, : 1000 - columns]
        assert abs((one * other).mean((1, 2))).max() < 5.5 / np.sqrt(one[0].size), (rows, columns)


def test_rectangles_are_not_correlated(bits):
    """Rows and columns are hashed apart and joined by exclusive or; the joint hash leaves no trace of that."""
    for rows, columns in ((1, 1), (2, 3), (17, 16)):
        corners = (
            bits[:, rows:, columns:]
            * bits[:, :-rows, columns:]
            * bits[:, rows:, :-columns]
            * bits[:, :-rows, :-columns]
        )
        assert abs(corners.mean((1, 2))).max() < 6 / np.sqrt(corners[0].size)


def test_one_flipped_bit_of_key_or_place_changes_half_of_the_bits():
    """Avalanche: every bit in turn."""
    base = random_bits(np, 0, 64, 64, (123, 456))
    for b in range(32):
        for key, row in (((123 ^ 1 << b, 456), 0), ((123, 456 ^ 1 << b), 0), ((123, 456), 1 << b)):
            changed = base ^ random_bits(np, row, 64, 64, key)
            share = np.unpackbits(changed.view(np.uint8)).mean()
            assert 0.45 < share < 0.55, (b, key, row)


@pytest.mark.parametrize("key", [(9, 9), (0, 0), (1, 2), (2**31, 7), key_pair("test")])
def test_numbers_are_spread_evenly(key):
    """Chi-squared of the top byte over 256 bins, also where rows and columns count alike."""
    drawn = random_bits(np, 0, 500, 500, key)
    counts = np.bincount((drawn >> np.uint32(24)).ravel(), minlength=256)
    expected = drawn.size / 256
    assert 170 < ((counts - expected) ** 2 / expected).sum() < 350
    assert np.unique(drawn).size > 0.9999 * drawn.size
    assert (drawn != drawn.T).mean() > 0.99
