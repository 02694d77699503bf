"""The exercises: collectives, their costs, group operations, pipeline schedules, staleness rules.

Each kind has its checker:

    collectives       (rank, size) -> that rank's steps. `prove` checks them on several numbers of
                      ranks; then rounds, bytes and partners are compared with the package's
    group operations  run on simulated ranks and compared with the serial result: see
                      `exercise.group_operations`
    schedules         `schedule.check` accepts any right one; then simulated time and the peak of
                      activations are compared with the package's
    costs, rules      compared on drawn cases with the collectives' `coefficients` and `synchrony`;
                      N ranks, M bytes, alpha seconds per message, beta seconds per byte
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import cleandoc
from itertools import chain, product
from math import isclose
from random import Random
from sys import float_info
from typing import Any, TypeAlias

import numpy as np

from nnmpi.asynchronous.consistency import WorkerClocks
from nnmpi.base.command import suggest
from nnmpi.base.custom import call_user
from nnmpi.base.errors import ScheduleError, UsageError, counted
from nnmpi.base.shard import split
from nnmpi.comm.algorithms.registry import ALGORITHMS, COLLECTIVES
from nnmpi.comm.algorithms.tree import tree_reduce
from nnmpi.comm.collective import (
    ROOT,
    Collective,
    Contract,
    Step,
    all_parts,
    as_collective,
    local_part,
)
from nnmpi.comm.duration import coefficients, price
from nnmpi.comm.prove import prove_steps
from nnmpi.lab.render.collectives import render_steps
from nnmpi.lab.render.schedules import render
from nnmpi.schedule.check import check as check_schedule
from nnmpi.schedule.lower import lower
from nnmpi.schedule.schedule import Instruction, Kind, Schedule
from nnmpi.schedule.schedules import make
from nnmpi.schedule.simulate import even_costs, simulate_schedule
from nnmpi.teaching.exercise.exercise import (
    Exercise,
    Measures,
    Setting,
    Solver,
    call,
    described,
)
from nnmpi.teaching.exercise.group_operations import SHARED
from nnmpi.teaching.exercise.wire import WrongAnswer

ANY, POWERS = (2, 3, 4, 5, 1, 8), (2, 4, 8, 1, 16)  # a mistake shows better on 2 ranks than on 1
MOST_DRAWN = 8  # ranks, and half as many as steps


def _line(rank: int, size: int) -> tuple[Step, ...]:
    first = () if rank == size - 1 else (Step(from_=rank + 1, recv=range(size), reduce=True),)
    return first if rank == ROOT else (*first, Step(to=rank - 1, send=range(size)))


_REDUCE = Contract(
    "reduce", local_part, lambda rank, chunk, size: all_parts(size) if rank == ROOT else None
)
_REDUCES = (Collective("line", _REDUCE, (_line,)), Collective("tree", _REDUCE, (tree_reduce,)))
REFERENCES = {**COLLECTIVES, **{("reduce", item.name): item for item in _REDUCES}}


def few(answer: Any, most: int) -> Any:
    """Return an answer that is short enough to be judged quickly.

    Raises:
        WrongAnswer: for more than `most` items. Callers pass a few times the length of any right
            answer, so that a slightly wasteful one is judged, with a sentence about its mistake.
    """
    if len(answer) > most:
        raise WrongAnswer(f"it gives {len(answer):,} of them, more than any right answer needs")
    return answer


def _drawing(steps: Sequence[Sequence[Step]]) -> str:
    if 0 < len(steps) <= MOST_DRAWN:
        return render_steps([rank[: 2 * MOST_DRAWN] for rank in steps])
    return ""


def measure_collective(
    right: Collective, near: bool, function: Solver, setting: Setting
) -> Measures:
    """Prove a collective; return chunks per rank, rounds, bytes of the busiest rank, and seconds.

    Args:
        right: a right collective.
        near: True if a rank may talk only to its partners in `right`.
        function: the solution.
        setting: the simulated machine.

    Raises:
        WrongAnswer: naming the number of ranks, and rank, step and chunk of the mistake.
    """
    size, steps, contract = setting.ranks, list[tuple[Step, ...]](), right.contract
    where = f"on {counted(size, 'rank')}"
    try:
        steps += [
            few(call_user(function, Step, rank, size), 4 * size * contract.chunks(size))
            for rank in range(size)
        ]
        proof = prove_steps(steps, contract)
        for rank, program in enumerate(steps if near else ()):
            partners = {other for step in right(rank, size) for other in (step.to, step.from_)}
            for at, step in enumerate(program):
                for other in {step.to, step.from_} - partners - {None}:
                    who = f"rank {rank}, step {at} talks to rank {other}"
                    raise ScheduleError(f"the result is right, but {who}, which is not allowed")
    except ScheduleError as error:
        raise WrongAnswer(f"{where}: {error}", _drawing(steps)) from None
    sent, received = (
        [sum(len(getattr(step, way)) for step in program) for program in steps]
        for way in ("send", "recv")
    )
    busiest = -(-setting.bytes // contract.chunks(size)) * max(*sent, *received)
    collective = as_collective(lambda rank, size: steps[rank], contract)
    seconds = price(collective, size, setting.bytes, setting.machine)
    numbers: dict[str, Sequence[float]] = {
        "chunks": sent,
        "bytes": [busiest],
        "rounds": [proof.rounds],
        "seconds": [seconds],
    }
    return where, numbers, _drawing(steps)


_FORM = """\
The buffer is cut into as many chunks as there are ranks. Return the rank's list of steps, such as
    Step(to=1, send=[0], from_=3, recv=[2], reduce=True)
