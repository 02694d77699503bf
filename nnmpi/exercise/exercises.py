"""The exercises: collectives as steps, what they cost, what ranks share out; pipeline schedules, and who may go on.

A collective is a function of (rank, size) that returns that rank's steps. It is proved on several numbers of ranks;
then its rounds, what a rank sends and with whom it talks are held against what is asked for. Costs are for N ranks, M
bytes, alpha seconds for a message and beta for a byte, and are held against `price`. What is written against a group
runs on simulated ranks, and is compared with the serial result. Schedules are checked, then timed and counted beside
the package's; rules are held against `synchrony` on drawn cases.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from math import isclose
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias

from nnmpi.comm.algorithms.bruck import bruck_all_gather, bruck_reduce_scatter
from nnmpi.comm.algorithms.gossip import gossip
from nnmpi.comm.algorithms.halving import halving_doubling
from nnmpi.comm.algorithms.pairwise import pairwise
from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from nnmpi.comm.algorithms.tree import star, tree, tree_broadcast, tree_reduce
from nnmpi.comm.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    NEIGHBOUR_AVERAGE,
    REDUCE_SCATTER,
    ROOT,
    Algorithm,
    Contract,
    Step,
    as_collective,
    everyone,
    own_part,
)
from nnmpi.comm.duration import ITEM_BYTES, price
from nnmpi.comm.machine import Machine
from nnmpi.comm.prove import Proof, prove_steps
from nnmpi.comm.render import render_steps
from nnmpi.custom import ask
from nnmpi.errors import ScheduleError, counted
from nnmpi.exercise.exercise import Exercise, Function, Measures, Setting, WrongAnswer, call, judged
from nnmpi.exercise.shared import SHARED
from nnmpi.schedule.check import check
from nnmpi.schedule.lower import lower
from nnmpi.schedule.render import render
from nnmpi.schedule.schedule import Instruction, Kind, Schedule
from nnmpi.schedule.schedules import SCHEDULES, make
from nnmpi.schedule.simulate import even_costs, simulate_schedule
from nnmpi.shard import split
from nnmpi.synchrony.consistency import WorkerClocks

ANY, POWERS = (1, 2, 3, 4, 5, 8), (1, 2, 4, 8, 16)
MOST_DRAWN = 8  # ranks, and half as many as steps

REDUCE = Contract("reduce", own_part, lambda rank, chunk, size: everyone(size) if rank == ROOT else None)


def check_collective(
    contract: Contract, right: Algorithm, near: bool, function: Function, sizes: Sequence[int] = ANY
) -> str:
    """Return what a right collective does.

    Args:
        contract: what every rank has before and after it.
        right: does it; in no more rounds, and with no more chunks from any one rank, it must be done.
        near: whether only those ranks may talk to one another that do so there.
        function: what was written.
        sizes: the numbers of ranks.

    Raises:
        WrongAnswer: naming the number of ranks, and rank, step and chunk of the fault.
    """
    for size in sizes:
        best = [right(rank, size) for rank in range(size)]
        with judged("", str, partial(_drawing, best)):
            steps, proof = _proved(contract, function, size)
        with judged("", partial(_drawing, steps), partial(_drawing, best)):
            _check_limits(steps, proof, best, prove_steps(best, contract).rounds, near)
    tried = ", ".join(map(str, sizes))
    return f"right on {tried} ranks; on {size} it takes {proof.rounds} rounds and {proof.messages} messages"


def _proved(contract: Contract, function: Function, size: int) -> tuple[list[tuple[Step, ...]], Proof]:
    """Return a solution's steps, which are right, and their proof."""
    steps: list[tuple[Step, ...]] = []
    with judged(f"on {counted(size, 'rank')}", lambda: _drawing(steps)):
        steps += [ask(function, Step, rank, size) for rank in range(size)]
        return steps, prove_steps(steps, contract)


