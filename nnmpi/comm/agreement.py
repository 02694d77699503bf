"""Agreement among ranks: on failures, on values, and on the steps at which they check.

It serves phases in which one rank can fail or differ alone: reading files, checking options,
building models, saving. Without it the others would wait for ever in their next collective. The
training step itself uses none of this: it would cost a collective per step. There an exception
aborts the job (see `nnmpi.comm.mpi.shutdown`).

    one rank fails, all raise   `agreed` around work that every rank does
                                `on_root` for work that rank 0 does for all
                                `CollectivePhase` for work in several steps with messages in between
    the same on every rank      `require_equal`, and `refuse_different` for gathered values;
                                `as_text` of values that are compared by their words
    a check every few steps     `PeriodicCheck`
"""

import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NoReturn, Self, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

import nnmpi.base.clock as clock
import nnmpi.base.errors as errors
from nnmpi.backend.array import is_array, plain
from nnmpi.base.errors import CommError, NnmpiError, UsageError, check_int, group_ranks, name_ranks
from nnmpi.base.lines import lines_of
from nnmpi.base.settled import Settled
from nnmpi.comm.buffers import to_host
from nnmpi.comm.world import Comm


class Communicator(Settled, read_once="comm rank size"):
    """Ranks 0..size-1 that exchange small values; `group.Group` adds the arrays.

    Its methods are collective unless they say otherwise: all ranks call them, in the same order.

    Args:
        comm: a communicator of these ranks.
        private: whether `comm` has no other user. If it has, this works on a duplicate, so that
            messages of both never mix.

    Attributes:
        rank: this process's number among them.
        size: the number of ranks.
        comm: the communicator, for the modules of this package.
    """

    def __init__(self, comm: Comm, private: bool = False) -> None:
        self.comm: Comm = comm if private else comm.duplicate()
        self.rank, self.size = self.comm.rank, self.comm.size
        self._nodes: list[int] | None = None

    def __repr__(self) -> str:
        """Return rank and size."""
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    def __reduce__(self) -> NoReturn:
        raise CommError(
            "a group of ranks cannot be copied or pickled, nor can a model in a Worker or a"
            " strategy; keep its values, such as the best ones, by model.state() and"
            " model.load_state, or call its release()"
        )

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the one that prints and writes (not collective)."""
        return self.rank == 0

    def split(self, color: int, key: int = 0) -> Self:
        """Return the group of the ranks with the same color, ordered by key, then by rank here.

        Raises:
            UsageError: for a negative color.
        """
        return type(self)(self.comm.split(check_int("color", color, 0), key), private=True)

    def node(self) -> Self:
        """Return the group of the ranks that share this node's memory, in rank order."""
        return type(self)(self.comm.split_by_node(self.rank), private=True)

    def nodes(self) -> list[int]:
        """Return each rank's node number; nodes in order of first ranks. Collective at first."""
        if self._nodes is None:
            node = self.node()
            firsts = self.gather(node.share(self.rank))  # the lowest rank of each rank's node
            node.free()
            numbers = sorted(set(firsts))
            self._nodes = [numbers.index(rank) for rank in firsts]
        return self._nodes

    def on_one_node(self) -> bool:
        """Return whether all ranks are on one node. Collective the first time."""
        return len(set(self.nodes())) == 1

    def local_rank(self) -> int:
        """Return this rank's number among those on its node. Collective the first time."""
        nodes = self.nodes()
        return nodes[: self.rank].count(nodes[self.rank])

    def free(self) -> None:
        """Free the communicator; MPI libraries have a limited number of them."""
        self.comm.free()

    # ---- values ----

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, in rank order, on every rank.

        Tuples become lists and keys of dictionaries text, also in this rank's value.

        Raises:
            CommError: on all ranks, when a value has no JSON form.
        """
        known: dict[bytes, Any] = {}  # most ranks say nothing: to decode each took n^2 on n ranks
        result = []
        for rank, text in enumerate(self.gather_texts(value)):
            one = known[text] if text in known else decode_json(text, rank)
            if not isinstance(one, list | dict):  # which a caller may change
                known[text] = one
            result.append(one)
        return result

    def gather_texts(self, value: Any) -> tuple[bytes, ...]:
        """Return what `decode_json` turns into every rank's JSON value, in rank order."""
        encoded = encode_json(value)
        self.comm.check_open()
        if self.size == 1:  # an epoch of a small run has several
            return (encoded,)
        text = np.frombuffer(encoded, np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.comm.allgather(np.array([text.size], np.int64), lengths)
        if lengths.min() < 0:  # of a rank that is in a backward pass: see `tensor.turns`
            raise CommError(
                "some ranks are in the backward pass of a collective, and others in another"
                " collective; call collectives and backward in the same order on all ranks"
            )
        texts = np.empty(int(lengths.sum()), np.uint8)
        self.comm.allgatherv(text, texts, lengths.tolist())
        full, ends = texts.tobytes(), np.cumsum(lengths).tolist()
        return tuple(full[begin:end] for begin, end in pairwise([0, *ends]))

    def share(self, value: Any, root: int = 0) -> Any:
        """Return root's JSON value on every rank; the other ranks' arguments are ignored.

        Raises:
            CommError: on all ranks, when the value has no JSON form.
        """
        self.check_root(root)
        return decode_json(self.gather_texts(value if self.rank == root else None)[root], root)

    def check_root(self, root: object) -> None:
        """Refuse a root that is none of these ranks."""
        if root not in range(self.size):
            raise UsageError(f"root {root!r} is none of {self.size} ranks, which count from 0")

    def barrier(self) -> None:
        """Return when every rank has entered the barrier."""
        self.comm.barrier()

    def sum_floats(self, values: Sequence[float], asleep: bool = False) -> list[float]:
        """Sum a few numbers over the ranks in float64 and rank order: the same bits with any MPI.

        Args:
            asleep: whether to yield the core while waiting; for ranks that may come late.
        """
        self.comm.check_open()
        if self.size == 1:
            return [float(value) for value in plain(values)]
        return list(self.gather_floats(values, asleep).sum(axis=0).tolist())

    def max_floats(self, values: Sequence[float]) -> list[float]:
        """Return the largest over the ranks of each of a few numbers; NaN if any rank has NaN."""
        # not MPI_MAX: its result with NaN is undefined
        return list(self.gather_floats(values).max(axis=0).tolist())

    def gather_floats(self, values: Sequence[float], asleep: bool = False) -> NDArray[np.float64]:
        """Return every rank's numbers: (size, numbers); `asleep`: see `sum_floats`."""
        local = np.array(plain(values), np.float64)
        by_rank = np.empty((self.size, local.size))
        if asleep:
            requests = [self.comm.iallgatherv(local, by_rank, [local.size] * self.size)]
            self.comm.world.wait_until(lambda: self.comm.test_all(requests))
        else:
            self.comm.allgather(local, by_rank)
        return by_rank


def encode_json(value: Any) -> bytes:
    """Return the value as JSON text: no pickle, so that a message can hold nothing but data.

    A value without a JSON form becomes an error that `decode_json` raises on every rank. Raising
    here, on the sender alone, would leave the other ranks waiting in the exchange.
    """
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


def decode_json(text: bytes, rank: int) -> Any:
    """Return the value that `rank` encoded; as in JSON, tuples are lists and keys are strings.

    Raises:
        CommError: when the value had no JSON form; names the rank.
    """
    message = json.loads(text)
    if "error" in message:
        raise CommError(
            f"rank {rank} sent something that is not a JSON value ({message['error']}); send None,"
            " bool, int, float, str, and lists and dictionaries of them"
        )
    return message["value"]


T = TypeVar("T")


# ---- one rank fails, all raise ----


@contextmanager
def agreed(group: Communicator) -> Iterator[None]:
    """Run the body, and raise on every rank if it raised on any. Collective: all ranks enter it.

    The body must not use the group after a point of failure of one rank: the others would wait in
    the group's call. KeyboardInterrupt and SystemExit pass through and end the job.

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


def agree(group: Communicator, error: Exception | None, speaker: int | None = None) -> None:
    """Return if no rank has an error; otherwise raise on every rank. Collective.

    An error of nnmpi keeps its class and exit status; of several, the lowest rank's counts. Any
    other exception becomes a CommError that ends with that rank's traceback. The text begins with
    the ranks that failed, unless all of them failed with the same text.

    Args:
        group: the ranks that must agree.
        error: this rank's exception; None without one.
        speaker: the rank that worked for all, if any: the text does not name it when it fails
            alone.

    Raises:
        NnmpiError: the error that all ranks raise; on a rank that failed, caused by its own
            exception.
    """
    by_rank: list[dict[str, Any] | None] = group.gather(None if error is None else _describe(error))
    failed = {rank: result for rank, result in enumerate(by_rank) if result is not None}
    if failed:
        raise _rebuild(failed, len(by_rank), speaker) from error


def on_root(group: Communicator, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and return its JSON value on every rank. Collective.

    The text of an error does not name rank 0: a user does not care which rank did the work for all.

    Raises:
        NnmpiError: on all ranks, when `work` raises; see `agree` for its class and text.
    """
    phase = CollectivePhase(group)
    result = phase.attempt(work) if group.is_root else None
    phase.agree()
    return group.share(result)


class CollectivePhase:
    """Work in steps with messages between them, which runs to its end even if a rank fails.

    A failed rank does no more work but still takes part in the messages, with a refusal in place of
    data (see `point_to_point.Rendezvous`), so that no rank waits for it. At the end all ranks
    agree.

        phase = CollectivePhase(group)
        part = phase.attempt(read, name)            # None if it fails, or failed before
        phase.require(channel.send(part, to=1))     # stop here if the other rank has failed
        phase.agree()                               # raises on all ranks if any has failed

    Attributes:
        stopped: whether work failed on this rank, or on another one that it met.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._error: Exception | None = None
        self.stopped = False

    def attempt(self, work: Callable[..., T], *args: Any) -> T | None:
        """Return the work's result; None if it fails, or anything has failed before."""
        if self.stopped:
            return None
        try:
            return work(*args)
        except Exception as error:
            self._error, self.stopped = error, True
            return None

    def require(self, done: bool) -> bool:
        """Stop the phase here if a transfer was refused (`done` False); return `done`."""
        self.stopped = self.stopped or not done
        return done

    def agree(self) -> None:
        """Return if no rank's work has failed; otherwise raise on every rank. Collective.

        Rank 0 works for all: the text does not name it when it fails alone.

        Raises:
            NnmpiError: see `agree`.
        """
        agree(self._group, self._error, speaker=0)


def _describe(error: BaseException) -> dict[str, Any]:
    """Return an error as a JSON value: nnmpi's nearest base class, text, traceback if foreign."""
    if isinstance(error := errors.translated(error), NnmpiError):
        kinds = [
            kind.__name__
            for kind in type(error).__mro__
            if getattr(errors, kind.__name__, None) is kind
        ]
        return {
            "kind": kinds[0],
            "status": error.exit_status,
            "text": str(error),
            "trace": "",
            "lines": lines_of(error),
        }
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return {
        "kind": CommError.__name__,
        "status": 1,
        "text": text,
        "trace": "".join(traceback.format_exception(error)),
        "lines": [],
    }


def _rebuild(failed: Mapping[int, Mapping[str, Any]], size: int, speaker: int | None) -> NnmpiError:
    """Return one error for all failed ranks, from their descriptions by rank."""
    first = failed[min(failed)]
    texts = group_ranks((rank, result["text"]) for rank, result in failed.items())
    if len(texts) == 1 and (len(failed) == size or list(failed) == [speaker]):
        text = first["text"]
    else:
        text = "; ".join(f"{name_ranks(ranks)}: {what}" for what, ranks in texts.items())
    kind: type[NnmpiError] = getattr(errors, first["kind"])
    trace = f"\n\nOn rank {min(failed)}:\n{first['trace']}" if first["trace"] else ""
    error = kind(text + trace)
    error.exit_status, error.lines = first["status"], first["lines"]
    return error


# ---- the same on every rank ----


def as_text(value: Any) -> str:
    """Return a value as text that is the same on all ranks that have the same value.

    Arrays are told by a checksum, as NumPy's text of a long one leaves most of it out; sets in the
    order of their items' texts, and objects without their addresses.
    """
    array = getattr(value, "_data", value)  # of a tensor
    if is_array(array):
        code = crc32(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data)
        return f"array of shape {array.shape} and {array.dtype} with the checksum {code}"
    if isinstance(value, partial):
        items = [*map(as_text, value.args), *_named(value.keywords)]
        return f"{as_text(value.func)}({', '.join(items)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(as_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(as_text, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(_named(value))})"
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def _named(values: Mapping[Any, Any]) -> list[str]:
    return [f"{name}={as_text(item)}" for name, item in values.items()]


def require_equal(group: Communicator, items: Sequence[Any], *how: Any, **options: Any) -> None:
    """Raise on all ranks unless all have the same items in the same order. Collective.

    Args:
        group: the ranks.
        items: JSON values of this rank; the ranks may have different numbers of them.
        how, options: further arguments of `refuse_different`.

    Raises:
        NnmpiError: on all ranks; see `refuse_different`.
    """
    refuse_different(group.gather(list(items)), *how, **options)


def refuse_different(
    by_rank: Sequence[Sequence[Any]],
    problem: str | Callable[[int], str],
    remedy: str = "",
    kind: type[NnmpiError] = CommError,
    show: Callable[[Any], str] | None = str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise unless all ranks have the same items in the same order.

    The text is "PROBLEM: rank 0 has A; ranks 1-3 have B; REMEDY", about the first item that
    differs.

    Args:
        by_rank: the items of each rank, in rank order.
        problem: the text of the problem, without ranks; or a function from the number of the first
            differing item to that text.
        remedy: the user's way out, as text; nothing by default.
        kind: the error to raise.
        show: returns an item as text; None for items such as hashes: the text then names only the
            ranks.
        ranks: whose items these are; by default 0, 1, 2 ...

    Raises:
        NnmpiError: of class `kind`.
    """
    missing, numbers = object(), range(len(by_rank)) if ranks is None else ranks
    for number, of_ranks in enumerate(zip_longest(*by_rank, fillvalue=missing)):
        if any(item != of_ranks[0] for item in of_ranks):
            if show is None:
                others = [
                    rank
                    for rank, item in zip(numbers, of_ranks, strict=True)
                    if item != of_ranks[0]
                ]
                result = (
                    f"{name_ranks(others)} of {len(of_ranks)} {_have(others)} not what rank"
                    f" {numbers[0]} has"
                )
            else:
                holders = group_ranks(
                    (rank, "nothing" if item is missing else show(item))
                    for rank, item in zip(numbers, of_ranks, strict=True)
                )
                result = "; ".join(
                    f"{name_ranks(those)} {_have(those)} {text}" for text, those in holders.items()
                )
            what = problem if isinstance(problem, str) else problem(number)
            raise kind(f"{what}: {result}" + (f"; {remedy}" if remedy else ""))


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


# ---- a check every few steps ----


UNTIMED_STEPS = 10  # between two checks when step times are not reproducible


# Seconds between two checks for signals: Open MPI kills a job half a second after the first signal.
SIGNALS_S = 0.1


class PeriodicCheck:
    """Gathers a value of each rank every SIGNALS_S seconds or so, at the same step everywhere.

        rank 0   step step step [check] step step step step [check]
        rank 1   step step step [check] step step step step [check]

    In each check rank 0 sends the number of steps until the next one, from its own step time. Ranks
    that went by their own clocks would check at different steps and wait for one another.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._steps_left = 1

    def gather(self, value: Any, step_s: float, last: bool = False) -> list[Any] | None:
        """Return every rank's JSON value if this step has a check, else None; call once per step.

        Collective at some steps, the same on all ranks, and at a `last` one.
        """
        if self._group.size == 1:
            return [value]
        self._steps_left -= 1
        if self._steps_left > 0 and not last:
            return None
        # a simulated run must not depend on the host's step times
        reproducible_s = clock.reproducible(step_s)
        steps = max(1, int(SIGNALS_S / reproducible_s)) if reproducible_s else UNTIMED_STEPS
        answers = self._group.gather([value, steps])
        self._steps_left = int(answers[0][1])
        return [answer[0] for answer in answers]
