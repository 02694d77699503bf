"""`python -m nnmpi.comm`: look at a collective without MPI (prove it, draw it, price it, simulate it), fit a machine.

python -m nnmpi.comm render ring --ranks 4
python -m nnmpi.comm prove halving-doubling --ranks 17
python -m nnmpi.comm price tree --ranks 16 --bytes 1MB --alpha 1e-5 --beta 1e-9 --gamma 1e-10
python -m nnmpi.comm simulate ring --operation all-gather --ranks 4096 --bytes 64MB
python -m nnmpi.comm cost --ranks 16 --bytes 64k
mpirun -n 4 python -m nnmpi.comm fit
python -m nnmpi.comm choose --fit FILE --bytes 64k
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from nnmpi.comm.algorithms.registry import COLLECTIVES, find_collective
from nnmpi.comm.choose import choose
from nnmpi.comm.collective import Collective
from nnmpi.comm.cost import table
from nnmpi.comm.fit import default_file, load_fit, save_fit
from nnmpi.comm.fitting.report import describe_fit, predictions
from nnmpi.comm.machine import Machine
from nnmpi.comm.price import price
from nnmpi.comm.prove import prove
from nnmpi.comm.render import render
from nnmpi.comm.simulate import simulate
from nnmpi.comm.sizes import name_bytes, name_seconds, parse_bytes
from nnmpi.errors import NnmpiError, UsageError
from nnmpi.launcher import read_launch


class _Parser(argparse.ArgumentParser):
    """Raises the package's error where argparse would end the program."""

    def error(self, message: str) -> NoReturn:
        """Raise with the message as a sentence."""
        raise UsageError(f"{message} (see {self.prog} --help)")


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
    """Draw a collective: rounds down, ranks across."""
    return render(_collective(arguments), arguments.ranks)


def _price(arguments: argparse.Namespace) -> str:
    """Price a collective along its critical path."""
    found = price(_collective(arguments), arguments.ranks, arguments.bytes, _machine(arguments))
    return "\n".join(
        [
            f"{_title(arguments)}: {name_seconds(found.seconds)}",
            f"on the critical path: {found.rounds} latencies, {found.sent_bytes} bytes sent, {found.added_bytes} added",
            f"all ranks together: {found.messages} messages",
        ]
    )


def _simulate(arguments: argparse.Namespace) -> str:
    """Simulate a collective for up to thousands of ranks."""
    found = simulate(_collective(arguments), arguments.ranks, arguments.bytes, _machine(arguments))
    first = int(np.argmin(found.finish_s))
    return "\n".join(
        [
            f"{_title(arguments)}: {name_seconds(found.seconds)}",
            f"the first to finish is rank {first} after {name_seconds(float(found.finish_s[first]))}",
            f"all ranks together: {found.messages} messages",
        ]
    )


def _cost(arguments: argparse.Namespace) -> str:
    """Print the course's table beside what the steps really cost."""
    rows = table(arguments.ranks, arguments.bytes, _machine(arguments))
    lines = [f"N = {arguments.ranks} ranks, M = {name_bytes(arguments.bytes)}", ""]
    lines.append(f"{'operation':35} {'formula':30} {'course':>12} {'exact':>12}   why they differ")
    for row in rows:
        course = "" if row.course_s is None else name_seconds(row.course_s)
        lines.append(f"{row.name:35} {row.formula:30} {course:>12} {name_seconds(row.exact_s):>12}   {row.differs}")
    return "\n".join(line.rstrip() for line in lines)


