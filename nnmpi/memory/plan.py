"""A plan for a pass through a chain of layers: actions, checked, priced and drawn.

    values      x0 --[0]--> x1 --[1]--> x2 --[2]--> x3     x0 is the input, which the caller keeps;
    gradients      <--[0]-- g1 <--[1]-- g2 <--[2]--        layer 2 is the loss

    F i    forward     computes value i + 1 from value i; saves nothing else
    K i    keep        the same, and saves the arrays that layer i's backward needs
    B i    backward    computes gradient i from gradient i + 1 and the saved arrays; frees these
    D i    drop        frees value i, unless a saved array is (or is a view of) its memory
    O i    out         starts the transfer of layer i's saved arrays to the store
    A i    away        waits for its end; their memory is free then
    I i    in          allocates memory, and starts the transfer back; B i waits for its end

    all kept        K0 K1 D1 K2 D2 B2 B1 B0                     most memory, each layer forward once
    least memory    F0 F1 D1 K2 D2 B2 F0 K1 D1 D2 B1 K0 D1 B0   the layers again and again
    swapped         K0 O0 K1 D1 A0 K2 D2 B2 I0 B1 B0            layer 0 is in the store meanwhile

    computes     | K0 | K1 | K2 B2 | B1 | B0 |        transfers run one by one, beside computation
    transfers         |- O0 -|     |- I0 -|

`price_plan` runs a plan on numbers alone. It checks that each action has its inputs, and computes
the bytes at each moment, with the temporary arrays of F, K and B, and the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

from nnmpi.base.errors import UsageError
from nnmpi.base.picture import preformat

Plan = tuple["Action", ...]
COLUMNS = 100  # of a drawn plan, before its rows continue below
DIGITS = 9  # of seconds in the rows of a price


class Act(Enum):
    """The kinds of actions, by their letters in written plans."""

    FORWARD = "F"
    KEEP = "K"
    BACKWARD = "B"
    DROP = "D"
    OUT = "O"
    AWAY = "A"
    IN = "I"


@dataclass(frozen=True)
class Action:
    """One action of a plan, on a layer; `DROP` is on the layer's input value."""

    act: Act
    layer: int

    def __str__(self) -> str:
        return f"{self.act.value}{self.layer}"


@dataclass(frozen=True)
class LayerCost:
    """A layer's bytes and seconds; the last layer is the loss, saved and run back once.

    Attributes:
        name: for output.
        value: bytes of the layer's result.
        gradient: bytes of its input's gradient.
        saved: bytes saved for its backward, besides its input and its result.
        saves_input, saves_result: whether its backward also needs its input, and its result.
        forward_s, keep_s, backward_s: seconds.
        forward_work, keep_work, backward_work: bytes of temporary arrays at the peak, besides the
            result, the saved arrays and the input's gradient.
        moves: whether all saved arrays can be moved to a store and back.
        elements: of its parameters on this rank.
        timed: whether its seconds were measured; otherwise they are proportional to its parameters
            and activations.
    """

    name: str
    value: int
    gradient: int
    saved: int
    saves_input: bool
    saves_result: bool
    forward_s: float
    keep_s: float
    backward_s: float
    moves: bool = False
    elements: int = 0
    timed: bool = True
    forward_work: int = 0
    keep_work: int = 0
    backward_work: int = 0

    @property
    def seconds(self) -> float:
        """The seconds of an ordinary pass, forward and backward."""
        return self.keep_s + self.backward_s

    def takes(self, act: Act) -> float:
        """Return the seconds of computing of an action on this layer."""
        return {
            Act.FORWARD: self.forward_s,
            Act.KEEP: self.keep_s,
            Act.BACKWARD: self.backward_s,
        }.get(act, 0.0)


LayerCosts = Sequence[LayerCost]


def saved_bytes(costs: LayerCosts, layers: range) -> int:
    """Return the bytes saved for the backward passes of consecutive layers."""
    values = {i for i in layers if costs[i].saves_result} | {
        i - 1 for i in layers if i and costs[i].saves_input
    }
    return sum(costs[i].saved for i in layers) + sum(costs[i].value for i in values)


def moved_bytes(costs: LayerCosts, layer: int) -> int:
    """Return the bytes swapped with a layer, all that it saves; 0 if it cannot move."""
    return saved_bytes(costs, range(layer, layer + 1)) * costs[layer].moves


