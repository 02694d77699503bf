"""Agreement: with pretended groups for every mix of outcomes, and on MPI."""

from typing import Any

import pytest

from nnmpi.comm.agreement import CollectivePhase, agree, agreed, on_root, refuse_different, require_equal
from nnmpi.comm.group import Group
from nnmpi.errors import CheckpointError, CommError, DataError, LayoutError, NnmpiError, UsageError
from tests.harness.refusals import told


class FakeGroup:
    """All ranks' outcomes collected first, then told to each: a group without MPI."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        raise InterruptedError

    def outcome(self, *failures: Exception | None) -> list[NnmpiError | None]:
        """Return what each rank raises when these are the ranks' own errors."""
        self.said = []
        for failure in failures:
            with pytest.raises(InterruptedError):
                agree(self, failure)
        return [self._raised(failure, list(self.said)) for failure in failures]

    def _raised(self, own: Exception | None, said: list[Any]) -> NnmpiError | None:
        class Told:
            def gather(self, value: Any) -> list[Any]:
                return said

        try:
            agree(Told(), own)
        except NnmpiError as error:
            assert error.__cause__ is own
            return error
        return None


def kinds(errors: list[NnmpiError | None]) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_one_rank_failed_and_all_raise_its_kind() -> None:
    assert kinds(FakeGroup().outcome(None, DataError("no file"), None)) == ["DataError: rank 1: no file"] * 3


def test_all_failed_alike_and_nobody_is_named() -> None:
    assert kinds(FakeGroup().outcome(DataError("no file"), DataError("no file"))) == ["DataError: no file"] * 2


def test_several_failed_and_the_lowest_decides_the_kind() -> None:
    found = kinds(FakeGroup().outcome(None, UsageError("a"), DataError("b"), UsageError("a"), UsageError("a")))
    assert found == ["UsageError: ranks 1, 3-4: a; rank 2: b"] * 5


def test_an_error_that_passed_an_agreement_passes_another_unchanged() -> None:
    inner = FakeGroup().outcome(None, DataError("no file"))
    assert kinds(FakeGroup().outcome(*inner)) == ["DataError: rank 1: no file"] * 2


def test_a_kind_from_elsewhere_is_raised_as_the_nearest_of_ours() -> None:
    class MyError(CheckpointError):
        pass

    assert kinds(FakeGroup().outcome(None, MyError("odd"))) == ["CheckpointError: rank 1: odd"] * 2


def test_a_foreign_exception_shows_its_traceback_once() -> None:
    def fail() -> Exception:
        try:
            return {}["missing"]
        except KeyError as error:
            return error

    for error in FakeGroup().outcome(None, fail(), ValueError()):
        assert isinstance(error, CommError)
        text = str(error)
        assert text.startswith("rank 1: KeyError: 'missing'; rank 2: ValueError\n\nOn rank 1:\nTraceback")
        assert text.count("Traceback") == 1
        assert 'return {}["missing"]' in text


def test_an_exit_is_not_for_agreement() -> None:
    with pytest.raises(SystemExit), agreed(FakeGroup()):
        raise SystemExit(3)


@pytest.mark.both_worlds
def test_every_rank_in_turn_stops_all(group: Group) -> None:
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


@pytest.mark.simulated
def test_a_rank_that_worked_for_all_is_not_named(group: Group) -> None:
    last = group.size - 1
    for speaker in (None, last):
        with pytest.raises(DataError) as caught:
            agree(group, DataError("no file") if group.rank == last else None, speaker)
        named = "" if speaker == last or group.size == 1 else f"rank {last}: "
        assert all(group.gather(str(caught.value) == f"{named}no file"))


@pytest.mark.simulated
def test_the_root_works_for_all(group: Group) -> None:
    assert on_root(group, lambda: {"rank": group.rank}) == {"rank": 0}

    def fail() -> None:
        raise CheckpointError("no")

    with pytest.raises(CheckpointError, match=r"^no$") as caught:
        on_root(group, fail)
    assert caught.value.exit_status == 1


@pytest.mark.simulated
def test_a_phase_does_no_more_work_once_something_has_failed(group: Group) -> None:
    def fail() -> int:
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


def refused(*everyones: list[object], show: Any = str) -> str:
    return told(
        LayoutError,
        lambda: refuse_different(everyones, lambda number: f"item {number} differs", "mend it", LayoutError, show),
    )


def test_the_first_item_that_differs_is_named_with_the_ranks_that_have_it() -> None:
    assert refused(["a", "b"], ["a", "b"]) == ""
    assert refused([], []) == ""
    assert refused(["a", "b"], ["a", "c"], ["a", "b"]) == "item 1 differs: ranks 0, 2 have b; rank 1 has c; mend it"
    assert refused(["a"], ["a", "c"]) == "item 1 differs: rank 0 has nothing; rank 1 has c; mend it"


def test_of_items_that_mean_nothing_the_ranks_alone_are_named() -> None:
    assert refused([1], [2], [1], [3], show=None) == "item 0 differs: ranks 1, 3 of 4 have not what rank 0 has; mend it"
    assert refused([1], [1], [3], show=None) == "item 0 differs: rank 2 of 3 has not what rank 0 has; mend it"


@pytest.mark.simulated
def test_items_are_compared_on_all_ranks(group: Group) -> None:
    require_equal(group, ["same", [1, 2.5]], "never seen")
    if group.size > 1:
        with pytest.raises(CommError, match="these differ: rank 0 has 0; rank 1 has 1"):
            require_equal(group, [group.rank], "these differ")
