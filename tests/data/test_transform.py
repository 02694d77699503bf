import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnmpi.base.errors import ShapeError
from nnmpi.data import ColorJitter, Compose, Cutout, Dataset, Flip, Normalize, Rotate, Shift
from nnmpi.data.dataset import BLOCK_BYTES
from nnmpi.data.transform import integers
from tests.harness.refusals import refuses, usage_error

IMAGES = [Shift(2), Flip(), Rotate(30), ColorJitter(), Cutout(3)]
ALL = [
    *IMAGES,
    Normalize(0.5, 0.25),
    Compose([Shift(1), Flip()], Normalize(np.ones(3), np.full(3, 2.0))),
]


def images(rows=24, side=7, channels=3):
    return np.random.default_rng(0).random((rows, side, side, channels), np.float32)


def moved(image, down, across):
    """Return the image moved, written out pixel by pixel."""
    result = np.zeros_like(image)
    height, width = image.shape[:2]
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + across < width:
                result[row, column] = image[row + down, column + across]
    return result


@pytest.mark.parametrize("transform", ALL, ids=repr)
@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, 24), max_size=5),
    epoch=st.integers(0, 3),
    order_seed=st.integers(0, 9),
)
def test_every_sharding_sees_the_same_images(transform, cuts, epoch, order_seed):
    x = images()
    indices = np.random.default_rng(order_seed).permutation(24)
    full = transform(x, np.arange(24), epoch, 5)[indices]
    for part in np.split(indices, sorted(cuts)):
        mine = transform(x[part], part, epoch, 5)
        assert mine.shape == x[part].shape
        np.testing.assert_array_equal(mine, full[np.isin(indices, part)])