This step sends chunk 0 to rank 1, and adds the chunk 2 that rank 3 sends to its own. Without reduce
it would replace its own. A step may also only send, or only receive."""


def _collective(
    name: str,
    operation: str,
    algorithm: str,
    statement: str,
    near: bool = False,
    sizes: tuple[int, ...] = ANY,
    form: str = _FORM,
) -> Exercise:
    right = REFERENCES[operation, algorithm]
    measure = partial(measure_collective, right, near)
    return Exercise(
        name,
        f"{cleandoc(statement)}\n\n{form}",
        "rank, size",
        sizes,
        imports="from nnmpi.comm.collective import Step",
        measure=measure,
        best=partial(measure, right),
        references={
            item.name: item for (named, _), item in REFERENCES.items() if named == operation
        },
    )


_COLLECTIVES = (
    _collective(
        "line-reduce",
        "reduce",
        "line",
        """Rank 0 gets the sum of all buffers, along a line.

        Rank r talks only to r - 1 and r + 1. All chunks travel at once, in size - 1 rounds.""",
        near=True,
    ),
    _collective(
        "star-all-reduce",
        "all-reduce",
        "star",
        """A parameter server: rank 0 adds up all buffers, and sends the sum back.

        The other ranks talk only to rank 0: 2 (size - 1) rounds.""",
        near=True,
    ),
    _collective(
        "ring-reduce-scatter",
        "reduce-scatter",
        "ring",
        """Rank r ends with the sum of chunk r, around a ring.

        Rank r talks only to its two neighbours: size - 1 rounds, and each rank sends size - 1
        chunks.""",
        near=True,
    ),
    _collective(
        "ring-all-gather",
        "all-gather",
        "ring",
        """Every rank gets chunk r of each rank r, around a ring.

        Rank r talks only to its two neighbours: size - 1 rounds, and each rank sends size - 1
        chunks.""",
        near=True,
    ),
    _collective(
        "ring-all-reduce",
        "all-reduce",
        "ring",
        """Every rank gets the sum of all buffers, around a ring.

        A reduce-scatter, then an all-gather: 2 (size - 1) rounds, and each rank sends
        2 (size - 1) chunks.""",
        near=True,
    ),
    _collective(
        "tree-broadcast",
        "broadcast",
        "tree",
        """Every rank gets rank 0's buffer, along a tree.

        The number of ranks that have it doubles in each round: ceil(log2(size)) rounds.""",
    ),
    _collective(
        "tree-reduce",
        "reduce",
        "tree",
        """Rank 0 gets the sum of all buffers, up a tree.

        The broadcast in reverse: ceil(log2(size)) rounds.""",
    ),
    _collective(
        "tree-all-reduce",
        "all-reduce",
        "tree",
        """Every rank gets the sum of all buffers, up a tree and down again.

        2 ceil(log2(size)) rounds; all chunks travel at once.""",
    ),
    _collective(
        "all-gather-doubling",
        "all-gather",
        "tree",
        """Every rank gets chunk r of each rank r in log2(size) rounds; size is a power of two.

        The number of a rank's chunks doubles in each round: it sends size - 1 chunks in total.""",
        sizes=POWERS,
    ),
    _collective(
        "reduce-scatter-halving",
        "reduce-scatter",
        "tree",
        """Rank r ends with the sum of chunk r in log2(size) rounds; size is a power of two.

        Each round halves the number of chunks that a rank still sums: it sends size - 1 chunks in
        total.""",
        sizes=POWERS,
    ),
    _collective(
        "halving-doubling",
        "all-reduce",
        "halving-doubling",
        """An all-reduce with few rounds and few bytes; size is a power of two.

        Halve, then double: 2 log2(size) rounds, and each rank sends 2 (size - 1) chunks.""",
        sizes=POWERS,
    ),
    _collective(
        "bruck-all-gather",
        "all-gather",
        "tree",
        """Every rank gets chunk r of each rank r, in ceil(log2(size)) rounds for any size.

        In round k (0, 1, ...) rank r gets from rank (r + 2^k) mod size the chunks that it lacks and
        that rank has.""",
    ),
    _collective(
        "neighbour-average",
        "neighbour-average",
        "gossip",
        """Gossip: each rank ends with twice its own buffer plus each neighbour's.

        The neighbours are r - 1 and r + 1 on a ring. With two ranks, each ends with the sum of both
        buffers; a single rank keeps its own.""",
        near=True,
    ),
    _collective(
        "my-all-reduce",
        "all-reduce",
        "star",
        """Every rank gets the sum of all buffers, by any algorithm.

        It must not be slower than a parameter server: at most 2 (size - 1) rounds, and no rank may
        send more than the server does.""",
    ),
    _collective(
        "all-to-all",
        "all-to-all",
        "pairwise",
        """Each rank has a chunk for every rank, and gets one from each.

        size - 1 rounds, and each rank sends size - 1 chunks.""",
        form=(
            "Chunk s * size + r is what rank s has for rank r; chunks for itself"
            f" stay.{_FORM.partition('.')[2]}"
        ),
    ),
)


