"""Times collectives in rounds, every contestant once in each round; prints a row for each.

    round 1  |  A  |  B  |  C  |     a new order every round, the same on all ranks, because a call
    round 2  |  C  |  A  |  B  |     leaves caches and threads in a state that affects the next one

    rank 0   refill | barrier |>--- call ---|                     refill | barrier |>-- ...
    rank 1   refill | barrier  |>--- call -----|                  refill | barrier |>-- ...
                               ^ last to enter  ^ last to leave

The refill is not timed, but needed: without it each rank's part of the result stays in its core's
cache, and shared memory looks three times faster than it is.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives import gloo
from benchmarks.collectives.pattern import Pattern
from benchmarks.harness import command, results
from benchmarks.harness.command import Parser, positive_count
from benchmarks.harness.launch import describe
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import MISSING, GrowingTable
from benchmarks.harness.turns import shuffled
from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.device import select
from nnmpi.base.errors import CommError, DeviceError, UsageError
from nnmpi.base.units import format_bytes, parse_bytes
from nnmpi.comm.agreement import agreed
from nnmpi.comm.algorithms.registry import AUTO, COLLECTIVES, NATIVE, SHARED
from nnmpi.comm.buffers import DTYPES
from nnmpi.comm.group import Group
from nnmpi.comm.node_sum import own_slice
from nnmpi.comm.saved_fit import find_fit
from nnmpi.optim.optimizer import Arrays
from nnmpi.optim.updates import SGD
from nnmpi.parallel.fused import FusedUpdate
from nnmpi.tensor.parameter import FlatStorage, Parameter

ALL_REDUCE = "all-reduce"
OPERATIONS = (ALL_REDUCE, "broadcast", "all-gather", "reduce-scatter")
FUSED = "fused"  # the all-reduce and the optimizer's update in one, over shared memory
UPDATE = "native+update"  # FUSED's baseline: MPI's all-reduce, then the update on every rank
GLOO = "gloo"  # PyTorch's, for comparison
WARM_UP, LEAST, MOST = 3, 5, 1000  # rounds
LR = 1.0  # makes the parameters minus the sum, exactly
# busbw: bytes over a rank's link per byte, in units of (N-1)/N; 1 for other operations
BUS = {ALL_REDUCE: 2.0, "broadcast": 0.0}


class Contestant(NamedTuple):
    """One way to do the operation, on a buffer of one length."""

    name: str
    array: Array  # refilled before each call
    run: Callable[[], Any]
    result: Callable[[], NDArray[Any]]
    prepare: Callable[[], Any] = lambda: None
    chosen: str = ""


def main(words: Sequence[str], group: Group, backend: Backend | None = None) -> None:
    """Run the command, or print the help. Collective.

    Raises:
        UsageError, DeviceError: on all ranks, for wrong options, or a missing device or library.
        CommError: on all ranks, with --check, for a wrong result.
    """
    if {"-h", "--help"} & {*words} and not group.is_root:
        return  # one rank prints the help
    options = parse(words)
    nodes = len(set(group.nodes()))
    with agreed(group):
        if group.is_root:
            results.check_writable("--json", options.json)
        if GLOO in options.algorithms:
            gloo.check_gloo(nodes)
        backend = backend or select(options.backend, group.local_rank())
    group.fit = find_fit(group)
    header = _header(options, group, backend)
    rows: list[dict[str, Any]] = []
    if GLOO in options.algorithms:
        gloo.start_gloo(group)
    is_table = group.is_root and options.format == "table"
    if is_table:
        for name, value in header.items():
            print(f"{name + ':':12} {value}")
        print(TABLE.head(), flush=True)
    for nbytes in options.sizes:
        result = measure(options, group, backend, nbytes)
        rows += result
        if is_table:
            print(*map(TABLE.line, result), sep="\n", flush=True)
        if group.is_root:
            results.write(options.json, {"header": header, "rows": rows})
    if group.is_root and options.format == "osu":
        print(*osu_lines(options.operation, rows), sep="\n")
    if GLOO in options.algorithms:
        gloo.stop_gloo()


def measure(
    options: argparse.Namespace, group: Group, backend: Backend, nbytes: int
) -> list[dict[str, Any]]:
    """Return the rows of one size. Collective."""
    contract = next(
        item.contract for (what, _), item in COLLECTIVES.items() if what == options.operation
    )
    elements = nbytes // np.dtype(options.dtype).itemsize
    pattern = Pattern(contract, group.rank, group.size, elements, options.dtype, backend)
    field = list(_contestants(options, group, backend, elements))
    begin = time.perf_counter()
    _time(field, group, pattern, range(WARM_UP), options.check)
    spent_s = group.max_floats([time.perf_counter() - begin])[0]
    rounds = options.iterations or int(
        np.clip((options.budget_s - spent_s) / (spent_s / WARM_UP), LEAST, MOST)
    )
    local = _time(field, group, pattern, range(WARM_UP, WARM_UP + rounds), options.check)
    everyones = np.empty((group.size, local.size))
    group.comm.allgather(local.reshape(-1), everyones)
    if not backend.is_device and {SHARED, AUTO, FUSED} & {item.name for item in field}:
        group.memory().free()
    return build_rows(options, group, field, everyones.reshape(group.size, *local.shape), nbytes)


def _contestants(
    options: argparse.Namespace, group: Group, backend: Backend, elements: int
) -> Iterator[Contestant]:
    """Yield the requested contestants; of "all", skip those that cannot run here, with a notice.
    Collective.
    """
    private = backend.zeros(elements, options.dtype)
    shared: list[NDArray[Any]] = []

    def node_array() -> NDArray[Any]:
        if not shared:
            shared.append(group.memory().allocate(elements, options.dtype))
        return shared[0]

    def make(name: str) -> Contestant:
        if name in (UPDATE, FUSED):
            return _update(name, options, group, private)
        if name == GLOO:
            return Contestant(name, private, gloo.gloo_sum(private), lambda: private)
        array: Any = node_array() if name in (SHARED, AUTO) and not backend.is_device else private
        how = group.choose(array).algorithm if name == AUTO else name
        pending = group.bind(array, how, operation=options.operation)

        def run() -> None:
            pending.run()
            backend.synchronize()

        timed = run if backend.is_device else pending.run
        chosen = how if name == AUTO else ""
        return Contestant(name, array, timed, lambda: backend.to_host(array), chosen=chosen)

    for name in options.algorithms:
        try:
            yield make(name)
        except (DeviceError, UsageError) as error:  # on all ranks
            if not options.everything:
                raise
            if group.is_root:
                print(f"{name} is left out: {error}")


def _update(
    name: str, options: argparse.Namespace, group: Group, grads: NDArray[Any]
) -> Contestant:
    """Return the all-reduce with plain SGD: MPI's call and the full update on every rank, or fused,
    each rank updating a slice.
    """
    if np.dtype(options.dtype).kind != "f" or not isinstance(grads, np.ndarray):
        raise UsageError(
            f"{name} updates float32 or float64 parameters in host memory, not {options.dtype}"
        )
    if name == UPDATE:
        params = np.zeros(grads.size, options.dtype)
        pending, optimizer = group.bind(grads, NATIVE), SGD(Arrays([params], [grads]), lr=LR)

        def run() -> None:
            pending.run()
            optimizer.step()

        local = params
    else:
        parameter = Parameter((grads.size,))
        storage = FlatStorage({FUSED: parameter}, {FUSED: np.zeros_like(grads)}, np.zeros)
        fused = FusedUpdate(storage, SGD(storage, lr=LR), group)
        (params,), (grads,) = storage.data, storage.grads
        parameter.grad = parameter.buffer

        def run() -> None:
            fused.reduce()
            fused.update()

        local = params[own_slice(params, fused.memory.size, fused.memory.rank)]
    # a check expects minus the sum; otherwise the parameters stay as the last update left them
    zero = (lambda: local.fill(0)) if options.check else (lambda: None)
    return Contestant(name, grads, run, lambda: -params, zero)


def _time(
    field: list[Contestant], group: Group, pattern: Pattern, rounds: range, check: bool
) -> NDArray[np.float64]:
    """Return this rank's begin and end of each call: (contestants, 2, rounds). Collective."""
    clock, stamps = time.perf_counter, np.empty((len(field), 2, len(rounds)))
    for column, call in enumerate(rounds):
        for row in shuffled(range(len(field)), call):
            item = field[row]
            pattern.fill(item.array, call)
            item.prepare()
            group.barrier()
            begin = clock()
            item.run()
            stamps[row, :, column] = begin, clock()
            wrong = pattern.first_wrong(item.result(), call) if check else None
            if check and group.max_floats([wrong is not None])[0]:
                rank, words = next(
                    (r, w) for r, w in enumerate(group.gather(wrong and str(wrong))) if w
                )
                raise CommError(
                    f"rank {rank} of {group.size} has a wrong result of {item.name}, call {call}:"
                    f" {words}"
                )
    return stamps