@pytest.mark.parametrize("transform", ALL, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_stays_and_input_is_not_changed(transform, dtype):
    x = images().astype(dtype)
    saved = x.copy()
    assert transform(x, np.arange(24), 0, 0).dtype == dtype
    np.testing.assert_array_equal(x, saved)


@pytest.mark.parametrize("transform", IMAGES, ids=repr)
def test_augmentation_changes_with_epoch_and_seed(transform):
    x, indices = images(), np.arange(24)
    first = transform(x, indices, 0, 0)
    assert not np.array_equal(first, transform(x, indices, 1, 0))
    assert not np.array_equal(first, transform(x, indices, 0, 1))


def test_shift_moves_whole_images_to_all_places():
    x = images(rows=400, side=5, channels=2)
    places = {(down, across): 0 for down in range(-2, 3) for across in range(-2, 3)}
    for before, after in zip(x, Shift(2)(x, np.arange(400), 0, 0), strict=True):
        matches = [place for place in places if np.array_equal(moved(before, *place), after)]
        assert len(matches) == 1
        places[matches[0]] += 1
    assert min(places.values()) > 3


def test_shifts_at_the_edge():
    np.testing.assert_array_equal(Shift(0)(images(), np.arange(24), 0, 0), images())
    assert Shift(9)(images(side=2), np.arange(24), 0, 0).shape == (24, 2, 2, 3)
    usage_error("a shift's pixels is -1; give", Shift, -1)


def test_flip_mirrors_about_half_of_the_images():
    x = images(rows=400)
    flipped = 0
    for before, after in zip(x, Flip()(x, np.arange(400), 0, 0), strict=True):
        mirrored = np.array_equal(after, before[:, ::-1])
        assert mirrored or np.array_equal(after, before)
        flipped += mirrored
    assert 150 < flipped < 250


@pytest.mark.parametrize("transform", IMAGES, ids=repr)
def test_augmenting_what_is_not_images_is_refused(transform):
    refuses(
        ShapeError,
        r"shape \(4,\) are not images",
        transform,
        np.zeros((3, 4), np.float32),
        np.arange(3),
        0,
        0,
    )


def test_rotations_are_those_of_a_plane():
    """Of a plane each pixel has its place's value, so a turned one has that of the place it comes
    from.
    """
    # 0 is the outside
    x = np.broadcast_to(np.mgrid[:9, :9].transpose(1, 2, 0), (50, 9, 9, 2)).astype("float64") + 1
    turned = Rotate(40)(x, np.arange(50), 0, 0)
    offset = (turned - 5).reshape(50, 81, 2)
    inner = (np.hypot(*(np.mgrid[:9, :9] - 4)) <= 4).ravel()
    before = (x - 5).reshape(50, 81, 2)[:, inner]
    np.testing.assert_allclose(
        np.linalg.norm(offset[:, inner], axis=2), np.linalg.norm(before, axis=2), atol=1e-12
    )
    down, across = offset[:, 44].T  # the pixel right of the middle: (0, 1) turned
    angles = np.degrees(np.arctan2(down, across))
    assert abs(angles).max() <= 40 and angles.min() < -30 and angles.max() > 30
    assert (turned[:, 0, 0] != x[:, 0, 0]).all()


def test_colors_and_holes():
    """A gray image keeps its hue; factors are within bounds; a hole is a square, cut off at the
    edge.
    """
    gray = np.broadcast_to(images(rows=60, channels=1), (60, 7, 7, 3)) * 0.5 + 0.2
    rest = np.arange(60), 0, 0
    factors = (ColorJitter(0.3, 0, 0)(gray, *rest) / gray).reshape(60, -1)
    np.testing.assert_allclose(factors.min(1), factors.max(1), rtol=1e-5)
    assert 0.7 <= factors.min() < 0.75 and 1.25 < factors.max() <= 1.3
    flat = ColorJitter(0, 0.9, 0)(gray, *rest)
    assert np.corrcoef(flat.std((1, 2, 3)), gray.std((1, 2, 3)))[0, 1] < 0.9
    np.testing.assert_allclose(ColorJitter(0, 0, 0.9)(gray, *rest), gray, rtol=1e-5)
    wild = ColorJitter(0.9, 0.9, 0.9)(images(rows=60), *rest)
    assert (wild.min(), wild.max()) == (0, 1)  # not beyond
    holes = (Cutout(3)(gray, *rest) == 0)[..., 0]
    assert {int(hole.sum()) for hole in holes} == {4, 6, 9}
    assert all(hole.sum() == hole.any(0).sum() * hole.any(1).sum() for hole in holes)


@pytest.mark.parametrize("rows", [1, 5000])
def test_fit_normalizes_each_feature(rows):
    x = (np.random.default_rng(0).normal(5, 3, (rows, 4))).astype(np.float32)
    x[:, 2] = 0.1  # does not vary: only centred
    data = Dataset("table", x, np.zeros(rows, np.int64), 1)
    done = Normalize.fit(data)(data.rows(np.arange(rows), "float64"), np.arange(rows), 0, 0)
    np.testing.assert_allclose(done.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(done.std(0), [0, 0, 0, 0] if rows == 1 else [1, 1, 0, 1], atol=1e-9)


def test_fit_normalizes_each_channel_after_scaling():
    x = np.random.default_rng(0).integers(0, 200, (5000, 3, 3, 2)).astype(np.uint8)
    x[..., 1] //= 3
    fitted = Normalize.fit(Dataset("images", x, np.zeros(5000, np.int64), 1, 1 / 255))
    np.testing.assert_allclose(fitted.mean, (x / 255).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(fitted.std, (x / 255).std((0, 1, 2)), rtol=1e-12)


def test_large_images_are_fitted_in_little_memory():
    x = np.random.default_rng(0).integers(0, 255, (400, 112, 112, 3), dtype=np.uint8)
    data = Dataset("images", x, np.zeros(400, np.int64), 1, 1 / 255)
    tracemalloc.start()
    fitted = Normalize.fit(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(fitted.std, (x / 255).std((0, 1, 2)), rtol=1e-9)
    # a block, its difference from the mean and its square; of all images these would be 240 MB
    assert peak < 4 * BLOCK_BYTES


def test_constant_channel_is_only_centred():
    """7 / 255 has no exact float, so its mean over 5000 images is a little off: that is no
    spread.
    """
    data = Dataset(
        "images", np.full((5000, 3, 3, 1), 7, np.uint8), np.zeros(5000, np.int64), 1, 1 / 255
    )
    assert Normalize.fit(data).std == 1.0


def test_normalization_of_other_shape_is_refused():
    for size in (3, 1):
        with pytest.raises(ShapeError, match=rf"mean \(4,\) .* do not fit .* shape \({size},\)"):
            Normalize(np.zeros(4), np.ones(4))(np.zeros((2, size)), np.arange(2), 0, 0)


@pytest.mark.parametrize("std", [0, -1.0, float("nan"), np.array([1.0, 0.0])])
def test_a_std_by_which_nothing_can_be_divided_is_refused(std):
    usage_error(r"std is .*; it must be more than 0", Normalize, 0.5, std)


def test_seed_epoch_and_purpose_each_change_the_draws():
    indices = np.arange(100)
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b"), (11, 1, "a"), (1, 11, "a")]
    drawn = np.array([integers(seed, epoch, indices, what, 5) for seed, epoch, what in keys])
    for i in range(len(keys)):
        for j in range(i):
            assert 0.05 < np.mean(drawn[i] == drawn[j]) < 0.4  # one in five agrees by chance


def test_numbers_are_uniform_and_in_range():
    n = 50_000
    for high in (1, 2, 5, 9):
        counts = np.bincount(integers(0, 0, np.arange(n), "test", high), minlength=high)
        assert len(counts) == high
        assert np.abs(counts - n / high).max() < 5 * np.sqrt(n / high)