def _fit(arguments: argparse.Namespace) -> str:
    """Measure this machine with these ranks, and keep the fit; run it under mpirun."""
    from nnmpi.comm.start import start

    group = start()
    from nnmpi.comm.fitting.measure import measure  # imports mpi4py.MPI, which `start` must have loaded by then

    fit = measure(group, lambda line: print(f"measuring {line}", flush=True))
    if not group.is_root:
        return ""
    file = arguments.out or default_file(fit.facts)
    if file is None:
        raise UsageError("no home directory is known to keep the fit in; give a file: --out FILE")
    try:
        save_fit(fit, file)
    except OSError as error:
        raise UsageError(f"the fit cannot be written to {file} ({error.strerror}); give another --out") from None
    return "\n".join([*describe_fit(fit), "", *predictions(fit), "", f"kept in {file}"])


def _choose(arguments: argparse.Namespace) -> str:
    """Tell which all-reduce auto would take, and why: by a fit, or by rule."""
    fit = load_fit(arguments.fit) if arguments.fit else None
    if fit is not None and fit.ranks != arguments.ranks:
        raise UsageError(f"the fit {arguments.fit} is of {fit.ranks} ranks, not {arguments.ranks}; leave --ranks away")
    choice = choose(arguments.bytes, arguments.ranks, fit, arguments.shared)
    rows = [] if fit is None else ["", *predictions(fit, (arguments.bytes,))]
    return "\n".join([f"{choice.algorithm}: {choice.reason}", *rows])


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], str]] = MappingProxyType(
    {"prove": _prove, "render": _render, "price": _price, "simulate": _simulate, "cost": _cost}
    | {"fit": _fit, "choose": _choose}
)
_OF_ONE = ("prove", "render", "price", "simulate")
_OF_BYTES = ("price", "simulate", "cost", "choose")
_ON_MACHINE = ("price", "simulate", "cost")
DEFAULT_RANKS = 4


def _parser() -> _Parser:
    parser = _Parser("python -m nnmpi.comm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    operations = ", ".join(dict.fromkeys(operation for operation, _ in COLLECTIVES))
    for name, command in _COMMANDS.items():
        one = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        if name in _OF_ONE:
            one.add_argument("algorithm", help="such as ring, tree, ps")
            one.add_argument("--operation", default="all-reduce", help=f"one of {operations} (default all-reduce)")
        if name == "fit":
            one.add_argument("--out", type=Path, help="file (default: one for these ranks in the user's cache)")
            continue
        one.add_argument("--ranks", type=_count, help=f"number of ranks (default: the fit's, else {DEFAULT_RANKS})")
        one.set_defaults(fit=None)
        if name in _OF_BYTES:
            one.add_argument("--bytes", type=_bytes, default=2**20, help="such as 4, 64k, 1MB (default 1MB)")
            one.add_argument("--fit", type=Path, help="the machine: a file made by the command fit")
        if name == "choose":
            one.add_argument("--shared", action="store_true", help="the arrays lie in shared memory")
        if name in _ON_MACHINE:
            one.add_argument("--alpha", type=_seconds, default=1e-5, help="seconds of latency (default 1e-5)")
            one.add_argument("--beta", type=_seconds, default=1e-9, help="seconds per byte sent (default 1e-9)")
            one.add_argument("--gamma", type=_seconds, default=0.0, help="seconds per byte added (default 0)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, of which there is at least 1")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; write it like 2e-6")
    return seconds


def _collective(arguments: argparse.Namespace) -> Collective:
    return find_collective(arguments.operation, arguments.algorithm)


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.fit:
        return load_fit(arguments.fit).machine
    return Machine.uniform(arguments.alpha, arguments.beta, arguments.gamma)


def _title(arguments: argparse.Namespace) -> str:
    return f"{arguments.operation} by {arguments.algorithm}, {arguments.ranks} ranks, {name_bytes(arguments.bytes)}"


def _speaks() -> bool:
    """Whether this process is the one of a job that talks."""
    launch = read_launch(os.environ)
    return launch is None or launch.rank == 0


if __name__ == "__main__":
    try:
        text = main(sys.argv[1:])
        if _speaks():
            print(text)
    except NnmpiError as error:
        if _speaks():
            print(f"nnmpi: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
