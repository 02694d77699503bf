"""`python -m nnmpi.simrun`: run an mpi4py program unchanged on simulated ranks in one process.

python -m nnmpi.simrun -n 8 program.py
python -m nnmpi.simrun -n 8 --network alpha_us=50,gbit=1 program.py
python -m nnmpi.simrun -n 8 --seeds 1000 program.py

It names, with ranks and lines: deadlocks, mismatched collectives, messages that do not fit or are
never received, and arrays changed while they are being sent.
"""

import argparse
import io
import random
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import module_from_spec
from pathlib import Path
from traceback import print_exception
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random import mtrand

from nnmpi.comm.fit import NETWORK_HELP, parse_network
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.mpi_front import Wire, make_modules
from nnmpi.comm.simulated.scheduler import Scheduler
from nnmpi.comm.simulated.simulated_comm import EAGER_BYTES, MessageBoard
from nnmpi.comm.simulated.simulated_world import SimulatedRun, play
from nnmpi.command import Parser, positive_count, say
from nnmpi.errors import CommError, UsageError, counted, raised_as
from nnmpi.units import format_bytes, format_seconds, parse_bytes


class Place:
    """One simulated rank's own state: modules, random numbers, output."""

    def __init__(self, rank: int) -> None:
        spec: Any = random.__spec__
        local: Any = module_from_spec(spec)
        spec.loader.exec_module(local)
        local.seed(rank)
        self.modules: dict[str, ModuleType] = {"random": local}
        self.bits: Any = np.random.MT19937(rank)
        self.text = self.line = ""


class Interpreter(io.TextIOBase):
    """Switches between ranks' own states, and passes their output on in whole lines.

    Args:
        folder: of the program, whose modules each rank imports for itself.
        ranks: how many.
        stream: where lines are printed; None for nowhere.
    """

    def __init__(self, folder: str, ranks: int, stream: Any) -> None:
        self.places = [Place(rank) for rank in range(ranks + 1)]  # the last one is the caller's
        self._folder, self._stream, self._count = folder, stream, 0
        self._now = self.places[ranks]

    def turn(self, number: int) -> None:
        """Let a rank continue.

        Raises:
            UsageError: when another one has stopped within an import, whose lock this one could
                wait for.
        """
        before, self._now = self._now, self.places[number]
        before.bits = mtrand.get_bit_generator()
        names = (
            [*before.modules]
            if len(sys.modules) == self._count
            else [*filter(self._is_own, list(sys.modules))]  # other threads import, too
        )
        before.modules = {name: sys.modules.pop(name) for name in names}
        sys.modules.update(self._now.modules)
        self._count = len(sys.modules)
        mtrand.set_bit_generator(self._now.bits)
        half = [
            name
            for name, module in before.modules.items()
            if getattr(module.__spec__, "_initializing", False)
        ]
        if half and self._now is not self.places[-1]:
            raise UsageError(
                f"the module {half[-1]} communicates while it is imported; let a function of it"
                " do so"
            )

    def _is_own(self, name: str) -> bool:
        module = sys.modules[name]
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        here = file.startswith(self._folder) and not file.startswith(sys.prefix)
        return here or name in ("__main__", "mpi4py", "mpi4py.MPI", "random")

    def write(self, text: str) -> int:
        """Print the lines that are whole."""
        lines, end, self._now.line = (self._now.line + text).rpartition("\n")
        self._now.text += lines + end
        if self._stream is not None:
            self._stream.write(lines + end)
        return len(text)

    def finish(self) -> None:
        """Print the lines that have no end."""
        for place in self.places:
            self._now = place
            self.write("\n" * bool(place.line))


def run_program(
    given: argparse.Namespace, seed: int, stream: Any
) -> tuple[SimulatedRun[None], list[str]]:
    """Run the program once; return what it took, and what each rank printed.

    Raises:
        SystemExit: with the status of the first rank that ended with one that is not 0, or called
            Abort.
        CommError: for a mistake in the program's communication.
        Exception: that a rank raised.
    """
    with raised_as(UsageError, f"{given.program} cannot be read"):
        code = compile(given.program.read_bytes(), given.program, "exec")
    machine = parse_network(given.network, given.n) if given.network else Machine.uniform(0.0, 0.0)
    scheduler = Scheduler(given.n, seed, 0.0)
    scheduler.by_time &= bool(given.network)
    board = MessageBoard(scheduler, machine)
    board.eager_bytes = given.eager
    interpreter = Interpreter(f"{given.program.resolve().parent}/", given.n, stream)
    scheduler.on_turn = interpreter.turn
    endings: list[SystemExit] = []

    def live(group: Group) -> None:
        main = ModuleType("__main__")
        main.__file__ = str(given.program)
        sys.modules.update(make_modules(group.comm), __main__=main)
        try:
            exec(code, vars(main))
        except SystemExit as ending:
            if ending.code:
                endings.append(ending)
        except Exception as error:
            if isinstance(error, CommError):
                raise
            assert error.__traceback__ is not None
            print_exception(error.with_traceback(error.__traceback__.tb_next))
            print(f"(on rank {group.rank} of {given.n}, with seed {seed})", file=sys.stderr)
            raise SystemExit(1) from None

    caller = sys.argv, sys.path
    sys.argv, sys.path = [str(given.program), *given.args], [interpreter._folder, *sys.path]
    try:
        with redirect_stdout(interpreter):
            run = play(live, board, comm_type=Wire)
    finally:
        interpreter.turn(given.n)
        sys.argv, sys.path = caller
        interpreter.finish()
        if endings:  # what others waited for in vain is not said then
            raise endings[0]
    return run, [place.text for place in interpreter.places]


def main(words: Sequence[str]) -> str:
    """Return what is to be said of the runs.

    Raises:
        NnmpiError: for the first seed with which the program makes a mistake.
    """
    given = _parser().parse_args(words)
    first: list[str] = []
    other, lines = "", []
    for seed in range(given.seed, given.seed + given.seeds):
        try:
            run, texts = run_program(given, seed, None if first else sys.stdout)
        except CommError as error:
            raise CommError(f"{error}\n(with seed {seed})") from error
        first = first or texts
        if texts != first and not other:
            rank = [*map(str.__eq__, first, texts)].index(False)
            other = (
                f", but with seed {seed} rank {rank} does not print what it prints with seed"
                f" {given.seed}"
            )
    if given.network:
        rank, nbytes = run.busiest
        lines = [
            f"{counted(given.n, 'rank')} with {given.network}: {format_seconds(run.seconds)} of"
            f" simulated time; the busiest, rank {rank}, sent or received {format_bytes(nbytes)}"
        ]
    if given.seeds > 1:
        lines.append(f"{given.seeds} seeds: none fails{other or ', and all print the same'}")
    return "\n".join(lines)


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.simrun", description=__doc__)
    parser.add_argument(
        "-n", type=positive_count, default=4, metavar="RANKS", help="ranks (default 4)"
    )
    parser.add_argument("--network", default="", help=f"{NETWORK_HELP}; prints seconds and bytes")
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the order of ranks and of arrivals"
    )
    parser.add_argument(
        "--seeds",
        type=positive_count,
        default=1,
        help="run with this many seeds and compare the outputs",
    )
    parser.add_argument(
        "--eager",
        type=parse_bytes,
        default=EAGER_BYTES,
        help="largest eager message, such as 64k",
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM.py", help="the program")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(say(main))
