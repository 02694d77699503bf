"""`python -m nnmpi.comm`: look at a collective without MPI (prove it, draw it, price it, simulate it), fit a machine.

python -m nnmpi.comm render ring --ranks 4
python -m nnmpi.comm render ring --ranks 6 --html ring.html
python -m nnmpi.comm prove halving-doubling --ranks 17
python -m nnmpi.comm price tree --ranks 16 --bytes 1MB --alpha 1e-5 --beta 1e-9 --gamma 1e-10
python -m nnmpi.comm simulate ring --operation all-gather --ranks 4096 --bytes 64MB
python -m nnmpi.comm cost --ranks 16 --bytes 64k
mpirun -n 4 python -m nnmpi.comm fit
python -m nnmpi.comm choose --fit FILE --bytes 64k
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.choose import choose
from nnmpi.comm.collective import ALL_REDUCE, Collective
from nnmpi.comm.cost import table
from nnmpi.comm.fitting.fit import check_place, default_file, load_fit, save_fit
from nnmpi.comm.fitting.measure import facts, measure
from nnmpi.comm.fitting.report import describe_fit, predictions
from nnmpi.comm.machine import Link, Machine, blocks
from nnmpi.comm.prove import prove
from nnmpi.comm.render import compare, draw_slide, render
from nnmpi.comm.simulate import price, simulate_collective
from nnmpi.comm.start import start
from nnmpi.command import Parser, positive_count, say
from nnmpi.custom import is_custom, load_custom
from nnmpi.errors import UsageError
from nnmpi.pages.page import write_page
from nnmpi.units import format_bytes, format_seconds, parse_bytes, parse_seconds


def main(words: Sequence[str]) -> str:
    """Return what the command that the words give has to say.

    Raises:
        UsageError: for words that make no command.
        ScheduleError: for a collective that cannot be proved.
    """
    arguments = _parser().parse_args(words)
    if getattr(arguments, "ranks", 0) is None:
        arguments.ranks = load_fit(arguments.fit).ranks if arguments.fit else DEFAULT_RANKS
    return _COMMANDS[arguments.command](arguments)


def _prove(arguments: argparse.Namespace) -> str:
    """Prove that a collective does what it promises, for a number of ranks."""
    proof = prove(_collective(arguments), arguments.ranks)
    return (
        f"{arguments.operation} by {arguments.algorithm} is right on {arguments.ranks} ranks: "
        f"{proof.rounds} rounds, {proof.messages} messages, {proof.chunk_transfers} chunks sent"
    )


def _render(arguments: argparse.Namespace) -> str:
    """Draw a collective: rounds down, ranks across; or as a page that runs, beside others."""
    collective = _collective(arguments)
    picture = render(collective, arguments.ranks)
    if arguments.svg is not None:
        draw_slide(collective, arguments.ranks, arguments.svg)
        picture += f"\n\n{arguments.svg} shows it on a slide"
    if arguments.html is None:
        return picture
    beside = {name: found for (operation, name), found in COLLECTIVES.items() if operation == arguments.operation}
    animation = compare(beside | {collective.name: collective}, collective.name, arguments.ranks)
    write_page(arguments.html, "collective", f"{arguments.operation} by {collective.name}", animation)
    return f"{picture}\n\n{arguments.html} runs it in a browser"


def _price(arguments: argparse.Namespace) -> str:
    """Price a collective along its critical path."""
    machine = _machine(arguments)
    found = price(_collective(arguments, machine.nodes), arguments.ranks, arguments.bytes, machine)
    return "\n".join(
        [
            f"{_title(arguments)}: {format_seconds(found.seconds)}",
            f"on the critical path: {found.rounds} latencies, {found.sent_bytes} bytes sent, {found.added_bytes} added",
            f"all ranks together: {found.messages} messages",
        ]
    )


def _simulate(arguments: argparse.Namespace) -> str:
    """Simulate a collective for up to thousands of ranks."""
    machine = _machine(arguments)
    found = simulate_collective(_collective(arguments, machine.nodes), arguments.ranks, arguments.bytes, machine)
    first = int(np.argmin(found.finish_s))
    return "\n".join(
        [
            f"{_title(arguments)}: {format_seconds(found.seconds)}",
            f"the first to finish is rank {first} after {format_seconds(float(found.finish_s[first]))}",
            f"all ranks together: {found.messages} messages",
            *([f"waiting for links between nodes: {format_seconds(found.waited_s)}"] if machine.nodes else []),
        ]
    )


def _cost(arguments: argparse.Namespace) -> str:
    """Print the course's table beside what the steps really cost."""
    rows = table(arguments.ranks, arguments.bytes, _machine(arguments))
    lines = [f"N = {arguments.ranks} ranks, M = {format_bytes(arguments.bytes)} (in an all-gather of each rank)", ""]
    lines.append(f"{'operation':35} {'formula':30} {'course':>12} {'exact':>12}   why they differ")
    for row in rows:
        course = "" if row.course_s is None else format_seconds(row.course_s)
        lines.append(f"{row.name:35} {row.formula:30} {course:>12} {format_seconds(row.exact_s):>12}   {row.differs}")
    return "\n".join(line.rstrip() for line in lines)


