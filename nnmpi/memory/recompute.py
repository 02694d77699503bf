"""Runs a model by a plan: the bits of an ordinary pass, within a budget of bytes.

    forward = RecomputedModel(model, 64 * 2**20)
    with nn.training(seed=0, step=step):
        loss = forward(x, lambda logits: ops.cross_entropy(logits, y))
    loss.backward()

Each layer is one operation on the tape, with its parameters as inputs, so strategies get gradients
as usual. The plan decides what the operations do:

    tape     [layer 0]  [layer 1]  [loss]   | backward |   [loss]   [layer 1]      [layer 0]
    plan     F0        F1 D1     K2                      B2 D2    F0 K1 B1 D1   K0 B0
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from functools import partial
from math import inf
from typing import Any, Literal

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend, numpy_backend
from nnmpi.backend.precision import precision, use_precision
from nnmpi.backend.recording import refuse_inside
from nnmpi.base.errors import GraphError, UsageError, counted
from nnmpi.base.settled import Settled
from nnmpi.base.units import format_bytes
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.memory.layers import (
    LayerGraph,
    Measured,
    Value,
    find_layers,
    local_tensor,
    measure,
    recomputing,
    run_saving,
    run_without_graph,
    without_hooks,
)
from nnmpi.memory.optimal import OptimalPlans, swapping_plan
from nnmpi.memory.plan import (
    Act,
    LayerCost,
    Plan,
    PlanPrice,
    keep_all,
    moved_bytes,
    price_plan,
)
from nnmpi.memory.store import SavedArrays, Store, arrays_of, measure_bandwidth
from nnmpi.nn.chain import ChainLayer, KnownLayers, ModelPart, open_chain, without_stash
from nnmpi.nn.mode import current
from nnmpi.nn.module import Module, run_with_kept_buffers
from nnmpi.tensor.function import Function, Grads, grad_enabled
from nnmpi.tensor.tensor import Tensor
from nnmpi.tensor.traits import NotExported, Traits

LastLayers = Callable[[Tensor], Tensor]
BETWEEN = (Act.DROP, Act.OUT, Act.AWAY, Act.IN)  # actions without computation


class PlannedPass:
    """One pass through a chain by a plan: the arrays between its actions.

    Args:
        layers: of the model, without the loss; the caller does the loss's actions.
        plan: for the layers and the loss.
        value: the first layer's input.
        backend: of the layers.
        store: the destination of saved arrays, if the plan offloads some.
    """

    def __init__(
        self,
        layers: Sequence[Module],
        plan: Plan,
        value: Value,
        backend: Backend,
        store: Store | None,
    ) -> None:
        self._layers, self._plan, self._next = layers, plan, 0
        self._calls = [partial(run_with_kept_buffers, layer, {}, layer) for layer in layers]
        self._input, self._backend, self._store = value.array, backend, store
        self._values = {0: value}
        self._graphs = dict[int, LayerGraph]()
        self._swapped = dict[int, SavedArrays]()
        self._needed, self._waiting = [False] * len(layers), set(range(len(layers)))
        self._mode, self._precision = current(), precision()

    def forward(self, layer: int, needed: bool) -> Value:
        """Do the plan's actions for a layer's first forward; return its result.

        Args:
            layer: called in the layers' order.
            needed: whether its input needs a gradient.
        """
        self._needed[layer] = needed
        self._do_next()
        value = self._values[layer + 1]
        if layer + 1 == len(self._layers):
            del self._values[layer + 1]  # the loss holds it
        self._do_between()
        return value

    def backward(self, layer: int, grad: Array) -> Array | None:
        """Run the plan up to a layer's backward pass; return the gradient of its input.

        Raises:
            GraphError: when this layer's backward pass is done already.
        """
        if layer not in self._waiting:
            raise GraphError(
                "this pass was used up by an earlier backward pass; compute the loss again"
            )
        self._waiting.discard(layer)
        while (action := self._plan[self._next]).act is not Act.BACKWARD or action.layer != layer:
            with use_precision(self._precision), recomputing(self._mode):
                self._do_next()
        self._next += 1
        if layer in self._swapped:
            self._swapped.pop(layer).wait()
        # What comes between this pass and the next layer's is done then: here the caller still
        # holds `grad`, beside which no array may be fetched.
        return self._graphs.pop(layer).backward(grad)

    def _do_next(self) -> None:
        """Do the next action, which is not a layer's backward."""
        action = self._plan[self._next]
        self._next += 1
        layer = action.layer
        if action.act is Act.DROP:
            self._values.pop(layer, None)
        elif action.act is Act.OUT:
            assert self._store is not None
            weights = arrays_of(item for _, item in self._layers[layer].named_weights())
            outside = [self._input, *weights]
            self._swapped[layer] = SavedArrays(
                self._graphs[layer].operations, outside, self._backend
            )
            self._swapped[layer].send(self._store)
        elif action.act is Act.AWAY:
            self._swapped[layer].release()
        elif action.act is Act.IN:
            self._swapped[layer].fetch()
        elif layer == len(self._layers):
            return  # the caller does it
        elif action.act is Act.FORWARD:
            self._values[layer + 1] = run_without_graph(self._calls[layer], self._values[layer])
        else:
            with without_hooks(self._layers[layer].parameters()):
                # hooks run for the tape's own operation, not for this inner graph
                result = run_saving(self._calls[layer], self._values[layer], self._needed[layer])
            self._values[layer + 1], self._graphs[layer] = result

    def _do_between(self) -> None:
        while self._next < len(self._plan) and self._plan[self._next].act in BETWEEN:
            self._do_next()


