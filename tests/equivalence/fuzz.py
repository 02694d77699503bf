"""Random mixes of everything that a layout can have, each equal to the serial run or refused.

    python -m tests.equivalence.fuzz COUNT [FIRST]        a line for each; status 1 if one differs
    mpirun -n 4 python -m tests.equivalence.fuzz COUNT    those of 4 ranks, over MPI

A refusal must be a pair of `compose.refusals`, or name what the model or the ranks lack.
"""

import random
import sys
import tempfile
from math import prod

import nnmpi
from nnmpi import Layout, simulate
from nnmpi.base.errors import UsageError
from nnmpi.nn.chain import open_chain
from nnmpi.schedule.schedules import SCHEDULES, TRAINING, example_of
from tests.equivalence import own
from tests.equivalence.reference import Setup, differences, run, serial_run
from tests.equivalence.rows import GPT, LIMITED, NOISY, ZERO_MLP

SETUPS = {
    "mlp": ZERO_MLP,
    "noisy": NOISY,
    "nested": Setup(own.nested, microbatches=2),
    "skipping": Setup(own.skipping, microbatches=3),
    "gpt": GPT,
    "experts": LIMITED,
}
MOST_RANKS = 12


def draw(rng):
    """Return a setup's name, a layout's options, and a worker's."""
    name = rng.choice([*SETUPS])
    text = name in ("gpt", "experts")
    sizes = {"dp": rng.choice((1, 1, 2, 2, 3)), "pp": rng.choice((1, 2, 2, 3))}
    sizes["tp"] = rng.choice((1, 1, 1, 2))
    if text:
        sizes["sp"] = rng.choice((1, 1, 1, 2, 3))
    if sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes.get("sp", 1) > MOST_RANKS:
        return draw(rng)
    layout = dict(sizes)
    if text and rng.random() < 0.5:
        layout["sp_attention"] = "ring"
    if rng.random() < 0.6:
        layout["zero"] = rng.choice((1, 2, 3))
        layout["unit_bytes"] = rng.choice((None, 1, 2000))
    if name == "experts" and rng.random() < 0.7:
        layout["expert_parallel"] = True
    layout["activation_memory"] = rng.choice((None, None, "least", 10**9, 400_000, 70_000))
    if rng.random() < 0.15:
        state = rng.choice(("optimizer", "all" if layout.get("zero") == 3 else "optimizer"))
        layout |= {"offload": tempfile.gettempdir(), "offload_state": state}
    elif isinstance(layout["activation_memory"], int) and rng.random() < 0.4:
        layout["offload"] = tempfile.gettempdir()
    if rng.random() < 0.05:
        layout["reduction"] = "fixed"
    if sizes["pp"] > 1:
        layout["pipeline"] = rng.choice(
            [name for name in TRAINING if not example_of(name).asynchronous]
        )
        if SCHEDULES[layout["pipeline"]].any_stages:
            layout["virtual_stages"] = rng.choice((2, 3))
        layout["split"] = _split(rng, SETUPS[name], layout)
    worker = {}
    if rng.random() < 0.5:
        worker["allreduce"] = rng.choice(("ring", "tree", "native"))
    if rng.random() < 0.2:
        worker["synchronous_sends"] = True
    return name, layout, worker


def _split(rng, setup, layout):
    """Return the number of layers of each stage."""
    dataset = setup.data()
    model = setup.model(dataset.sample_shape, dataset.classes, **setup.model_options)
    layers, stages = (
        len(open_chain(model)),
        layout["pp"]
        * Layout(
            pp=layout["pp"],
            pipeline=layout["pipeline"],
            virtual_stages=layout.get("virtual_stages", 1),
        ).stages_per_rank,
    )
    if layers < stages:
        return "auto"
    edges = sorted(rng.sample(range(1, layers), stages - 1))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, layers], strict=True))


def try_one(seed, group=None):
    """Return the outcome of a drawn mix, and its description; empty for other ranks' numbers.

    Args:
        seed: of the mix.
        group: its ranks; None to simulate them.
    """
    name, options, worker = draw(random.Random(seed))
    setup, what = SETUPS[name], f"{seed} {name} {options} {worker}"
    ranks = prod(options.get(axis, 1) for axis in ("dp", "pp", "tp", "sp"))
    if group is not None and ranks != group.size:
        return "", what
    try:
        layout = Layout(**options)
        (serial,) = simulate(lambda alone: serial_run(setup, alone), 1)
        if group is None:
            parallel = simulate(
                lambda group: run(setup, group, layout, counts=True, **worker), ranks
            )
        else:
            parallel = [run(setup, group, layout, counts=True, **worker)]
    except UsageError as error:  # what ranks disagree about is no refusal
        return f"refused: {str(error).splitlines()[0][:160]}", what
    except Exception as error:  # noqa: BLE001
        return f"ERROR {type(error).__name__}: {error}", what
    is_told = group is None or group.is_root  # which has all weights
    found = differences(parallel[0], serial, setup) if is_told else []
    return ("equal" if not found else f"DIFFERS: {found[:2]}"), what


def main():
    """Try the drawn mixes."""
    count, first = (*map(int, sys.argv[1:]), 0)[:2]
    world, wrong = nnmpi.start(), 0
    for seed in range(first, first + count):
        outcome, what = try_one(seed, world if world.size > 1 else None)
        wrong += outcome.startswith(("ERROR", "DIFFERS"))
        if outcome and world.is_root:
            print(f"{outcome:<8} {what}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
