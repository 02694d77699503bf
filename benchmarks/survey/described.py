"""Models and machines described by numbers, to plan for hardware out of reach: layers without
modules or values.

A model is a chain of layers, each with its parameters, the operations of a forward, and the bytes
that it saves for the backward and passes on. The activations of a transformer's block follow
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from nnmpi.lab.planner.price import Division, Profile, SegmentCosts, ShareCost, StepCost
from nnmpi.memory.fitting import StageCost
from nnmpi.memory.plan import LayerCost, keep_all, price_plan, saved_bytes
from nnmpi.parallel.zero.storage import StateBytes
from nnmpi.schedule.partition import partition
from nnmpi.schedule.schedule import stages_of

BACKWARD = 2  # operations over those of a forward: a product for the weights, one for the input


@dataclass(frozen=True)
class DescribedLayer:
    """One layer of a described model.

    Attributes:
        parameters: how many.
        flops: of a forward of one row.
        value_bytes: of one row's output, the message over a cut after the layer.
        kept_bytes: of one row, saved for the backward.
    """

    parameters: float
    flops: float
    value_bytes: float
    kept_bytes: float


def describe_layers(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    """Return the chain of a described model.

    Args:
        model: "kind", and its sizes: see `systems.json`.
        itemsize: bytes of an activation.
    """
    return {
        "transformer": _transformer,
        "vgg": _vgg,
        "unet": _unet,
        "even": _even,
        "dense": _dense,
    }[model["kind"]](model, itemsize)


def _transformer(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    hidden, sequence, heads = model["hidden"], model["sequence"], model["heads"]
    wide, inner = model.get("feedforward", 4 * hidden), model.get("attention", hidden)
    weights = hidden * (4 * inner + 2 * wide)
    value = sequence * hidden * itemsize
    # Korthikanti et al., bytes per element of the input for activations of 2 bytes: 11 of attention
    # and 19 of the MLP at their usual widths, 4 of the norms.
    narrow = sequence * (4 * hidden + 11 * inner + 19 * wide / 4) + 5 * heads * sequence**2
    block = DescribedLayer(
        weights, 2 * sequence * weights + 4 * sequence**2 * inner, value, narrow * itemsize / 2
    )
    table = model["vocabulary"] * hidden
    first = DescribedLayer(table + sequence * hidden, 0.0, value, value)
    last = DescribedLayer(0.0, 2 * sequence * table, 0.0, sequence * model["vocabulary"] * itemsize)
    return [first, *[block] * model["layers"], last]


def _convolution(
    pixels: int, incoming: int, outgoing: int, itemsize: int, times: int
) -> DescribedLayer:
    """Return a 3 x 3 convolution; the operations after it save its result `times` times."""
    weights, value = 9 * incoming * outgoing, pixels**2 * outgoing * itemsize
    return DescribedLayer(weights, 2 * pixels**2 * weights, value, times * value)


def _vgg(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    result, pixels, incoming = [], model["pixels"], 3
    for width, count in model["widths"]:
        for _ in range(count):
            result.append(_convolution(pixels, incoming, width, itemsize, 2))
            incoming = width
        pixels //= 2
    incoming *= pixels**2
    for width in model["dense"]:
        result.append(
            DescribedLayer(
                incoming * width, 2 * incoming * width, width * itemsize, 2 * width * itemsize
            )
        )
        incoming = width
    return result


def _unet(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    """Return torchgpipe's U-Net: stacks of convolutions, down and up; each with dropout, norm and
    ReLU.
    """
    depth, base, pixels = model["depth"], model["channels"], model["pixels"]
    down = [
        (3 if i == 0 else base << (i - 1), base << i, base << i, pixels >> i) for i in range(depth)
    ]
    middle = [(base << (depth - 1), base << depth, base << (depth - 1), pixels >> depth)]
    up = [
        (base << (i + 1), (base << i) // 2, (base << i) // 2, pixels >> i)
        for i in reversed(range(depth))
    ]
    result = []
    for incoming, inside, outgoing, side in [*down, *middle, *up]:
        widths = [incoming, *[inside] * (model["convolutions"] - 1), outgoing]
        result += [
            _convolution(side, a, b, itemsize, 4) for a, b in zip(widths, widths[1:], strict=False)
        ]
    return result


def _even(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    count = model["layers"]
    item = DescribedLayer(
        model["parameters"] / count,
        model["flops"] / count,
        model["value_bytes"],
        model["kept_bytes"] / count,
    )
    return [item] * count


def _dense(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    width = model["width"]
    return [DescribedLayer(width**2, 2 * width**2, width * itemsize, 2 * width * itemsize)] * model[
        "layers"
    ]


class DescribedShapes:
    """The ranks' shares of a described model; see `price.ModelShapes`.

    Args:
        layers: of the chain.
        bytes_each: bytes of each parameter: "parameters", "gradients" and "state".
        split: number of layers of each stage, used for this number of stages; other numbers of
            stages are cut by the layers' operations.
    """

    backend = SimpleNamespace(is_device=True)

    def __init__(
        self,
        layers: Sequence[DescribedLayer],
        bytes_each: Mapping[str, int],
        split: Sequence[int] = (),
    ) -> None:
        self.layers, self.bytes_each, self._split = layers, bytes_each, tuple(split)

    def states(
        self, division: Division, zero: int, replicas: int, once: bool = False
    ) -> tuple[StateBytes, ...]:
        """Return the bytes of each of a pipeline's ranks."""
        tp, pp, virtual, home = division
        cuts = self.cuts(pp, virtual)
        return tuple(
            self._held(
                [self.layers[i] for s in stages_of(r, pp, len(cuts), home) for i in cuts[s]],
                tp,
                zero,
                replicas,
            )
            for r in range(pp)
        )

    def _held(
        self, layers: Sequence[DescribedLayer], tp: int, zero: int, replicas: int
    ) -> StateBytes:
        sizes = [layer.parameters / tp for layer in layers]
        full, unit = sum(sizes), max(sizes)
        parameters, gradients, state = (
            self.bytes_each[kind] for kind in ("parameters", "gradients", "state")
        )
        shares = [replicas if zero >= stage else 1 for stage in (3, 2, 1)]
        count = max(1, round(full / unit)) if unit else 1
        return StateBytes(
            round(full * parameters / shares[0]),
            round(full * gradients / shares[1]),
            round(full * state / shares[2]),
            round(unit * {0: 0, 1: 0, 2: gradients, 3: gradients + 2 * parameters}[zero]),
            (round(full * parameters / count),) * count,
        )

    def tied_bytes(self, division: Division) -> int:
        """Return 0: no stages share parameters."""
        return 0

    def cuts(self, pp: int, virtual: int) -> tuple[range, ...]:
        """Return the layers of each stage."""
        if pp * virtual != len(self._split):
            return partition([layer.flops for layer in self.layers], pp * virtual)
        ends = [sum(self._split[: i + 1]) for i in range(pp * virtual)]
        return tuple(range(end - size, end) for end, size in zip(ends, self._split, strict=True))


