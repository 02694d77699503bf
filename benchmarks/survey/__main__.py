"""The models of ten published systems on their devices: nnmpi's prices beside the published
figures.

systems.json    paper, model, devices, the system's strategy, the published figure and its source
described       the model's layers, and a profile from the devices' nominal speeds

Each model is priced in its system's layout. The assumptions are in the file, and are printed.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout

from benchmarks.harness.command import Parser, run  # noqa: E402
from benchmarks.survey.described import (  # noqa: E402
    DescribedLayer,
    DescribedShapes,
    count_costs,
    describe_layers,
    profile_of,
)
from nnmpi.base.command import options_of  # noqa: E402
from nnmpi.base.errors import UsageError  # noqa: E402
from nnmpi.base.units import format_bytes, format_seconds  # noqa: E402
from nnmpi.comm.machine import Curve, Link, Machine, blocks  # noqa: E402
from nnmpi.lab.plan import SHORT  # noqa: E402
from nnmpi.lab.planner.network import PlannedNetwork  # noqa: E402
from nnmpi.lab.planner.price import Candidate, LayoutPrice, Memory, Pricer  # noqa: E402
from nnmpi.memory.ledger import (  # noqa: E402
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    STATE,
)
from nnmpi.train.config import check  # noqa: E402

WIDTH = 100
BYTES_PER_GBIT = 1e9 / 8
CLOSE = 1.3  # predicted over published; a larger factor needs an explanation


@dataclass(frozen=True)
class SurveyedSystem:
    """One system of `systems.json`."""

    facts: Mapping[str, Any]

    @cached_property
    def layers(self) -> list[DescribedLayer]:
        """The chain of the model's layers."""
        return describe_layers(self.facts["model"], self.facts["bytes"]["parameters"])

    @property
    def parameters(self) -> float:
        """Number of the model's parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def limit_bytes(self) -> int:
        """The memory of a device."""
        return int(self.facts["device"]["memory_gb"] * 2**30)

    @property
    def flops_s(self) -> float:
        """Sustained operations per second of a device."""
        return (
            float(self.facts["device"]["tflops"]) * 1e12 * float(self.facts["device"]["efficiency"])
        )

    @cached_property
    def network(self) -> PlannedNetwork:
        """The network between the devices."""
        text, latency_s = self.facts, self.facts["latency_us"] / 1e6
        inside, across = (
            Link.line(latency_s, 1 / (text[k] * BYTES_PER_GBIT))
            for k in ("inside_gbit", "across_gbit")
        )
        several = text["per_node"] < text["devices"]
        nodes = blocks(text["devices"], text["per_node"]) if several else None
        # an addition reads two numbers and writes one
        add = Curve.line(0.0, 3 / (text["device"]["memory_gbyte_s"] * 1e9))
        return PlannedNetwork(
            text["system"],
            Machine(inside, across if several else None, nodes, add),
            text["devices"],
        )

    def read(self, layout: Mapping[str, Any]) -> Candidate:
        """Return a layout of the file, whose options are read as those of a command are.

        Raises:
            UsageError: for an unknown option, with the nearest names, and for a wrong value.
        """
        options = {item.name: item for item in options_of(Candidate)}
        return Candidate(**check(layout, f"systems.json, {self.facts['system']}", options))

    def pricer(self, tp: int = 1, split: Sequence[int] = ()) -> Pricer:
        """Return a pricer of the chain's layouts, with layers sharded over `tp` ranks."""
        text = self.facts
        update_s = (
            sum(text["bytes"].values()) * self.parameters / (text["device"]["memory_gbyte_s"] * 1e9)
        )
        profile = profile_of(self.layers, self.flops_s, tp, text["batch"], update_s, text)
        sample = text["model"].get("sample") or [
            text["model"].get("sequence") or text["model"].get("pixels", 1) ** 2
        ]
        shapes: Any = DescribedShapes(self.layers, text["bytes"], split)
        count = partial(count_costs, shapes, profile, text)
        return Pricer(text["batch"], 4 * prod(sample), profile, self.network, shapes, count)

    def price(self) -> tuple[LayoutPrice, Memory, int]:
        """Return the price of the system's strategy, the bytes of the fullest device, and those of
        all devices.
        """
        local = dict(self.facts["own"])
        kind, split = local.pop("kind"), local.pop("split", ())
        del local["words"]
        if kind == "replicated":
            return self._replicated(local["replicas"], local["layers"])
        item = self.read(local)
        pricer = self.pricer(item.tp, split)
        price, ranks = pricer.price(item), pricer.memory_of_ranks(item)
        memory = max(ranks, key=lambda kinds: sum(kinds.values()))
        total = sum(sum(kinds.values()) for kinds in ranks) * (item.ranks // len(ranks))
        if kind == "host":
            price, memory = self._from_host(price, memory)
            total = sum(memory.values()) * item.ranks
        return price, memory, total

    def _from_host(self, price: LayoutPrice, memory: Memory) -> tuple[LayoutPrice, Memory]:
        """Return a price with weights, gradients and state in the host's memory, and two blocks on
        the device.

        Weights are loaded for the forward and for the backward, gradients are stored; both overlap
        with other blocks' computation.
        """
        item = self.facts["bytes"]
        moved_s = self.parameters * (2 * item["parameters"] + item["gradients"])
        moved_s /= self.facts["host_gbit"] * BYTES_PER_GBIT
        block = 2 * max(layer.parameters for layer in self.layers)
        held = {
            **memory,
            STATE: 0,
            **{kind: round(block * item[kind]) for kind in (PARAMETERS, GRADIENTS)},
        }
        exposed_s = price.exposed_s + max(0.0, moved_s - price.computing_s)
        return replace(price, exposed_s=exposed_s, update_s=0.0), held

    def _replicated(self, replicas: int, layers: int) -> tuple[LayoutPrice, Memory, int]:
        """Return the price of a full pipeline, whose first stage has replicas and whose second has
        one rank.

        A step is one minibatch of every replica: the slower of the replicas with their all-reduce,
        and of the second stage.
        """
        rows = self.facts["batch"] // self.facts["devices"]
        times, memories = [], []
        for part, count, local in (
            (self.layers[:layers], replicas, rows),
            (self.layers[layers:], 1, rows * replicas),
        ):
            busy_s = local * 3 * sum(layer.flops for layer in part) / self.flops_s
            gradients = sum(layer.parameters for layer in part) * self.facts["bytes"]["gradients"]
            sums_s = self.network.exchange("all-reduce", [range(count)], round(gradients))
            times.append((busy_s, sums_s))
            # of weights and activations: also those of the minibatch in flight
            versions = 2 if count > 1 else 1
            memories.append(
                {
                    kind: round(
                        sum(layer.parameters for layer in part)
                        * size
                        * (versions if kind == PARAMETERS else 1)
                    )
                    for kind, size in zip(
                        (PARAMETERS, GRADIENTS, STATE), self.facts["bytes"].values(), strict=True
                    )
                }
                | {
                    ACTIVATIONS: round(sum(layer.kept_bytes for layer in part) * rows * versions),
                    COMMUNICATION: 0,
                }
            )
        slow = max(range(2), key=lambda i: sum(times[i]))
        busy_s, sums_s = times[slow]
        most = max(memories, key=lambda kinds: sum(kinds.values()))
        total = replicas * sum(memories[0].values()) + sum(memories[1].values())
        return LayoutPrice(busy_s, 0.0, sums_s, 0.0), most, total


@dataclass(frozen=True)
class SurveyRow:
    """The result of one system.

    Attributes:
        system: which.
        price: of the system's strategy; a step is the pass of one batch.
        memory: of the fullest device, by kind.
        total_bytes: of all devices.
        figure: the prediction of the published figure; None without one.
    """

    system: SurveyedSystem
    price: LayoutPrice
    memory: Memory
    total_bytes: int
    figure: float | None = None

    @property
    def factor(self) -> float | None:
        """Predicted over published."""
        published = self.system.facts["published"]
        return (
            None if published is None or self.figure is None else self.figure / published["value"]
        )

    @property
    def rows(self) -> int:
        """Samples of a step."""
        local = self.system.facts["own"]
        batch: int = self.system.facts["batch"]
        return (
            batch * local["replicas"] // self.system.facts["devices"]
            if local["kind"] == "replicated"
            else batch
        )


def systems() -> Iterator[SurveyedSystem]:
    """Yield the systems of the file."""
    text = Path(__file__).with_name("systems.json").read_text(encoding="utf-8")
    yield from map(SurveyedSystem, json.loads(text))


def survey() -> Iterator[SurveyRow]:
    """Yield the rows of the table, one system after the other."""
    for system in systems():
        row = SurveyRow(system, *system.price())
        yield replace(row, figure=figure_of(row))


def figure_of(row: SurveyRow) -> float | None:
    """Return the prediction of the published figure, or None."""
    text, step_s = row.system.facts, row.price.seconds
    if text["published"] is None:
        return None
    if text["published"]["what"] == "tflops_per_device":
        flops = (3 + text["recompute"]) * sum(layer.flops for layer in row.system.layers) * row.rows
        return float(flops / step_s / text["devices"] / 1e12)
    if text["published"]["what"] == "speedup":
        few = SurveyedSystem(
            {**text, "devices": text["baseline"]["pp"], "per_node": text["baseline"]["pp"]}
        )
        return few.pricer().price(few.read(text["baseline"])).seconds / step_s
    figures: dict[str, float] = {
        "step_s": step_s,
        "samples_per_s": row.rows / step_s,
        "total_bytes": float(row.total_bytes),
    }
    return figures[text["published"]["what"]]


def describe_survey(row: SurveyRow) -> Iterator[str]:
    """Yield the lines of one system."""
    message, local, device = row.system.facts, row.price, row.system.facts["device"]
    held = sum(row.memory.values())
    fits = "fits" if held <= row.system.limit_bytes else "DOES NOT FIT"
    yield (
        f"{message['system']}: {message['model']['name']}, {_count(row.system.parameters)}"
        " parameters, on " + f"{message['devices']} x {device['name']}"
    )
    lines = [
        ("paper", message["paper"]),
        (
            "device",
            (
                f"{device['tflops']:g} TFLOP/s x {device['efficiency']:g} ({device['why']}),"
                f" {device['memory_gb']} GiB"
            ),
        ),
        (
            "network",
            (
                f"{message['per_node']} on a node, {message['inside_gbit']} Gbit/s inside,"
                f" {message['across_gbit']} between"
            ),
        ),
        ("own", message["own"]["words"]),
        (
            "",
            (
                f"{fits}: {format_bytes(held)} of {format_bytes(row.system.limit_bytes)}:"
                f" {_kinds(row.memory)}"
            ),
        ),
        (
            "",
            (
                f"step of {row.rows} samples {format_seconds(local.seconds, 3)},"
                f" {row.rows / local.seconds:.4g} samples/s"
            ),
        ),
        ("published", _published(row)),
    ]
    if row.factor is not None and not 1 / CLOSE <= row.factor <= CLOSE:
        lines.append(("why", message.get("why", "not explained")))
    lines.append(("assumed", message["assumed"]))
    for name, text in lines:
        first, *rest = wrap(text, WIDTH - 12)
        yield f"  {name:<10}{first}"
        yield from (f"{'':>12}{line}" for line in rest)


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _kinds(memory: Memory) -> str:
    held = [(name, memory.get(kind, 0)) for name, kind in zip(SHORT, KINDS, strict=True)]
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held if nbytes)


