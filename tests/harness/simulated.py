"""Tests of what several ranks do: on simulated ranks, on real ones, or on both.

    @pytest.mark.simulated       in a serial run, on ranks of the simulated world, each a thread of
                                 that process
    @pytest.mark.mpi             under mpirun, on real processes
    @pytest.mark.both_worlds     both

A test is simulated if it is about what ranks compute and say to one another; it runs under mpirun
if something real takes part: MPI's own calls and sums, memory that processes share, processes that
are started, fail or are killed, seconds that go by, transports between devices. In both worlds runs
what all of the package rests on: collectives, messages, the exchange of gradients, the contract of
layouts; every call of `comm.world` must be among them or under mpirun alone.

In a simulated test `group` and `tmp_path` are the rank's own, and so is what fixtures make of them;
all else is shared. So what one rank patches is patched for all.

Numbers of ranks are 1 to 9, 12, 16 and 33. With --sizes K a test runs on K of them, told by its
name, a small number more often, and on twice as many if it is about messages and collectives
themselves and this is no quick run; `scripts/test` has K = 1. Without it a test runs on all of
them, and on few ranks with several seeds. What is no test of messages and collectives themselves is
dealt to at most 12, the fewest with three axes of ranks that differ, and whole trainings
(`equivalence`) to at most 6, since rows of their own have three axes on 8; on the double of a
device to at most 4.
"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import pytest

from nnmpi.comm.simulated.simulated_world import simulate
from tests.harness import left_out

FEW, MANY = (1, 2, 3, 4, 5, 6), (7, 8, 9, 12, 16, 33)
SEEDS = 3  # on each of the few, where nothing is left out
MOST_DEALT = 12  # ranks of what is no test of messages and collectives themselves
MOST_OF_A_TRAINING = 6
MOST_ON_DOUBLE = 4


@dataclass(frozen=True)
class Simulation:
    """What stands for the group of a simulated test until its ranks are there.

    Attributes:
        ranks: how many.
        seed: of all that MPI leaves open; with it goes a number made of the test's name.
        check: whether all messages must have been received at the end.
    """

    ranks: int
    seed: int
    check: bool = True

    def __str__(self):
        """Return it as part of the test's name."""
        return f"{self.ranks}-ranks-seed-{self.seed}"


@dataclass(frozen=True)
class PerRank:
    """What stands for a fixture that each rank makes for itself: a function, and what it is
    given.
    """

    make: Callable[..., Any]
    given: dict[str, Any]


def pytest_addoption(parser):
    """Add --sizes."""
    parser.addoption(
        "--sizes", type=int, help="on how many of the numbers of ranks a simulated test runs (all)"
    )


