"""`python -m nnmpi.comm`: prove, draw and simulate collectives without MPI; fit a machine.

python -m nnmpi.comm list --ranks 16 --bytes 64k
python -m nnmpi.comm render ring --ranks 4
python -m nnmpi.comm render ring --ranks 6 --html ring.html --svg ring.svg
python -m nnmpi.comm prove halving-doubling --ranks 17
python -m nnmpi.comm simulate tree --ranks 16 --bytes 1MB --network alpha=1e-5,beta=1e-9,gamma=1e-10
python -m nnmpi.comm simulate ring --operation all-gather --ranks 4096 --bytes 64MB
mpirun -n 4 python -m nnmpi.comm fit
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from nnmpi.comm.agreement import on_root
from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.collective import ALL_REDUCE, Collective
from nnmpi.comm.duration import price, simulate_collective
from nnmpi.comm.fit import (
    NETWORK,
    NETWORK_HELP,
    default_file,
    describe_fit,
    describe_network,
    find_network_fit,
    parse_network,
    save_fit,
)
from nnmpi.comm.measure import facts, measure
from nnmpi.comm.mpi.start import start
from nnmpi.comm.prove import prove
from nnmpi.comm.render import coefficients, compare, picture, render
from nnmpi.command import Parser, announce, positive_count, say
from nnmpi.custom import is_custom, load_custom
from nnmpi.errors import UsageError, raised_as
from nnmpi.pages.page import write_page
from nnmpi.units import format_bytes, format_seconds, parse_bytes


def main(words: Sequence[str]) -> str:
    """Run the command line's command and return its text.

    Raises:
        UsageError: for an invalid command line.
        ScheduleError: for a collective without proof.
    """
    arguments = _parser().parse_args(words or ["--help"])
    if getattr(arguments, "ranks", 0) is None:
        fit = find_network_fit(arguments.network, None)
        arguments.ranks = DEFAULT_RANKS if fit is None else fit.ranks
    if arguments.command in ("prove", "render"):
        # cubic: each of N ranks may send N chunks in N steps
        announce(f"{arguments.algorithm} on {arguments.ranks} ranks", 5e-7 * arguments.ranks**3)
    return _COMMANDS[arguments.command](arguments)


def _list(arguments: argparse.Namespace) -> str:
    """List all collectives with the latencies and bytes on their critical path."""
    ranks = arguments.ranks
    machine = parse_network(arguments.network, ranks, ranks)
    network = describe_network(arguments.network)
    lines = [
        f"N = {ranks} ranks, M = {format_bytes(arguments.bytes)} in a buffer",
        f"messages by {network}",
        "",
    ]
    for (operation, name), collective in COLLECTIVES.items():
        latencies, buffers = coefficients(collective, ranks)
        result = find_collective(operation, name, machine.nodes)
        seconds = format_seconds(price(result, ranks, arguments.bytes, machine))
        lines.append(
            f"{operation:18} {name:17} {latencies:5} alpha + {buffers:8.3f} M beta {seconds:>12}"
        )
    return "\n".join(lines)


def _prove(arguments: argparse.Namespace) -> str:
    """Prove a collective correct for a number of ranks."""
    proof = prove(_collective(arguments), arguments.ranks)
    return (
        f"{arguments.operation} by {arguments.algorithm} is right on {arguments.ranks} ranks: "
        f"{proof.rounds} rounds, {proof.messages} messages, {proof.chunk_transfers} chunks sent"
    )


def _render(arguments: argparse.Namespace) -> str:
    """Draw a collective, rounds down and ranks across, or write an interactive page."""
    collective = _collective(arguments)
    drawn = render(collective, arguments.ranks)
    if arguments.svg is not None:
        picture(collective, arguments.ranks).save(arguments.svg)
    if arguments.html is None:
        return drawn
    beside = {
        name: result
        for (operation, name), result in COLLECTIVES.items()
        if operation == arguments.operation
    }
    machine = parse_network(arguments.network, arguments.ranks, arguments.ranks)
    animation = compare(
        beside | {collective.name: collective}, collective.name, arguments.ranks, machine
    )
    write_page(
        arguments.html, "collective", f"{arguments.operation} by {collective.name}", animation
    )
    return f"{drawn}\n\n{arguments.html} runs it in a browser"


def _simulate(arguments: argparse.Namespace) -> str:
    """Simulate a collective's time on a machine, for up to thousands of ranks."""
    machine = parse_network(arguments.network, arguments.ranks, arguments.ranks)
    result = simulate_collective(
        _collective(arguments, machine.nodes), arguments.ranks, arguments.bytes, machine
    )
    title = (
        f"{arguments.operation} by {arguments.algorithm}, {arguments.ranks} ranks,"
        f" {format_bytes(arguments.bytes)}"
    )
    first = min(range(len(result)), key=result.__getitem__)
    first_to_finish = f"the first to finish is rank {first} after {format_seconds(result[first])}"
    return (
        f"{title}: {format_seconds(max(result))}, messages by"
        f" {describe_network(arguments.network)}\n{first_to_finish}"
    )