def profile_of(
    layers: Sequence[DescribedLayer],
    flops_s: float,
    tp: int,
    rows: int,
    update_s: float,
    facts: Mapping[str, Any],
) -> Profile:
    """Return the profile that `profile.measure` would give on a device of a nominal speed.

    Args:
        layers: of the chain.
        flops_s: sustained operations per second of the device.
        tp: ranks over which layers are sharded.
        rows: of the profile.
        update_s: of the update of all parameters by one rank.
        facts: "recompute": each layer saves its input alone, and recomputes its forward;
            "partitioned": ranks of a tensor-parallel group shard these inputs, as in ZeRO-R.
    """
    recompute = facts["recompute"]
    times = 1 + BACKWARD + recompute
    inner = [item for item in layers if item.parameters and item.value_bytes]

    def layer(number: int, element: DescribedLayer) -> LayerCost:
        forward_s = rows * element.flops / flops_s
        saved = element.value_bytes if recompute else element.kept_bytes
        value = round(rows * element.value_bytes)
        rest = False, False, forward_s, forward_s, (times - 1) * forward_s
        # the saved bytes include the input
        return LayerCost(
            str(number), value, 0, round(rows * saved), *rest, elements=round(element.parameters)
        )

    # Two all-reduces forward, two backward, and two more if the forward is recomputed: Megatron-LM,
    # figure 4.
    sums = (("all-reduce", "tp", inner[-1].value_bytes, 2 * (2 + recompute) * (len(inner) - 1)),)

    shares = {(1, 1): ShareCost(), (tp, 1): ShareCost(1 / tp, sums)}
    forward_s = rows * sum(item.flops for item in layers) / flops_s
    steps = {rows: StepCost(times * forward_s, update_s, (times + 1) * forward_s)}
    return Profile(steps, shares, tuple(layer(i, item) for i, item in enumerate(layers)), rows)


def _saved(layers: Sequence[DescribedLayer], facts: Mapping[str, Any], tp: int) -> float:
    """Return the bytes that a row saves on each of `tp` ranks."""
    if not facts["recompute"]:
        return sum(item.kept_bytes for item in layers) / tp
    inputs = sum(item.value_bytes for item in layers) / (tp if facts.get("partitioned") else 1)
    return inputs + max(item.kept_bytes for item in layers) / tp


def count_costs(
    shapes: DescribedShapes,
    profile: Profile,
    facts: Mapping[str, Any],
    ranks: int,
    options: Mapping[str, Any],
) -> SegmentCosts:
    """Return a layout's segments and their bytes, as `planner.profile.count_costs` counts them.

    Args:
        shapes, profile: of the described model.
        facts: as for `profile_of`.
        ranks, options: of the layout.
    """
    layers, stages = shapes.layers, options["pp"]
    rows = options["batch_size"] // (options.get("microbatches", 1) * options["dp"])
    whole = _saved(layers, facts, 1)
    part = rows * _saved(layers, facts, options["tp"]) / whole
    if stages == 1:
        if options.get("activation_memory"):
            whole = sum(item.value_bytes for item in layers)
            whole += 2 * max(item.kept_bytes for item in layers)
        return (1,), {0: StageCost(inner=part * whole)}
    part, costs = part / profile.layer_rows, dict[int, StageCost]()
    for number, cut in enumerate(shapes.cuts(stages, 1)):
        stage = profile.layers[cut.start : cut.stop]
        inputs = profile.layers[cut.start - 1].value if cut.start else 0
        outputs = stage[-1].value
        inner = saved_bytes(stage, range(len(stage))) - outputs * stage[-1].saves_result
        work = part * (price_plan(stage, keep_all(stage)).peak - inner)
        saves = (part * nbytes for nbytes in (inputs, inner, outputs))
        costs[number] = StageCost(*saves, work=work, finishing=work)
    return (1,) * stages, costs