def _drawing(steps: Sequence[Sequence[Step]]) -> str:
    return render_steps([own[: 2 * MOST_DRAWN] for own in steps]) if 0 < len(steps) <= MOST_DRAWN else ""


def measure_collective(contract: Contract, function: Function, setting: Setting) -> Measures:
    """Return the seconds of a right collective on simulated clocks, bytes of its busiest rank, and rounds."""
    size, nbytes = setting.ranks, setting.bytes
    steps, proof = _proved(contract, function, size)
    lengths = [len(part) * ITEM_BYTES for part in split(-(-nbytes // ITEM_BYTES), contract.chunks(size))]
    busiest = max(
        sum(lengths[chunk] for step in own for chunk in getattr(step, way)) for own in steps for way in ("send", "recv")
    )
    collective = as_collective(lambda rank, size: steps[rank], contract)
    seconds = price(collective, size, nbytes, setting.machine)
    return {"seconds": seconds, "bytes": busiest, "rounds": proof.rounds}, _drawing(steps)


def _check_limits(
    steps: Sequence[Sequence[Step]], proof: Proof, best: Sequence[Sequence[Step]], rounds: int, near: bool
) -> None:
    """Refuse what is right but not what was asked for."""
    right, enough = f"on {counted(len(steps), 'rank')}: the result is right, but", max(map(_chunks, best))
    for rank, own in enumerate(steps):
        friends = {partner for step in best[rank] for partner in (step.to, step.from_)}
        for at, step in enumerate(own):
            for partner in {step.to, step.from_} - friends - {None}:
                if near:
                    raise WrongAnswer(f"{right} rank {rank}, step {at} talks to rank {partner}, which it may not")
        if _chunks(own) > enough:
            raise WrongAnswer(f"{right} rank {rank} sends {_chunks(own)} chunks, and {enough} are enough")
    if proof.rounds > rounds:
        raise WrongAnswer(f"{right} it takes {proof.rounds} rounds, and {rounds} are enough")


def _chunks(steps: Sequence[Step]) -> int:
    return sum(len(step.send) for step in steps)


def _line(rank: int, size: int) -> tuple[Step, ...]:
    first = () if rank == size - 1 else (Step(from_=rank + 1, recv=range(size), reduce=True),)
    return first if rank == ROOT else (*first, Step(to=rank - 1, send=range(size)))


_FORM = """
The buffer is cut into as many chunks as there are ranks. Return a list of steps, such as
    Step(to=1, send=[0], from_=3, recv=[2], reduce=True)
chunk 0 goes to rank 1, while chunk 2 comes from rank 3 and is added; without reduce it takes the place of the old one.
A step may also only send, or only receive."""


def _collective(
    name: str,
    statement: str,
    contract: Contract,
    right: Algorithm,
    near: bool = False,
    sizes: tuple[int, ...] = ANY,
    form: str = _FORM,
) -> Exercise:
    check = partial(check_collective, contract, right, near, sizes=sizes)
    imports, measure = "from nnmpi.comm.collective import Step", partial(measure_collective, contract)
    own = {how: each for (what, how), each in COLLECTIVES.items() if what == contract.name}
    return Exercise(name, f"{statement}\n{form}", "rank, size", check, imports, measure, own)


_COLLECTIVES = (
    _collective(
        "line-reduce",
        "The sum of all ranks at rank 0, passed along a line.\n\nRank r talks to r - 1 and r + 1 only; all chunks "
        "travel at once, in size - 1 rounds.",
        REDUCE,
        _line,
        near=True,
    ),
    _collective(
        "star-all-reduce",
        "A parameter server: rank 0 adds up what all bring, and sends the sum back.\n\nOnly rank 0 talks to the "
        "others: 2 (size - 1) rounds.",
        ALL_REDUCE,
        star,
        near=True,
    ),
    _collective(
        "ring-reduce-scatter",
        "Around a ring: rank r ends with the sum of chunk r.\n\nRank r talks to its two neighbours only: size - 1 "
        "rounds, and a rank sends size - 1 chunks.",
        REDUCE_SCATTER,
        ring_reduce_scatter,
        near=True,
    ),
    _collective(
        "ring-all-gather",
        "Around a ring: rank r's chunk r gets to everybody.\n\nRank r talks to its two neighbours only: size - 1 "
        "rounds, and a rank sends size - 1 chunks.",
        ALL_GATHER,
        ring_all_gather,
        near=True,
    ),
    _collective(
        "ring-all-reduce",
        "Everybody gets the sum of all buffers, around a ring.\n\nA reduce-scatter, then an all-gather: 2 (size - 1) "
        "rounds, and a rank sends 2 (size - 1) chunks.",
        ALL_REDUCE,
        ring,
        near=True,
    ),
    _collective(
        "tree-broadcast",
        "Rank 0's buffer to everybody along a tree.\n\nIn each round twice as many ranks have it: log2 of size rounds, "
        "rounded up.",
        BROADCAST,
        tree_broadcast,
    ),
    _collective(
        "tree-reduce",
        "The sum of all buffers at rank 0, up a tree.\n\nThe broadcast's picture from the bottom to the top: log2 of "
        "size rounds, rounded up.",
        REDUCE,
        tree_reduce,
    ),
    _collective(
        "tree-all-reduce",
        "Everybody gets the sum, up a tree and down again.\n\n2 log2 of size rounds, rounded up; all chunks travel at "
        "once.",
        ALL_REDUCE,
        tree,
    ),
    _collective(
        "all-gather-doubling",
        "Rank r's chunk r gets to everybody in log2 of size rounds; size is a power of two.\n\nWhat a rank has doubles "
        "in each round: it sends size - 1 chunks in all.",
        ALL_GATHER,
        bruck_all_gather,
        sizes=POWERS,
    ),
    _collective(
        "reduce-scatter-halving",
        "Rank r ends with the sum of chunk r in log2 of size rounds; size is a power of two.\n\nWhat a rank is "
        "responsible for halves in each round: it sends size - 1 chunks in all.",
        REDUCE_SCATTER,
        bruck_reduce_scatter,
        sizes=POWERS,
    ),
    _collective(
        "halving-doubling",
        "An all-reduce with few rounds and few bytes; size is a power of two.\n\nHalve, then double: 2 log2 of size "
        "rounds, and a rank sends 2 (size - 1) chunks.",
        ALL_REDUCE,
        halving_doubling,
        sizes=POWERS,
    ),
    _collective(
        "bruck-all-gather",
        "Rank r's chunk r gets to everybody; log2 of size rounds for any size, rounded up.\n\nIn round k rank r gets "
        "from rank r + 2^k what that rank has, as far as it is still missing.",
        ALL_GATHER,
        bruck_all_gather,
    ),
    _collective(
        "neighbour-average",
        "Gossip: each rank ends with twice its own buffer and once each neighbour's.\n\nThe neighbours are r - 1 and "
        "r + 1 on a ring. With two ranks each ends with the sum of both.",
        NEIGHBOUR_AVERAGE,
        gossip,
        near=True,
    ),
    _collective(
        "my-all-reduce",
        "Everybody gets the sum of all buffers, in any way.\n\nNo slower than a parameter server: 2 (size - 1) rounds, "
        "and no rank sends more than the server.",
        ALL_REDUCE,
        star,
    ),
    _collective(
        "all-to-all",
        "Each rank has a chunk for every rank, and gets one from each.\n\nsize - 1 rounds, and a rank sends size - 1 "
        "chunks.",
        ALL_TO_ALL,
        pairwise,
        form=f"\nChunk s * size + r is what rank s has for rank r; its own ones stay.{_FORM.partition('.')[2]}",
    ),
)


# ---- what they cost ----


def _exact(operation: str, algorithm: str, N: int, M: int, alpha: float, beta: float) -> float:
    return price(find_collective(operation, algorithm), N, M, Machine.uniform(alpha, beta))


def _buckets(N: int, M: int, alpha: float, beta: float, buckets: int) -> float:
    return buckets * _exact("all-reduce", "ring", N, M // buckets, alpha, beta)


def check_cost(exact: Callable[..., float], further: Sequence[tuple[int, ...]], function: Function) -> str:
    """Return that a formula is right.

    Args:
        exact: (N, M, alpha, beta, ...) -> the right seconds.
        further: the values of what the formula depends on beside N, M, alpha and beta.

    Raises:
        WrongAnswer: saying for how many ranks, and whether latencies or bytes are wrong.
    """
    for N, rest in product((1, 2, 3, 4, 5, 8, 16, secrets.choice(range(17, 65))), further):
        whole = 4000 * N
        latencies, bytes_ = exact(N, whole, 1.0, 0.0, *rest), exact(N, whole, 0.0, 1.0, *rest) / whole
        for M, alpha, beta in ((whole, 1.0, 0.0), (whole, 0.0, 1.0), (1, 0.0, 1.0), (whole, 1.0, 1.0)):
            found, wanted = _number(function, N, M, alpha, beta, *rest), alpha * latencies + beta * bytes_ * M
            if not isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9):
                given = f"with N = {N}, M = {M}, alpha = {alpha:g}, beta = {beta:g}"
                given += f" and {rest[0]} buckets" if rest else ""
                hint = "; bytes are divided by /, not by //" if M == 1 else ""
                raise WrongAnswer(f"{given} it gives {found:g}, but the steps' critical path takes {wanted:g}{hint}")
    return "right for 1 to 64 ranks: latencies and bytes are those of the steps' critical path"


def check_crossover(function: Function) -> str:
    """Return where a crossover was confirmed; errors are those of `check`."""
    for N in (4, 8, 16, 64):
        alpha, beta = 1e-3, 1e-8  # so that a few bytes more or less do not matter
        M = _number(function, N, alpha, beta)
        if not 0 < M < 1e15:
            raise WrongAnswer(f"with N = {N} it gives {M:g} bytes, which is no length of a buffer")
        for share, better, worse in ((0.98, "tree", "ring"), (1.02, "ring", "tree")):
            times = {name: _exact("all-reduce", name, N, int(share * M), alpha, beta) for name in ("tree", "ring")}
            if times[better] > times[worse]:
                told = f"ring {times['ring']:.4g} s, tree {times['tree']:.4g} s"
                raise WrongAnswer(f"with N = {N} the two do not cross at {M:g} bytes: at {int(share * M)} it is {told}")
    return "right for 4, 8, 16 and 64 ranks: below it the tree is faster, above it the ring"


def _number(function: Function, *values: float) -> float:
    found = call(function, *values)
    if not isinstance(found, int | float):
        raise WrongAnswer(f"it gives {found!r}, and must give a number of seconds or bytes")
    return float(found)


def _cost(name: str, statement: str, operation: str, algorithm: str, returns: str) -> Exercise:
    check = partial(check_cost, partial(_exact, operation, algorithm), [()])
    return Exercise(name, f"{statement}\n\nReturn its seconds {returns}", "N, M, alpha, beta", check)


_BYTES = "for M bytes on N ranks; adding takes no time."
_COSTS = (
    _cost(
        "server-cost",
        "The parameter server's all-reduce: rank 0 takes from one after another, then sends to each.",
        "all-reduce",
        "ps",
        _BYTES,
    ),
    _cost(
        "ring-cost",
        "The ring's all-reduce: 2 (N - 1) steps with an N-th of the buffer each.",
        "all-reduce",
        "ring",
        _BYTES,
    ),
    _cost(
        "tree-cost",
        "The tree's all-reduce: up and down, the whole buffer on every level.",
        "all-reduce",
        "tree",
        _BYTES,
    ),
    _cost(
        "all-gather-cost",
        "The ring's all-gather: N - 1 steps.",
        "all-gather",
        "ring",
        "on N ranks; M are the bytes of all chunks together.",
    ),
    Exercise(
        "bucket-cost",
        "Gradients in equal buckets, each summed around the ring, one after another.\n\nReturn the seconds for M bytes "
        "in all on N ranks.",
        "N, M, alpha, beta, buckets",
        partial(check_cost, _buckets, [(1,), (2,), (5,)]),
    ),
    Exercise(
        "ring-tree-crossover",
        "From how many bytes on is the ring faster than the tree?\n\nReturn the M at which both all-reduces take as "
        "long; N is a power of two, at least 4.",
        "N, alpha, beta",
        check_crossover,
    ),
)


# ---- pipeline schedules ----

VIRTUAL = 2  # stages on each rank of the interleaved one
SHAPES = ((2, 2), (2, 4), (3, 6), (4, 4), (4, 8))  # ranks and microbatches
FEW = (*SHAPES[:-1], (3, 1), (4, 2), SHAPES[-1])  # also with fewer microbatches than ranks


def check_order(name: str, virtual: int, function: Function, sizes: Sequence[tuple[int, int]] = SHAPES) -> str:
    """Return what a right schedule takes.

    Args:
        name: the package's schedule that is wanted; another one that is as good passes, too.
        virtual: stages on each rank.
        function: what was written.
        sizes: numbers of ranks and microbatches.

    Raises:
        WrongAnswer: showing the programs with the fault marked, or saying which rank keeps too much, or what is slow.
    """
    for ranks, microbatches in sizes:
        wanted = lower(make(name, ranks, microbatches, virtual))
        with judged("", str, partial(render, wanted)):
            schedule, where = _checked(name, virtual, function, ranks, microbatches)
            _check_figures(schedule, where, wanted)
    found = simulate_schedule(schedule, even_costs(schedule.stages))
    return f"right; {where} it takes {found.makespan_s:g} units, bubble {found.bubble:.0%}"


def _check_figures(schedule: Schedule, where: str, wanted: Schedule) -> None:
    """Refuse what keeps more, or takes longer, than is wanted."""
    found, best = (simulate_schedule(each, even_costs(schedule.stages)) for each in (schedule, wanted))
    right, picture = f"{where}: everything is done, in a possible order, but", render(schedule)
    for rank, (kept, enough) in enumerate(zip(found.peak_activations, best.peak_activations, strict=True)):
        if kept > enough:
            told = f"{right} rank {rank} keeps {kept} activations at once, and {enough} are enough"
            raise WrongAnswer(told, picture)
    if found.makespan_s > best.makespan_s + 1e-9:
        raise WrongAnswer(
            f"{right} it takes {found.makespan_s:g} units of time, where {best.makespan_s:g} are enough; a forward "
            f"takes one, a backward two",
            picture,
        )


def _checked(name: str, virtual: int, function: Function, ranks: int, microbatches: int) -> tuple[Schedule, str]:
    """Return a solution's schedule, which is right, and for what it is."""
    where = f"with {ranks} ranks and {microbatches} microbatches"
    with judged(where, str):  # the sentence shows the programs
        programs = tuple(ask(function, Instruction, rank, ranks, microbatches) for rank in range(ranks))
        for one in chain.from_iterable(programs):
            there = one.stage in range(ranks * virtual) and one.microbatch in range(microbatches)
            if type(one.kind) is not Kind or not there:
                raise ScheduleError(f"{one} has no place in {ranks * virtual} stages and {microbatches} microbatches")
        schedule = lower(Schedule(name, ranks, ranks * virtual, microbatches, programs))
        check(schedule)
    return schedule, where


def measure_order(name: str, virtual: int, function: Function, setting: Setting) -> Measures:
    """Return the seconds of a right schedule, and the most activations that a rank keeps."""
    schedule, _ = _checked(name, virtual, function, setting.ranks, setting.microbatches)
    costs = even_costs(setting.ranks * virtual, setting.forward_s / virtual, message_s=setting.message_s)
    found = simulate_schedule(schedule, costs)
    return {"seconds": found.makespan_s, "activations": max(found.peak_activations)}, render(schedule)


def check_cycles(function: Function, sizes: Sequence[tuple[int, int]] = FEW) -> str:
    """Return in how many clock cycles the forwards are done.

    Args:
        function: what was written.
        sizes: numbers of stages and microbatches.

    Raises:
        WrongAnswer: naming cycle, microbatch and stage.
    """
    for stages, microbatches in sizes:
        where = f"with {stages} stages and {counted(microbatches, 'microbatch', 'microbatches')}"
        cycles, done = call(function, stages, microbatches), dict[tuple[int, int], int]()
        if not isinstance(cycles, tuple | list) or not all(isinstance(each, tuple | list) for each in cycles):
            raise WrongAnswer(f"{where} it gives {cycles!r}; give a list of lists of (microbatch, stage)")
        for number, cycle in enumerate(cycles):
            busy = set[int]()
            for one in cycle:
                m, s = one if isinstance(one, tuple | list) and len(one) == 2 else (-1, -1)
                told = f"{where}: {one!r} in cycle {number}"
                if m not in range(microbatches) or s not in range(stages):
                    raise WrongAnswer(f"{told} is no (microbatch, stage)")
                if (m, s) in done:
                    raise WrongAnswer(f"{told} was done in cycle {done[m, s]}")
                if s > 0 and done.get((m, s - 1), number) >= number:
                    raise WrongAnswer(f"{told} comes before {(m, s - 1)} is over")
                if s in busy:
                    raise WrongAnswer(f"{told}: stage {s} has another microbatch in this cycle")
                busy.add(s)
                done[m, s] = number
        missing = [one for one in product(range(microbatches), range(stages)) if one not in done]
        if missing:
            raise WrongAnswer(f"{where}: {missing[0]} is missing")
        if len(cycles) > stages + microbatches - 1:
            enough = stages + microbatches - 1
            raise WrongAnswer(f"{where}: all is done, but it takes {len(cycles)} cycles, and {enough} are enough")
    return f"right; {where} it takes {len(cycles)} cycles"


_ORDER = "\n\nReturn what the rank computes, in order: Kind.F.at(stage, microbatch) and Kind.B.at(stage, microbatch)."
_SCHEDULES = (
    ("naive-pipeline", "naive", 1, f"One microbatch after another: forward through all ranks, and back.{_ORDER}"),
    ("gpipe", "gpipe", 1, f"GPipe: all forwards, then all backwards.{_ORDER}"),
    (
        "one-f-one-b",
        "1f1b",
        1,
        f"1F1B: as soon as a backward can be done it is done; rank r keeps at most ranks - r activations.{_ORDER}",
    ),
    (
        "interleaved",
        "interleaved",
        VIRTUAL,
        f"Interleaved 1F1B: rank r has the stages r and r + ranks.{_ORDER}\nMicrobatches are a multiple of ranks; a "
        "round is as many of them as there are ranks.",
    ),
    (
        "zero-bubble",
        "zero-bubble",
        1,
        "Zero bubble (ZB-H1): a backward in two halves, the second when there is time.\n\nReturn what the rank "
        "computes, in order: Kind.F.at(rank, m), then Kind.I.at(rank, m) for the gradient of the input,\n"
        "which the rank before waits for, and Kind.W.at(rank, m) for those of the weights, which nobody waits for.",
    ),
    (
        "inference-pipeline",
        "inference",
        VIRTUAL,
        "Forwards only: rank r has the stages r and r + ranks.\n\nReturn what the rank computes, in order: "
        "Kind.F.at(stage, microbatch). Microbatches are a multiple of ranks.",
    ),
)


# ---- who may go on ----

Cases: TypeAlias = Callable[[Random], Iterator[tuple[str, tuple[Any, ...], Any]]]
"""Yields (the case in words, the values that are given, what must come out)."""


def check_rule(cases: Cases, function: Function) -> str:
    """Return in how many cases the rule is right.

    Raises:
        WrongAnswer: showing the first case in which it is not.
    """
    tried = 0
    for case, values, wanted in cases(Random(secrets.randbits(64))):
        tried += 1
        found = call(function, *values)
        if type(found) is not type(wanted) or found != wanted:
            raise WrongAnswer(f"{case}: it gives {found!r}, and must give {wanted!r}")
    return f"right in {tried} cases"


def _ssp(draw: Random) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for _ in range(100):
        clocks = WorkerClocks(draw.randint(1, 5))
        clocks.steps[:] = [draw.randint(3, 6) for _ in clocks.steps]
        worker, bound = draw.randrange(len(clocks.steps)), draw.randint(0, 3)
        lead = f"it leads the slowest by {clocks.lead(worker)}"
        case = f"workers have done {clocks.steps} steps, and worker {worker} asks under the bound {bound} ({lead})"
        yield case, (list(clocks.steps), worker, bound), clocks.may_start(worker, bound)


def _gradients(draw: Random) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    for length in range(1, 40):
        events: list[tuple[str, int]] = []
        read: dict[int, int] = {}
        wanted: list[int] = []
        for _ in range(length):
            worker = draw.randrange(3)
            if worker in read:
                wanted.append(len(wanted) - read.pop(worker))
                events.append(("push", worker))
            else:
                read[worker] = len(wanted)
                events.append(("read", worker))
        yield f"events {events}", (list(events),), wanted


_RULES: tuple[tuple[str, str, str, Cases], ...] = (
    (
        "ssp-rule",
        "Stale synchronous: may a worker begin a step?\n\nsteps[w] is how many steps worker w has done. It may, if it "
        "leads the slowest by at most bound.\nReturn True or False.",
        "steps, worker, bound",
        _ssp,
    ),
    (
        "gradient-staleness",
        'How stale is each gradient?\n\nevents are in order: ("read", worker) takes the weights, ("push", worker) '
        "gives the "
        "gradient made with them,\nwhich is one update. Return a list: for each push, how many updates there were "
        "between the worker's read and it.",
        "events",
        _gradients,
    ),
)

KINDS: Mapping[str, tuple[Exercise, ...]] = MappingProxyType(
    {
        "collectives": _COLLECTIVES,
        "what they cost": _COSTS,
        "what ranks share out": SHARED,
        "pipeline schedules": tuple(
            Exercise(
                name,
                statement,
                "rank, ranks, microbatches",
                partial(check_order, schedule, virtual, sizes=FEW if virtual == 1 else SHAPES),
                "from nnmpi.schedule.schedule import Kind",
                partial(measure_order, schedule, virtual),
                {schedule: partial(SCHEDULES[schedule], **{"virtual": virtual} if virtual > 1 else {})},
            )
            for name, schedule, virtual, statement in _SCHEDULES
        )
        + (
            Exercise(
                "gpipe-clock",
                "GPipe's forwards, clock cycle by clock cycle.\n\nReturn a list of cycles, each a list of "
                "(microbatch, stage): what is done at once. Stage s may begin a microbatch\nin the cycle after stage "
                "s - 1 has done it. In as few cycles as can be.",
                "stages, microbatches",
                check_cycles,
            ),
        ),
        "who may go on": tuple(
            Exercise(name, statement, arguments, partial(check_rule, cases))
            for name, statement, arguments, cases in _RULES
        ),
    }
)
EXERCISES: Mapping[str, Exercise] = {each.name: each for kind in KINDS.values() for each in kind}
