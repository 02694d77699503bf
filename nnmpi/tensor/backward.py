"""The backward pass: a walk back along the tape, the operations of a graph in execution order.

    forward    x --> [Mul] --> [Add] --> [Sum] --> loss  the tape is the list Mul, Add, Sum
    backward   x <-- [Mul] <-- [Add] <-- [Sum] <-- 1     the walk goes from its end to its beginning

Execution order is a topological order, so nothing recurses: a graph of a million operations is a
loop over a list. A graph's first operation starts its tape. When two graphs meet, the shorter tape
is appended to the longer one, and a backward pass first sorts such a tape by the operations'
numbers. Neither graph depends on the other, so any order would give right gradients on one rank;
but ranks that begin the same collectives in the forward pass must begin them in one order in the
backward pass, too. Only tensors reference the tape, operations never do. So there are no reference
cycles, and a graph is freed with its last tensor.
"""

from collections.abc import Iterable
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np

from nnmpi.backend.array import Array, is_array, is_result, namespace
from nnmpi.backend.program.record import bare
from nnmpi.backend.recording import Recorder, active, call
from nnmpi.base.errors import DtypeError, GraphError, ShapeError
from nnmpi.tensor.function import (
    Function,
    Grads,
    Tape,
    Variable,
    kind_of,
    unbroadcast,
)
from nnmpi.tensor.turns import Turn, find_turns, graph_alone, inside_pass


class Deferred:
    """The deferred half of a backward pass: parameter gradients, computed by `finish`.

        backward    B | all gradients      halves    I | the inputs'     ...     W | the parameters'

    A parameter is a leaf with a buffer in flat storage (`Variable.buffer`). The first half computes
    the gradients that lead to other leaves. For each operation on a parameter it stores the
    operation and its output gradient for the second half. Pipelines fill their bubbles with second
    halves (Qi et al., "Zero bubble pipeline parallelism", 2024).
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[Function, Array, tuple[bool, ...]]] = []

    def backward(self, node: Function, grad: Array, recorder: Recorder | None) -> Grads:
        """Return the gradients of an operation's activations now, and defer its parameters'."""
        assert node.edges is not None  # used-up operations are taken off the tape
        later = tuple(isinstance(edge, Variable) and edge.buffer is not None for edge in node.edges)
        if not any(later):
            return _backward(node, grad, recorder)
        self._waiting.append((node, grad, later))
        return _part_of_backward(node, grad, tuple(not item for item in later), recorder)

    def finish(self) -> None:
        """Compute the deferred gradients in the order of an ordinary pass; free their inputs.

        It is within the pass: graphs within an operation meet no other ranks for others'.
        """
        waiting, self._waiting = self._waiting, []
        recorder = active()
        with graph_alone():
            for node, grad, selected in waiting:
                _pass_on(node, _part_of_backward(node, grad, selected, recorder))
                _release(node, recorder)

    def holds(self, node: Function) -> bool:
        """Whether an operation was deferred just now: only the newest entry is compared."""
        return bool(self._waiting) and self._waiting[-1][0] is node


def _backward(node: Function, grad: Array, recorder: Recorder | None) -> Grads:
    """Return an operation's gradients; record what computes them."""
    if recorder is None:
        return node.backward(grad)
    if not node.is_whole(recorder):
        return node.recorded_backward(recorder, grad)
    buffers = [getattr(edge, "buffer", None) for edge in node.edges or ()]
    again = partial(_again, node, node.edges, node.needs)
    return recorder.whole(again, (bare(grad),), buffers)


def _release(node: Function, recorder: Recorder | None) -> None:
    """Drop what the operation's backward needed."""
    node.release()
    if recorder is not None and node.is_whole(recorder):
        # each replay's forward saves arrays anew, so each replay releases them
        recorder.record(node.release)


def _part_of_backward(
    node: Function, grad: Array, selected: tuple[bool, ...], recorder: Recorder | None
) -> Grads:
    """Return an operation's gradients for some of its inputs, None for the others."""
    needs = node.needs
    now = tuple(need and select for need, select in zip(needs, selected, strict=True))
    if True not in now:
        return (None,) * len(now)
    node.needs = now
    try:
        grads = _backward(node, grad, recorder)
    finally:
        node.needs = needs
    _check_tuple(node, grads)
    return tuple(item if need else None for item, need in zip(grads, now, strict=True))


def walk_back(root: Variable, seed: Array, retain: bool, deferred: Deferred | None = None) -> None:
    """Compute the gradients of all leaves below `root`, given the gradient `seed` of its values.

    Each operation's gradient is freed after its use. The arrays that the operation saved are freed
    too, unless `retain`.

    Args:
        deferred: collects the parameters' gradients, which its `finish` computes.

    Raises:
        GraphError: when an earlier pass used up the graph of `root` or a part of it; when a saved
            parameter was written after the forward pass; for `deferred` with gradient hooks or
            `retain`.
        ShapeError: when an operation returns a gradient of another shape than its input's.
        DtypeError: when an operation returns a gradient of another dtype, or no array.
    """
    walk = _BackwardWalk(root, seed, retain, deferred)
    token = inside_pass.set(True)
    try:
        walk.run()
    except BaseException:
        # A later pass over the same graph must not add to this pass's partial sums.
        for node in walk.nodes:
            node.grad = None
        raise
    finally:
        inside_pass.reset(token)
        if not retain:
            walk.free()


