"""`nnmpi simrun`: run an mpi4py program unchanged on simulated ranks in one process.

nnmpi simrun -n 8 program.py
nnmpi simrun -n 8 --network alpha_us=50,gbit=1 program.py
nnmpi simrun -n 8 --seeds 1000 program.py

It names, with ranks and lines: deadlocks, mismatched collectives, messages that do not fit or are
never received, and arrays changed while they are being sent.
"""

import io
import logging  # noqa: F401 (ranks share it; so its state before the first rank is known)
import random
import signal
import sys
import threading
import warnings
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import module_from_spec
from operator import attrgetter
from pathlib import Path
from traceback import StackSummary, TracebackException, print_exception
from types import ModuleType
from typing import Any

import numpy as np
from numpy.random import mtrand

from nnmpi.base.command import FLAG, MOST, check_numbers, read_command, say, silence
from nnmpi.base.errors import CommError, UsageError, counted, raised_as
from nnmpi.base.files import check_ordinary
from nnmpi.base.units import Bytes, format_bytes, format_seconds
from nnmpi.comm.fit import parse_network
from nnmpi.comm.group import Group
from nnmpi.comm.machine import EAGER_BYTES, Machine
from nnmpi.comm.simulated.scheduler import PACKAGE_FOLDER, Abandoned
from nnmpi.comm.simulated.simulated_comm import EVERYONE, MessageBoard
from nnmpi.comm.simulated.simulated_world import SimulatedRun, play
from nnmpi.comm.world import WARNING_S
from nnmpi.teaching.mpi_front.handles import Exception as MpiError
from nnmpi.teaching.mpi_front.messages import Wire
from nnmpi.teaching.mpi_front.modules import make_modules
from nnmpi.teaching.mpi_front.scheduler import ProgramScheduler
from nnmpi.teaching.rank_modules import RankModules


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


PATIENCE_S = 2.0  # of loops that poll and end by the computer's clock
STREAMS = "stdin", "stdout", "stderr"


def _set_folder(module: Any, folder: str) -> None:
    module.chdir(folder)


def _set_streams(module: Any, streams: Any) -> None:
    module.stdin, module.stdout, module.stderr = streams


def _set_warnings(module: Any, state: Any) -> None:
    filters, module.showwarning, module.formatwarning = state
    module.filters = [*filters]


def _set_root_logger(module: Any, state: Any) -> None:
    module.root.setLevel(state[0])
    module.root.handlers[:] = state[1]


def _set_torch(module: Any, state: Any) -> None:
    module.set_rng_state(state[0])
    module.set_default_dtype(state[1])


# What a library keeps once for a process: its module, how to read it, how to write it.
_SHARED: tuple[tuple[str, Callable[[Any], Any], Callable[[Any, Any], None]], ...] = (
    ("os", lambda module: module.getcwd(), _set_folder),
    ("sys", attrgetter(*STREAMS), _set_streams),
    (
        "warnings",
        lambda module: ([*module.filters], module.showwarning, module.formatwarning),
        _set_warnings,
    ),
    ("logging", lambda module: (module.root.level, [*module.root.handlers]), _set_root_logger),
    (
        "torch",
        lambda module: (module.get_rng_state(), module.get_default_dtype()),
        _set_torch,
    ),
)


