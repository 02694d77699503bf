"""Who has what: slices that make up their wholes are taken, all others are refused with the name and the ranks."""

import re
from typing import Any

import pytest

from nnmpi.errors import CheckpointError, LayoutError
from nnmpi.parallel.model_state import ArraySpec, check_fit, describe, shard_maps
from nnmpi.shard import Region

OUTLINE = ArraySpec((4, 6), "float32")


def columns(start: int, stop: int, repeats: int = 1) -> Region:
    return Region((4, 6), 1, start, stop, repeats)


def say(region: Region | None = None, owned: bool = True, spec: ArraySpec = OUTLINE, name: str = "w") -> list[Any]:
    return describe(name, spec, region, owned)


@pytest.mark.parametrize(
    ("everyones", "text"),
    [
        ([[say()], [say()]], "w is written by ranks 0-1; one may own it"),
        ([[say()], [say(columns(0, 2))]], "w is written by ranks 0-1; one may own it"),
        (
            [[say(columns(0, 2))], [say(columns(3, 6))]],
            "the slices of w do not join on axis 1: one ends at 2, the next",
        ),
        (
            [[say(columns(0, 4))], [say(columns(3, 6))]],
            "the slices of w do not join on axis 1: one ends at 4, the next",
        ),
        ([[say(columns(0, 2))], [say(columns(2, 5))]], "the end of w is written by no rank; give an owner"),
        ([[say(owned=False)], []], "the end of w is written by no rank; give an owner"),
        ([[say(columns(0, 3))], [say(columns(2, 3, 2))]], "w is cut along 2 different axes; its slices must be of one"),
        ([[], []], "no rank has 'w'; every array of the model must be somewhere"),
        ([[say()], [say(name="v")]], "rank 1 has 'v', which is not among the 1 names of the model"),
        ([[say(), say(owned=False)]], "rank 0 has 'w' twice; a rank gives each array once"),
        (
            [[say()], [say(owned=False, spec=ArraySpec((4, 6), "float64"))]],
            "w has shape (4, 6) and float32 on rank 0, but shape (4, 6) and float64 on rank 1",
        ),
    ],
)
def test_slices_that_make_no_whole_are_refused(everyones: list[list[Any]], text: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(text)}"):
        shard_maps(everyones, ["w"])


def test_an_array_without_elements_needs_no_owner() -> None:
    assert shard_maps([[say(owned=False, spec=ArraySpec((0, 3), "int64"))]], ["w"])["w"].written == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({}, "f has no w, which this model needs with shape (4, 6)"),
        (
            {"w": ArraySpec((6, 4), "float32")},
            "f has w with shape (6, 4) and float32, but this model needs shape (4, 6)",
        ),
        (
            {"w": ArraySpec((4, 6), "float64")},
            "f has w with shape (4, 6) and float64, but this model needs shape (4, 6)",
        ),
        ({"w": OUTLINE, "x": OUTLINE}, "f has x with shape (4, 6), which this model does not have"),
    ],
)
def test_arrays_that_do_not_fit_are_named_with_both_shapes(found: dict[str, ArraySpec], text: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(text)}"):
        check_fit(found, {"w": OUTLINE}, "f")
