"""nnmpi's errors: each message is one sentence, with the values and a remedy.

`exit_status` is what the command line ends with: 2 for wrong use (the user changes the command), 1
for a failure, 65 (EX_DATAERR) for one that the same command meets again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EACCES, ELOOP, ENAMETOOLONG
from operator import index

# 65; `python -m nnmpi.run` tries what ends with it once more, and then gives up
from os import EX_DATAERR


def counted(n: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, for sentences: "1 rank", "2 ranks".

    Args:
        n: the number.
        singular: the noun for 1.
        plural: the noun for others; empty for the singular with an s.
    """
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text, neighbours joined: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


def shortened(text: str, most: int = 200) -> str:
    """Return a text without its middle if nobody would read it to its end."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class NnmpiError(Exception):
    """Any error whose text is written for the person who runs the program.

    Example:
        >>> try:
        ...     models.mlp([4], 0)
        ... except nnmpi.NnmpiError as error:
        ...     print(error)
        mlp needs hidden sizes and classes of at least 1, not [128, 64] and 0
    """

    exit_status = 1


class HelpAsked(NnmpiError):
    """The user asked for help or the version; the text is printed and the status is 0."""

    exit_status = 0


class UsageError(NnmpiError, ValueError):
    """A wrong option, value or combination of them, found before any work is done."""

    exit_status = 2


def whole(name: str, value: object, least: int = 1) -> int:
    """Return a whole number that is not below `least`; an error calls it `name`.

    Raises:
        UsageError: for a smaller number, one with a fraction, and what is no number.
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least:
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}")
    return number


@contextmanager
def raised_as(kind: type[NnmpiError], what: str, advice: str = "") -> Iterator[None]:
    """Turn the system's refusal in the body into an error: "WHAT (its reason); ADVICE"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}){advice and f'; {advice}'}") from None


def told(error: BaseException) -> BaseException:
    """Return an error; for the system's errors about paths, one with a sentence.

    Any rank that asks whether a file is there meets it where a folder may not be entered or a name
    is too long. It comes from what the user has written, wherever it is raised.
    """
    if (
        isinstance(error, OSError)
        and error.errno in (EACCES, ELOOP, ENAMETOOLONG)
        and error.filename
    ):
        return UsageError(
            f"{shortened(str(error.filename))} cannot be used ({error.strerror}); give another"
        )
    return error


class LayoutError(UsageError):
    """A parallel layout that does not fit the number of ranks."""


class LaunchError(UsageError):
    """MPI was started in a way that cannot work (wrong mpirun, no MPI library)."""


class ShapeError(NnmpiError, ValueError):
    """Arrays whose shapes do not fit the operation."""


class DtypeError(NnmpiError, TypeError):
    """Arrays whose dtypes do not fit the operation: nnmpi never converts silently."""


class GraphError(NnmpiError, RuntimeError):
    """A backward pass that cannot be done: nothing was recorded, or it was used up."""


class UninitializedError(GraphError, AttributeError):
    """Values requested of an uninitialized model; an AttributeError, for `hasattr` and
    `deepcopy`.
    """


class DataError(NnmpiError):
    """A data file that is missing, damaged or of the wrong kind; the message names it."""

    exit_status = EX_DATAERR


class CheckpointError(NnmpiError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DivergenceError(NnmpiError):
    """A loss or gradient that is not finite; the message names rank, step and layer."""

    exit_status = EX_DATAERR


class CommError(NnmpiError):
    """Ranks that disagree, or messages that do not fit one another."""


class ScheduleError(NnmpiError):
    """A collective or schedule whose steps are wrong, found by proof before any message is sent."""


class DeviceError(NnmpiError):
    """A device that is asked for and not there, or out of memory."""