class RankGlobals:
    """One simulated rank's global state: modules, random numbers, output, libraries' settings.

    Ranks are threads of one process, but a program written for MPI takes its modules' variables,
    NumPy's random state, the folder and the settings of libraries for private.
    """

    def __init__(self, rank: int) -> None:
        spec: Any = random.__spec__
        local: Any = module_from_spec(spec)
        spec.loader.exec_module(local)
        local.seed(rank)
        self.rank = rank
        exits: Any = make_exits()
        self.at_exit = exits._run_exitfuncs
        self.modules: dict[str, ModuleType] = {
            "random": local,
            "signal": make_signal(rank),
            "atexit": exits,
        }
        self.bits: Any = np.random.MT19937(rank)
        self.shared: dict[str, Any] = {}
        self.leave()
        self.shared.pop("torch", None)  # it has a seed for each rank
        self.text: list[str] = []
        self.line: list[str] = []
        self.locks: dict[str, Any] = {}
        self.thread = 0
        self.decode = getincrementaldecoder("utf-8")("replace").decode

    def leave(self) -> None:
        """Keep what libraries have now."""
        for name, read, _ in _SHARED:
            if name in sys.modules:
                with suppress(OSError):  # the folder is gone
                    self.shared[name] = read(sys.modules[name])

    def enter(self, before: "RankGlobals") -> None:
        """Give libraries what this rank has set, instead of another's."""
        for name, _, write in _SHARED:
            mine, others = (state.shared.get(name) for state in (self, before))
            if mine is None and others is not None:  # imported since
                sys.modules[name].manual_seed(self.rank)
            elif name == "torch" and mine is not None or mine != others:
                write(sys.modules[name], mine)


def make_signal(rank: int) -> ModuleType:
    """Return a rank's module `signal`: no signal reaches a thread, so handlers are kept, unused."""
    local = ModuleType("signal")
    vars(local).update(vars(signal))
    handlers: dict[int, Any] = {}

    def handle(number: int, handler: Any) -> Any:
        if callable(handler):
            warnings.warn(
                f"rank {rank} handles signal {int(number)}, which reaches no simulated rank",
                RuntimeWarning,
                stacklevel=2,
            )
        before = find(number)
        handlers[number] = handler
        return before

    def find(number: int) -> Any:
        return handlers.get(number, signal.SIG_DFL)

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no signal reaches a simulated rank; run this program under mpirun")

    waits = "alarm pause setitimer set_wakeup_fd sigtimedwait sigwait sigwaitinfo"
    vars(local).update(dict.fromkeys(waits.split(), refuse), signal=handle, getsignal=find)
    return local


def make_exits() -> ModuleType:
    """Return a rank's module `atexit`, whose functions are called when its program ends."""
    local, kept = ModuleType("atexit"), list[tuple[Any, ...]]()

    def register(function: Any, *args: Any, **named: Any) -> Any:
        kept.append((function, args, named))
        return function

    def unregister(function: Any) -> None:
        kept[:] = [item for item in kept if item[0] != function]

    def run() -> None:
        while kept:
            function, args, named = kept.pop()
            function(*args, **named)

    vars(local).update(register=register, unregister=unregister, _run_exitfuncs=run)
    return local


class OutputBytes(io.RawIOBase):
    """The bytes under `sys.stdout`, which become text at once.

    Args:
        write: takes bytes.
    """

    def __init__(self, write: Callable[[Any], int]) -> None:
        self.write = write  # type: ignore[method-assign]

    def writable(self) -> bool:
        """Return True."""
        return True


