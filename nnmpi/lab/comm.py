"""`nnmpi comm`: prove, draw and simulate collectives without MPI; fit a machine.

nnmpi comm list --ranks 16 --bytes 64k
nnmpi comm render ring --ranks 4
nnmpi comm render ring --ranks 6 --html ring.html --svg ring.svg
nnmpi comm prove halving-doubling --ranks 17
nnmpi comm simulate tree --ranks 16 --bytes 1M --network alpha=1e-5,beta=1e-9,gamma=1e-10
nnmpi comm simulate ring --operation all-gather --ranks 4096 --bytes 64MiB
mpirun -n 4 nnmpi comm fit --svg fit.svg
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nnmpi.base.command import (
    MOST,
    announce,
    check_numbers,
    make_section,
    options_of,
    read_words,
    require,
    say,
    split_command,
)
from nnmpi.base.custom import load_custom
from nnmpi.base.errors import UsageError, name_ranks, raised_as
from nnmpi.base.files import OutputFile
from nnmpi.base.launcher import usable_cores
from nnmpi.base.picture import check_figure
from nnmpi.base.units import Bytes, format_bytes, format_seconds
from nnmpi.comm.agreement import on_root
from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.collective import ALL_REDUCE, Collective
from nnmpi.comm.duration import coefficients, price, simulate_collective
from nnmpi.comm.fit import (
    NETWORK,
    default_file,
    describe_fit,
    describe_network,
    find_network_fit,
    parse_network,
    save_fit,
)
from nnmpi.comm.machine import EAGER_BYTES
from nnmpi.comm.mpi.start import start
from nnmpi.comm.prove import prove
from nnmpi.comm.saved_fit import facts
from nnmpi.lab.measure import measure, measure_sums
from nnmpi.lab.pages.page import write_page
from nnmpi.lab.render.collectives import compare, draw_fit, picture, render

PROGRAM = "nnmpi comm"
DEFAULT_RANKS = 4
SUMS_S = 12.0
LEAST_BYTES = 1024  # of the all-reduces whose prediction is judged


@dataclass(frozen=True)
class CommConfig:
    """The collective, its ranks and links."""

    operation: str | None = None
    """What the collective does, such as all-gather (default: what the algorithm is for, or
    all-reduce).
    """
    ranks: int | None = None
    """Number of ranks (default: the fit's, else 4)."""
    bytes: Bytes = Bytes("1MiB")
    """Bytes of a buffer, such as 4, 64k, 1MiB; k is 1024."""
    network: str = NETWORK
    """Numbers, such as alpha_us=50,gbit=10 or alpha=5e-5,beta=8e-10,gamma=1e-10 (seconds; gamma per
    byte added), and per_node=8,inside_gbit=80 for nodes of several ranks; fit: as measured here; or
    the file of a fit.
    """
    html: OutputFile | None = None
    """File for an interactive page."""
    svg: OutputFile | None = None
    """File for a picture for slides: .svg, .png, .pdf."""
    out: OutputFile | None = None
    """File of the fit (default: one for these ranks in the user's cache)."""
    replace: bool = False
    """Replace files that are there."""

    def __post_init__(self) -> None:
        check_numbers(self, "ranks", 1, MOST)


def main(words: Sequence[str]) -> str:
    """Run the command line's command and return its text.

    Raises:
        UsageError: for an invalid command line.
        ScheduleError: for a collective without proof.
    """
    texts = {name: call.__doc__ or "" for name, (call, _, _) in _COMMANDS.items()}
    name, rest = split_command(words, PROGRAM, __doc__ or "", texts)
    call, paths, options = _COMMANDS[name]
    known = [item for item in options_of(CommConfig) if item.name in options.split()]
    given = read_words(rest, known, f"{PROGRAM} {name}", texts[name], names=paths)
    asked, algorithm = make_section(CommConfig, given), given.get(ALGORITHM, "")
    check_figure(asked.svg)
    if name == "render" and asked.html is None:
        for option in ("bytes", "network"):  # only a page shows times
            require(option not in given, f"--{option} changes nothing of this render; leave it out")
    ranks = asked.ranks
    if ranks is None:
        fit = find_network_fit(asked.network, None)
        ranks = DEFAULT_RANKS if fit is None else fit.ranks
    if name in ("prove", "render"):
        # cubic: each of N ranks may send N chunks in N steps
        announce(f"{algorithm} on {ranks} ranks", 5e-7 * ranks**3)
    return call(algorithm, ranks, asked)


def _list(_: str, ranks: int, asked: CommConfig) -> str:
    """List all collectives with the latencies and bytes on their critical path."""
    machine = parse_network(asked.network, ranks, ranks)
    lines = [
        f"N = {ranks} ranks, M = {format_bytes(asked.bytes)} in a buffer",
        f"messages by {describe_network(asked.network)}",
        (
            f"formulas of messages above {format_bytes(EAGER_BYTES)}; shorter ones do not wait for"
            " their receivers"
        ),
        "",
    ]
    for (operation, name), collective in COLLECTIVES.items():
        latencies, sent = coefficients(collective, ranks)[:2]
        result = find_collective(operation, name, machine.nodes)
        seconds = format_seconds(price(result, ranks, asked.bytes, machine))
        lines.append(
            f"{operation:18} {name:18} {latencies:4} alpha + {sent:8.3f} M beta {seconds:>12}"
        )
    return "\n".join(lines)


def _prove(algorithm: str, ranks: int, asked: CommConfig) -> str:
    """Prove a collective correct for a number of ranks."""
    operation, collective = _collective(algorithm, asked)
    proof = prove(collective, ranks)
    return (
        f"{operation} by {algorithm} is right on {ranks} ranks: "
        f"{proof.rounds} rounds, {proof.messages} messages, {proof.chunk_transfers} chunks sent"
    )


def _render(algorithm: str, ranks: int, asked: CommConfig) -> str:
    """Draw a collective, rounds down and ranks across, or write an interactive page."""
    operation, collective = _collective(algorithm, asked)
    drawn = render(collective, ranks)
    if asked.svg is not None:
        picture(collective, ranks).save(asked.svg)
    if asked.html is None:
        return drawn
    beside = {name: result for (what, name), result in COLLECTIVES.items() if what == operation}
    machine = parse_network(asked.network, ranks, ranks)
    animation = compare(
        beside | {collective.name: collective}, collective.name, ranks, machine, asked.bytes
    )
    write_page(asked.html, "collective", f"{operation} by {collective.name}", animation)
    return f"{drawn}\n\nopen {asked.html} in a browser"


def _simulate(algorithm: str, ranks: int, asked: CommConfig) -> str:
    """Simulate a collective's time on a machine, for up to thousands of ranks."""
    machine = parse_network(asked.network, ranks, ranks)
    operation, collective = _collective(algorithm, asked, machine.nodes)
    result = simulate_collective(collective, ranks, asked.bytes, machine)
    first = [rank for rank, seconds in enumerate(result) if seconds == min(result)]
    return (
        f"{operation} by {algorithm}, {ranks} ranks, {format_bytes(asked.bytes)}:"
        f" {format_seconds(max(result))}, messages by {describe_network(asked.network)}\n"
        + (
            "all ranks finish at once"
            if len(first) == ranks
            else f"the first to finish: {name_ranks(first)}, after {format_seconds(min(result))}"
        )
    )


def _fit(_: str, ranks: int, asked: CommConfig) -> str:
    """Measure this machine with these ranks and save the fit, with the error of its predictions;
    run it under mpirun. With --svg, draw the all-reduces of steps beside their predictions.
    """
    group = start()
    file = asked.out or default_file(facts(group))
    on_root(group, lambda: _check_writable(file))  # before half a minute of measuring
    load, cores = os.getloadavg()[0], usable_cores()[1]

    def tell(line: str) -> None:
        if group.is_root:
            print(f"measuring {line}", flush=True)

    fit = measure(group, say=tell)
    tell("all-reduces of steps, beside their predictions")
    sums = measure_sums(group, SUMS_S)
    if not group.is_root:
        return ""
    off = [
        seconds / fit.predict(name, int(nbytes))
        for name, curve in sums.items()
        for nbytes, seconds in curve.points
        if nbytes >= LEAST_BYTES
    ]
    fit = replace(fit, facts={**fit.facts, "took": [min(off), max(off)]})
    save_fit(fit, file)
    busy = [
        f"warning: before it the load was {load:.1f} on {cores} cores: other programs use them, so"
        " these times are unreliable, and auto chooses by them; measure again on an idle machine"
    ] * (load > 1.5 * cores)
    drawn = []
    if asked.svg is not None:
        draw_fit(fit, sums, asked.svg)
        drawn.append(f"drawn in {asked.svg}: all-reduces, measured and predicted")
    return "\n".join([*describe_fit(fit), "", *busy, f"kept in {file}", *drawn])


def _check_writable(file: Path) -> None:
    """Refuse a file that cannot be written; folders are made."""
    with raised_as(UsageError, f"the fit cannot be written to {file}", "give another --out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()


ALGORITHM = "ALGORITHM"  # such as ring, tree, star, or FILE.py:NAME
# Each command's function, path and options.
_COMMANDS: Mapping[str, tuple[Callable[[str, int, CommConfig], str], str, str]] = {
    "list": (_list, "", "ranks bytes network"),
    "prove": (_prove, ALGORITHM, "operation ranks"),
    "render": (_render, ALGORITHM, "operation ranks bytes network html svg replace"),
    "simulate": (_simulate, ALGORITHM, "operation ranks bytes network"),
    "fit": (_fit, "", "out svg replace"),
}


def _collective(
    name: str, asked: CommConfig, nodes: Sequence[int] | None = None
) -> tuple[str, Collective]:
    """Return the requested operation and collective.

    Without --operation, a name that exactly one operation has means that operation.
    """
    algorithm = load_custom(name, "the algorithm", "(rank, size)")
    matches = [what for what, known in COLLECTIVES if known == name]
    if isinstance(algorithm, Collective):
        matches = [algorithm.contract.name]
    operation = asked.operation or (matches[0] if len(matches) == 1 else ALL_REDUCE.name)
    return operation, find_collective(operation, algorithm, nodes)


if __name__ == "__main__":
    sys.exit(say(main))
