"""nnmpi's errors: each message is one sentence, with the values and a remedy.

`exit_status` is the command line's: 2 for wrong use (the user changes the command), 1 for a
failure, 65 (EX_DATAERR) for a failure that recurs when the same command runs again, 73
(EX_CANTCREAT) for a disk on which nothing can be written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EISDIR, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EROFS
from math import inf, nan
from operator import index

# 73 and 65; `nnmpi run` restarts a job that ends with them once, and then gives up
from os import EX_CANTCREAT, EX_DATAERR
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])
DISK = (ENOSPC, EDQUOT, EROFS)  # of a disk that no other start of the same command finds better


def counted(n: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, for sentences: "1 rank", "2 ranks".

    Args:
        n: the number.
        singular: the noun for 1.
        plural: the noun for others; empty for the singular with an s.
    """
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


def note_read_only(error: BaseException) -> None:
    """Say at NumPy's error about an array that cannot be written what such an array may be."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        error.add_note(
            "(weights that ranks share or gather cannot be written by one of them: call"
            " model.load_state on all ranks, or change this rank's part in model.storage.data)"
        )


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text, consecutive ones as a range: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


def group_ranks(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks of each value, from (rank, value) pairs."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def shortened(text: str, most: int = 200) -> str:
    """Return a text without its middle if it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class NnmpiError(Exception):
    """Any error with a text for the user of the program.

    Attributes:
        lines: those of the user's code on the rank that failed, if all ranks raise its error; see
            `nnmpi.base.lines`.

    Example:
        >>> try:
        ...     models.mlp([4], 0)
        ... except nnmpi.NnmpiError as error:
        ...     print(error)
        mlp's classes is 0; give a whole number of at least 1
    """

    exit_status = 1
    lines: Sequence[str] = ()


class HelpAsked(NnmpiError):
    """The user asked for help or the version; the text is printed and the status is 0."""

    exit_status = 0


class UsageError(NnmpiError, ValueError):
    """A wrong option, value or combination of them, detected before any work."""

    exit_status = 2


def check_int(name: str, value: object, least: float = 1) -> int:
    """Return the value if it is an integer of at least `least`; an error calls it `name`.

    Args:
        least: the inclusive lower bound; -inf for none.

    Raises:
        UsageError: for a smaller number, a fraction, or another type.
    """
    number: Any
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = nan
    if not number >= least:
        bound = f" of at least {least}" if least > -inf else ""
        raise UsageError(f"{name} is {shortened(repr(value))}; give a whole number{bound}")
    return number


def number(name: str, value: Any, below: float = inf, most: float | None = None) -> float:
    """Return the value as a float of at least 0; an error calls it `name`.

    Args:
        below: the exclusive upper bound, such as 1 for the decay rate of an average.
        most: an inclusive upper bound instead.

    Raises:
        UsageError: for a value out of range, NaN, or an object that is no number, such as text.
    """
    try:
        result = value.__float__()  # which text has not: float("1e-3") is a number
    except (AttributeError, TypeError, OverflowError):
        result = nan
    if not (0 <= result < below if most is None else 0 <= result <= most):
        end = (
            f"at most {most}"
            if most is not None
            else "finite"
            if below == inf
            else f"below {below}"
        )
        raise UsageError(
            f"{name} is {shortened(repr(value))}; give a number of at least 0 that is {end}"
        )
    return result


