"""Agreement: every mix of outcomes on simulated ranks, and on MPI."""

import pytest

from nnmpi import NnmpiError, simulate
from nnmpi.base.errors import CheckpointError, CommError, DataError, LayoutError, UsageError
from nnmpi.comm.agreement import (
    CollectivePhase,
    agree,
    agreed,
    on_root,
    refuse_different,
    require_equal,
)
from tests.harness.refusals import told


def outcome(*failures):
    """Return what each rank raises when these are the ranks' own errors."""

    def main(group):
        try:
            agree(group, failures[group.rank])
        except NnmpiError as error:
            assert error.__cause__ is failures[group.rank]
            return f"{type(error).__name__}: {error}"
        return ""

    return simulate(main, len(failures))


class MyError(CheckpointError):
    """A kind that only one program has."""


A, B, NO_FILE = UsageError("a"), DataError("b"), DataError("no file")


@pytest.mark.parametrize(
    "failures, raised",
    [
        ((None, None), ""),
        ((None, NO_FILE, None), "DataError: rank 1: no file"),
        ((NO_FILE, NO_FILE), "DataError: no file"),  # all failed alike, and nobody is named
        # the lowest decides the kind
        ((None, A, B, A, A), "UsageError: ranks 1, 3-4: a; rank 2: b"),
        (
            (DataError("rank 1: no file"), DataError("rank 1: no file")),
            "DataError: rank 1: no file",
        ),
        ((None, MyError("odd")), "CheckpointError: rank 1: odd"),  # the nearest of nnmpi's own
    ],
)
def test_all_ranks_raise_what_some_have_raised(failures, raised):
    assert outcome(*failures) == [raised] * len(failures)


def test_a_foreign_exception_shows_its_traceback_once():
    def fail():
        try:
            return {}["missing"]
        except KeyError as error:
            return error

    for text in outcome(None, fail(), ValueError()):
        assert text.startswith(
            "CommError: rank 1: KeyError: 'missing'; rank 2: ValueError\n\nOn rank 1:\nTraceback"
        )
        assert text.count("Traceback") == 1
        assert 'return {}["missing"]' in text


@pytest.mark.simulated
def test_an_exit_is_not_for_agreement(group):
    with pytest.raises(SystemExit), agreed(group):
        raise SystemExit(3)


@pytest.mark.both_worlds
def test_every_rank_in_turn_stops_all(group):
    for guilty in range(group.size):
        text = "nothing"
        try:
            with agreed(group):
                if group.rank == guilty:
                    raise DataError("damaged")
        except DataError as error:
            text = str(error)
        expected = "damaged" if group.size == 1 else f"rank {guilty}: damaged"
        assert group.gather(text) == [expected] * group.size
    lists = group.gather([0])
    lists[0].append(1)  # a caller's own, though the ranks say the same
    assert lists == [[0, 1], *[[0]] * (group.size - 1)]


@pytest.mark.simulated
def test_a_rank_that_worked_for_all_is_not_named(group):
    last = group.size - 1
    for speaker in (None, last):
        with pytest.raises(DataError) as caught:
            agree(group, DataError("no file") if group.rank == last else None, speaker)
        named = "" if speaker == last or group.size == 1 else f"rank {last}: "
        assert all(group.gather(str(caught.value) == f"{named}no file"))


@pytest.mark.simulated
def test_the_root_works_for_all(group):
    assert on_root(group, lambda: {"rank": group.rank}) == {"rank": 0}

    def fail():
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match=r"^no$") as caught:
        on_root(group, fail)
    assert caught.value.exit_status == 1


@pytest.mark.simulated
def test_a_phase_does_no_more_work_once_something_has_failed(group):
    def fail():
        raise DataError("damaged")

    phase, last = CollectivePhase(group), group.size - 1
    assert phase.attempt(fail if group.rank == last else int) == (None if group.rank == last else 0)
    assert phase.attempt(int) == (None if group.rank == last else 0)
    assert not phase.require(done=False)
    assert phase.stopped
    assert phase.attempt(fail) is None  # not called
    with pytest.raises(DataError) as caught:
        phase.agree()
    assert str(caught.value) == ("damaged" if group.size == 1 else f"rank {last}: damaged")


def refused(*everyones, show=str):
    return told(
        LayoutError,
        lambda: refuse_different(
            everyones, lambda number: f"item {number} differs", "mend it", LayoutError, show
        ),
    )


def test_the_first_item_that_differs_is_named_with_the_ranks_that_have_it():
    assert refused(["a", "b"], ["a", "b"]) == ""
    assert refused([], []) == ""
    assert (
        refused(["a", "b"], ["a", "c"], ["a", "b"])
        == "item 1 differs: ranks 0, 2 have b; rank 1 has c; mend it"
    )
    assert refused(["a"], ["a", "c"]) == "item 1 differs: rank 0 has nothing; rank 1 has c; mend it"


def test_of_items_that_mean_nothing_the_ranks_alone_are_named():
    assert (
        refused([1], [2], [1], [3], show=None)
        == "item 0 differs: ranks 1, 3 of 4 have not what rank 0 has; mend it"
    )
    assert (
        refused([1], [1], [3], show=None)
        == "item 0 differs: rank 2 of 3 has not what rank 0 has; mend it"
    )


@pytest.mark.simulated
def test_items_are_compared_on_all_ranks(group):
    require_equal(group, ["same", [1, 2.5]], "never seen")
    if group.size > 1:
        with pytest.raises(CommError, match="these differ: rank 0 has 0; rank 1 has 1"):
            require_equal(group, [group.rank], "these differ")
