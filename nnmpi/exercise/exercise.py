"""What an exercise is: a few lines that say what is wanted, a file to begin with, and a check of
what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any, TypeAlias

from nnmpi.comm.fit import parse_network
from nnmpi.comm.machine import Machine, blocks
from nnmpi.custom import fault
from nnmpi.errors import NnmpiError, ScheduleError
from nnmpi.exercise.child import show
from nnmpi.exercise.wire import WrongAnswer
from nnmpi.units import Bytes

Function: TypeAlias = Callable[..., Any]

Measures: TypeAlias = tuple[str, Mapping[str, Sequence[float]], str]
"""Where, such as "on 2 ranks"; what a solution takes there by name, each rank or all of them; a
drawing of it.
"""

SAID = {
    "chunks": "sends {:.10g} chunks",
    "bytes": "sends or receives {:.10g} bytes",
    "rounds": "takes {:.10g} rounds",
    "activations": "keeps {:.10g} activations at once",
    "seconds": "takes {:.5g} s of simulated time",
}


@dataclass(frozen=True)
class Setting:
    """Where a solution is measured, as an assignment has it; nothing of it depends on the computer.

    Attributes:
        ranks, per_node: how many, and how many of them share a node.
        network, inside: links between nodes and within one, such as "alpha_us=50,gbit=1"; empty
            ones cost nothing.
        bytes: of a collective's whole buffer.
        microbatches: of a pipeline.
        forward_s: of a rank's stages for one microbatch; a backward takes twice as long.
        message_s: of a message between two stages.
    """

    ranks: int = 8
    microbatches: int = 8
    per_node: int = 1
    network: str = ""
    inside: str = ""
    bytes: Bytes = Bytes("1MiB")
    forward_s: float = 1.0
    message_s: float = 0.0

    @property
    def machine(self) -> Machine:
        """What messages cost, and where the ranks are."""
        across, inside = (
            parse_network(text or "alpha_us=0", 1).inside for text in (self.network, self.inside)
        )
        return Machine(inside, across, blocks(self.ranks, self.per_node))


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        name: as it is written on the command line.
        statement: what is wanted, in a few lines.
        arguments: of the function, such as "rank, size".
        judge: (function, size) -> what it was found to do; it raises `WrongAnswer`. The function
            may run in processes of its own: see `exercise.solution` for what may be handed over.
        sizes: numbers of ranks (of pipelines: ranks and microbatches).
        imports: what the file begins with.
        measure: (function, setting) -> what a right solution takes there: "seconds" and "bytes" on
            simulated clocks, "chunks", "rounds", "activations". It raises `WrongAnswer` for one
            that is not right. None where there is nothing to measure.
        own: the package's own solutions by name, to which measures can be compared.
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
        """The name of the function that is to be written."""
        return self.name.replace("-", "_")

    @property
    def title(self) -> str:
        """The first line of the statement."""
        return self.statement.partition("\n")[0]

    def check(self, function: Function, sizes: Sequence[Any] = ()) -> str:
        """Return what a right function does, for these sizes or its own.

        Raises:
            WrongAnswer: saying what is wrong, and for which size.
        """
        *_, told = [self.judge(function, size) for size in sizes or self.sizes]
        return f"right {told}"

    def starter(self) -> str:
        """Return the file to begin with: the statement, and a function that is not written yet."""
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
    """Return what a right solution takes, which is no more than is enough.

    Args:
        measure: of the exercise.
        best: setting -> what is enough there; of activations for each rank, of all else for any.
        function: what was written.
        size: the number of ranks, or the numbers of ranks and microbatches.

    Raises:
        WrongAnswer: saying what is wrong, or which rank takes too much of what.
    """
    setting = Setting(*size) if isinstance(size, Sequence) else Setting(size)
    _, limits, drawn = best(setting)
    with judged("", str, lambda: drawn):
        where, numbers, drawing = measure(function, setting)
        for what, enough in limits.items():
            for rank, found in enumerate(numbers[what]):
                most = enough[rank] if what == "activations" else max(enough)
                if found > most * (1 + 1e-9):
                    who = f"rank {rank}" if len(numbers[what]) > 1 else "it"
                    told = f"{who} {SAID[what].format(found)}, and {most:.10g} are enough"
                    raise WrongAnswer(f"{where}: the result is right, but {told}", drawing)
    return (
        f"{where}: it"
        f" {', '.join(SAID[what].format(max(each)) for what, each in numbers.items() if any(each))}"
    )


def call(function: Function, *values: Any) -> Any:
    """Return what a solution makes of these values.

    Raises:
        WrongAnswer: for any exception in it that is not the package's own: what it was, where, and
            for which values.
    """
    try:
        return function(*values)
    except NnmpiError:
        raise
    except (Exception, SystemExit) as error:  # a solution that ends the program must not seem right
        raise WrongAnswer(fault(function, map(show, values), error)) from error


@contextmanager
def judged(where: str, draw: Callable[[], str], best: Callable[[], str] = str) -> Iterator[None]:
    """Within this, what is wrong with steps or a schedule is a `WrongAnswer` that says where, with
    a drawing.

    Args:
        where: such as "on 2 ranks".
        draw: called when something is wrong.
        best: the same, for the drawing of what would be right.
    """
    try:
        yield
    except ScheduleError as error:
        raise WrongAnswer(f"{where}: {error}", draw(), best()) from None
    except WrongAnswer as error:
        error.drawing, error.best = error.drawing or draw(), error.best or best()
        raise