class _BackwardWalk:
    """A backward pass over the operations of a graph; the arguments are those of `walk_back`.

    Attributes:
        nodes: the operations in order, the root's among them.
    """

    def __init__(
        self, root: Variable, seed: Array, retain: bool, deferred: Deferred | None
    ) -> None:
        self._recorder, self._retain, self._deferred = active(), retain, deferred
        plain = np if type(seed) is np.ndarray else namespace(seed)
        self._xp: Any = plain if self._recorder is None else self._recorder.module(plain)
        start = self._start = root.node
        if start is None or root.tape is None:  # a leaf: no operations to walk back along
            root.add_grad(self._wrapped(seed))
            if root.hook is not None:
                call(root.hook, (root,))
            self._tape, self.nodes, last = Tape(), list[Function](), -1
        else:
            self._tape = root.tape.find()
            self.nodes = nodes = self._tape.ordered()
            # The loss is nearly always the newest operation. Newer operations belong to other
            # results and are skipped.
            last = len(nodes) - 1 if nodes and nodes[-1] is start else _position(nodes, start)
            start.grad = self._wrapped(seed)
        if deferred is not None and (self._tape.hooked or retain):
            raise GraphError(
                "a backward pass in halves supports neither hooks nor retain_graph; run a full one"
            )
        # a pass within another one, as of a layer that is recomputed, leaves the others' operations
        inside, self._newer = inside_pass.get(), self.nodes[last + 1 :]
        self._stops = find_turns(start, self.nodes if inside else None)
        self._turns = (
            [] if inside else [*dict.fromkeys(turn.turns for turn in self._stops.values())]
        )
        if self._stops:
            self.nodes = _with(self.nodes[: last + 1], self._stops)
            last = len(self.nodes) - 1
        self._last = last  # where it goes on
        self._roots = {*self._stops} if start is None else {start, *self._stops}
        self._finals = (
            _final_uses(self.nodes[: last + 1], self._roots) if self._tape.hooked else None
        )

    def _wrapped(self, seed: Array) -> Array:
        return seed if self._recorder is None else self._recorder.wrap(seed)

    def run(self) -> None:
        """Go through the operations; again from one that only other ranks' losses use."""
        while self._last >= 0 or self._turns:
            missed = self._go_down()
            self._last = -1
            while missed is None and self._turns:
                missed, _ = Turn(self._turns[0]).agree(False)
                if missed is None:
                    self._turns.pop(0).forget(self._start)
            if missed is not None:
                self._go_back_to(missed)

    def _go_down(self) -> Function | None:
        """Compute gradients from the present place on, the newest operation first.

        Returns:
            an operation that only other ranks' losses use, at which the pass stops; None at its
            end.
        """
        nodes, stops, deferred = self.nodes, self._stops, self._deferred
        recorder, finals = self._recorder, self._finals
        for i in range(self._last, -1, -1):
            node = nodes[i]
            if stops and node in stops:
                missed, is_used = stops[node].agree(node.grad is not None)
                if missed is not None:
                    return missed
                del stops[node]
                if is_used and node.grad is None:
                    node.own_grad(self._xp)  # zeros
            grad = node.grad
            # None: the root does not depend on this operation, or only through inputs that need
            # no gradient
            if grad is not None:
                node.grad = None
                if node.version is not None and node.version.count != node.version_read:
                    _check_unchanged(node)
                if deferred is not None:
                    grads = deferred.backward(node, grad, recorder)
                else:
                    grads = _backward(node, grad, recorder)
                grad = None  # freed before _pass_on allocates
                _pass_on(node, grads)
                if not (self._retain or (deferred is not None and deferred.holds(node))):
                    _release(node, recorder)
            if finals is not None:
                # outside the `if` above: the hook is due even if no gradient reached this node
                for leaf in finals.get(node, ()):
                    if leaf.hook is not None and leaf._grad is not None:
                        call(leaf.hook, (leaf,))
        return None

    def _go_back_to(self, missed: Function) -> None:
        """Let the pass go on at an operation, with a gradient of zeros.

        Raises:
            GraphError: if a hook has been called for its inputs already.
        """
        if self._finals is not None and missed not in self._roots:
            raise GraphError(
                "another rank's loss uses the result of a collective that this rank called after"
                " its loss; compute the loss last on every rank"
            )
        self.nodes = _with(self.nodes, [missed])
        self._last = self.nodes.index(missed)
        self._stops.pop(missed, None)
        missed.own_grad(self._xp)

    def free(self) -> None:
        """Forget the operations, but the newer ones of other results."""
        # deferred operations still have edges, but no later pass may run them
        unused = self._tape.nodes if self._deferred is None else self._newer
        self._tape.nodes = [node for node in unused if node.edges is not None]


