"""What a search found, as text at most 100 columns wide, and as JSON values."""

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from nnmpi.memory.ledger import KINDS
from nnmpi.planner.search import LayoutSearch, PlannedLayout
from nnmpi.units import format_bytes, format_seconds

WIDTH = 100
TIMES = ("computing", "bubble", "messages", "update")
SHORT = ("weights", "gradients", "state", "activations", "exchange", "batches")  # the ledger's kinds, as headings
REASONS = 8  # of those that most layouts fall out for


def describe(found: LayoutSearch) -> Iterator[str]:
    """Yield the lines that tell what a search found."""
    looked_at = "1 layout" if found.looked_at == 1 else f"{found.looked_at} layouts"
    yield f"{looked_at}, {found.priced} of them simulated in {found.seconds:.2f} s; no other can be better"
    yield ""
    yield f"{'':>3}{'step':>10}" + "".join(f"{name:>10}" for name in TIMES) + "  layout"
    for number, one in enumerate(found.best, 1):
        times = "".join(f"{format_seconds(each, 3):>10}" for each in (one.price.seconds, *_times(one)))
        first, *rest = wrap(str(one.candidate), WIDTH - 55)
        yield f"{number:>3}{times}  {first}"
        yield from (f"{'':>55}{line}" for line in rest)
    yield ""
    yield f"{'':>3}{'bytes':>12}" + "".join(f"{name:>13}" for name in SHORT)
    for number, one in enumerate(found.best, 1):
        sizes = "".join(f"{format_bytes(one.price.memory.get(kind, 0)):>13}" for kind in KINDS)
        yield f"{number:>3}{format_bytes(one.price.bytes):>12}{sizes}"
    if found.refused:
        yield ""
        yield "fall out:"
    for reason, count in found.refused.most_common(REASONS):
        first, *rest = wrap(reason, WIDTH - 10)
        yield f"{count:>8}  {first}"
        yield from (f"{'':>10}{line}" for line in rest)


def _times(one: PlannedLayout) -> tuple[float, ...]:
    price = one.price
    return price.computing_s, price.bubble_s, price.exposed_s, price.update_s


def to_json(found: LayoutSearch) -> dict[str, Any]:
    """Return what a search found as JSON values."""
    return {
        "layouts": found.looked_at,
        "priced": found.priced,
        "seconds": found.seconds,
        "refused": dict(found.refused),
        "best": [layout_to_json(one) for one in found.best],
    }


def layout_to_json(one: PlannedLayout) -> dict[str, Any]:
    """Return a layout and its price as JSON values."""
    return {
        **vars(one.candidate),
        "split": list(one.price.split),
        "step_s": one.price.seconds,
        **{f"{name}_s": seconds for name, seconds in zip(TIMES, _times(one), strict=True)},
        "memory": dict(one.price.memory),
    }


def options(one: PlannedLayout) -> Mapping[str, Any]:
    """Return the train command's options that mean this layout, by name; what is the default is left out."""
    candidate = one.candidate
    found: dict[str, Any] = dict(zip(("dp", "pp", "tp", "sp"), candidate.axes, strict=True))
    if candidate.zero:
        found["zero"] = candidate.zero
    if candidate.pp > 1:
        found["pipeline"] = candidate.schedule
        found["microbatches"] = candidate.microbatches
        found["split"] = ",".join(map(str, one.price.split))
        if candidate.virtual_stages > 1:
            found["virtual_stages"] = candidate.virtual_stages
    if candidate.recompute:
        found["activation_memory"] = "least"
    elif candidate.activation_memory:
        found["activation_memory"] = str(candidate.activation_memory)
    if candidate.replicas > 1 and candidate.allreduce != "auto":
        found["allreduce"] = candidate.allreduce
    return found