class Interpreter(io.TextIOBase):
    """Switches between the ranks' global states, and prints their output in complete lines.

    Args:
        modules: those that each rank imports for itself.
        ranks: number of ranks.
        stream: the output; None for none.
    """

    encoding = "utf-8"

    def __init__(self, modules: RankModules, ranks: int, stream: Any) -> None:
        self._modules, self._stream, self._count = modules, stream, 0
        self._ranks = ranks
        bootstrap: Any = sys.modules["_frozen_importlib"]
        self._locks: dict[str, Any] = bootstrap._module_locks  # of imports under way
        self.buffer = OutputBytes(self._write_bytes)
        self.states: list[RankGlobals] = []

    def begin(self) -> None:
        """Let all ranks begin with what the process has now."""
        # the last one is the caller's
        self.states = [RankGlobals(rank) for rank in range(self._ranks + 1)]
        self._current = self.states[-1]
        self._current.leave()

    def reconfigure(self, **options: Any) -> None:
        """Do nothing: lines are printed when they are complete."""

    def turn(self, number: int) -> None:
        """Switch to a rank's state.

        Raises:
            UsageError: when the last rank stopped while it imported a shared module: this one could
                wait for ever for the lock of that import.
        """
        before, self._current = self._current, self.states[number]
        before.bits = mtrand.get_bit_generator()
        before.leave()
        names = (
            [*before.modules]
            if len(sys.modules) == self._count  # nothing was imported: skip the search
            else self._modules.find()
        )
        before.modules = {name: sys.modules.pop(name) for name in names}
        for name, module in self._current.modules.items():
            if name not in self._modules.shared:
                sys.modules[name] = module
        self._count = len(sys.modules)
        half = {name: lock() for name, lock in self._locks.items() if name in self._modules.shared}
        before.locks = {name: self._locks.pop(name) for name in [*self._locks] if name not in half}
        self._locks.update(self._current.locks)
        mtrand.set_bit_generator(self._current.bits)
        self._current.enter(before)
        self._current.thread = threading.get_ident()
        for name, lock in half.items():
            if lock is not None and lock.owner == before.thread != self._current.thread:
                raise UsageError(
                    f"the module {name}, which all ranks share, communicates while it is imported;"
                    " let a function of it do so"
                )

    def write(self, text: str) -> int:
        """Print the complete lines, and keep the rest."""
        state = self._current
        state.line.append(text)
        if "\n" in text:
            lines, end, rest = "".join(state.line).rpartition("\n")
            state.line = [rest]
            state.text.append(lines + end)
            if self._stream is not None:
                try:
                    self._stream.write(lines + end)
                except OSError as error:  # as in `Console`: a closed pipe ends the printing alone
                    silence(self._stream)
                    self._stream = None
                    if not isinstance(error, BrokenPipeError):
                        raise CommError(f"the output cannot be written: {error.strerror}") from None
        return len(text)

    def _write_bytes(self, data: Any) -> int:
        self.write(self._current.decode(bytes(data)))
        return len(data)

    def finish(self) -> None:
        """Print the ranks' incomplete lines."""
        for state in self.states:
            self._current = state
            self.write("\n" * any(state.line))


class ProgramBoard(MessageBoard):
    """A board on which messages may stay that a library sends at the end, by `atexit`."""

    last: Any = ()

    def find_sent(self, rank: int) -> list[Any]:
        """Return a rank's messages that nobody has received."""
        sent = [message for queue in self.queues.values() for message in queue.sends]
        return [message for message in sent if message.request.owner.number == rank]

    def find_leftovers(self) -> list[str]:
        """Return what stays of the other messages and of all requests."""
        for queue in self.queues.values():
            for message in [*queue.sends]:
                if message in self.last:
                    queue.sends.remove(message)
        return super().find_leftovers()


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


def _compiled(program: Path) -> Any:
    """Return a program's code.

    Raises:
        UsageError: for a file that cannot be read.
        SystemExit: for one that is not Python; its error is printed.
    """
    try:
        with raised_as(UsageError, f"{program} cannot be read"):
            check_ordinary(program)
            return compile(program.read_bytes(), program, "exec")
    except SyntaxError as error:
        print_exception(error.with_traceback(None))
        raise SystemExit(1) from None


def _is_of_messages(error: BaseException | None) -> bool:
    """Return whether an error is about the program's communication, and none of MPI's own."""
    return isinstance(error, CommError) and not isinstance(error, MpiError)