# ---- rules: costs of collectives, a rank's rows, staleness ----

Case: TypeAlias = tuple[str, tuple[Any, ...], Any]
"""A description, the arguments, and the expected result."""

Cases: TypeAlias = Callable[[Random], Iterator[Case]]


def judge_rule(cases: Cases, function: Solver, *_: object) -> str:
    """Check a rule on drawn cases; return their number in a sentence.

    Raises:
        WrongAnswer: showing the first case with a wrong result.
    """
    tried = 0
    for case, values, expected in cases(Random(secrets.randbits(64))):
        tried += 1
        result = _plain(call(function, *values))
        if isinstance(expected, float):
            if not isinstance(result, int | float) or abs(result) > float_info.max:
                raise WrongAnswer(
                    f"it gives {result!r}, but must give a number of seconds or bytes"
                )
            if not isclose(result, expected, rel_tol=1e-9, abs_tol=1e-9):
                raise WrongAnswer(f"{case} it gives {result:g}, but must give {expected:g}")
        elif type(result) is not type(expected) or result != expected:
            raise WrongAnswer(f"{case}: it gives {result!r}, but must give {expected!r}")
    return f"in {tried} cases"


def _plain(result: Any) -> Any:
    """Return Python's value of one of NumPy's, such as what `numpy.min(steps) <= 3` gives."""
    is_one = isinstance(result, np.generic) or (isinstance(result, np.ndarray) and not result.ndim)
    return result.item() if is_one else result


RING = ALGORITHMS["ring"]


def _seconds(collective: Collective, draw: Random) -> Iterator[Case]:
    for N in (1, 2, 3, 4, 5, 8, 16, draw.randint(17, 64)):
        latencies, sent, _ = coefficients(collective, N)
        for M, alpha, beta in (
            (4000 * N, 1.0, 0.0),
            (4000 * N, 0.0, 1.0),
            (1, 0.0, 1.0),
            (4000 * N, 1.0, 1.0),
        ):
            hint = " (bytes are divided by /, not by //)" if M == 1 else ""
            case = f"with N = {N}, M = {M}, alpha = {alpha:g}, beta = {beta:g}{hint}"
            yield case, (N, M, alpha, beta), latencies * alpha + sent * M * beta


def _cost(name: str, operation: str, algorithm: str, statement: str) -> Exercise:
    judge = partial(judge_rule, partial(_seconds, COLLECTIVES[operation, algorithm]))
    return Exercise(name, cleandoc(statement), "N, M, alpha, beta", judge=judge)