def build_rows(
    options: argparse.Namespace,
    group: Group,
    field: Sequence[Contestant],
    stamps: NDArray[np.float64],
    nbytes: int,
) -> list[dict[str, Any]]:
    """Return a row for each contestant from stamps of (ranks, contestants, 2, rounds).

    A rank's time lasts from its begin to its end; the collective's from the last rank's begin to
    the last rank's end. Clocks of several nodes differ, so there it is the longest of the ranks'
    times.
    """
    local = stamps[:, :, 1] - stamps[:, :, 0]
    one_clock = len(set(group.nodes())) == 1
    lasted = (
        stamps[:, :, 1].max(axis=0) - stamps[:, :, 0].max(axis=0)
        if one_clock
        else local.max(axis=0)
    )
    median = {item.name: float(np.median(times)) for item, times in zip(field, lasted, strict=True)}
    rows = []
    for number, element in enumerate(field):
        averages, seconds = 1e6 * local[:, number].mean(axis=1), median[element.name]
        moved = BUS.get(options.operation, 1.0) * (group.size - 1) / group.size or 1.0
        expected = _predict(options.operation, element.chosen or element.name, group, nbytes)
        native = median.get(UPDATE if element.name in (FUSED, UPDATE) else NATIVE)
        rows.append(
            {
                "algorithm": element.name,
                "size": nbytes,
                "avg_us": averages.mean(),
                "min_us": averages.min(),
                "max_us": averages.max(),
                "p50_us": 1e6 * seconds,
                "p99_us": 1e6 * float(np.percentile(lasted[number], 99)),
                "iterations": local.shape[-1],
                "algbw_gbs": nbytes / seconds / 1e9,
                "busbw_gbs": nbytes / seconds / 1e9 * moved,
                "predicted_us": None if expected is None else 1e6 * expected,
                "measured_over_predicted": None if not expected else seconds / expected,
                "speed_against_native": None if native is None else native / seconds,
                "chosen": element.chosen,
            }
        )
    return rows