def _fit(arguments: argparse.Namespace) -> str:
    """Measure this machine with these ranks, and keep the fit; run it under mpirun."""
    group = start()
    file = arguments.out or default_file(facts(group))
    refused = ""
    if group.is_root:  # before it takes half a minute
        try:
            check_place(file)
        except OSError as error:
            refused = f"the fit cannot be written to {file} ({error.strerror}); give another --out"
    refused = group.share(refused)
    if refused:
        raise UsageError(refused)
    for _ in range(TRIALS):
        fit = measure(group, lambda line: print(f"measuring {line}", flush=True))
        doubt = fit.doubt()
        if not doubt:
            break
        if group.is_root:
            print(f"this cannot be: {doubt}; the machine is busy", flush=True)
    if not group.is_root:
        return ""
    save_fit(fit, file)
    notes = [f"kept in {file}"]
    if doubt:
        notes.append("measured on a busy machine: auto will not follow it; measure again when it is idle")
    return "\n".join([*describe_fit(fit), "", *predictions(fit), "", *notes])


def _choose(arguments: argparse.Namespace) -> str:
    """Tell which all-reduce auto would take, and why: by a fit, or by rule."""
    fit = load_fit(arguments.fit) if arguments.fit else None
    if fit is not None and fit.ranks != arguments.ranks:
        raise UsageError(f"the fit {arguments.fit} is of {fit.ranks} ranks, not {arguments.ranks}; leave --ranks out")
    choice = choose(arguments.bytes, arguments.ranks, fit, arguments.shared, arguments.started)
    rows = [] if fit is None else ["", *predictions(fit, (arguments.bytes,))]
    return "\n".join([f"{choice.algorithm}: {choice.reason}", *rows])


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], str]] = MappingProxyType(
    {"prove": _prove, "render": _render, "price": _price, "simulate": _simulate, "cost": _cost}
    | {"fit": _fit, "choose": _choose}
)
_OF_ONE = ("prove", "render", "price", "simulate")
_OF_BYTES = ("price", "simulate", "cost", "choose")
_ON_MACHINE = ("price", "simulate", "cost")
_STRANGERS = ("price", "simulate")
_MACHINE = ("alpha", "beta", "gamma", "per_node", "across_alpha", "across_beta")
_STRANGE = ("slow_ranks", "slow_nodes", "late")
_STRANGE_OPTIONS = (
    ("--slow-rank", "slow_ranks", "rank N's processor is X times slower"),
    ("--slow-node", "slow_nodes", "node N's link is X times slower"),
    ("--late", "late", "rank N begins X seconds later"),
)
DEFAULT_RANKS = 4
TRIALS = 3  # of a fit on a busy machine
ALPHA_S, BETA_S = 1e-5, 1e-9


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.comm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    operations = ", ".join(dict.fromkeys(operation for operation, _ in COLLECTIVES))
    for name, command in _COMMANDS.items():
        one = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        if name in _OF_ONE:
            one.add_argument("algorithm", help="such as ring, tree, ps, or FILE.py:NAME")
            one.add_argument("--operation", help=f"one of {operations} (default all-reduce)")
        if name == "render":
            one.add_argument("--svg", type=Path, metavar="FILE", help="write a picture for slides")
            one.add_argument("--html", type=Path, metavar="FILE", help="write a page that runs, for a browser")
        if name == "fit":
            one.add_argument("--out", type=Path, help="file (default: one for these ranks in the user's cache)")
            continue
        one.add_argument("--ranks", type=positive_count, help=f"ranks (default: the fit's, else {DEFAULT_RANKS})")
        one.set_defaults(fit=None)
        if name in _OF_BYTES:
            one.add_argument("--bytes", type=_bytes, default=2**20, help="such as 4, 64k, 1MB (default 1MB)")
            one.add_argument("--fit", type=Path, help="the machine: a file made by the command fit")
        if name == "choose":
            one.add_argument("--shared", action="store_true", help="the arrays lie in shared memory")
            one.add_argument("--started", action="store_true", help="started and polled, as under a backward pass")
        if name in _ON_MACHINE:
            one.add_argument("--alpha", type=_seconds, help=f"seconds of latency (default {ALPHA_S:g})")
            one.add_argument("--beta", type=_seconds, help=f"seconds per byte sent (default {BETA_S:g})")
            one.add_argument("--gamma", type=_seconds, help="seconds per byte added (default 0)")
            one.add_argument("--per-node", type=positive_count, help="ranks of a node, which share its link (all)")
            one.add_argument("--across-alpha", type=_seconds, help="latency between nodes (default: alpha)")
            one.add_argument("--across-beta", type=_seconds, help="seconds per byte between nodes (default: beta)")
        if name in _STRANGERS:
            for option, place, text in _STRANGE_OPTIONS:
                one.add_argument(
                    option, dest=place, type=_by_number, action="append", default=[], metavar="N:X", help=text
                )
    return parser


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _by_number(text: str) -> tuple[int, float]:
    number, _, value = text.partition(":")
    try:
        return int(number), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and its value; write it like 3:2.5") from None