def _rule(arguments: str) -> Callable[[Cases], Exercise]:
    return lambda cases: Exercise(*described(cases), arguments, judge=partial(judge_rule, cases))


@_rule("N, M, alpha, beta, buckets")
def bucket_cost(draw: Random) -> Iterator[Case]:
    """Gradients in equal buckets, each summed around the ring, one after another.

    Return the seconds for M bytes in total on N ranks. A message of m bytes takes alpha + m * beta
    seconds.
    """
    for buckets, (case, values, seconds) in product((1, 2, 5), _seconds(RING, draw)):
        N, _, alpha, _ = values
        # each bucket has the latencies of a ring, and a share of its bytes
        expected = seconds + (buckets - 1) * coefficients(RING, N)[0] * alpha
        yield f"{case} and {buckets} buckets", (*values, buckets), expected


@_rule("N, alpha, beta")
def ring_tree_crossover(draw: Random) -> Iterator[Case]:
    """Above how many bytes is the ring faster than the tree?

    Return the M for which both all-reduces take the same time. N is a power of two, at least 4. A
    message of m bytes takes alpha + m * beta seconds.
    """
    for N in (4, 8, 16, 64):
        alpha, beta = draw.uniform(1e-4, 1e-3), draw.uniform(1e-9, 1e-8)
        (rounds, shares, _), (levels, buffers, _) = (
            coefficients(item, N) for item in (RING, ALGORITHMS["tree"])
        )
        expected = alpha * (rounds - levels) / (beta * (buffers - shares))
        yield f"with N = {N}, alpha = {alpha}, beta = {beta}", (N, alpha, beta), expected


@_rule("rows, rank, size")
def data_split(draw: Random) -> Iterator[Case]:
    """Which rows of a batch a rank takes.

    Return (start, stop). Together the ranks take each row once, in order. If size does not divide
    rows, the first ranks take one row more than the others.
    """
    for size in (1, 2, 3, 5, 8):
        drawn = 7 * size + draw.randrange(size), draw.randrange(100, 1000)
        for rows in (size, size + 1, size - 1, *drawn):
            for rank, part in enumerate(split(rows, size)):
                case = f"{counted(rows, 'row')} on {counted(size, 'rank')}, rank {rank}"
                yield case, (rows, rank, size), (part.start, part.stop)


@_rule("steps, worker, bound")
def ssp_rule(draw: Random) -> Iterator[Case]:
    """Stale synchronous parallel: may a worker begin a step?

    steps[w] is the number of steps that worker w has done. A worker may begin if it leads the
    slowest one by at most bound. Return True or False.
    """
    for _ in range(100):
        clocks = WorkerClocks(draw.randint(1, 5))
        clocks.steps[:] = [draw.randint(3, 6) for _ in clocks.steps]
        worker, bound = draw.randrange(len(clocks.steps)), draw.randint(0, 3)
        case = (
            f"workers have done {clocks.steps} steps, and worker {worker} asks under the bound"
            f" {bound} (it leads the slowest by {clocks.lead(worker)})"
        )
        yield case, (clocks.steps, worker, bound), clocks.may_start(worker, bound)


@_rule("events")
def gradient_staleness(draw: Random) -> Iterator[Case]:
    """How stale is each gradient?

    events are in order. ("read", worker) reads the weights; ("push", worker) pushes the gradient
    computed with them, and is one update. Return a list with, for each push, the number of updates
    between the worker's read and its push.
    """
    for length in range(1, 40):
        events: list[tuple[str, int]] = []
        updates_at_read: dict[int, int] = {}
        expected: list[int] = []
        for worker in draw.choices(range(3), k=length):
            reads = worker not in updates_at_read
            events.append(("read" if reads else "push", worker))
            if reads:
                updates_at_read[worker] = len(expected)
            else:
                expected.append(len(expected) - updates_at_read.pop(worker))
        yield f"events {events}", (events,), expected


