"""Agreement among ranks: all raise if one has failed, all have the same values, all check at the same step.

Used where a rank can fail or differ alone: reading files, checking options, building models, saving. Without it the
others would wait for ever in their next collective. Nothing here is called in the training step itself; there an
exception ends the job (see `nnmpi.comm.mpi.shutdown`).

    one rank fails, all raise     `agreed` around work that every rank does
                                  `on_root` for work that rank 0 does for all
                                  `CollectivePhase` for work in several steps with messages in between
    the same on every rank        `require_equal`, and `refuse_different` for values that were gathered already
    a check every few steps       `PeriodicCheck`
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import nnmpi.errors as errors
from nnmpi import clock
from nnmpi.errors import CommError, NnmpiError

T = TypeVar("T")


class Gathers(Protocol):
    """What most of this needs of a `Group`."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""


class Ranks(Gathers, Protocol):
    """What the rest needs of a `Group`."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""

    def share(self, value: Any, root: int = 0) -> Any:
        """Return root's value on every rank."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks in words, neighbours joined: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


# ---- one rank fails, all raise ----


@contextmanager
def agreed(group: Gathers) -> Iterator[None]:
    """Run the body, and raise on every rank if it raised on any. Collective: all ranks enter it.

    The body must not use the group itself after a point where one rank can fail alone: the others would wait there.
    KeyboardInterrupt and SystemExit are not for agreement; they pass through and end the job.

        with agreed(group):
            train = load(path)          # a file that is damaged on one node stops all

    Raises:
        NnmpiError: see `agree`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(group, failure)


def agree(group: Gathers, error: Exception | None, speaker: int | None = None) -> None:
    """Return if no rank has an error; otherwise raise on every rank. Collective.

    An error of nnmpi's own keeps its kind, and with it the exit status; of several, the lowest rank's counts. Any
    other exception becomes a CommError that ends with that rank's traceback. The text begins with the ranks that
    failed, unless all of them failed with the same text.

    Args:
        group: the ranks that must agree.
        error: this rank's exception, None if all went well.
        speaker: a rank that worked for all, if there is one: where it fails alone it is not named either.

    Raises:
        NnmpiError: the error that all ranks raise; on a rank that failed, caused by its own exception.
    """
    everyones: list[dict[str, Any] | None] = group.gather(None if error is None else _describe(error))
    failed = {rank: found for rank, found in enumerate(everyones) if found is not None}
    if failed:
        raise _rebuild(failed, len(everyones), speaker) from error


def on_root(group: Ranks, work: Callable[[], Any]) -> Any:
    """Return what `work` returns on rank 0, a JSON value, on every rank. Collective.

    The text of an error does not name rank 0: the user need not know which rank did the work for all.

    Raises:
        NnmpiError: on all ranks, when `work` raises; of what kind and with what text, see `agree`.
    """
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if group.is_root:
        try:
            answer = {"result": work()}
        except Exception as error:
            failure, answer = error, {"error": _describe(error)}
    answer = group.share(answer)
    if "error" in answer:
        raise _rebuild({0: answer["error"]}, group.size, speaker=0) from failure
    return answer["result"]


class CollectivePhase:
    """Work in several steps, with messages between the ranks, that all go through to the end whoever fails.

    A rank that has failed does no more work but still takes part in the messages, in which it says that it has nothing
    (see `point_to_point.Rendezvous`): so nobody waits for it. At the end all ranks agree.

        phase = CollectivePhase(group)
        part = phase.attempt(read, name)            # None if it fails, or anything has failed before
        phase.require(channel.send(part, to=1))     # no more work here if the other rank has failed
        phase.agree()                               # raises on all ranks if any has failed

    Attributes:
        stopped: whether this rank's work failed, or it noticed that another's has: then it does no more work.
    """

    def __init__(self, group: Gathers) -> None:
        self._group = group
        self._error: Exception | None = None
        self.stopped = False

    def attempt(self, work: Callable[..., T], *args: Any) -> T | None:
        """Return what the work returns; None if it fails, or something has failed before."""
        if self.stopped:
            return None
        try:
            return work(*args)
        except Exception as error:
            self._error, self.stopped = error, True
            return None

    def require(self, done: bool) -> bool:
        """Do no more work if this was not done because another rank has failed; return `done`."""
        self.stopped = self.stopped or not done
        return done

    def agree(self, speaker: int | None = None) -> None:
        """Return if no rank's work has failed; otherwise raise on every rank. Collective.

        Args:
            speaker: see `agree`.

        Raises:
            NnmpiError: see `agree`.
        """
        agree(self._group, self._error, speaker)


def _describe(error: Exception) -> dict[str, Any]:
    """Return the error as a JSON value: its kind (nnmpi's nearest base), its text, its traceback if it is foreign."""
    if isinstance(error, NnmpiError):
        kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
        return {"kind": kinds[0], "status": error.exit_status, "text": str(error), "trace": ""}
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {"kind": CommError.__name__, "status": 1, "text": text, "trace": "".join(traceback.format_exception(error))}


def _rebuild(failed: Mapping[int, Mapping[str, Any]], size: int, speaker: int | None) -> NnmpiError:
    """Return the error that stands for all that failed, from their descriptions by rank."""
    first = failed[min(failed)]
    texts: dict[str, list[int]] = {}
    for rank, found in failed.items():
        texts.setdefault(found["text"], []).append(rank)
    if len(texts) == 1 and (len(failed) == size or list(failed) == [speaker]):
        text = first["text"]
    else:
        text = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in texts.items())
    kind: type[NnmpiError] = getattr(errors, first["kind"])
    trace = f"\n\nOn rank {min(failed)}:\n{first['trace']}" if first["trace"] else ""
    error = kind(text + trace)
    error.exit_status = first["status"]
    return error


