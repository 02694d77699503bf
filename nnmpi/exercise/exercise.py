"""An exercise: its statement, a starter file, and a check of a solution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any, TypeAlias

from nnmpi.comm.fit import parse_network
from nnmpi.comm.machine import Machine
from nnmpi.custom import fault
from nnmpi.errors import NnmpiError, ScheduleError
from nnmpi.exercise.child import show
from nnmpi.exercise.wire import WrongAnswer
from nnmpi.units import Bytes

Function: TypeAlias = Callable[..., Any]

Measures: TypeAlias = tuple[str, Mapping[str, Sequence[float]], str]
"""The setting, such as "on 2 ranks"; measures by name, per rank or of all ranks; a drawing."""

VERBS = {
    "chunks": "sends {:.10g} chunks",
    "bytes": "sends or receives {:.10g} bytes",
    "rounds": "takes {:.10g} rounds",
    "activations": "keeps {:.10g} activations at once",
    "seconds": "takes {:.5g} s of simulated time",
}


@dataclass(frozen=True)
class Setting:
    """A simulated machine and workload that a solution is measured on, the same on every computer.

    Attributes:
        ranks: number of ranks.
        microbatches: of a pipeline.
        network: as `comm.fit.parse_network` reads it, such as "alpha_us=50,gbit=1" or
            "gbit=25,per_node=4,inside_gbit=400"; messages on an empty one cost nothing.
        bytes: of a collective's full buffer.
        forward_s: seconds of a rank's stages for one microbatch; a backward takes twice as long.
        message_s: seconds of a message between two stages.
    """

    ranks: int = 8
    microbatches: int = 8
    network: str = ""
    bytes: Bytes = Bytes("1MiB")
    forward_s: float = 1.0
    message_s: float = 0.0

    @property
    def machine(self) -> Machine:
        """The cost of messages, and the node of each rank."""
        return parse_network(self.network or "alpha_us=0", self.ranks)


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: as on the command line.
        statement: the task, in a few lines.
        arguments: of the function, such as "rank, size".
        judge: (function, size) -> a sentence on a right solution; it raises `WrongAnswer`. The
            function may run in another process, which passes values alone: see `exercise.solution`.
        sizes: numbers of ranks (of pipelines: ranks and microbatches).
        imports: import lines of the starter file.
        measure: (function, setting) -> the measures of a right solution: "seconds" and "bytes" on
            simulated clocks, "chunks", "rounds", "activations". It raises `WrongAnswer` for a wrong
            one. None if there is nothing to measure.
        own: the package's solutions by name, as references for measures.
    """

    name: str
    statement: str
    arguments: str
    judge: Callable[[Function, Any], str]
    sizes: Sequence[Any] = (1,)
    imports: str = ""
    measure: Callable[[Function, Setting], Measures] | None = None
    own: Mapping[str, Function] = field(default_factory=dict)

    @property
    def function(self) -> str:
        """The name of the function to write."""
        return self.name.replace("-", "_")

    @property
    def title(self) -> str:
        """The first line of the statement."""
        return self.statement.partition("\n")[0]

    def check(self, function: Function, sizes: Sequence[Any] = ()) -> str:
        """Return a sentence on a right function, judged on these sizes or the exercise's.

        Raises:
            WrongAnswer: naming the mistake and the size.

        Example:
            >>> from nnmpi.exercise.notebook import find
            >>> def data_split(rows, rank, size):
            ...     start = rank * (rows // size) + min(rank, rows % size)
            ...     return start, start + rows // size + (rank < rows % size)
            >>> find("data-split").check(data_split)
            'right in 95 cases'
        """
        *_, sentence = [self.judge(function, size) for size in sizes or self.sizes]
        return f"right {sentence}"

    def starter(self) -> str:
        """Return the starter file: the statement, and a function without a body."""
        file = f"{self.function}.py"
        text = f"{self.statement}\n\nCheck it with: python -m nnmpi.exercise {self.name} {file}"
        imports = f"{self.imports}\n\n\n" if self.imports else "\n"
        body = indent('raise NotImplementedError("write it here")', "    ")
        return f'"""{text}\n"""\n\n{imports}def {self.function}({self.arguments}):\n{body}\n'


def judge_measures(
    measure: Callable[[Function, Setting], Measures],
    best: Callable[[Setting], Measures],
    function: Function,
    size: Any,
) -> str:
    """Return a sentence on the measures of a right solution, which exceed no limit.

    Args:
        measure: of the exercise.
        best: setting -> the limits: of activations for each rank, of all else for any rank.
        function: the solution.
        size: the number of ranks, or the numbers of ranks and microbatches.

    Raises:
        WrongAnswer: naming the mistake, or the rank and the measure over its limit.
    """
    setting = Setting(*size) if isinstance(size, Sequence) else Setting(size)
    _, limits, drawn = best(setting)
    with judged("", str, lambda: drawn):
        where, numbers, drawing = measure(function, setting)
        for name, limit in limits.items():
            for rank, number in enumerate(numbers[name]):
                most = limit[rank] if name == "activations" else max(limit)
                if number > most * (1 + 1e-9):
                    who = f"rank {rank}" if len(numbers[name]) > 1 else "it"
                    excess = f"{who} {VERBS[name].format(number)}, and {most:.10g} are enough"
                    raise WrongAnswer(f"{where}: the result is right, but {excess}", drawing)
    verbs = (VERBS[name].format(max(ranks)) for name, ranks in numbers.items() if any(ranks))
    return f"{where}: it {', '.join(verbs)}"


def call(function: Function, *values: Any) -> Any:
    """Call a solution.

    Raises:
        WrongAnswer: for any exception but the package's own: its type, its line and the arguments.
    """
    try:
        return function(*values)
    except NnmpiError:
        raise
    except (Exception, SystemExit) as error:  # a solution that ends the program must not seem right
        raise WrongAnswer(fault(function, map(show, values), error)) from error


@contextmanager
def judged(where: str, draw: Callable[[], str], best: Callable[[], str] = str) -> Iterator[None]:
    """Turn a ScheduleError in the body into a `WrongAnswer` with the setting and drawings.

    Args:
        where: the setting, such as "on 2 ranks".
        draw: returns the drawing of the solution; called on errors alone.
        best: returns the drawing of a right one.
    """
    try:
        yield
    except ScheduleError as error:
        raise WrongAnswer(f"{where}: {error}", draw(), best()) from None
    except WrongAnswer as error:
        error.drawing, error.best = error.drawing or draw(), error.best or best()
        raise
