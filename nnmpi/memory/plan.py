"""A plan for a pass through a chain of links, forward and back: a list of actions, checked, priced and drawn.

    values      x0 --[0]--> x1 --[1]--> x2 --[2]--> x3        x0 is the input, which the caller has; link 2 is the loss
    gradients      <--[0]-- g1 <--[1]-- g2 <--[2]--

    F i    forward     computes value i + 1 of value i; nothing else stays
    K i    keep        the same, and what link i's backward needs stays
    B i    backward    computes gradient i of gradient i + 1 and of what was kept, which goes
    D i    drop        value i goes, unless something that was kept is (or looks into) its memory

    all kept            K0 K1 D1 K2 D2 B2 B1 B0                     most memory, each link forward once
    least memory        F0 F1 D1 K2 D2 B2 F0 K1 D1 D2 B1 K0 D1 B0   the links again and again

`simulate` runs a plan on numbers alone: whether each action has what it needs, the bytes at each moment, the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import isfinite

from nnmpi.errors import UsageError

Plan = tuple["Action", ...]


class Act(Enum):
    """What is done; the letters in which plans are written."""

    FORWARD = "F"
    KEEP = "K"
    BACKWARD = "B"
    DROP = "D"


@dataclass(frozen=True)
class Action:
    """One action of a plan: on a link, or for `DROP` on the value that comes to that link."""

    act: Act
    link: int

    def __str__(self) -> str:
        return f"{self.act.value}{self.link}"


@dataclass(frozen=True)
class ChainLinkCost:
    """What a link takes, in bytes and seconds; the last one of a chain is the loss, which is kept and goes back once.

    Attributes:
        name: for people.
        value: bytes of the link's result.
        gradient: bytes of the gradient of what comes to the link.
        kept: bytes that stay for its backward, besides what comes to it and its result.
        keeps_input, keeps_result: whether what comes to it, and its result, stay for its backward, too.
        forward_peak, keep_peak: the most that it takes on its way forward, beyond what was there before: without and
            with what is kept.
        backward_peak: the most that its backward takes beyond what was there before: what was kept, the gradient that
            came, and what came to the link, if somebody else holds it.
        backward_peak_alone: the same, where that is not so: what came to the link goes on the way.
        forward_s, keep_s, backward_s: seconds.
    """

    name: str
    value: int
    gradient: int
    kept: int
    keeps_input: bool
    keeps_result: bool
    forward_peak: int
    keep_peak: int
    backward_peak: int
    backward_peak_alone: int
    forward_s: float
    keep_s: float
    backward_s: float


Costs = Sequence[ChainLinkCost]


@dataclass(frozen=True)
class PlanPrice:
    """What a plan takes.

    Attributes:
        peak: the most bytes at any moment.
        seconds: of all actions.
        bytes: after each action.
        peaks: the most during each action.
        again: how many of the actions go forward through a link that was gone through before.
    """

    peak: int
    seconds: float
    bytes: tuple[int, ...]
    peaks: tuple[int, ...]
    again: int


def simulate(costs: Costs, plan: Iterable[Action]) -> PlanPrice:
    """Return what a plan takes, after checking that it computes each link's gradient once, in order.

    Raises:
        UsageError: naming the first action that lacks what it needs, or what is missing at the end.
    """
    values, kept, grad = {0}, set[int](), len(costs)
    seen, after, peaks, seconds = set[int](), list[int](), list[int](), 0.0

    def alive() -> int:
        held = sum(costs[i].kept for i in kept)
        inputs = {i for i in kept if costs[i].keeps_input} | {i + 1 for i in kept if costs[i].keeps_result}
        held += sum(costs[i - 1].value for i in values | inputs if 0 < i < len(costs))
        return held + (costs[grad].gradient if grad < len(costs) else 0)

    again = 0
    for action in plan:
        i, act = action.link, action.act
        before = alive()
        if not (i in kept and grad == i + 1 if act is Act.BACKWARD else i in values and i < len(costs)):
            raise UsageError(f"action {action} of the plan, number {len(after)}, lacks what it needs; check the plan")
        cost, peak = costs[i], before
        if act is Act.DROP:
            values.discard(i)
        elif act is Act.BACKWARD:
            kept.discard(i)
            is_held = i in values or (i - 1 in kept and costs[i - 1].keeps_result)
            peak, grad = before + (cost.backward_peak if is_held else cost.backward_peak_alone), i
            seconds += cost.backward_s
        else:
            keeps = act is Act.KEEP
            again += i in seen
            seen.add(i)
            values.add(i + 1)
            if keeps:
                kept.add(i)
            peak = before + (cost.keep_peak if keeps else cost.forward_peak)
            seconds += cost.keep_s if keeps else cost.forward_s
        after.append(alive())
        peaks.append(max(peak, after[-1]))
    if grad or kept or values - {0, len(costs)}:
        raise UsageError("the plan leaves something behind; each link must go back once, and each value be dropped")
    return PlanPrice(max(peaks), seconds, tuple(after), tuple(peaks), again)


def parse_plan(text: str) -> Plan:
    """Return the plan that a text such as "F0 K1 B1 D1 K0 B0" writes down.

    Raises:
        UsageError: for a word that is no action.
    """
    letters = {act.value: act for act in Act}
    actions = []
    for word in text.split():
        if word[0] not in letters or not word[1:].isdecimal():
            raise UsageError(f"{word!r} is no action; write F, K, B or D and the number of a link, such as F0")
        actions.append(Action(letters[word[0]], int(word[1:])))
    return tuple(actions)


def keep_all(costs: Costs) -> Plan:
    """Return the plan of an ordinary pass, in which everything is kept that a backward needs."""
    plan: list[Action] = []
    for i in range(len(costs)):
        plan += [Action(Act.KEEP, i), *[Action(Act.DROP, i)] * (i > 0)]
    return (*plan, *(Action(Act.BACKWARD, i) for i in reversed(range(len(costs)))))


def costs_to_json(costs: Costs) -> list[dict[str, object]]:
    """Return the costs as JSON values."""
    return [asdict(cost) for cost in costs]


def costs_from_json(values: Iterable[Mapping[str, object]]) -> tuple[ChainLinkCost, ...]:
    """Return the costs that `costs_to_json` wrote.

    Raises:
        UsageError: for anything else.
    """
    try:
        costs = tuple(ChainLinkCost(**value) for value in values)  # type: ignore[arg-type]
        fits = bool(costs) and all(
            isfinite(number) and number >= 0
            for cost in costs
            for name, number in asdict(cost).items()
            if name != "name"
        )
    except TypeError:
        fits = False
    if not fits:
        raise UsageError("this is no list of links' costs; take what `python -m nnmpi.memory plan` saves")
    return costs


def draw_plan(costs: Costs, plan: Plan, columns: int = 100) -> str:
    """Return a plan as text: a row for each link, a column for each action, and below the bytes as bars.

    F forward, K keep, B backward, small letters where a link is gone through again; a line where a value waits, a
    double one where a link is kept:

        0 | F...f.K=B.
        1 | .F--..
    """
    price = simulate(costs, plan)
    actions = [(i, action) for i, action in enumerate(plan) if action.act is not Act.DROP]
    rows = [[" "] * len(actions) for _ in costs]
    kept, values, seen = set[int](), {0}, set[int]()
    column = -1
    for action in plan:
        i, act = action.link, action.act
        if act is Act.DROP:
            values.discard(i)
            continue
        column += 1
        for j in range(len(costs)):
            rows[j][column] = "=" if j in kept else "-" if j in values and j else " "
        rows[i][column] = act.value.lower() if act is not Act.BACKWARD and i in seen else act.value
        if act is Act.BACKWARD:
            kept.discard(i)
        else:
            seen.add(i)
            values.add(i + 1)
            if act is Act.KEEP:
                kept.add(i)
    width = max(len(cost.name) for cost in costs)
    peaks = [price.peaks[i] for i, _ in actions]
    lines = []
    for start in range(0, len(actions), columns):
        part = slice(start, start + columns)
        lines += [f"{cost.name:>{width}} |{''.join(row[part])}" for cost, row in zip(costs, rows, strict=True)]
        lines.append(f"{'bytes':>{width}} |{_bars(peaks[part], price.peak)}")
        lines.append("")
    return "\n".join(lines[:-1])


def _bars(numbers: Sequence[int], most: int) -> str:
    """Return a bar for each number, as high as it is of the most."""
    steps = " ▁▂▃▄▅▆▇█"
    return "".join(steps[-(-number * 8 // most) if most else 0] for number in numbers)