def check_ints(name: str, values: object, least: int = 1) -> tuple[int, ...]:
    """Return the values if they are a sequence of integers of at least `least`.

    Raises:
        UsageError: for another one, or something else than a sequence.
    """
    if not isinstance(values, Iterable):
        raise UsageError(f"{name} is {values!r}; give whole numbers, such as (128, 64)")
    return tuple(check_int(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def expect(call: str, *pairs: tuple[object, type]) -> None:
    """Refuse an argument that is not of its type.

    Args:
        call: the right one, for the error.
        pairs: of an argument and its type.

    Raises:
        UsageError: "NoneType is no Module; call CALL".
    """
    for value, kind in pairs:
        if not isinstance(value, kind):
            raise UsageError(f"{type(value).__name__} is no {kind.__name__}; call {call}")


def is_own(thing: Any) -> bool:
    """Return whether a class or a function is nnmpi's own."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "nnmpi"


@contextmanager
def raised_as(kind: type[NnmpiError], what: str, advice: str = "") -> Iterator[None]:
    """Turn an OSError of the body into another error: "WHAT (the system's reason); ADVICE"."""
    try:
        yield
    except OSError as error:
        result = kind(f"{what} ({error.strerror or error}){advice and f'; {advice}'}")
        if error.errno in DISK:
            result.exit_status = EX_CANTCREAT
        raise result from None


def translated(error: BaseException) -> BaseException:
    """Return the error; for one whose cause is the user's, a UsageError with a sentence.

    The system's errors about paths: any access raises them on any rank, for a folder without
    permission or in place of a file, or a name that is too long. And NumPy's about rounding to
    zero and the like, in nnmpi's own code, when the program has asked for them.
    """
    if (
        isinstance(error, OSError)
        and error.errno in (EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR)
        and error.filename
    ):
        return UsageError(
            f"{shortened(str(error.filename))} cannot be used ({error.strerror}); give another"
        ).with_traceback(error.__traceback__)
    if isinstance(error, FloatingPointError) and _is_raised_here(error):
        return UsageError(
            f"{error}: the program has told NumPy to raise this (np.seterr, np.errstate), and a"
            ' training meets it in its ordinary course; train within np.errstate(all="warn")'
        ).with_traceback(error.__traceback__)
    return error


def _is_raised_here(error: BaseException) -> bool:
    """Return whether code of nnmpi has raised an error."""
    frames = [*walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(_PACKAGE)


class LayoutError(UsageError):
    """A parallel layout that does not fit the number of ranks or the model."""


class LaunchError(UsageError):
    """A start of MPI that cannot work (wrong mpirun, no MPI library)."""


class ShapeError(NnmpiError, ValueError):
    """Arrays whose shapes do not fit the operation."""


class DtypeError(NnmpiError, TypeError):
    """Arrays whose dtypes do not fit the operation; nnmpi never converts silently."""


class GraphError(NnmpiError, RuntimeError):
    """An impossible backward pass: its graph was not recorded, or is used up."""


class UninitializedError(GraphError, AttributeError):
    """Access to an uninitialized model's values; an AttributeError for `hasattr` and `deepcopy`."""


class DataError(NnmpiError):
    """A missing or damaged data file, or one of the wrong kind; the message names it."""

    exit_status = EX_DATAERR


class CheckpointError(NnmpiError):
    """A checkpoint that is missing, damaged, or of another model."""


class DivergenceError(NnmpiError):
    """A loss or gradient with NaN or infinity; the message names rank, step and layer."""

    exit_status = EX_DATAERR


class StopTraining(Exception):
    """Raised by a callback to end the training as the string "stop", returned, does.

    Example:
        >>> def on_record(record):  # of nnmpi train --callback FILE.py:on_record
        ...     if record["kind"] == "eval" and record["accuracy"] > 0.98:
        ...         raise nnmpi.StopTraining
        >>> on_record({"kind": "eval", "accuracy": 0.9})
    """


def asks_to_stop(callback: Callable[[Any], object], item: Any) -> bool:
    """Call a user's callback; return whether it asks to end the training."""
    try:
        answer = callback(item)
    except StopTraining:
        return True
    words = answer if isinstance(answer, str) else ""
    if words not in ("", "stop"):
        raise UsageError(
            f"the callback returned {shortened(repr(words))}; only 'stop' has a meaning"
        )
    return bool(words)


class CommError(NnmpiError):
    """Ranks that disagree, or messages that do not fit one another."""


class ScheduleError(NnmpiError):
    """A collective or schedule with wrong steps, found by proof before any message is sent."""


class DeviceError(NnmpiError):
    """A missing device, or device or shared memory that is used up."""
