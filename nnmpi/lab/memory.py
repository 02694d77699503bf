"""`nnmpi memory`: plan recomputation and offloading without training.

nnmpi memory plan --layers 8 --budget 50%
nnmpi memory plan --model gpt --batch 4 --budget 16MiB
nnmpi memory plan --layers 8 --budget 50% --bandwidth 8MiB
nnmpi memory plan --layers 8 --budget 50% --html swap.html --svg swap.svg
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import numpy as np

from nnmpi.base.command import (
    MOST,
    announce,
    check_numbers,
    read_command,
    require,
    say,
    split_command,
)
from nnmpi.base.errors import UsageError
from nnmpi.base.files import OutputFile
from nnmpi.base.picture import Bar, Picture, check_figure
from nnmpi.base.units import Bytes, format_bytes, format_seconds, parse_bytes
from nnmpi.lab.pages.page import write_page
from nnmpi.memory.optimal import OptimalPlans, swapping_plan
from nnmpi.memory.plan import DIGITS, LayerCost, LayerCosts, Plan, PlanPrice, keep_all, price_plan
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.nn.lora import ALL_LINEAR, adapt
from nnmpi.nn.mode import training
from nnmpi.ops.loss import cross_entropy
from nnmpi.train.build import build_model
from nnmpi.train.config import TRANSFORMERS, Config, ModelConfig
from nnmpi.train.inputs import SampleConfig

PROGRAM = "nnmpi memory"
# By model, if not MNIST's: the shape of a sample, and the classes; a gpt's context and tokens.
SAMPLES = {"resnet": ((32, 32, 3), 10), "gpt": ((128,), 256), "llama": ((128,), 256)}
SIGNS = {
    "F": "forward",
    "K": "forward",
    "B": "backward",
    "=": "kept",
    "-": "waits",
    "O": "moves",
    "I": "moves",
    "D": "freed",
    "A": "freed",
}
LEGEND = """F forward, K forward and kept (small: again), B backward, D its input is dropped
O leaves memory, A has left, I returns"""
MOST_LAYERS = 64  # that a page has room for
POINTS = 11  # budgets from the least to an ordinary pass's


@dataclass(frozen=True)
class MemoryPlanConfig:
    """The chain, the budget and the pictures."""

    layers: int = 8
    """Number of equal layers."""
    model: Literal["cnn", "gpt", "llama", "mlp", "resnet"] | None = None
    """Measure this model's layers instead."""
    batch: int = 8
    """Batch size, for --model."""
    lora: int | None = None
    """For --model: train adapters of this rank to all linear layers, and no other weights."""
    budget: str = "50%"
    """Bytes such as 16MiB, or from 0% (least) to 100% (ordinary)."""
    bandwidth: Bytes | None = None
    """Allow offloading, at this many bytes per second."""
    html: OutputFile | None = None
    """File for an interactive page."""
    svg: OutputFile | None = None
    """File for a picture for slides: .svg, .png, .pdf."""
    replace: bool = False
    """Replace files that are there."""

    def __post_init__(self) -> None:
        check_numbers(self, "layers batch bandwidth lora", 1, MOST)
        require(
            self.model is None or self.layers == MemoryPlanConfig.layers,
            "--layers is for equal layers, and --model has its own; leave one of them out",
        )
        require(
            self.model is not None or self.batch == MemoryPlanConfig.batch,
            "--batch is for --model; leave it out",
        )
        require(self.model is not None or self.lora is None, "--lora is for --model; leave it out")


def main(words: Sequence[str]) -> str:
    """Return the picture and the figures of a plan by options.

    Raises:
        UsageError: for wrong options, a budget below the least, or a file that cannot be written.
    """
    about = __doc__ or ""
    _, rest = split_command(
        words, PROGRAM, about, {"plan": "Find the fastest plan within a budget."}
    )
    (options,) = read_command("", f"{PROGRAM} plan", about, (MemoryPlanConfig,), rest)
    check_figure(options.svg)
    if options.model is None:
        announce(f"a plan of {options.layers} layers", 9e-6 * options.layers**3)
    costs = _equal(options.layers) if options.model is None else _measured(options)
    bandwidth: int | None = options.bandwidth
    plans = OptimalPlans(costs)
    budget = _budget(options.budget, plans)
    plan = plans.plan(budget) if bandwidth is None else swapping_plan(plans, budget, bandwidth)
    price, ordinary = price_plan(costs, plan, bandwidth or inf), price_plan(costs, keep_all(costs))
    more = []
    if bandwidth:
        more.append(f"moved     {format_bytes(price.moved)}, at {format_bytes(bandwidth)}/s")
    if options.svg is not None:
        what = (
            "equal layers" if options.model is None else f"{options.model}, batch {options.batch}"
        )
        picture(price, what).save(options.svg)
    if options.html is not None:
        write_page(
            options.html,
            "plan",
            f"memory plans of {len(costs)} layers",
            compare(plans, budget, bandwidth),
        )
        more.append(f"open {options.html} in a browser")
    return "\n".join(
        [
            price.draw(),
            "",
            f"{LEGEND}, . elsewhere\n= kept, - input waits",
            "",
            " ".join(map(str, plan)),
            "",
            f"least     {format_bytes(plans.least)} ({plans.least} bytes)",
            (
                f"ordinary  {format_bytes(plans.all)} ({plans.all} bytes),"
                f" {format_seconds(ordinary.seconds)}"
            ),
            f"budget    {format_bytes(budget)} ({budget} bytes)",
            (
                f"this plan {format_bytes(price.peak)} ({price.peak} bytes),"
                f" {format_seconds(price.seconds)}, {price.seconds / ordinary.seconds:.3f} of the"
                f" ordinary time; layers recomputed: {price.recomputed}"
            ),
            *more,
        ]
    )