def pytest_configure(config):
    """Describe the marks."""
    for name, where in (
        ("simulated", "simulated ranks"),
        ("both_worlds", "simulated ranks and under mpirun"),
    ):
        config.addinivalue_line(
            "markers", f"{name}(min_size=1, max_size=33, check=True): the test runs on {where}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item):
    """Give a test of both worlds to pytest-mpi where there is MPI."""
    mark = item.get_closest_marker("both_worlds")
    if mark is not None and item.config.getoption("--with-mpi", default=False):
        item.add_marker(pytest.mark.mpi(min_size=mark.kwargs.get("min_size", 1)))


def pytest_generate_tests(metafunc):
    """Make a test of each number of ranks where there is no MPI."""
    marks = [
        metafunc.definition.get_closest_marker(name)
        for name in ("simulated", "both_worlds", "needs_ranks")
    ]
    mark, needed = marks[0] or marks[1], marks[2]
    if mark is None or metafunc.config.getoption("--with-mpi", default=False):
        return
    low, high = mark.kwargs.get("min_size", 1), mark.kwargs.get("max_size", MANY[-1])
    sizes = [
        size
        for size in FEW + MANY
        if low <= size <= high and (needed is None or size in needed.args)
    ]
    seeds = {size: 1 if _dealt_to(metafunc.config) or size in MANY else SEEDS for size in sizes}
    check = mark.kwargs.get("check", True)
    worlds = [Simulation(size, seed, check) for size in sizes for seed in range(seeds[size])]
    metafunc.parametrize("group", worlds, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out the numbers of ranks that a test is not dealt to."""
    if not _dealt_to(config):
        return
    worlds = [(item, world) for item in items if (world := _simulation(item)) is not None]
    sizes = {}
    on_host = config.getoption("--backend", default="numpy") == "numpy"
    for item, world in worlds:
        if world.ranks <= most_ranks(item, on_host):
            sizes.setdefault(_name(item, world), []).append(world.ranks)
    others = set()
    for item, world in worlds:
        is_dealt = left_out.is_dealt(item)
        name = _name(item, world)
        count = _dealt_to(config) * (1 if config.option.quick or is_dealt else 2)
        # on eight ranks a training takes four times as long as on two: few of them get many ranks
        share = (crc32(name.encode()) / 2**32) ** (2 if is_dealt else 1)
        spread = _spread(sizes.get(name, []), count, share)
        if config.option.but_plain and item.get_closest_marker("slow") is None:
            spread = spread[1:]  # the first is the plain run's
        if world.ranks not in spread:
            others.add(item)
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _simulation(item):
    """Return the simulation that a test is to run in, if any."""
    world = item.callspec.params.get("group") if hasattr(item, "callspec") else None
    return world if isinstance(world, Simulation) else None


def most_ranks(item, on_host):
    """Return on how many ranks a test runs at most where tests are dealt out."""
    if not left_out.is_dealt(item):
        return MANY[-1]
    if not on_host:
        return MOST_ON_DOUBLE
    is_training = item.nodeid.startswith("tests/equivalence/")
    return MOST_OF_A_TRAINING if is_training else MOST_DEALT


def _name(item, world):
    """Return the test's name without its number of ranks."""
    return item.nodeid.replace(str(world), "", 1)


def _dealt_to(config):
    """Return on how many numbers of ranks a test is to run, 0 for all."""
    return config.option.sizes or int(config.option.quick)


def _spread(sizes, count, share):
    """Return so many of the sizes, from small to large ones, beginning at a share of the list."""
    first = int(len(sizes) * share)
    return [
        sizes[(first + number * len(sizes) // count) % len(sizes)]
        for number in range(count if sizes else 0)
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Leave what hangs on the group to the ranks."""
    if _simulation(request.node) is None:
        return None
    given = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
    if not any(isinstance(value, Simulation | PerRank) for value in given.values()):
        return None
    later = PerRank(fixturedef.func, given)
    fixturedef.cached_result = (later, fixturedef.cache_key(request), None)
    return later


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the test on its ranks."""
    world = _simulation(pyfuncitem)
    if world is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def live(group):
        with ExitStack() as stack:
            values = _Values(group, stack)
            pyfuncitem.obj(**{name: values.of(name, item) for name, item in given.items()})

    simulate(
        live,
        world.ranks,
        seed=world.seed + crc32(_name(pyfuncitem, world).encode()),
        check=world.check,
    )
    return True


class _Values:
    """What a rank gets for what was given to all: its group, folder and fixtures, each made once,
    and ended at last.
    """

    def __init__(self, group, stack):
        self._group, self._stack = group, stack
        self._made = {}

    def of(self, name, given):
        """Return the value for an argument of a test or fixture."""
        if isinstance(given, Simulation):
            return self._group
        if name == "tmp_path":
            local = given / f"rank-{self._group.rank}"
            local.mkdir(exist_ok=True)
            return local
        if not isinstance(given, PerRank):
            return given
        if id(given) not in self._made:
            values = {key: self.of(key, item) for key, item in given.given.items()}
            is_context = inspect.isgeneratorfunction(given.make)
            made = (contextmanager(given.make) if is_context else given.make)(**values)
            self._made[id(given)] = self._stack.enter_context(made) if is_context else made
        return self._made[id(given)]