_COSTS = (
    _cost(
        "server-cost",
        "all-reduce",
        "star",
        """The parameter server's all-reduce: rank 0 receives from each rank, then sends to each.

        Return its seconds for M bytes on N ranks. A message of m bytes takes alpha + m * beta
        seconds; adding takes no time.""",
    ),
    _cost(
        "ring-cost",
        "all-reduce",
        "ring",
        """The ring's all-reduce: 2 (N - 1) steps with an N-th of the buffer each.

        Return its seconds for M bytes on N ranks. A message of m bytes takes alpha + m * beta
        seconds; adding takes no time.""",
    ),
    _cost(
        "tree-cost",
        "all-reduce",
        "tree",
        """The tree's all-reduce: up and down, the whole buffer on every level.

        Return its seconds for M bytes on N ranks. A message of m bytes takes alpha + m * beta
        seconds; adding takes no time.""",
    ),
    _cost(
        "all-gather-cost",
        "all-gather",
        "ring",
        """The ring's all-gather: N - 1 steps.

        Return its seconds on N ranks; M is the number of bytes of all chunks together. A message of
        m bytes takes alpha + m * beta seconds.""",
    ),
    bucket_cost,
    ring_tree_crossover,
)


# ---- pipeline schedules ----

VIRTUAL = 2  # stages on each rank of the interleaved one
SHAPES = ((2, 2), (2, 4), (3, 6), (4, 4), (4, 8))  # ranks and microbatches
FEW = (*SHAPES[:-1], (3, 1), (4, 2), SHAPES[-1])  # also with fewer microbatches than ranks


def measure_order(name: str, virtual: int, function: Solver, setting: Setting) -> Measures:
    """Check a schedule; return the peak activations of each rank and the simulated seconds.

    Args:
        name: of the package's schedule. Other schedules pass, too, if they need no more time or
            activations.
        virtual: stages on each rank.
        function: the solution.
        setting: the simulated machine.

    Raises:
        WrongAnswer: showing the programs with the mistake marked.
    """
    ranks, stages, microbatches = setting.ranks, setting.ranks * virtual, setting.microbatches
    where = f"with {ranks} ranks and {microbatches} microbatches"
    most = 8 * virtual * (microbatches + 1)  # a solution may also list its messages
    try:
        programs = tuple(
            few(call_user(function, Instruction, rank, ranks, microbatches), most)
            for rank in range(ranks)
        )
        for item in chain(*programs):
            exists = item.stage in range(stages) and item.microbatch in range(microbatches)
            if type(item.kind) is not Kind or not exists:
                raise ScheduleError(
                    f"{item} does not belong in {stages} stages and {microbatches} microbatches"
                )
        schedule = lower(Schedule(name, ranks, stages, microbatches, programs))
        check_schedule(schedule)
    except ScheduleError as error:
        raise WrongAnswer(f"{where}: {error}") from None  # the sentence shows the programs
    costs = even_costs(stages, setting.forward_s / virtual, message_s=setting.message_s)
    run = simulate_schedule(schedule, costs)
    numbers = {"activations": run.peak_activations, "seconds": [run.makespan_s]}
    return where, numbers, render(schedule)


def judge_cycles(function: Solver, shape: tuple[int, int]) -> str:
    """Check GPipe's clock cycles; return their number in a sentence.

    Args:
        function: the solution.
        shape: numbers of stages and microbatches.

    Raises:
        WrongAnswer: naming cycle, microbatch and stage.
    """
    stages, microbatches = shape
    where = f"with {stages} stages and {counted(microbatches, 'microbatch', 'microbatches')}"
    passes, enough = [*product(range(microbatches), range(stages))], stages + microbatches - 1
    answer, done = call(function, *shape), dict[Any, int]()  # passes, each with its cycle
    try:
        cycles = [[*map(tuple, cycle)] for cycle in few(answer, 4 * len(passes))]
    except TypeError:
        raise WrongAnswer(
            f"{where} it gives {answer!r}; give a list of lists of (microbatch, stage)"
        ) from None
    for number, cycle in enumerate(cycles):
        for item in cycle:
            at = f"{where}: {item!r} in cycle {number}"
            if item not in passes or any(isinstance(index, float) for index in item):
                raise WrongAnswer(f"{at} is not a (microbatch, stage)")
            if item in done:
                raise WrongAnswer(f"{at} is done already")
            m, s = item
            if s > 0 and done.get((m, s - 1), number) == number:
                raise WrongAnswer(f"{at} comes before {(m, s - 1)} is over")
            if number in (done.get((other, s)) for other in range(microbatches)):
                raise WrongAnswer(f"{at}: stage {s} has another microbatch in this cycle")
            done[item] = number
    for item in passes:
        if item not in done:
            raise WrongAnswer(f"{where}: {item} is missing")
    if len(cycles) > enough:
        raise WrongAnswer(
            f"{where}: all is done, but it takes {len(cycles)} cycles; the limit is {enough}"
        )
    return f"{where} it takes {len(cycles)} cycles"


