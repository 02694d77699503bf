"""Models and machines that are told in numbers, for planning what nobody has here: layers without
modules or values.

A model is a chain of layers, each with its parameters, the operations of a forward, and the bytes
that it keeps and hands on. Activations of a transformer's block are those of Korthikanti et al.,
Reducing Activation Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnmpi.memory.plan import LayerCost
from nnmpi.parallel.zero.storage import StateBytes
from nnmpi.schedule.partition import partition
from nnmpi.schedule.schedule import Home, around, stages_of
from nnmpi.train.planner.price import Profile, ShareCost, StepCost

BACKWARD = 2  # times the operations of a forward: one product for the weights, one for what came in


@dataclass(frozen=True)
class DescribedLayer:
    """One layer of a model that is told in numbers.

    Attributes:
        parameters: how many.
        flops: of a forward of one row.
        value_bytes: of one row, that go over a cut behind it.
        kept_bytes: of one row, that wait for the backward.
    """

    parameters: float
    flops: float
    value_bytes: float
    kept_bytes: float


def describe_layers(model: Mapping[str, Any], itemsize: int) -> list[DescribedLayer]:
    """Return the chain of a described model.

    Args:
        model: "kind", and what that takes: see `systems.json`.
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
    # Bytes for 2 of an activation: 11 of attention and 19 of the wide layers at their usual widths,
    # 4 of the norms.
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
    """Return a convolution of 3 x 3, whose result stands `times` times: before and after what
    follows it.
    """
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
    """What ranks hold of a described model; see `price.ModelShapes`.

    Args:
        layers: of the chain.
        bytes_each: bytes of each parameter: "parameters", "gradients" and "state".
        split: how many layers each stage has, for as many stages; others are cut by the layers'
            operations.
    """

    def __init__(
        self,
        layers: Sequence[DescribedLayer],
        bytes_each: Mapping[str, int],
        split: Sequence[int] = (),
    ) -> None:
        self.layers, self.bytes_each, self._split = layers, bytes_each, tuple(split)

    def states(
        self,
        tp: int,
        pp: int,
        virtual: int,
        zero: int,
        replicas: int,
        once: bool,
        home: Home = around,
    ) -> tuple[StateBytes, ...]:
        """Return what each of a pipeline's ranks holds; that of all layers without one."""
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
        full, unit = (
            sum(layer.parameters for layer in layers) / tp,
            max(layer.parameters for layer in layers) / tp,
        )
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

    def tied_bytes(self, tp: int, pp: int, virtual: int, home: Home = around) -> int:
        """Return that no stages share parameters."""
        return 0

    def cuts(self, pp: int, virtual: int) -> tuple[range, ...]:
        """Return where the chain is cut for so many stages."""
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
    told: Mapping[str, Any],
) -> Profile:
    """Return what `profile.measure` would find on a device of a stated speed.

    Args:
        layers: of the chain.
        flops_s: operations per second that the device sustains.
        tp: ranks that share the layers.
        rows: to tell it for.
        update_s: of the update of all parameters by one rank.
        told: "recompute", whether each layer keeps only what came in, and computes its forward
            again; "partitioned", whether ranks that share layers share these inputs out, too, as
            ZeRO-R does.
    """
    recompute = told["recompute"]
    times, inner = (
        1 + BACKWARD + recompute,
        [item for item in layers if item.parameters and item.value_bytes],
    )

    def layer(number: int, element: DescribedLayer) -> LayerCost:
        forward_s = rows * element.flops / flops_s
        saved, value = (
            (element.value_bytes if recompute else element.kept_bytes),
            round(rows * element.value_bytes),
        )
        rest = False, False, forward_s, forward_s, (times - 1) * forward_s
        # what comes in is in what it keeps
        return LayerCost(
            str(number), value, 0, round(rows * saved), *rest, elements=round(element.parameters)
        )

    # Two sums forward, two backward and, where the forward is computed again, two more:
    # Megatron-LM, figure 4.
    sums = (("all-reduce", inner[-1].value_bytes, 2 * (2 + recompute) * (len(inner) - 1)),)

    def saved(shared: int) -> float:
        if not recompute:
            return sum(item.kept_bytes for item in layers) / shared
        inputs = sum(item.value_bytes for item in layers) / (
            shared if told.get("partitioned") else 1
        )
        return inputs + max(item.kept_bytes for item in layers) / shared

    shares = {
        (1, 1): ShareCost(),
        (tp, 1): ShareCost(1 / tp, saved(tp) / saved(1), sums if tp > 1 else ()),
    }
    seconds = rows * times * sum(item.flops for item in layers) / flops_s
    steps = {rows: StepCost(seconds, update_s, rows * saved(1))}
    return Profile(steps, shares, tuple(layer(i, item) for i, item in enumerate(layers)), rows)
