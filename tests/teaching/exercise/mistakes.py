"""Mistakes to plant into a right solution: each is made of the right function, and says what must
be found.

line-reduce    the right steps, but rank 1's last one is missing      "rank"
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from nnmpi.schedule.schedule import Kind
from nnmpi.teaching.exercise.exercises import KINDS
from tests.teaching.exercise import solutions
from tests.teaching.exercise.defects import DEFECTS, changed


def of_collective(name, right):
    """Yield mistakes in steps; the sentence names the number of ranks and a rank, most the step and
    the chunk.
    """

    def at_last(steps, change, wanted):
        """Change the last step that is as wanted."""
        found = [i for i, step in enumerate(steps) if wanted(step)]
        return [change(step) if found and i == found[-1] else step for i, step in enumerate(steps)]

    def other_chunk(chunks, size):
        return (
            tuple((chunk + 1) % size for chunk in chunks)
            if len(chunks) < size
            else tuple(chunks)[1:]
        )

    def chunks(steps, rank, size):
        sender = size - 1 if any(step.send for step in right(size - 1, size)) else 0
        return at_last(
            steps,
            lambda s: replace(s, send=other_chunk(s.send, size)),
            lambda s: s.send and rank == sender,
        )

    kept = []
    named = r"on \d+ ranks.*rank \d+"
    yield (
        "one list for all calls",
        changed(right, lambda steps, *_: kept.extend(steps) or kept),
        rf"{named}.*; called again, {name.replace('-', '_')} gives other values: it must keep none",
    )
    missing = changed(right, lambda steps, rank, size: steps[:-1] if rank == 1 else steps)
    yield "rank 1 forgets its last step", missing, named
    yield (
        "a rank sends other chunks at its last",
        changed(right, chunks),
        rf"{named}, step \d+.*chunks?",
    )
    partner = changed(
        right,
        lambda steps, _, size: at_last(
            steps, lambda s: replace(s, to=(s.to + 1) % size), lambda s: s.send
        ),
    )
    yield "everybody sends the last ones to somebody else", partner, named
    if any(step.reduce for step in right(0, 4)):
        yield (
            "rank 0 replaces what it must add",
            changed(right, lambda all, r, _: all if r else [replace(s, reduce=False) for s in all]),
            rf"{named}.*chunk \d+",
        )
    if any(step.recv and not step.reduce for step in right(1, 4)):
        reduced = changed(right, lambda all, *_: [replace(s, reduce=bool(s.recv)) for s in all])
        yield "all add what they must replace", reduced, rf"{named}.*chunk \d+"
    yield (
        "rank 2 gives nothing",
        changed(right, lambda steps, rank, size: None if rank == 2 else steps),
        r"\(2, \d+\) gives a NoneType; give a list of Step",
    )
    yield ("a number of rounds too many", changed(right, lambda steps, *_: [*steps, *steps]), named)


def of_cost(name, right):
    if name == "ring-tree-crossover":
        for factor in (2, 0.5, -1):
            yield (
                f"{factor} times as long",
                changed(right, lambda M, *values, factor=factor: factor * M),
                r"with N = 4, .*it gives .*, but must give",
            )
        return
    yield (
        "a latency too many",
        changed(right, lambda s, N, M, alpha, *rest: s + alpha),
        r"with N = \d+.*alpha = 1.*gives 1,.*must give 0",
    )
    more = changed(right, lambda s, N, M, alpha, beta, *rest: s + M * beta)
    yield "M too many", more, "beta = 1.*gives 4000,.*must give 0"
    yield (
        "log N in place of N",
        lambda N, M, alpha, beta, *rest: right(N.bit_length(), M, alpha, beta, *rest),
        "with N = ",
    )
    yield (
        "a product of both",
        changed(right, lambda s, N, M, a, b, *rest: s + a * b),
        "alpha = 1, beta = 1 ",
    )
    if name == "ring-cost":
        yield (
            "divided by //",
            lambda N, M, alpha, beta: 2 * (N - 1) * (alpha + M // N * beta),
            "by /, not by //",
        )
    yield "no number", lambda *values: "cheap", "must give a number"


def of_schedule(name, right):
    named = r"with \d+ ranks and \d+ microbatches.*"
    without = changed(right, lambda program, rank, *_: program[:-1] if rank == 1 else program)
    yield "rank 1 forgets its last instruction", without, rf"{named} missing"
    twice = changed(right, lambda program, rank, *_: program if rank else [program[0], *program])
    yield "rank 0 does the first one twice", twice, rf"{named} 0F0 occurs 2 times"
    yield (
        "stages of the next rank",
        changed(right, lambda p, *_: [one.kind.at(one.stage + 1, one.microbatch) for one in p]),
        f"{named} (is on rank|does not belong)",
    )
    yield (
        "a word",
        changed(right, lambda program, *values: "F0 B0"),
        "gives a str; give a list of Instruction",
    )
    if name != "inference-pipeline":
        yield (
            "the last first",
            changed(right, lambda program, *_: program[::-1]),
            rf"{named} comes before",
        )
    if name == "gpipe":
        yield (
            "naive",
            solutions.naive_pipeline,
            r"it takes \d+ s of simulated time; the limit is \d+",
        )
    if name == "one-f-one-b":

        def long_warm_up(rank, ranks, microbatches):
            """Return 1F1B with ranks - rank - 1 forwards first, also where there are fewer
            microbatches.
            """
            first, f, b = ranks - rank - 1, iter(range(microbatches)), iter(range(microbatches))
            order = [*"F" * first, *"FB" * (microbatches - first), *"B" * first]
            return [Kind(kind).at(rank, next(f if kind == "F" else b, 0)) for kind in order]

        yield (
            "the warm-up is not cut at the number of microbatches",
            long_warm_up,
            rf"{named}0F0 occurs",
        )
        yield "GPipe", solutions.gpipe, r"rank \d keeps \d activations at once; the limit is \d"
    if name == "zero-bubble":
        whole = changed(
            right, lambda program, rank, *values: [one for one in program if one.kind is not Kind.W]
        )
        yield "no second halves", whole, "W0 is missing"


def of_sharding(name, right):
    class Silent:
        """A group whose sums are left out."""

        def __init__(self, group):
            self.rank, self.size = group.rank, group.size

        def all_reduce(self, array):
            pass

        reduce_scatter = all_gather = all_reduce

    @wraps(right)
    def alone(group, *values):
        return right(Silent(group), *values)

    @wraps(right)
    def not_all(group, *values):
        return right(group if group.rank == 0 else Silent(group), *values)

    yield "nothing is summed", alone, r"on 2 ranks, the result of rank 0.*is .*, but must be"
    yield "only rank 0 sums", not_all, r"on 2 ranks: .*rank"
    if name != "zero-update":
        yield (
            "no result",
            changed(right, lambda found, *values: None),
            r"on 1 rank, the result of rank 0 is None",
        )


def of_staleness(name, right):
    wrong = {
        "ssp-rule": lambda steps, worker, bound: steps[worker] - min(steps) < bound,
        "gradient-staleness": changed(right, lambda found, events: [each + 1 for each in found]),
    }
    yield "off by one", wrong[name], r"(workers|events).*: it gives .*, but must give"
    yield "nothing", lambda *values: None, "it gives None"


OF_KIND = (of_collective, of_cost, of_sharding, of_schedule, of_staleness)


def all_mistakes():
    """Yield (exercise, mistake)."""
    for make, exercises in zip(OF_KIND, KINDS.values(), strict=True):
        for each in exercises:
            own = DEFECTS.get(each.name, [])
            general = (
                []
                if own and each.name != "all-to-all"
                else make(each.name, getattr(solutions, each.function))
            )
            for mistake in (*general, *own):
                yield each.name, mistake