@dataclass(frozen=True)
class PlanPrice:
    """A plan's bytes and seconds.

    Attributes:
        peak: the peak bytes.
        seconds: of all actions, with the waits between them.
        recomputed: the number of forward actions that compute a layer again.
        moved: the bytes sent to the store; as many come back.
        rows: one for each action, as JSON values, in seconds and bytes:

                ["K", 0, "=- ", begin, computes, end, peak, after, transfer]

            An action waits from `begin` to `computes`, and computes until `end`. Meanwhile the
            memory is at most `peak` bytes, and then `after`. A transfer is [begin, end] of `O` and
            `I`, else null. The text has a sign for each layer: the action's letter on its own
            layer, lower case if the layer is computed again; "=" on a kept layer, "." on an
            offloaded one, "-" on a layer whose input value waits. `D` is on the layer of its input
            value.
        layers: their names.
    """

    peak: int
    seconds: float
    recomputed: int
    moved: int
    rows: list[list[Any]]
    layers: tuple[str, ...]

    def draw(self) -> str:
        """Return the plan as text: rows of layers, columns of actions except `D`, bytes as bars.

        0 | F...f.K=B.
        1 | .F--..
        """
        shown = [(row[2], row[6]) for row in self.rows if row[0] != Act.DROP.value]
        width, lines, steps = max(map(len, self.layers)), list[str](), " ▁▂▃▄▅▆▇█"
        for start in range(0, len(shown), COLUMNS):
            part = shown[start : start + COLUMNS]
            rows = zip(*(signs for signs, _ in part), strict=True)
            lines += [
                f"{name:>{width}} |{''.join(row)}"
                for name, row in zip(self.layers, rows, strict=True)
            ]
            bars = "".join(steps[-(-peak * 8 // max(self.peak, 1))] for _, peak in part)
            lines += [f"{'bytes':>{width}} |{bars}", ""]
        return "\n".join(lines[:-1])

    def _repr_html_(self) -> str:  # a notebook draws it
        return preformat(self.draw())


class PlanState:
    """The memory in the middle of a plan, as numbers.

    Args:
        costs: of the layers.
        bandwidth: of the store, in bytes per second.

    Attributes:
        seconds: so far.
        leaving: layers with a transfer out in progress, in the order of their start.
        done: layer -> the end of its last transfer, in seconds.
        recomputed: the number of forward actions so far that computed a layer again.
    """

    def __init__(self, costs: LayerCosts, bandwidth: float = inf) -> None:
        self._costs, self._bandwidth = costs, bandwidth
        self._values, self._saved, self._grad = {0}, set[int](), len(costs)
        self._computed, self._offloaded, self._returned = set[int](), set[int](), set[int]()
        self._moves = [moved_bytes(costs, i) for i in range(len(costs))]
        self.done: dict[int, float] = {}
        self._idle_s = 0.0  # the end of the last transfer
        self.leaving: tuple[int, ...] = ()
        self.seconds, self.recomputed = 0.0, 0

    def copy(self) -> PlanState:
        """Return a copy that continues independently."""
        other = copy(self)
        vars(other).update({name: copy(item) for name, item in vars(self).items()})
        return other

    @property
    def bytes(self) -> int:
        """The present bytes."""
        costs, saved = self._costs, self._saved
        total = sum(costs[i].saved for i in saved) + sum(self._moves[i] for i in self._returned)
        inputs = {i for i in saved if costs[i].saves_input} | {
            i + 1 for i in saved if costs[i].saves_result
        }
        total += sum(costs[i - 1].value for i in self._values | inputs if 0 < i < len(costs))
        return total + (costs[self._grad].gradient if self._grad < len(costs) else 0)

    @property
    def is_complete(self) -> bool:
        """Whether each layer's backward pass is done, and the memory is empty."""
        return not (
            self._grad
            or self._saved
            or self._offloaded
            or self._returned
            or self._values - {0, len(self._costs)}
        )

    def has_inputs(self, action: Action) -> bool:
        """Return whether an action has its inputs."""
        i, act = action.layer, action.act
        if act is Act.BACKWARD:
            return self._grad == i + 1 and (
                i in self._returned or (i in self._saved and i not in self.leaving)
            )
        if act is Act.OUT:
            return i in self._saved and i not in self.leaving and self._costs[i].moves
        if act is Act.AWAY:
            return i in self.leaving
        return i in self._offloaded if act is Act.IN else i in self._values and i < len(self._costs)

    def signs(self, action: Action) -> str:
        """Return the sign of each layer during an action, see `PlanPrice`."""
        saved, i = self._saved | self._returned, action.layer
        row = [
            (
                "="
                if j in saved
                else "."
                if j in self._offloaded
                else "-"
                if j and j in self._values
                else " "
            )
            for j in range(len(self._costs))
        ]
        recomputed = i in self._computed and action.act in (Act.FORWARD, Act.KEEP)
        row[i] = action.act.value.lower() if recomputed else action.act.value
        return "".join(row)

    def do(self, action: Action) -> int:
        """Perform an action that has its inputs; return the peak bytes meanwhile."""
        i, act, before = action.layer, action.act, self.bytes
        cost, peak = self._costs[i], before
        if act is Act.DROP:
            self._values.discard(i)
        elif act is Act.OUT or act is Act.IN:
            self._idle_s = max(self._idle_s, self.seconds) + self._moves[i] / self._bandwidth
            self.done[i] = self._idle_s
            if act is Act.OUT:
                self.leaving += (i,)
            else:
                self._offloaded.discard(i)
                self._returned.add(i)
        elif act is Act.AWAY:
            self.seconds = max(self.seconds, self.done[i])
            self.leaving = tuple(item for item in self.leaving if item != i)
            self._saved.discard(i)
            self._offloaded.add(i)
        elif act is Act.BACKWARD:
            peak += cost.gradient + cost.backward_work
            if i in self._returned:
                self._returned.discard(i)
                self.seconds = max(self.seconds, self.done[i])
            self._saved.discard(i)
            self._grad = i
        else:
            self.recomputed += i in self._computed
            self._computed.add(i)
            self._values.add(i + 1)
            if act is Act.KEEP:
                self._saved.add(i)
            peak = self.bytes + (cost.keep_work if act is Act.KEEP else cost.forward_work)
        self.seconds += cost.takes(act)
        return max(peak, self.bytes)


def price_plan(costs: LayerCosts, plan: Iterable[Action], bandwidth: float = inf) -> PlanPrice:
    """Return a plan's price, after checking that it computes each gradient once, in order.

    Args:
        costs: of the layers.
        plan: of the layers.
        bandwidth: of the store, in bytes per second, for a plan with transfers.

    Raises:
        UsageError: naming the first action without its inputs, or the omissions at the end.

    Example:
        >>> from nnmpi.memory.plan import LayerCost, parse_plan, price_plan
        >>> cost = LayerCost("", 10, 10, 0, True, False, 1.0, 1.0, 2.0)
        >>> kept = price_plan([cost, cost], parse_plan("K0 K1 D1 B1 B0"))
        >>> again = price_plan([cost, cost], parse_plan("F0 K1 D1 B1 K0 D1 B0"))
        >>> kept.seconds, again.seconds
        (6.0, 7.0)
    """
    state, moved, rows = PlanState(costs, bandwidth), 0, list[list[Any]]()
    for action in plan:
        if not state.has_inputs(action):
            raise UsageError(
                f"action {action} of the plan, number {len(rows)}, lacks what it needs; check the"
                " plan"
            )
        i, act, begin_s, signs = action.layer, action.act, state.seconds, state.signs(action)
        peak, end_s, nbytes = state.do(action), state.seconds, moved_bytes(costs, i)
        moved += nbytes * (act is Act.OUT)
        transfer = (
            [state.done[i] - nbytes / bandwidth, state.done[i]] if act in (Act.OUT, Act.IN) else []
        )
        begin_s, computes_s, end_s, *transfer = (
            round(item, DIGITS) for item in (begin_s, end_s - costs[i].takes(act), end_s, *transfer)
        )
        rows.append(
            [act.value, i, signs, begin_s, computes_s, end_s, peak, state.bytes, transfer or None]
        )
    if not state.is_complete:
        raise UsageError(
            "the plan is incomplete; each layer needs one backward pass, and each value must be"
            " dropped"
        )
    names = tuple(cost.name for cost in costs)
    return PlanPrice(
        max(row[6] for row in rows), state.seconds, state.recomputed, moved, rows, names
    )


def parse_plan(text: str) -> Plan:
    """Return the plan of a text such as "F0 K1 B1 D1 K0 B0".

    Raises:
        UsageError: for a word that is not an action.
    """
    letters = [act.value for act in Act]
    actions = []
    for word in text.split():
        if word[0] not in letters or not word[1:].isdecimal():
            raise UsageError(
                f"{word!r} is not an action; write {', '.join(letters)} and the number of a layer,"
                " such as F0"
            )
        actions.append(Action(Act(word[0]), int(word[1:])))
    return tuple(actions)


def keep_all(costs: LayerCosts) -> Plan:
    """Return the plan of an ordinary pass, which saves all that a backward needs."""
    plan: list[Action] = []
    for i in range(len(costs)):
        plan += [Action(Act.KEEP, i), *[Action(Act.DROP, i)] * (i > 0)]
    return (*plan, *(Action(Act.BACKWARD, i) for i in reversed(range(len(costs)))))
