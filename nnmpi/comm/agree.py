"""Agreement on errors, for phases that all ranks go through together: one rank fails, all ranks raise.

Without it the others would wait for ever in their next collective. Used where a rank can fail alone: reading files,
checking options, saving. In the training step itself nobody asks; there an exception ends the job.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import nnmpi.errors as errors
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import CommError, NnmpiError


class Gathers(Protocol):
    """What of a `Group` is needed here."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""


def agree(group: Gathers, error: Exception | None, speaker: int | None = None) -> None:
    """Return if no rank has an error; otherwise raise on every rank. Collective.

    An error of nnmpi's own keeps its kind, and with it the exit status; of several, the lowest rank's counts. Any
    other exception becomes a CommError that ends with that rank's traceback. If all ranks failed with the same text,
    nobody in particular is guilty and the text stays as it is; otherwise it begins with the guilty ranks.

    Args:
        group: the ranks that must agree.
        error: this rank's exception, None if all went well.
        speaker: a rank that worked for all, if there is one: where it fails alone its text stays as it is too.

    Raises:
        NnmpiError: the error that all ranks raise; on a rank that failed, caused by its own exception.
    """
    everyones: list[dict[str, Any] | None] = group.gather(None if error is None else _describe(error))
    failed = {rank: found for rank, found in enumerate(everyones) if found is not None}
    if failed:
        raise _build(failed, len(everyones), speaker) from error


@contextmanager
def agreed(group: Gathers) -> Iterator[None]:
    """Run the body, and raise on every rank if it raised on any. Collective: all ranks enter it.

    The body must not use the group itself after a point where one rank can fail alone: the others would wait there.
    KeyboardInterrupt and SystemExit are not for agreement; they pass through and end the job.

        with agreed(group):
            train = load(path)          # a file that is damaged on one node stops all
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    agree(group, failure)


def _describe(error: Exception) -> dict[str, Any]:
    """Return the error as a JSON value: its kind (nnmpi's nearest base), its text, its traceback if it is foreign."""
    if isinstance(error, NnmpiError):
        kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind]
        return {"kind": kinds[0], "status": error.exit_status, "text": str(error), "trace": ""}
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {"kind": CommError.__name__, "status": 1, "text": text, "trace": "".join(traceback.format_exception(error))}


def _build(failed: Mapping[int, Mapping[str, Any]], size: int, speaker: int | None) -> NnmpiError:
    """Return the error that stands for all that failed."""
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
