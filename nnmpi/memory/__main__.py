"""`python -m nnmpi.memory`: look at a plan without training: what is kept, what is computed again, what it takes.

python -m nnmpi.memory plan --layers 8 --budget 50%
python -m nnmpi.memory plan --model gpt --batch 4 --budget 30% --save costs.json
python -m nnmpi.memory plan --costs costs.json --budget 16MiB
python -m nnmpi.memory plan --layers 8 --budget 50% --bandwidth 8MiB
python -m nnmpi.memory plan --model gpt --budget 30% --offload /tmp
python -m nnmpi.memory plan --layers 8 --budget 50% --html swap.html
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import numpy as np

from nnmpi.command import Parser, positive_count, say
from nnmpi.errors import UsageError
from nnmpi.memory.animation import compare
from nnmpi.memory.optimal import OptimalPlans, swapping_plan
from nnmpi.memory.plan import LayerCost, costs_from_json, costs_to_json, draw_plan, keep_all, price_plan
from nnmpi.memory.recompute import RecomputedModel
from nnmpi.memory.store import Store
from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.mlp import mlp
from nnmpi.models.resnet import resnet
from nnmpi.nn.mode import training
from nnmpi.nn.module import Module
from nnmpi.ops.loss import cross_entropy
from nnmpi.pages.page import write_page
from nnmpi.units import format_bytes, format_seconds, parse_bytes

# Each with the shape of a sample; None for so many tokens.
MODELS: dict[str, tuple[Callable[[], Module], tuple[int, ...] | None]] = {
    "mlp": (lambda: mlp((28, 28, 1), 10), (28, 28, 1)),
    "cnn": (lambda: cnn((28, 28, 1), 10), (28, 28, 1)),
    "resnet": (lambda: resnet((32, 32, 3), 10), (32, 32, 3)),
    "gpt": (lambda: gpt(256, 128, 128, 8, 4), None),
}
TOKENS, CONTEXT = 256, 128


def main(words: Sequence[str]) -> str:
    """Return the picture and the figures of the plan that the words ask for.

    Raises:
        UsageError: for words that make none, a budget below the least, or a file that cannot be read or written.
    """
    given = _parser().parse_args(words)
    store = None if given.offload is None else Store(given.offload)
    costs, bandwidth = _costs(given, store)
    plans = OptimalPlans(costs)
    budget = _budget(given.budget, plans)
    plan = plans.plan(budget) if bandwidth is None else swapping_plan(plans, budget, bandwidth)
    price, ordinary = price_plan(costs, plan, bandwidth or inf), price_plan(costs, keep_all(costs))
    if given.save is not None:
        try:
            given.save.write_text(json.dumps(costs_to_json(costs), indent=1))
        except OSError as error:
            raise UsageError(f"{given.save} cannot be written ({error.strerror}); give another file") from None
    files = []
    if given.html is not None:
        write_page(given.html, "plan", f"memory plans of {len(costs)} layers", compare(plans, budget, bandwidth))
        files.append(f"{given.html} runs it in a browser")
    return "\n".join(
        [
            draw_plan(costs, plan),
            "",
            " ".join(map(str, plan)),
            "",
            f"least     {format_bytes(plans.least)} ({plans.least} bytes)",
            f"ordinary  {format_bytes(plans.all)} ({plans.all} bytes), {format_seconds(ordinary.seconds)}",
            f"this plan {format_bytes(price.peak)} ({price.peak} bytes), {format_seconds(price.seconds)}, "
            f"{price.seconds / ordinary.seconds:.3f} of the ordinary time; layers gone through again: {price.again}",
            *([f"moved     {format_bytes(price.moved)}, at {format_bytes(int(bandwidth))}/s"] if bandwidth else []),
            *files,
        ]
    )


def _costs(given: argparse.Namespace, store: Store | None) -> tuple[Sequence[LayerCost], float | None]:
    """Return the costs that the options name (from a file, of a model, or of equal layers), and bytes per second."""
    bandwidth = None if given.bandwidth is None else float(parse_bytes(given.bandwidth))
    if given.costs is not None:
        try:
            return costs_from_json(json.loads(given.costs.read_text())), bandwidth
        except (OSError, ValueError) as error:
            raise UsageError(f"--costs {given.costs} cannot be read: {error}") from None
    if given.model is None:
        layer = LayerCost("", 1 << 20, 1 << 20, 4 << 20, True, False, 1.0, 1.0, 2.0, True)
        return [LayerCost(**{**vars(layer), "name": str(i)}) for i in range(given.layers)], bandwidth
    make, shape = MODELS[given.model]
    model, draw = make().initialize(seed=0), np.random.default_rng(0)
    if shape is None:
        x = y = draw.integers(0, TOKENS, (given.batch, CONTEXT))
    else:
        x, y = draw.normal(size=(given.batch, *shape)).astype("float32"), draw.integers(0, 10, given.batch)
    forward = RecomputedModel(model, None, store=store)
    with training():
        forward(x, lambda logits: cross_entropy(logits, y))
    assert forward.plans is not None
    forward.release()
    return forward.plans.costs, bandwidth if store is None or bandwidth is not None else forward.bandwidth


def _budget(text: str, plans: OptimalPlans) -> int:
    """Return the bytes that a text means: bytes, or a part of the way from the least to an ordinary pass."""
    if text.endswith("%") and text[:-1].isdecimal() and int(text[:-1]) <= 100:
        return plans.least + (plans.all - plans.least) * int(text[:-1]) // 100
    return parse_bytes(text)


def _parser() -> Parser:
    parser = Parser("python -m nnmpi.memory", description=__doc__)
    plan = parser.add_subparsers(dest="command", required=True).add_parser("plan", help="the quickest plan in a budget")
    chain = plan.add_mutually_exclusive_group()
    chain.add_argument("--layers", type=positive_count, default=8, help="so many equal layers (8)")
    chain.add_argument("--model", choices=sorted(MODELS), help="this model's, which is measured")
    chain.add_argument("--costs", type=Path, metavar="FILE", help="those that --save has written")
    plan.add_argument("--batch", type=positive_count, default=8, help="samples of a batch, for --model (8)")
    plan.add_argument("--budget", default="50%", help="bytes such as 16MiB, or from 0%% (least) to 100%% (ordinary)")
    plan.add_argument("--offload", metavar="DIR", help="activations may go to a file there: its bandwidth is measured")
    plan.add_argument("--bandwidth", metavar="BYTES", help="or: so many bytes per second go out and come in")
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the layers' costs there")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write a page that runs it, for a browser")
    return parser


if __name__ == "__main__":
    sys.exit(say(main))