class _ProgramRanks:
    """The ranks of one run of a program: what each does, and how it ends.

    Args:
        program, code: its file, and what `_compiled` made of it.
        board: of the ranks' messages.
        interpreter: of the ranks.

    Attributes:
        endings: exits of ranks with a status that is not 0.
        of_threads: errors of threads that ranks have started.
    """

    def __init__(
        self, program: Path, code: Any, board: ProgramBoard, interpreter: Interpreter
    ) -> None:
        self._program, self._code = program, code
        self._board, self._interpreter = board, interpreter
        # of the program's world: a receive from any rank must not take nnmpi's messages
        self._number = next(board.numbers)
        self.endings: list[SystemExit] = []
        self.of_threads: list[CommError] = []

    def live(self, group: Group) -> None:
        """Run the program on a rank.

        Raises:
            CommError: for a mistake in its communication.
            SystemExit: after another exception, which is printed.
        """
        main = ModuleType("__main__")
        main.__file__ = str(self._program)
        local = self._board.scheduler.ranks[group.rank]
        wire = Wire(self._board, group.comm.world, local, range(group.size), self._number)
        self._board.names[self._number] = EVERYONE
        sys.modules.update(make_modules(wire), __main__=main)
        try:
            self._execute(group.rank, vars(main))
        except Exception as error:
            if _is_of_messages(error):
                raise
            print_error(error)
            seed = self._board.scheduler.seed
            print(f"(on rank {group.rank} of {group.size}, with seed {seed})", file=sys.stderr)
            raise SystemExit(1) from None

    def _execute(self, rank: int, names: dict[str, Any]) -> None:
        """Run the code, and what the program has registered for its end."""
        board = self._board
        try:
            exec(self._code, names)
        except SystemExit as ending:
            if ending.code:
                self.endings.append(ending)
        sent = board.find_sent(rank)
        self._interpreter.states[rank].at_exit()
        late = [item for item in board.find_sent(rank) if item not in sent]
        board.last = [*board.last, *late]

    def end_thread(self, ended: threading.ExceptHookArgs) -> None:
        """Keep the error of a thread that a rank has started, or print it."""
        error = ended.exc_value
        if _is_of_messages(error):
            assert isinstance(error, CommError)
            self.of_threads.append(error)
        elif error is not None and not isinstance(error, Abandoned):
            print_error(error)


@contextmanager
def _as_program(
    program: Path, args: Sequence[str], modules: RankModules, end_thread: Callable[..., None]
) -> Iterator[None]:
    """Let the body have the arguments, modules and threads' end of a program, as `python` does."""
    caller = sys.argv, sys.path, threading.excepthook
    sys.argv, sys.path = [str(program), *args], [modules.folder, *sys.path]
    sys.meta_path.insert(0, modules)
    threading.excepthook = end_thread
    try:
        yield
    finally:
        sys.argv, sys.path, threading.excepthook = caller
        sys.meta_path.remove(modules)


def run_program(
    program: Path,
    args: Sequence[str],
    given: SimulationConfig,
    seed: int,
    stream: Any,
    modules: RankModules,
) -> tuple[SimulatedRun[None], list[str]]:
    """Run the program once; return the run, and the output of each rank.

    Raises:
        SystemExit: with the first exit status of a rank that is not 0, or that of an Abort.
        CommError: for a mistake in the program's communication.
        Exception: raised by a rank.
    """
    code = _compiled(program)
    machine = (
        parse_network(given.network, given.ranks) if given.network else Machine.uniform(0.0, 0.0)
    )
    interpreter = Interpreter(modules, given.ranks, stream)
    scheduler = ProgramScheduler(
        given.ranks,
        seed,
        interpreter.turn,
        lambda text: print(f"nnmpi: {text}", file=sys.__stderr__, flush=True),
        WARNING_S,
        PATIENCE_S,
    )
    scheduler.by_time &= bool(given.network)
    board = ProgramBoard(scheduler, machine)
    board.eager_bytes = given.eager
    ranks = _ProgramRanks(program, code, board, interpreter)
    try:
        with (
            _as_program(program, args, modules, ranks.end_thread),
            redirect_stdout(interpreter),
        ):
            interpreter.begin()
            try:
                run = play(ranks.live, board)
            finally:
                interpreter.turn(given.ranks)
    finally:
        interpreter.finish()
        if ranks.endings:  # instead of the deadlock of the other ranks, its consequence
            raise ranks.endings[0]
    if ranks.of_threads:
        raise ranks.of_threads[0]
    return run, ["".join(state.text) for state in interpreter.states]


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
    modules = RankModules(f"{program.resolve().parent}/")
    for seed in range(given.seed, given.seed + given.seeds):
        try:
            run, texts = run_program(
                program, words[at + 1 :], given, seed, None if first else sys.stdout, modules
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