def _collective(arguments: argparse.Namespace, nodes: Sequence[int] | None = None) -> Collective:
    """Return what is asked for; a name that only another operation has means that one."""
    operation, name = arguments.operation, arguments.algorithm
    if is_custom(name):
        arguments.operation = operation or ALL_REDUCE.name
        return find_collective(arguments.operation, load_custom(name, "the algorithm", "(rank, size)"))
    if operation is None:
        having = [what for what, how in COLLECTIVES if how == name]
        operation = having[0] if len(having) == 1 else ALL_REDUCE.name
    arguments.operation = operation
    return find_collective(operation, name, nodes)


def _machine(arguments: argparse.Namespace) -> Machine:
    """Return the machine of the fit, or the one that the options describe.

    Raises:
        UsageError: for both at once.
    """
    given = {name: getattr(arguments, name) for name in _MACHINE if getattr(arguments, name, None) is not None}
    if arguments.fit:
        if given:
            option = "--" + next(iter(given)).replace("_", "-")
            raise UsageError(f"--fit says what the machine is, and so does {option}; leave one of them out")
        machine = load_fit(arguments.fit).machine
    else:
        alpha_s, beta_s = given.get("alpha", ALPHA_S), given.get("beta", BETA_S)
        machine = Machine.uniform(alpha_s, beta_s, given.get("gamma", 0.0))
        across = Link.line(given.get("across_alpha", alpha_s), given.get("across_beta", beta_s))
        if "per_node" in given:
            machine = replace(machine, across=across, nodes=blocks(arguments.ranks, given["per_node"]))
        elif "across_alpha" in given or "across_beta" in given:
            raise UsageError("--across-alpha and --across-beta are of messages between nodes; give --per-node as well")
    if getattr(arguments, "slow_nodes", ()) and machine.nodes is None:
        raise UsageError("--slow-node slows a link between nodes, but all ranks are on one; give --per-node as well")
    slow_ranks, slow_nodes, late = (dict(getattr(arguments, name, ())) for name in _STRANGE)
    return replace(machine, slow_ranks=slow_ranks, slow_nodes=slow_nodes, late=late)


def _title(arguments: argparse.Namespace) -> str:
    return f"{arguments.operation} by {arguments.algorithm}, {arguments.ranks} ranks, {format_bytes(arguments.bytes)}"


if __name__ == "__main__":
    sys.exit(say(main))