def _order(name: str, schedule: str, statement: str, virtual: int = 1) -> Exercise:
    def right(rank: int, ranks: int, microbatches: int) -> Any:
        return make(schedule, ranks, microbatches, virtual).programs[rank]

    measure = partial(measure_order, schedule, virtual)
    return Exercise(
        name,
        cleandoc(statement),
        "rank, ranks, microbatches",
        FEW if virtual == 1 else SHAPES,
        imports="from nnmpi.schedule.schedule import Kind",
        measure=measure,
        best=partial(measure, right),
        references={schedule: right},
    )


_SCHEDULES = (
    _order(
        "naive-pipeline",
        "naive",
        """One microbatch after another: forward through all ranks, then backward.

        Return the passes of the rank, in order: Kind.F.at(stage, microbatch) and
        Kind.B.at(stage, microbatch).""",
    ),
    _order(
        "gpipe",
        "gpipe",
        """GPipe: all forwards, then all backwards.

        Return the passes of the rank, in order: Kind.F.at(stage, microbatch) and
        Kind.B.at(stage, microbatch).""",
    ),
    _order(
        "one-f-one-b",
        "1f1b",
        """1F1B: each backward runs as soon as it can; rank r keeps at most ranks - r activations.

        Return the passes of the rank, in order: Kind.F.at(stage, microbatch) and
        Kind.B.at(stage, microbatch).""",
    ),
    _order(
        "interleaved",
        "interleaved",
        """Interleaved 1F1B: rank r has the stages r and r + ranks.

        Return the passes of the rank, in order: Kind.F.at(stage, microbatch) and
        Kind.B.at(stage, microbatch).
        The number of microbatches is a multiple of ranks. A rank's forwards run one stage on as
        many microbatches as there are ranks, then the other on the same ones; so do its
        backwards.""",
        VIRTUAL,
    ),
    _order(
        "zero-bubble",
        "zero-bubble",
        """Zero bubble (ZB-H1): each backward in two halves, the second in idle time.

        Return the passes of the rank, in order: Kind.F.at(rank, m), then Kind.I.at(rank, m) for the
        gradient of the input, for which the previous rank waits, and Kind.W.at(rank, m) for the
        gradients of the weights, for which no rank waits.
        """,
    ),
    _order(
        "inference-pipeline",
        "inference",
        """Forwards only: rank r has the stages r and r + ranks.

        Return the passes of the rank, in order: Kind.F.at(stage, microbatch). The number of
        microbatches is a multiple of ranks.""",
        VIRTUAL,
    ),
    Exercise(
        "gpipe-clock",
        """GPipe's forwards, clock cycle by clock cycle.

Return a list of cycles, each a list of the (microbatch, stage) that run at once. Stage s may begin
a microbatch in the cycle after stage s - 1 has done it. Use as few cycles as possible.""",
        "stages, microbatches",
        FEW,
        judge_cycles,
    ),
)

KINDS: Mapping[str, tuple[Exercise, ...]] = {
    "collectives": _COLLECTIVES,
    "costs": _COSTS,
    "sharded data, layers and states": (data_split, *SHARED),
    "pipeline schedules": _SCHEDULES,
    "staleness": (ssp_rule, gradient_staleness),
}
EXERCISES: Mapping[str, Exercise] = {item.name: item for kind in KINDS.values() for item in kind}


def find(name: str) -> Exercise:
    """Return the exercise of this name.

    Raises:
        UsageError: for an unknown name.

    Example:
        >>> from nnmpi.teaching.exercise.exercises import find
        >>> find("ring-all-reduce").title
        'Every rank gets the sum of all buffers, around a ring.'
    """
    if name not in EXERCISES:
        near = suggest(name, EXERCISES) or "; nnmpi exercise lists them"
        raise UsageError(f"there is no exercise {name!r}{near}")
    return EXERCISES[name]


def check(name: str, function: Solver) -> str:
    """Check a solution of an exercise; return a sentence on a right one.

    Raises:
        UsageError: for an unknown exercise.
        WrongAnswer: naming the mistake.

    Example:
        >>> def ring_cost(N, M, alpha, beta):
        ...     return 2 * (N - 1) * (alpha + M / N * beta)
        >>> nnmpi.exercise.check("ring-cost", ring_cost)
        'right in 32 cases'
    """
    return find(name).check(function)
