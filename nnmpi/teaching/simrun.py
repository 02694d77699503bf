"""`nnmpi simrun`: run an mpi4py program unchanged on simulated ranks in one process.

nnmpi simrun -n 8 program.py
nnmpi simrun -n 8 --network alpha_us=50,gbit=1 program.py
nnmpi simrun -n 8 --seeds 1000 program.py

It names, with ranks and lines: deadlocks, mismatched collectives, messages that do not fit or are
never received, and arrays changed while they are being sent.
"""

import io
import random
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import module_from_spec
from pathlib import Path
from traceback import StackSummary, TracebackException, print_exception
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random import mtrand

from nnmpi.base.command import FLAG, MOST, check_numbers, read_command, say
from nnmpi.base.errors import CommError, UsageError, counted, raised_as
from nnmpi.base.units import Bytes, format_bytes, format_seconds
from nnmpi.comm.fit import parse_network
from nnmpi.comm.group import Group
from nnmpi.comm.machine import EAGER_BYTES, Machine
from nnmpi.comm.simulated.scheduler import PACKAGE_FOLDER, Scheduler
from nnmpi.comm.simulated.simulated_comm import MessageBoard
from nnmpi.comm.simulated.simulated_world import SimulatedRun, play
from nnmpi.teaching.mpi_front.handles import Exception as MpiError
from nnmpi.teaching.mpi_front.messages import Wire
from nnmpi.teaching.mpi_front.modules import make_modules


@dataclass(frozen=True)
class SimulationConfig:
    """The simulation."""

    ranks: int = 4
    """Number of ranks; also -n."""
    network: str = ""
    """The links, such as alpha_us=50,gbit=1, or the file of a fit; prints seconds and bytes
    (default: messages take no time).
    """
    seed: int = 0
    """Decides the order of ranks and of arrivals."""
    seeds: int = 1
    """Run with this many seeds and compare the outputs."""
    eager: Bytes = Bytes(str(EAGER_BYTES))
    """Bytes of the largest eager message, such as 64k."""

    def __post_init__(self) -> None:
        check_numbers(self, "ranks seeds", 1, MOST)


class RankGlobals:
    """One simulated rank's global state: modules, random numbers, output.

    Ranks are threads of one process, but a program written for MPI takes its modules' variables
    and NumPy's random state for private.
    """

    def __init__(self, rank: int) -> None:
        spec: Any = random.__spec__
        local: Any = module_from_spec(spec)
        spec.loader.exec_module(local)
        local.seed(rank)
        self.modules: dict[str, ModuleType] = {"random": local}
        self.bits: Any = np.random.MT19937(rank)
        self.text = self.line = ""


class Interpreter(io.TextIOBase):
    """Switches between the ranks' global states, and prints their output in complete lines.

    Args:
        folder: of the program, whose modules each rank imports for itself.
        ranks: number of ranks.
        stream: the output; None for none.
    """

    def __init__(self, folder: str, ranks: int, stream: Any) -> None:
        # the last one is the caller's
        self.states = [RankGlobals(rank) for rank in range(ranks + 1)]
        self._folder, self._stream, self._count = folder, stream, 0
        self._current = self.states[ranks]

    def turn(self, number: int) -> None:
        """Switch to a rank's state.

        Raises:
            UsageError: when the last rank stopped within an import: this one could wait for ever
                for the import's lock.
        """
        before, self._current = self._current, self.states[number]
        before.bits = mtrand.get_bit_generator()
        names = (
            [*before.modules]
            if len(sys.modules) == self._count  # nothing was imported: skip the search
            else [*filter(self._is_private, list(sys.modules))]  # (a copy: threads import, too)
        )
        before.modules = {name: sys.modules.pop(name) for name in names}
        sys.modules.update(self._current.modules)
        self._count = len(sys.modules)
        mtrand.set_bit_generator(self._current.bits)
        half = [
            name
            for name, module in before.modules.items()
            if getattr(module.__spec__, "_initializing", False)
        ]
        if half and self._current is not self.states[-1]:
            raise UsageError(
                f"the module {half[-1]} communicates while it is imported; let a function of it"
                " do so"
            )

    def _is_private(self, name: str) -> bool:
        module = sys.modules[name]
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        here = file.startswith(self._folder) and not file.startswith(sys.prefix)
        return here or name in ("__main__", "mpi4py", "mpi4py.MPI", "mpi4py.rc", "random")

    def write(self, text: str) -> int:
        """Print the complete lines, and keep the rest."""
        lines, end, self._current.line = (self._current.line + text).rpartition("\n")
        self._current.text += lines + end
        if self._stream is not None:
            self._stream.write(lines + end)
        return len(text)

    def finish(self) -> None:
        """Print the ranks' incomplete lines."""
        for state in self.states:
            self._current = state
            self.write("\n" * bool(state.line))