class PlannedLayer(Function):
    """A layer on the tape: its forward and backward do the plan's actions up to its own."""

    __slots__ = ("cuts", "layer", "run")

    traits = Traits(
        onnx=NotExported("export the model itself"), tested_in="tests/memory/test_recompute.py"
    )

    is_call = True

    def __init__(self, run: PlannedPass, layer: int) -> None:
        self.run, self.layer = run, layer

    def forward(self, *inputs: Any) -> Array:
        value = self.run.forward(self.layer, self.needs[0])
        self.cuts = value.cuts
        return value.array

    def backward(self, grad: Array) -> Grads:
        # The layer's own graph has added to the parameters' gradients.
        return (self.run.backward(self.layer, grad), *[None] * (len(self.needs) - 1))


class RecomputedModel(Settled, read_once="model budget store"):
    """A model whose passes stay within a memory budget by recomputation.

    The budget counts all arrays that a pass makes, from its input to the parameters' gradients:
    saved arrays, values and gradients between layers, and temporary arrays of operations. Each
    layer's costs are measured with the first input, with each larger one, and with the first pass
    that adds to gradients.

    Args:
        model: initialized; use a `Sequential`, as only that can be cut.
        budget: in bytes; "least" for the least possible; None for an ordinary pass's bytes.
        backend: of the model; NumPy by default.
        group: the ranks that compute the same passes, and must choose the same plan; None if they
            need not agree.
        store: the destination of saved arrays, used if that is faster than recomputation (see
            `memory.store`); None for none.

    Attributes:
        plans: of the last measurement, without swapping; none before the first pass.
        plan: the current plan.
        bandwidth: of the store, measured, in bytes per second.

    Example:
        >>> model = models.mlp((64,), 3, hidden=[64] * 4).initialize(seed=0)
        >>> forward = nnmpi.memory.RecomputedModel(model, budget="least")
        >>> x, y = np.ones((256, 64), "float32"), np.zeros(256, int)
        >>> loss = forward(x, lambda logits: ops.cross_entropy(logits, y))
        >>> loss.backward()
        >>> forward.plans.least < forward.plans.all, forward.price.recomputed > 0
        (True, True)
    """

    plans: OptimalPlans

    def __init__(
        self,
        model: Module,
        budget: int | Literal["least"] | None,
        backend: Backend | None = None,
        group: Group | None = None,
        store: Store | None = None,
    ) -> None:
        self.model, self.budget, self.store = model, budget, store
        self._backend, self._group = backend or numpy_backend(), group
        self._layers: tuple[Module, ...] = ()
        self._known: KnownLayers | None = None
        self._size, self._adds = 0, False
        self.plan: Plan = ()
        self.bandwidth = inf

    def follow(self) -> None:
        """Refuse a model that is not as it was measured; see `nn.module.TreeCheck`."""
        if self._known is not None:
            self._known.check("make a new RecomputedModel, or a new Worker")

    @property
    def price(self) -> PlanPrice:
        """The plan's bytes and seconds."""
        return price_plan(self.plans.costs, self.plan, self.bandwidth)

    def describe(self) -> str:
        """Return the plan's bytes and time, beside an ordinary pass's, in a sentence."""
        price, ordinary = self.price, price_plan(self.plans.costs, keep_all(self.plans.costs))
        out = sum(action.act is Act.OUT for action in self.plan)
        moved = ""
        if out:
            rate = format_bytes(int(self.bandwidth))
            moved = f"{out} go out and come back ({format_bytes(price.moved)} at {rate}/s), "
        return (
            f"activations take {format_bytes(price.peak)} at most, {format_bytes(ordinary.peak)} if"
            f" all were kept; {counted(price.recomputed, 'recomputation')} in"
            f" {counted(len(self._layers), 'layer')}, {moved}predicted"
            f" {price.seconds / ordinary.seconds:.2f} of the time"
        )

    def __call__(
        self,
        x: Any,
        head: LastLayers | None = None,
        size: int | None = None,
        adds: bool | None = None,
    ) -> Tensor:
        """Return head(model(x)), whose backward pass is the plan's.

        Args:
            x: the input.
            head: computes the loss from the model's result. A loss computed after the call is not
                in the budget.
            size: measure again if this is larger than before; by default the elements of x. All
                ranks give the same.
            adds: whether passes add to gradients of others; by default whether there are any now.
                All ranks give the same.

        Raises:
            UsageError: for too small a budget, and in a compiled step.
        """
        x = x if isinstance(x, Tensor) else Tensor(self._backend.asarray(x))
        head = _identity if head is None else head
        storage = vars(self.model).get("storage")  # none without parameters, maybe
        if storage is not None:
            storage.check_tree()
        if not grad_enabled() or current().observe is not None:
            return head(self.model(x))
        refuse_inside("recomputation")
        x, cuts = local_tensor(x)
        size = x.data.size if size is None else size
        if adds is None:
            adds = any(parameter._grad is not None for parameter in self.model.parameters())
        if size > self._size or adds > self._adds:
            self._size, self._adds = size, adds or self._adds
            self.measure(Value(x.data, cuts), x.requires_grad, head)
        run = PlannedPass(self._layers, self.plan, Value(x.data, cuts), self._backend, self.store)
        for i, layer in enumerate(self._layers):
            node = PlannedLayer(run, i)
            x = node(x, *layer.parameters())
        return head(Value(x.data, node.cuts).marked(x))

    def measure(self, value: Value, needed: bool, head: LastLayers) -> None:
        """Measure the layers with this value, and choose the plan. Collective with a group, or if
        the layers communicate.

        Raises:
            UsageError: for too small a budget, or a model that a strategy runs.
        """
        group, budget = self._group, self.budget
        together = nullcontext if group is None else partial(agreed, group)
        chain = open_chain(self.model)
        if "forward" in vars(self.model):
            raise UsageError(
                "ZeRO 2 or 3 has replaced this model's forward, so its layers cannot be recomputed"
                " one by one; give a Worker the budget, Layout(zero=3, activation_memory=...), or"
                " leave out ZeRO"
            )
        runs = find_layers(self.model, value)
        if group is not None:
            runs = [
                range(*bounds)
                for bounds in group.gather([(run.start, run.stop) for run in runs])[0]
            ]
            # from rank 0: a rank without samples cannot tell its layers apart
        self._layers = tuple(ModelPart(self.model, chain[run.start : run.stop]) for run in runs)
        self._known = KnownLayers(self.model, chain)
        if "storage" in vars(self.model):
            self.model.storage.check.tell(self)
        measured = [
            Measured(
                _name(chain[run.start]),
                partial(without_stash, layer),
                layer.parameters(),
                [item for _, item in layer.named_base()],
            )
            for run, layer in zip(runs, self._layers, strict=True)
        ]
        measured.append(
            Measured("result" if head is _identity else "loss", partial(without_stash, head), ())
        )
        with together():
            x = value.marked(Tensor(value.array, requires_grad=needed))
            costs = measure(measured, x, self._backend, self.store, self._adds)
            if self.store is not None:
                most = max(moved_bytes(costs, i) for i in range(len(costs)))
                self.bandwidth = measure_bandwidth(self.store, self._backend, most)
        if group is not None:
            costs = _most_costs(group.gather([list(astuple(cost)) for cost in costs]))
            self.bandwidth = min(group.gather(self.bandwidth))
        vars(self)["plans"] = OptimalPlans(costs)
        with together():
            self.plan = self.find_plan(
                self.plans.all
                if budget is None
                else self.plans.least
                if budget == "least"
                else budget
            )
            if self.store is not None:
                self.store.reserve(self.price.moved)

    def find_plan(self, budget: int) -> Plan:
        """Return the fastest plan for a budget; with a store, the fastest one found.

        Raises:
            UsageError: for too small a budget.
        """
        if self.store is None:
            return self.plans.plan(budget)
        return swapping_plan(self.plans, budget, self.bandwidth)

    def release(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


def _most_costs(measured: Sequence[Any]) -> list[LayerCost]:
    """Return each layer's largest costs over the ranks; `moves` only if true on all ranks."""
    result = []
    for rows in zip(*measured, strict=True):
        most = LayerCost(*map(max, zip(*rows, strict=True)))
        result.append(replace(most, moves=all(LayerCost(*row).moves for row in rows)))
    return result


def _identity(x: Tensor) -> Tensor:
    return x


def _name(layer: ChainLayer) -> str:
    kind = "" if layer.module is None else f" {type(layer.module).__name__}"
    return (layer.name or "model") + kind
