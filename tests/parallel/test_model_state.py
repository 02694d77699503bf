"""What one layout gives, any other takes: whole arrays on rank 0, from slices that lie anywhere,
and back.
"""

import re
from functools import partial

import numpy as np
import pytest

from nnmpi.base.errors import CheckpointError, CommError, LayoutError
from nnmpi.base.shard import Region, part
from nnmpi.parallel.model_state import ArraySpec, ModelState, StateEntry, shard_maps
from tests.harness.refusals import told_on_all

SHAPES = {
    "column": (5, 7),
    "row": (7, 3),
    "repeats": (12, 2),
    "kernel": (3, 3, 2, 5),
    "scalar": (),
    "none": (0, 4),
    "tied": (3, 4),
    "alone": (6,),
}
WHOLE = {
    name: np.random.default_rng(number)
    .normal(size=shape)
    .astype(("float32", "float64", "int64")[number % 3])
    for number, (name, shape) in enumerate(SHAPES.items())
}


def cut(name, axis, size, index, repeats=1):
    rows = part(SHAPES[name][axis] // repeats, size, index)
    return Region(SHAPES[name], axis, rows.start, rows.stop, repeats)


def sharded(group):
    """Everything is cut over all ranks (some get nothing), the rest is everywhere and rank 0's."""
    rank, size = group.rank, group.size
    regions = {
        "column": cut("column", 1, size, rank),
        "row": cut("row", 0, size, rank),
        "repeats": cut("repeats", 0, size, rank, repeats=3),
        "kernel": cut("kernel", 3, size, rank),
    }
    return {name: (regions.get(name), name in regions or rank == 0) for name in SHAPES}


def staged(group):
    """Whole arrays, dealt out in turn; "tied" also on the last rank; rank 1 has nothing but
    replicas.
    """
    owners = [rank for rank in range(group.size) if rank != 1]
    held = {}
    for number, name in enumerate(SHAPES):
        owner = owners[number % len(owners)]
        if group.rank in (owner, 1) or (name == "tied" and group.rank == group.size - 1):
            held[name] = (None, group.rank == owner)
    return held


def mixed(group):
    """Two shards at most, ranks in pairs: the pairs are replicas; an odd last rank has nothing."""
    if group.size == 1:
        return dict.fromkeys(SHAPES, (None, True))
    if group.rank == group.size - 1 and group.size % 2:
        return {}
    half, first = group.rank % 2, group.rank < 2
    held = dict.fromkeys(SHAPES, (None, group.rank == 0))
    return held | {
        "column": (cut("column", 0, 2, half), first),
        "repeats": (cut("repeats", 0, 2, half, repeats=2), first),
        "alone": (Region((6,), 0, 0, 6) if half == 0 else Region((6,), 0, 6, 6), first),
    }


LAYOUTS = [sharded, staged, mixed]


def make(layout, group, filled):
    """Return the state of a layout, with the right values in every array, or with wrong ones."""
    arrays = {}
    for name, (region, _) in layout(group).items():
        values = WHOLE[name] if region is None else region.take(WHOLE[name])
        # a view with gaps, as an array in a larger one may be
        padded = np.zeros((*values.shape, 2), values.dtype)
        padded[..., 0] = values if filled else -1
        arrays[name] = (padded[..., 0] if group.rank % 2 else padded[..., 0].copy(), region)
    entries = [
        StateEntry(name, arrays[name][0], region, owned)
        for name, (region, owned) in reversed(layout(group).items())
    ]
    return ModelState(entries, list(SHAPES), group), arrays


def equal(found, expected):
    return list(found) == list(expected) and all(
        (found[name].shape, found[name].dtype) == (item.shape, item.dtype)
        and np.array_equal(found[name], item)
        for name, item in expected.items()
    )


@pytest.mark.simulated
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_holder_gets_its_part(group, layout):
    state, arrays = make(layout, group, filled=False)
    state.scatter(WHOLE.__getitem__)
    right = [
        np.array_equal(array, WHOLE[name] if region is None else region.take(WHOLE[name]))
        for name, (array, region) in arrays.items()
    ]
    assert all(map(all, group.gather(right)))


@pytest.mark.simulated
def test_what_any_layout_gives_any_other_takes(group):
    for first in LAYOUTS:
        for second in LAYOUTS:
            result = make(first, group, filled=True)[0].to_dict()
            state, _ = make(second, group, filled=False)
            state.scatter(
                result.__getitem__, {name: ArraySpec.of(array) for name, array in result.items()}
            )
            assert all(group.gather(equal(state.to_dict(everywhere=True), WHOLE)))


@pytest.mark.simulated
@pytest.mark.parametrize(
    "found, text",
    [
        ({"row": None}, r"f has no row, which this model needs with shape (7, 3)"),
        (
            {"tied": np.zeros((3, 4))},
            "f has tied with shape (3, 4) and float64, but this model needs shape (3, 4) and",
        ),
        (
            {"row": np.zeros((3, 7))},
            "f has row with shape (3, 7) and float64, but this model needs shape (7, 3) and",
        ),
        ({"more": np.zeros(2)}, "f has more with shape (2,), which this model does not have"),
    ],
)
def test_nothing_is_changed_by_what_does_not_fit(group, found, text):
    given = {name: array for name, array in {**WHOLE, **found}.items() if array is not None}
    state, arrays = make(sharded, group, filled=False)
    specs = {name: ArraySpec.of(array) for name, array in given.items()}
    calls = []

    def read(name):
        calls.append(name)
        return given[name]

    assert told_on_all(group, lambda: state.scatter(read, specs, "f"), CheckpointError).startswith(
        text
    )
    assert all(group.gather(all((array == -1).all() for array, _ in arrays.values())))
    assert all(group.gather(group.is_root or not calls))


@pytest.mark.simulated
def test_a_failure_of_rank_0_is_raised_on_all_in_its_words(group):
    written = []

    def write(name, _):
        written.append(name)
        if name == "repeats":
            raise CheckpointError("the disk is full")

    def read(name):
        if name == "repeats":
            raise CheckpointError("the disk is gone")
        return WHOLE[name]

    specs = {name: ArraySpec.of(array) for name, array in WHOLE.items()}
    for layout in LAYOUTS:
        state, _ = make(layout, group, filled=True)
        assert (
            told_on_all(group, partial(state.gather, write), CheckpointError) == "the disk is full"
        )
        assert (
            told_on_all(group, partial(state.scatter, read, specs), CheckpointError)
            == "the disk is gone"
        )
    assert written == (["column", "row", "repeats"] * len(LAYOUTS) if group.is_root else [])


class Broken(np.ndarray):
    """An array whose values can be neither had nor set, as on a device that has failed."""

    def get(self):
        raise MemoryError("out of pinned memory")

    def __setitem__(self, *_):
        raise MemoryError("out of pinned memory")


@pytest.mark.simulated
def test_a_failure_of_another_rank_is_raised_on_all_with_its_name(group):
    guilty = min(group.size, SHAPES["row"][0]) - 1  # a rank that has some of it
    entries = []
    for name, (region, owned) in sharded(group).items():
        values = (WHOLE[name] if region is None else region.take(WHOLE[name])).copy()
        broken = name == "row" and group.rank == guilty
        entries.append(StateEntry(name, values.view(Broken) if broken else values, region, owned))
    state = ModelState(entries, list(SHAPES), group)
    prefix = "" if guilty == 0 else f"rank {guilty}: "
    written = []
    text = told_on_all(group, lambda: state.gather(lambda name, _: written.append(name)), CommError)
    assert text.startswith(f"{prefix}MemoryError: out of pinned memory")
    assert written == (["column"] if group.is_root else [])
    text = told_on_all(group, lambda: state.scatter(WHOLE.__getitem__), CommError)
    assert text.startswith(f"{prefix}MemoryError: out of pinned memory")
    assert all(group.gather(group.comm.size == group.size))  # and the group is as good as before


@pytest.mark.simulated
def test_ranks_that_know_other_names_are_refused(group):
    order = ["w"] if group.rank == 0 else ["w", "v"]
    state = ModelState([StateEntry("w", np.zeros(2), owned=group.is_root)], order, group)
    if group.size > 1:
        text = told_on_all(group, state.specs, LayoutError)
        others = (
            "rank 1 of 2 has"
            if group.size == 2
            else f"ranks 1-{group.size - 1} of {group.size} have"
        )
        differ = "the names of the model's arrays, or their order, differ between the ranks"
        assert text == f"{differ}: {others} not what rank 0 has"


OUTLINE = ArraySpec((4, 6), "float32")


def columns(start, stop, repeats=1):
    return Region((4, 6), 1, start, stop, repeats)


def say(region=None, owned=True, spec=OUTLINE, name="w"):
    shape = spec.shape if region is None else region.local_shape
    return StateEntry(name, np.empty(shape, spec.dtype), region, owned).describe()


ONCE = "the ranks do not write each element of w exactly once: "


@pytest.mark.parametrize(
    "everyones, text",
    [
        ([[say()], [say()]], f"{ONCE}0..4 of axis 0 by rank 0, 0..4 of axis 0 by rank 1"),
        (
            [[say()], [say(columns(0, 2))]],
            f"{ONCE}0..4 of axis 0 by rank 0, 0..2 of axis 1 by rank 1",
        ),
        (
            [[say(columns(0, 2))], [say(columns(3, 6))]],
            f"{ONCE}0..2 of axis 1 by rank 0, 3..6 of axis 1 by rank 1",
        ),
        (
            [[say(columns(0, 4))], [say(columns(3, 6))]],
            f"{ONCE}0..4 of axis 1 by rank 0, 3..6 of axis 1 by rank 1",
        ),
        (
            [[say(columns(0, 2))], [say(columns(2, 5))]],
            f"{ONCE}0..2 of axis 1 by rank 0, 2..5 of axis 1 by rank 1",
        ),
        ([[say(owned=False)], []], f"{ONCE}nothing"),
        (
            [[say(columns(0, 3))], [say(columns(2, 3, 2))]],
            f"{ONCE}0..3 of axis 1 by rank 0, 2..3 of axis 1 by rank 1",
        ),
        ([[], []], "no rank has 'w'; each array of the model must be on a rank"),
        ([[say()], [say(name="v")]], "rank 1 has 'v', which is not among the 1 names of the model"),
        ([[say(), say(owned=False)]], "rank 0 has 'w' twice; a rank gives each array once"),
        (
            [[say()], [say(owned=False, spec=ArraySpec((4, 6), "float64"))]],
            "w has shape (4, 6) and float32 on rank 0, but shape (4, 6) and float64 on rank 1",
        ),
    ],
)
def test_slices_that_make_no_whole_are_refused(everyones, text):
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        shard_maps(everyones, ["w"])


def test_an_array_without_elements_needs_no_owner():
    assert (
        shard_maps([[say(owned=False, spec=ArraySpec((0, 3), "int64"))]], ["w"])["w"].written == []
    )