def _published(row: SurveyRow) -> str:
    published = row.system.facts["published"]
    if published is None or row.figure is None or row.factor is None:
        return f"no figure: {row.system.facts['no_figure']}"
    name = published["what"].replace("_per_", "/").replace("_", " ")
    return (
        f"{name} {published['value']:.4g}, predicted {row.figure:.4g} ({row.factor:.2f} of it);"
        f" {published['source']}"
    )


def survey_to_json(row: SurveyRow) -> dict[str, Any]:
    """Return one system's row as JSON values, with its facts from the file."""
    return {
        **row.system.facts,
        "parameters": row.system.parameters,
        "fits": sum(row.memory.values()) <= row.system.limit_bytes,
        "memory": dict(row.memory),
        "step_s": row.price.seconds,
        "samples_per_s": row.rows / row.price.seconds,
        "total_bytes": row.total_bytes,
        "predicted": row.figure,
        "factor": row.factor,
    }


def main() -> None:
    """Print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="all numbers and assumptions")
    text = "fail if a layout does not fit its devices, or a figure is far off without a reason"
    parser.add_argument("--check", action="store_true", help=text)
    given = parser.parse_args()
    rows = list(survey())
    if given.check:
        for row in rows:
            fits = sum(row.memory.values()) <= row.system.limit_bytes
            far = row.factor is not None and not 1 / CLOSE <= row.factor <= CLOSE
            if not fits or (far and "why" not in row.system.facts):
                raise UsageError(
                    f"{row.system.facts['system']} is wrong: see its lines without --check"
                )
        return
    print(json.dumps([survey_to_json(row) for row in rows], indent=1) if given.json else "", end="")
    if not given.json:
        print("\n".join(line for row in rows for line in (*describe_survey(row), "")))


if __name__ == "__main__":
    sys.exit(run("python benchmarks/survey", main))
