"""The widest MLP that fits a limit in each way: predicted, then trained for some steps; 5 % wider does not fit."""

from nnmpi.backend.backend import numpy_backend
from nnmpi.nn.chain import open_chain
from nnmpi.parallel.pipeline.profile import LayerProfile
from nnmpi.planner.price import Pricer
from nnmpi.planner.profile import Profile, StepCost
from nnmpi.planner.report import options
from nnmpi.planner.search import PlannedLayout
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate
from nnmpi.train.auto_layout import take_network, time_layout, with_options, workload_of
from nnmpi.train.cli import parse
from nnmpi.train.inputs import load_samples

WIDEST, STEP = 8192, 2  # widths are even: tp cuts them


def show_edges(limit, group, say):
    """Print a row for each way and width; return 1 where something else fits than was predicted, else 0. Collective."""
    network, backend, right = take_network(group, say), numpy_backend(), True
    group.fit = network.fit
    say("| way | width | parameters | predicted, bytes | measured, bytes | fits | kinds that are off |")
    say("|" + "---|" * 7)
    for one in ways(group.size):
        low, high = STEP, WIDEST
        while high - low > STEP:
            middle = (low + high) // 2 // STEP * STEP
            fits = _pricer(middle, network, backend, group)[1].bytes(one) <= limit
            low, high = (middle, high) if fits else (low, middle)
        for width, wanted in ((low, True), (low * 21 // 20 // STEP * STEP, False)):
            config, pricer, parameters = _pricer(width, network, backend, group)
            predicted = pricer.memory(one)
            plan = PlannedLayout(one, pricer.price(one))
            found = time_layout(with_options(config, options(plan)), group, backend, group.rank).memory
            took = sum(found.values())
            off = {kind: predicted[kind] - nbytes for kind, nbytes in found.items() if predicted[kind] != nbytes}
            right = right and (took <= limit) == wanted
            sizes = f"{width} | {parameters} | {sum(predicted.values())} | {took}"
            say(f"| {one} | {sizes} | {'yes' if took <= limit else 'no'} | {off or 'none'} |")
    return 0 if right else 1


def ways(ranks):
    """Return the layouts of so many ranks of which each shares out something else."""
    if ranks == 1:
        return [Candidate()]
    stages = Candidate(pp=ranks, microbatches=2 * ranks)
    sharded = [Candidate(dp=ranks, zero=stage, allreduce="ring") for stage in (0, 1, 2, 3)]
    again = Candidate(pp=ranks, microbatches=2 * ranks, recompute=True)
    return [Candidate(dp=ranks), *sharded, stages, again, Candidate(tp=ranks)]


def _pricer(width, network, backend, group):
    """Return the configuration of an MLP of a width, its prices, whose bytes alone count, and its parameters."""
    # iris: its 120 samples are whole batches. A short last one is recorded, too, which no price has (see the README).
    config = parse(f"--dataset iris --model mlp --hidden {width} {width} {width} --batch-size 60".split())
    work = workload_of(config, load_samples(config, group, group.rank, print)[0])
    sizes = [sum(p.size for _, m in layer.members for p in m.parameters()) for layer in open_chain(work.build())]
    step, rows = StepCost(1e-3, 1e-4, 0, unrecorded_s=1e-3), (1, 10**6)  # no batch has so many: bytes are found anew
    layers = tuple(LayerProfile(str(i), 1e-6 + 1e-9 * n, n, 1e-7, 4 * width, 1e-7, 1e-7) for i, n in enumerate(sizes))
    steps = {share: dict.fromkeys(rows, step) for share in ((1, 1), (group.size, 1))}
    profile = Profile({}, steps, dict.fromkeys(rows, layers))
    return config, Pricer(work, profile, network, ModelShapes(work, profile, backend)), sum(sizes)
