"""Which layout meets which model, schedule and all-reduce at each number of ranks: few runs, in
which all pairs meet.

Layouts are of one kind if the same axes have more than one rank. With a pipeline there are five of
each kind (and one of dp x pp x tp, which meets everything alone), so a Latin square lets every kind
meet every model with every schedule:

    pipeline alone     mlp           cnn           resnet
    2 ranks, pp 2      naive         gpipe         1f1b
    3 ranks, pp 3      gpipe         1f1b          interleaved
    4 ranks, pp 4      1f1b          interleaved   zero-bubble
    6 ranks, pp 6      interleaved   zero-bubble   naive
    8 ranks, pp 8      zero-bubble   naive         gpipe

`test_cover.py` counts it. On other numbers of ranks, which are simulated ones, every layout meets
one model.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

from nnmpi import Layout, models
from nnmpi.comm.algorithms.registry import AUTO, NAMES
from nnmpi.nn.chain import open_chain
from nnmpi.schedule.schedules import SCHEDULES as EVERY
from tests.equivalence.reference import Setup, digits

WORLDS = (1, 2, 3, 4, 6, 8)
# as many as make the square; `test_schedules` has all others
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
MEMORIES = (None, "least")
ALGORITHMS = [name for name in NAMES if name != AUTO]

MOST_STAGES = 16
# Each has at least so many layers: for 8 ranks with two stages each. No number of microbatches
# divides the batch of 29.
SETUPS = {
    "mlp": Setup(
        models.mlp, {"hidden": (13, 11, 9, 7, 6, 9, 8), "activation_name": "tanh"}, microbatches=6
    ),
    "cnn": Setup(models.cnn, {"hidden": (11, 9, 8, 7)}, microbatches=4),
    "resnet": Setup(models.resnet, {"width": 3}, microbatches=3),
}
MODELS = tuple(SETUPS)


@dataclass(frozen=True)
class Case:
    """One run of the contract."""

    model: str
    dp: int
    pp: int
    tp: int
    schedule: str = "1f1b"
    allreduce: str = "auto"
    memory: str | None = None

    def __str__(self):
        """Return it as the test's name."""
        named = f"{self.model} dp {self.dp} pp {self.pp} tp {self.tp}"
        named += f" {self.schedule}" if self.pp > 1 else ""
        return (
            named
            + f" {self.allreduce}" * (self.dp > 1)
            + f" {self.memory} memory" * (self.memory is not None)
        )

    @property
    def mesh(self):
        """The degrees of parallelism."""
        return self.dp, self.pp, self.tp

    @property
    def kind(self):
        """Which axes have more than one rank."""
        return self.dp > 1, self.pp > 1, self.tp > 1

    @property
    def layout(self):
        """The layout, cut unevenly and always in the same places."""
        return spread(SETUPS[self.model], self.mesh, self.schedule, activation_memory=self.memory)


def meshes(world, most=MOST_STAGES):
    """Return every (dp, pp, tp) of so many ranks that a model of at least so many layers can be cut
    for.
    """
    parts = [n for n in range(1, world + 1) if world % n == 0]
    return [
        (d, p, world // d // p) for d in parts for p in parts if world // d % p == 0 and p <= most
    ]


def uneven(setup, stages):
    """Return numbers of layers for the stages of a setup's model, the last two layers of each
    second one moved on.
    """
    count = layers(setup)
    lengths = [count // stages + (stage < count % stages) for stage in range(stages)]
    for stage in range(0, stages - 1, 2):
        moved = min(2, lengths[stage] - 1)
        lengths[stage] -= moved
        lengths[stage + 1] += moved
    return tuple(lengths)


def spread(setup, mesh, schedule, **options):
    """Return a layout that cuts the setup's model unevenly, and always in the same places.

    Ranks have the schedule's usual number of stages, or three if it takes any and there are two
    ranks; where the model is too short for that, the schedule is 1F1B.
    """
    virtual = EVERY[schedule].stages if mesh[1] > 1 else 1
    if EVERY[schedule].any_stages and mesh[1] == 2:
        virtual = 3
    if mesh[1] * virtual > layers(setup):
        virtual, schedule = 1, "1f1b"
    split = uneven(setup, mesh[1] * virtual) if mesh[1] > 1 else "auto"
    return Layout(
        *mesh, **{"pipeline": schedule, "virtual_stages": virtual, "split": split, **options}
    )


def kinds(world, setup, **options):
    """Return a layout of each kind that so many ranks have, under the schedules in turn."""
    chosen = {tuple(size > 1 for size in mesh): mesh for mesh in meshes(world, layers(setup))}
    result = []
    for number, mesh in enumerate(sorted(chosen.values())):
        schedule = SCHEDULES[(world + 2 * number) % len(SCHEDULES)]
        result.append(spread(setup, mesh, schedule, **options))
    return result


def layers(setup):
    """Return into how many layers a setup's model opens."""
    return len(
        open_chain(setup.model(digits().sample_shape, digits().classes, **setup.model_options))
    )


def cases(world):
    """Return the runs for a number of ranks."""
    if world in WORLDS:
        return [case for case in _all() if case.dp * case.pp * case.tp == world]
    return [_in_turn(number, mesh) for number, mesh in enumerate(meshes(world))]


def _in_turn(number, mesh):
    model, schedule = MODELS[number % len(MODELS)], SCHEDULES[number % len(SCHEDULES)]
    algorithm = ALGORITHMS[number % len(ALGORITHMS)] if mesh[0] > 1 else "auto"
    return Case(model, *mesh, schedule, algorithm, memory=MEMORIES[number % 2])


@cache
def _all():
    result = []
    seen = {}
    for mesh in (mesh for world in WORLDS for mesh in meshes(world)):
        kind = tuple(size > 1 for size in mesh)
        rows = range(len(SCHEDULES)) if all(kind) else (seen.setdefault(kind, 0),)
        for row, (j, model) in product(rows, enumerate(MODELS)):
            schedule = SCHEDULES[(row + j) % len(SCHEDULES)] if mesh[1] > 1 else SCHEDULES[0]
            seen[kind] = number = seen.get(kind, 0) + (j == len(MODELS) - 1)
            algorithm = ALGORITHMS[(3 * number + j) % len(ALGORITHMS)] if mesh[0] > 1 else "auto"
            before = sum(case.schedule == schedule and case.pp > 1 for case in result)
            memory = MEMORIES[before % 2] if mesh[1] > 1 else None
            result.append(Case(model, *mesh, schedule, algorithm, memory=memory))
    return tuple(result)
