"""An exercise: its statement, a starter file, and a check of a solution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import getdoc
from typing import Any, TypeAlias

from nnmpi.base.custom import fault
from nnmpi.base.errors import NnmpiError
from nnmpi.base.units import Bytes
from nnmpi.comm.fit import parse_network
from nnmpi.comm.machine import Machine
from nnmpi.teaching.exercise.child import show
from nnmpi.teaching.exercise.wire import WrongAnswer

Solver: TypeAlias = Callable[..., Any]

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
        sizes: numbers of ranks (of pipelines: ranks and microbatches).
        judge: (function, size) -> a sentence on a right solution; raises `WrongAnswer`. None: the
            limits of `best` judge what `measure` returns. The function may run in another process,
            which passes only values: see `exercise.solution`.
        imports: import lines of the starter file.
        measure: (function, setting) -> the measures of a right solution: "seconds" and "bytes" on
            simulated clocks, "chunks", "rounds", "activations". It raises `WrongAnswer` for a wrong
            one. None if there is nothing to measure.
        best: setting -> the limits of the measures: of activations one for each rank, of any other
            measure the largest for all ranks.
        references: the package's solutions by name; a measure may be given as a multiple of theirs.
    """

    name: str
    statement: str
    arguments: str
    sizes: Sequence[Any] = (1,)
    judge: Callable[[Solver, Any], str] | None = None
    imports: str = ""
    measure: Callable[[Solver, Setting], Measures] | None = None
    best: Callable[[Setting], Measures] = lambda _: ("", {}, "")
    references: Mapping[str, Solver] = field(default_factory=dict)

    @property
    def function(self) -> str:
        """The name of the function to write."""
        return self.name.replace("-", "_")

    @property
    def title(self) -> str:
        """The first paragraph of the statement."""
        return self.statement.partition("\n\n")[0]

    def check(self, function: Solver, sizes: Sequence[Any] = ()) -> str:
        """Return a sentence on a right function, judged on these sizes or the exercise's.

        Raises:
            WrongAnswer: naming the mistake and the size.

        Example:
            >>> from nnmpi.teaching.exercise.exercises import find
            >>> def data_split(rows, rank, size):
            ...     start = rank * (rows // size) + min(rank, rows % size)
            ...     return start, start + rows // size + (rank < rows % size)
            >>> find("data-split").check(data_split)
            'right in 95 cases'
        """
        judge = self.judge or self._judge_measures
        *_, sentence = [judge(function, size) for size in sizes or self.sizes]
        return f"right {sentence}"

    def starter(self, file: object = "") -> str:
        """Return the starter file: the statement, and a function without a body."""
        file = file or f"{self.function}.py"
        imports = f"{self.imports}\n\n\n" if self.imports else "\n"
        return (
            f'"""{self.statement}\n\nCheck it with: nnmpi exercise {self.name} {file}\n'
            f'"""\n\n{imports}def {self.function}({self.arguments}):\n'
            '    raise NotImplementedError("write it here")\n'
        )

    def _judge_measures(self, function: Solver, size: Any) -> str:
        assert self.measure is not None
        values = size if isinstance(size, Sequence) else (size,)
        setting = Setting(*values)
        _, limits, drawn = self.best(setting)
        try:
            where, numbers, drawing = self.measure(function, setting)
            for name, limit in limits.items():
                for rank, number in enumerate(numbers[name]):
                    most = limit[rank] if name == "activations" else max(limit)
                    if number > most * (1 + 1e-9):
                        who = f"rank {rank}" if len(numbers[name]) > 1 else "it"
                        excess = f"{who} {VERBS[name].format(number)}; the limit is {most:.10g}"
                        raise WrongAnswer(f"{where}: the result is right, but {excess}", drawing)
        except WrongAnswer as error:
            error.best = drawn * ("NotImplementedError" not in str(error))  # not before a try
            if self.arguments.startswith("rank") and _differs(function, 0, *values):
                error.args = (
                    f"{error}; called again, {self.function} gives other values: it must keep none"
                    " from call to call, such as a list outside of the function or a default",
                )
            raise
        verbs = [VERBS[name].format(max(ranks)) for name, ranks in numbers.items() if any(ranks)]
        return f"{where}: it {', '.join(verbs)}" if verbs else where


def _differs(function: Solver, *values: int) -> bool:
    """Return whether two calls give different lists; another error has been reported before."""
    with suppress(Exception, SystemExit):
        first, second = ([*function(*values)] for _ in range(2))
        return first != second
    return False


def call(function: Solver, *values: Any) -> Any:
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


def described(function: Solver) -> tuple[str, str]:
    """Return an exercise's name and statement: a function's name and docstring."""
    return function.__name__.replace("_", "-"), getdoc(function) or ""