def _predict(operation: str, how: str, group: Group, nbytes: int) -> float | None:
    """Return the fit's prediction of one call, or None."""
    fit = group.fit
    measured = operation == ALL_REDUCE and (
        how == NATIVE or (how == SHARED and fit is not None and fit.shared)
    )
    if fit is None or not (measured or (operation, how) in COLLECTIVES):
        return None
    return fit.predict(how, nbytes, operation=operation)


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"


NUMBERS = ("avg_us", "min_us", "max_us", "p50_us", "p99_us", "algbw_gbs", "busbw_gbs")
NUMBERS += ("predicted_us", "measured_over_predicted", "speed_against_native")
TITLES = {"measured_over_predicted": "measured/predicted", "speed_against_native": "native/this"}
TABLE = GrowingTable(
    ("algorithm", -17, lambda row: row["algorithm"]),
    ("size", 9, lambda row: format_bytes(row["size"])),
    *(
        (
            TITLES.get(name, name),
            max(12, len(TITLES.get(name, name)) + 3),
            lambda r, n=name: _number(r[n]),
        )
        for name in NUMBERS
    ),
    ("", -1, lambda row: f"  chose {row['chosen']}" if row["chosen"] else ""),
)


# Those whose sizes are the same to OSU's programs, which count an all-gather's by the rank.
OSU = {ALL_REDUCE: "Allreduce", "broadcast": "Broadcast"}
OSU_COLUMNS = {"avg_us": "Avg", "min_us": "Min", "max_us": "Max"}


