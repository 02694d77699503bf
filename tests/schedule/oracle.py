"""Runs a schedule with terms instead of arrays: what is computed from what comes out at the end, right or wrong.

It knows nothing of order, matching or deadlock; it does what the programs say, as an executor would. Whatever it gets
wrong `check` must have refused.
"""

from collections import defaultdict, deque
from typing import Any

from nnmpi.schedule.instruction import SENDS, Instruction, Kind, message_of, parts
from nnmpi.schedule.schedule import Schedule


class Wrong(Exception):
    """An executor would hang, read what is not there, or end with other gradients."""


def run(schedule: Schedule, rendezvous: bool) -> None:
    """Run, and raise Wrong unless all stages end with all microbatches' gradients, or inference with all outputs."""
    machine = _Machine(schedule, rendezvous)
    while any(machine.advance(rank) for rank in range(schedule.ranks)):
        pass
    if any(machine.at[rank] < len(schedule.programs[rank]) for rank in range(schedule.ranks)):
        raise Wrong("hangs")
    if any(machine.channels.values()):
        raise Wrong("messages are left over")
    for stage in range(schedule.stages):
        expected = sorted(_weight_gradient(schedule, stage, m) for m in range(schedule.microbatches))
        if schedule.trains and sorted(machine.updated[stage]) != expected:
            raise Wrong(f"stage {stage} updates with {machine.updated[stage]}")
        for m in range(schedule.microbatches):
            if machine.stores[schedule.rank_of(stage)].get(("output", stage, m)) != _output(stage, m):
                raise Wrong(f"the output of stage {stage} on {m} is not there, or wrong")


def _output(stage: int, m: int) -> str:
    return f"F{stage}({_output(stage - 1, m) if stage else f'x{m}'})"


def _input_gradient(schedule: Schedule, stage: int, m: int) -> str:
    """The gradient of a stage's input; of the one behind the last stage it is the loss's."""
    if stage == schedule.stages:
        return f"loss({_output(stage - 1, m)})"
    return f"I{stage}({_output(stage, m)}, {_input_gradient(schedule, stage + 1, m)})"


def _weight_gradient(schedule: Schedule, stage: int, m: int) -> str:
    return f"W{stage}({_output(stage, m)}, {_input_gradient(schedule, stage + 1, m)})"


class _Machine:
    def __init__(self, schedule: Schedule, rendezvous: bool) -> None:
        self.schedule, self.rendezvous = schedule, rendezvous
        self.at = [0] * schedule.ranks
        self.stores: list[dict[Any, str]] = [{} for _ in range(schedule.ranks)]
        self.channels: defaultdict[Any, deque[list[Any]]] = defaultdict(deque)  # [term, was taken]
        self.open: list[list[Any]] = [[] for _ in range(schedule.ranks)]  # what a rank waits for
        self.gradients: defaultdict[int, list[tuple[int | None, str]]] = defaultdict(list)
        self.reduced: dict[Any, list[str]] = {}
        self.updated: defaultdict[int, list[str]] = defaultdict(list)

    def advance(self, rank: int) -> bool:
        """Do one thing of a rank; return whether anything was done."""
        program = self.schedule.programs[rank]
        if self.at[rank] == len(program):
            return False
        own = parts(program[self.at[rank]])
        if not hasattr(self, str(own[0].kind)):
            if not self.open[rank]:
                self.open[rank] = [self.send(rank, one) if one.kind in SENDS else one for one in own]
                return True
            took = self.take(rank)
            if not self.open[rank]:
                self.at[rank] += 1
                return True
            return took
        getattr(self, str(own[0].kind))(rank, own[0])
        self.at[rank] += 1
        return True

    def send(self, rank: int, one: Instruction) -> list[Any]:
        what = "output" if one.kind is Kind.SEND_ACT else "input gradient"
        message = [self.read(rank, what, one.stage, one.microbatch), False]
        self.channels[message_of(one).channel(self.schedule.ranks)].append(message)
        return message

    def take(self, rank: int) -> bool:
        """Take what has come, one message after the other on each channel; drop what a rank need not wait for."""
        before, blocked = len(self.open[rank]), set()
        left: list[Any] = []
        for each in self.open[rank]:
            if isinstance(each, list):
                if self.rendezvous and not each[1]:
                    left.append(each)
                continue
            channel = message_of(each).channel(self.schedule.ranks)
            if channel in blocked or not self.channels[channel]:
                blocked.add(channel)
                left.append(each)
                continue
            message = self.channels[channel].popleft()
            message[1] = True
            what = "input" if each.kind is Kind.RECV_ACT else "output gradient"
            self.stores[rank][what, each.stage, each.microbatch] = message[0]
        self.open[rank] = left
        return len(left) < before

    def read(self, rank: int, what: str, stage: int, m: int | None) -> str:
        alone = self.schedule.ranks == 1
        if what == "input" and stage == 0:
            return f"x{m}"
        if what == "input" and alone:
            return self.read(rank, "output", stage - 1, m)
        if what == "output gradient" and stage == self.schedule.stages - 1:
            return f"loss({self.read(rank, 'output', stage, m)})"
        if what == "output gradient" and alone:
            return self.read(rank, "input gradient", stage + 1, m)
        if (what, stage, m) not in self.stores[rank]:
            raise Wrong(f"rank {rank} has no {what} of stage {stage}, microbatch {m}")
        return self.stores[rank][what, stage, m]

    def both(self, rank: int, one: Instruction) -> str:
        terms = (self.read(rank, what, one.stage, one.microbatch) for what in ("output", "output gradient"))
        return f"{one.stage}({', '.join(terms)})"

    def F(self, rank: int, one: Instruction) -> None:
        self.stores[rank]["output", one.stage, one.microbatch] = (
            f"F{one.stage}({self.read(rank, 'input', one.stage, one.microbatch)})"
        )

    def I(self, rank: int, one: Instruction) -> None:  # noqa: E743
        self.stores[rank]["input gradient", one.stage, one.microbatch] = f"I{self.both(rank, one)}"

    def W(self, rank: int, one: Instruction) -> None:
        self.read(rank, "input gradient", one.stage, one.microbatch)  # left by I
        self.gradients[one.stage].append((one.microbatch, f"W{self.both(rank, one)}"))

    def B(self, rank: int, one: Instruction) -> None:
        self.I(rank, one)
        self.W(rank, one)

    def REDUCE(self, rank: int, one: Instruction) -> None:
        found = self.gradients[one.stage]
        own = [each for each in found if one.microbatch in (None, each[0])]
        if not own:
            raise Wrong(f"{one} has nothing to sum")
        self.gradients[one.stage] = [each for each in found if each not in own]
        self.reduced[one.stage, one.microbatch] = [term for _, term in own]

    def STEP(self, rank: int, one: Instruction) -> None:
        if (one.stage, one.microbatch) not in self.reduced:
            raise Wrong(f"{one} without a reduction")
        self.updated[one.stage] += self.reduced.pop((one.stage, one.microbatch))