def print_error(error: BaseException) -> None:
    """Print an exception of the program: with its own lines, and those of other libraries."""
    shown = TracebackException.from_exception(error)
    part: TracebackException | None = shown
    while part is not None:
        part.stack = StackSummary.from_list(
            frame for frame in part.stack if not frame.filename.startswith(PACKAGE_FOLDER)
        )
        part = part.__cause__ or part.__context__
    sys.stderr.write("".join(shown.format()))


def run_program(
    program: Path, args: Sequence[str], given: SimulationConfig, seed: int, stream: Any
) -> tuple[SimulatedRun[None], list[str]]:
    """Run the program once; return the run, and the output of each rank.

    Raises:
        SystemExit: with the first exit status of a rank that is not 0, or that of an Abort.
        CommError: for a mistake in the program's communication.
        Exception: raised by a rank.
    """
    try:
        with raised_as(UsageError, f"{program} cannot be read"):
            code = compile(program.read_bytes(), program, "exec")
    except SyntaxError as error:
        print_exception(error.with_traceback(None))
        raise SystemExit(1) from None
    machine = (
        parse_network(given.network, given.ranks) if given.network else Machine.uniform(0.0, 0.0)
    )
    scheduler = Scheduler(given.ranks, seed, 0.0)
    scheduler.by_time &= bool(given.network)
    board = MessageBoard(scheduler, machine)
    board.eager_bytes = given.eager
    interpreter = Interpreter(f"{program.resolve().parent}/", given.ranks, stream)
    scheduler.on_turn = interpreter.turn
    endings: list[SystemExit] = []

    def live(group: Group) -> None:
        main = ModuleType("__main__")
        main.__file__ = str(program)
        sys.modules.update(make_modules(group.comm), __main__=main)
        try:
            exec(code, vars(main))
        except SystemExit as ending:
            if ending.code:
                endings.append(ending)
        except Exception as error:
            if isinstance(error, CommError) and not isinstance(error, MpiError):
                raise
            print_error(error)
            print(f"(on rank {group.rank} of {given.ranks}, with seed {seed})", file=sys.stderr)
            raise SystemExit(1) from None

    caller = sys.argv, sys.path
    sys.argv, sys.path = [str(program), *args], [interpreter._folder, *sys.path]
    try:
        with redirect_stdout(interpreter):
            run = play(live, board, comm_type=Wire)
    finally:
        interpreter.turn(given.ranks)
        sys.argv, sys.path = caller
        interpreter.finish()
        if endings:  # instead of the deadlock of the other ranks, its consequence
            raise endings[0]
    return run, [state.text for state in interpreter.states]


def main(words: Sequence[str]) -> str:
    """Run the program with all seeds and return the summary.

    Raises:
        NnmpiError: for the first seed with a mistake in the program.
    """
    at = 0  # of the program: each option before it has a value
    while at < len(words) and FLAG.fullmatch(words[at]):
        at += 1 if "=" in words[at] else 2
    program, given = read_command(
        "PROGRAM.py", "nnmpi simrun", __doc__ or "", (SimulationConfig,), words[: at + 1]
    )
    first: list[str] = []
    other, lines = "", []
    for seed in range(given.seed, given.seed + given.seeds):
        try:
            run, texts = run_program(
                program, words[at + 1 :], given, seed, None if first else sys.stdout
            )
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
            f"{counted(given.ranks, 'rank')} with {given.network}: {format_seconds(run.seconds)} of"
            f" simulated time; the busiest, rank {rank}, sent or received {format_bytes(nbytes)}"
        ]
    if given.seeds > 1:
        lines.append(f"{given.seeds} seeds: none fails{other or ', and all print the same'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(say(main))