def _equal(count: int) -> list[LayerCost]:
    return [
        LayerCost(str(i), 1 << 20, 1 << 20, 4 << 20, True, False, 1.0, 1.0, 2.0, True)
        for i in range(count)
    ]


def _measured(options: MemoryPlanConfig) -> LayerCosts:
    """Return the measured costs of a model's layers."""
    name, batch = str(options.model), options.batch
    shape, classes = SAMPLES.get(name, ((28, 28, 1), 10))
    config = ModelConfig(name, layers=8 if name in TRANSFORMERS else None)
    model = build_model(config, shape, classes)
    if options.lora is not None:
        adapt(model, options.lora, targets=ALL_LINEAR)
    model.initialize(seed=0)
    x, y = SampleConfig(shape, classes).draw(batch, Config(config)).pair(np.arange(batch))
    forward = RecomputedModel(model, None)
    with training():
        forward(x, lambda logits: cross_entropy(logits, y.clip(0)))
    return [replace(cost, moves=True) for cost in forward.plans.costs]


def picture(price: PlanPrice, what: str) -> Picture:
    """Return the picture of each layer's memory, action by action; `what` names the layers."""
    spans = [
        Bar(f"layer {name}" if name.isdigit() else name, at, at + 1, kind, sign.strip("=-."))
        for i, name in enumerate(price.layers)
        for at, row in enumerate(price.rows)
        for sign in row[2][i].strip()
        if (kind := SIGNS.get(sign.upper()))
    ]
    return Picture(
        f"A plan of {len(price.layers)} layers ({what}): at most {format_bytes(price.peak)}",
        f"actions\n{LEGEND}",
        spans,
    )


def compare(plans: OptimalPlans, budget: int, bandwidth: float | None = None) -> dict[str, Any]:
    """Return a page's data, the plans of a chain under several budgets, as JSON values.

    Args:
        plans: of the chain.
        budget: the page's first choice.
        bandwidth: of the store, in bytes per second; None for no offloading.

    Raises:
        UsageError: for a chain too long for a page, or a budget below the least.
    """
    costs = plans.costs
    if len(costs) > MOST_LAYERS:
        raise UsageError(
            f"a page draws up to {MOST_LAYERS} layers, not {len(costs)}; use the text output"
        )

    def shown(plan: Plan) -> dict[str, Any]:
        price = price_plan(costs, plan, bandwidth or inf)
        return {
            "actions": price.rows,
            "peak": price.peak,
            "seconds": round(price.seconds, DIGITS),
            "again": price.recomputed,
            "moved": price.moved,
        }

    kinds: dict[str, Callable[[int], Plan]] = {
        "recomputed": plans.plan,
        "all kept": lambda limit: keep_all(costs),
    }
    if bandwidth is not None:
        kinds = {"offloaded, too": lambda limit: swapping_plan(plans, limit, bandwidth), **kinds}
    budgets = sorted({*plans.budgets(POINTS), budget})
    return {
        "layers": [cost.name for cost in costs],
        "budgets": budgets,
        "budget": budget,
        "plans": {name: [shown(make(limit)) for limit in budgets] for name, make in kinds.items()},
    }


def _budget(text: str, plans: OptimalPlans) -> int:
    """Return a budget in bytes: from bytes, or per cent from the least to an ordinary pass's."""
    if text.endswith("%") and text[:-1].isdecimal() and int(text[:-1]) <= 100:
        return plans.least + (plans.all - plans.least) * int(text[:-1]) // 100
    return parse_bytes(text)


if __name__ == "__main__":
    sys.exit(say(main))