def _with(nodes: list[Function], others: Iterable[Function]) -> list[Function]:
    """Return the operations and others with all that these depend on, in order."""
    found, pending = set(nodes), list(others)
    for node in pending:
        if node not in found and node.edges is not None:
            found.add(node)
            pending += [edge for edge in node.edges if isinstance(edge, Function)]
    return nodes if len(found) == len(nodes) else sorted(found, key=attrgetter("number"))


def _check_unchanged(node: Function) -> None:
    """Refuse an operation's backward if its saved arrays share memory with rewritten parameters."""
    assert node.version is not None
    for saved, array in product(filter(is_array, bare(node.saved)), node.version.arrays):
        if type(array) is type(saved) and namespace(saved).may_share_memory(array, saved):
            raise GraphError(
                f"parameters that {type(node).__name__} used were changed before its backward,"
                " which needs their old values; call backward before the update, or compute the"
                " loss again"
            )


def _again(
    node: Function,
    edges: tuple[Function | Variable | None, ...] | None,
    needs: tuple[bool, ...],
    grad: Array,
) -> Any:
    """Run an operation's backward in a replay, with the edges and needs that were recorded.

    Backward reads the edges to find the buffers that it may write to (`Function.into`). A pass over
    a graph of its own meets no other ranks for others' operations, as within the recorded pass.
    """
    node.edges, before, node.needs = edges, node.needs, needs
    try:
        with graph_alone():
            return node.backward(grad)
    finally:
        node.needs = before


def leaves_of(root: Variable) -> set[Variable]:
    """Return the leaves that a backward pass from `root` would give gradients to."""
    if root.tape is None or root.node is None:
        return set()
    nodes = root.tape.find().ordered()
    finals = _final_uses(nodes[: _position(nodes, root.node) + 1], {root.node})
    return {leaf for leaves in finals.values() for leaf in leaves}


def _position(nodes: list[Function], node: Function) -> int:
    for i in range(len(nodes) - 1, -1, -1):
        if nodes[i] is node:
            return i
    raise _used_up()


def _final_uses(nodes: list[Function], roots: set[Function]) -> dict[Function, list[Variable]]:
    """Return, per operation, the leaves whose gradient is final after its backward.

    Walking back, the last operation to add to a leaf's gradient is the first
    one that used the leaf. Operations that no root does depend on run no backward, so they do
    not count.
    """
    reached = set(roots)
    first_use: dict[Variable, Function] = {}
    for node in reversed(nodes):
        if node not in reached or node.edges is None:
            continue
        for edge in node.edges:
            if edge is None:
                continue
            if isinstance(edge, Variable):
                first_use[edge] = node  # an older operation replaces a younger one
            else:
                reached.add(edge)
    finals: dict[Function, list[Variable]] = {}
    for leaf, node in first_use.items():
        finals.setdefault(node, []).append(leaf)
    return finals


def _pass_on(node: Function, grads: Grads) -> None:
    """Add what an operation's backward returned to its inputs' gradients."""
    edges = node.edges
    assert edges is not None  # used-up operations are taken off the tape
    if type(grads) is not tuple:
        _check_tuple(node, grads)
    if len(grads) != len(edges):
        raise ShapeError(
            f"{type(node).__name__}.backward returned {len(grads)} gradients for {len(edges)}"
            " inputs; return one per input, None where there is none"
        )
    name, recorder = type(node).__name__, active()
    for edge, grad in zip(edges, grads, strict=True):
        if edge is None or grad is None:
            continue
        if isinstance(edge, Variable):
            data = edge._data
            shape, dtype = data.shape, data.dtype
        elif edge.edges is None:
            raise _used_up()
        else:
            shape, dtype = edge.shape, edge.dtype
        if recorder is not None:
            grad = recorder.wrap(grad)
        if not isinstance(grad, np.ndarray) and not is_result(grad):
            raise DtypeError(
                f"{name}.backward returned {kind_of(grad)} for an input; return its array"
            )
        if node.broadcasts and grad.shape != shape:
            grad = unbroadcast(grad, shape)
        if grad.shape != shape:
            raise ShapeError(
                f"{name}.backward returned a gradient of shape {grad.shape} for an input of shape"
                f" {shape}"
            )
        if grad.dtype != dtype:
            raise DtypeError(
                f"{name}.backward returned a gradient of {grad.dtype} for an input of {dtype}"
            )
        edge.add_grad(grad)


def _check_tuple(node: Function, grads: Any) -> None:
    """Refuse a backward's result that is no tuple: a bare array would be read as one per row."""
    if not isinstance(grads, tuple | list):
        raise GraphError(
            f"{type(node).__name__}.backward returned {kind_of(grads)}; return a tuple with one"
            " gradient per input"
        )


def _used_up() -> GraphError:
    return GraphError(
        "this graph was used up by an earlier backward pass; call backward(retain_graph=True)"
        " there, or compute the loss again"
    )