def _fit(arguments: argparse.Namespace) -> str:
    """Measure this machine with these ranks and save the fit; run it under mpirun."""
    group = start()
    file = arguments.out or default_file(facts(group))
    on_root(group, lambda: _check_writable(file))  # before half a minute of measuring
    fit = measure(group, say=lambda line: group.is_root and print(f"measuring {line}", flush=True))
    if not group.is_root:
        return ""
    save_fit(fit, file)
    return "\n".join([*describe_fit(fit), "", f"kept in {file}"])


def _check_writable(file: Path) -> None:
    """Refuse a file that cannot be written; folders are made."""
    with raised_as(UsageError, f"the fit cannot be written to {file}", "give another --out"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], str]] = MappingProxyType(
    {"list": _list, "prove": _prove, "render": _render, "simulate": _simulate, "fit": _fit}
)
_OF_ONE = ("prove", "render", "simulate")
_ON_MACHINE = ("list", "simulate", "render")
DEFAULT_RANKS = 4


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.comm", description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, parser_class=Parser, metavar="COMMAND"
    )
    operations = ", ".join(dict.fromkeys(operation for operation, _ in COLLECTIVES))
    for name, command in _COMMANDS.items():
        item = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        if name in _OF_ONE:
            item.add_argument("algorithm", help="such as ring, tree, ps, or FILE.py:NAME")
            item.add_argument("--operation", help=f"one of {operations} (default all-reduce)")
        if name == "render":
            item.add_argument("--html", type=Path, metavar="FILE", help="write an interactive page")
            item.add_argument(
                "--svg",
                type=Path,
                metavar="FILE",
                help="write a picture for slides: .svg, .png, .pdf",
            )
        if name == "fit":
            item.add_argument(
                "--out", type=Path, help="file (default: one for these ranks in the user's cache)"
            )
            continue
        item.add_argument(
            "--ranks", type=positive_count, help=f"ranks (default: the fit's, else {DEFAULT_RANKS})"
        )
        item.set_defaults(network=NETWORK)
        if name in _ON_MACHINE:
            if name != "render":
                item.add_argument(
                    "--bytes",
                    type=parse_bytes,
                    default=2**20,
                    help="such as 4, 64k, 1MB (default 1MB)",
                )
            item.add_argument(
                "--network", default=NETWORK, help=f"{NETWORK_HELP} (default {NETWORK})"
            )
    return parser


def _collective(arguments: argparse.Namespace, nodes: Sequence[int] | None = None) -> Collective:
    """Return the requested collective.

    Without --operation, a name that exactly one operation has means that operation.
    """
    operation, name = arguments.operation, arguments.algorithm
    if is_custom(name):
        arguments.operation = operation or ALL_REDUCE.name
        return find_collective(
            arguments.operation, load_custom(name, "the algorithm", "(rank, size)")
        )
    if operation is None:
        matches = [what for what, algorithm in COLLECTIVES if algorithm == name]
        operation = matches[0] if len(matches) == 1 else ALL_REDUCE.name
    arguments.operation = operation
    return find_collective(operation, name, nodes)


if __name__ == "__main__":
    sys.exit(say(main))