# ---- the same on every rank ----


def require_equal(
    group: Gathers,
    items: Sequence[Any],
    problem: str | Callable[[int], str],
    remedy: str = "",
    kind: type[NnmpiError] = CommError,
    show: Callable[[Any], str] | None = str,
) -> None:
    """Make sure that all ranks have the same items in the same order. Collective.

    Args:
        group: the ranks.
        items: JSON values of this rank; the ranks may have different numbers of them.
        problem, remedy, kind, show: see `refuse_different`.

    Raises:
        NnmpiError: on all ranks; see `refuse_different`.
    """
    refuse_different(group.gather(list(items)), problem, remedy, kind, show)


def refuse_different(
    everyones: Sequence[Sequence[Any]],
    problem: str | Callable[[int], str],
    remedy: str = "",
    kind: type[NnmpiError] = CommError,
    show: Callable[[Any], str] | None = str,
) -> None:
    """Raise unless all ranks have the same items in the same order.

    The text is "PROBLEM: rank 0 has A; ranks 1-3 have B; REMEDY", about the first item that differs.

    Args:
        everyones: the items of each rank, in rank order.
        problem: what is wrong then, without the ranks; or a function that returns it for the number of the first item
            that differs.
        remedy: what the user can do; nothing by default.
        kind: the error to raise.
        show: returns an item in words; None for items that mean nothing to the user, such as hashes: then the ranks
            alone are named.

    Raises:
        NnmpiError: of that kind.
    """
    missing = object()
    for number, of_ranks in enumerate(zip_longest(*everyones, fillvalue=missing)):
        if any(item != of_ranks[0] for item in of_ranks):
            if show is None:
                others = [rank for rank, item in enumerate(of_ranks) if item != of_ranks[0]]
                found = f"{name_ranks(others)} of {len(of_ranks)} {_have(others)} not what rank 0 has"
            else:
                holders: dict[str, list[int]] = {}
                for rank, item in enumerate(of_ranks):
                    holders.setdefault("nothing" if item is missing else show(item), []).append(rank)
                found = "; ".join(f"{name_ranks(ranks)} {_have(ranks)} {text}" for text, ranks in holders.items())
            what = problem if isinstance(problem, str) else problem(number)
            raise kind(f"{what}: {found}" + (f"; {remedy}" if remedy else ""))


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


# ---- a check every few steps ----


UNTIMED_STEPS = 10  # between two checks where steps take no reproducible time


SIGNALS_S = 0.1  # between two questions for signals: Open MPI leaves half a second from the first one to the end


class PeriodicCheck:
    """Gathers a value of every rank about every SIGNALS_S seconds, at steps that are the same on all ranks.

        rank 0   step step step [check] step step step step [check]     rank 0 chooses the next step of a check from its
        rank 1   step step step [check] step step step step [check]     own step time, and tells the others in this one

    Ranks that went by their own clocks would wait for one another at different steps.
    """

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._steps_left = 1

    def gather(self, value: Any, step_s: float) -> list[Any] | None:
        """Return every rank's JSON value if there is a check at this step, else None; call it once per step.

        Collective at some steps, the same on all ranks.
        """
        if self._group.size == 1:
            return [value]
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        reproducible_s = clock.reproducible(step_s)  # a simulated run must not hang on what steps take here
        steps = max(1, int(SIGNALS_S / reproducible_s)) if reproducible_s else UNTIMED_STEPS
        answers = self._group.gather([value, steps])
        self._steps_left = int(answers[0][1])
        return [answer[0] for answer in answers]