def osu_lines(operation: str, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows as tables of OSU's programs, one for each algorithm."""
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        yield f"# OSU MPI {OSU[operation]} Latency Test: {name}, measured by nnmpi"
        titles = "".join(f"{title} Latency(us)".rjust(18) for title in OSU_COLUMNS.values())
        yield f"# {'Size':8}{titles}{'Iterations':>12}"
        for row in rows:
            if row["algorithm"] == name:
                times = "".join(f"{row[column]:18.2f}" for column in OSU_COLUMNS)
                yield f"{row['size']:<10}{times}{row['iterations']:12}"


def _header(options: argparse.Namespace, group: Group, backend: Backend) -> dict[str, Any]:
    """Return operation, libraries and machine. Collective."""
    result = describe(group)
    fit = (
        "no fit" if group.fit is None else f"of {group.fit.facts['date']}, {group.fit.ranks} ranks"
    )
    return {
        "operation": options.operation,
        "dtype": options.dtype,
        "backend": f"{backend.name} on {backend.device}",
        "checked": options.check,
        "ranks": group.size,
        "nodes": result.nodes,
        "mpi": result.mpi,
        "blas": result.blas,
        "machine": machine_facts(),
        "fit": fit,
    }


def algorithms(operation: str, on_device: bool = False) -> tuple[str, ...]:
    """Return the names that "all" stands for, on host or device arrays: the baseline first."""
    steps = tuple(how for what, how in COLLECTIVES if what == operation)
    if operation != ALL_REDUCE:
        return (NATIVE, *steps)
    return (
        NATIVE,
        *([] if on_device else [SHARED]),
        *steps,
        AUTO,
        *([] if on_device else [UPDATE, FUSED]),
    )


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, and `sizes` in bytes.

    Raises:
        UsageError: for an unknown name, or a value that cannot be used.
    """
    parser = Parser("mpirun -n P python benchmarks/collectives", description=__doc__.split("\n")[0])
    one_of = command.one_of
    command.add_options(
        parser,
        ("--operation", one_of(*OPERATIONS), ALL_REDUCE, ", ".join(OPERATIONS)),
        ("--algorithms", command.list_of(str), "all", "names; all is all but gloo"),
        ("--min", parse_bytes, "4", "bytes of the shortest buffer"),
        ("--max", parse_bytes, "64m", "bytes of the longest one"),
        ("--factor", positive_count, "4", "from one size to the next"),
        ("--dtype", one_of(*(item.name for item in DTYPES)), "float32", "of the elements"),
        ("--backend", one_of("numpy", "cupy"), "numpy", "numpy, or cupy"),
        ("--iterations", positive_count, None, "calls at each size, not what the budget allows"),
        ("--budget-s", command.positive_seconds, "2", "seconds for each size"),
        ("--format", one_of("table", "osu"), "table", "table, or osu: as OSU's programs print it"),
        ("--json", command.file, None, "file for the rows, written after each size"),
    )
    parser.add_argument("--check", action="store_true", help="verify every result of every call")
    options = parser.parse_args(words)
    if options.format == "osu" and options.operation not in OSU:
        raise UsageError(f"--format osu is for {' and '.join(OSU)}, not for {options.operation}")
    every = algorithms(options.operation, options.backend == "cupy")
    options.everything = "all" in options.algorithms
    unknown = [name for name in options.algorithms if name not in ("all", *every, GLOO)]
    if unknown or options.factor < 2 or options.min > options.max:
        what = (
            f"--algorithms {unknown[0]!r} is unknown"
            if unknown
            else "--factor is 2 or more, --min at most --max"
        )
        raise UsageError(f"{what}; the names are {', '.join(('all', *every, GLOO))}")
    chosen = [item for name in options.algorithms for item in (every if name == "all" else (name,))]
    options.algorithms, itemsize = tuple(dict.fromkeys(chosen)), np.dtype(options.dtype).itemsize
    sizes, size = [], max(options.min, itemsize)
    while size <= options.max:
        sizes.append(size // itemsize * itemsize)
        size *= options.factor
    options.sizes = tuple(dict.fromkeys(sizes))
    return options
