"""Steps whose computing is paced, as the planner prices them: beside netlab's links, and beside simulated worlds."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.netlab.steps import CASES, StepCase, describe_network
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from nnmpi.nn.chain import open_chain
from nnmpi.parallel.pipeline.profile import LayerProfile
from nnmpi.planner.network import PlannedNetwork
from nnmpi.planner.price import Pricer
from nnmpi.planner.profile import Profile, StepCost
from nnmpi.planner.shapes import ModelShapes
from nnmpi.planner.space import Candidate
from nnmpi.train.auto_layout import workload_of
from nnmpi.train.cli import parse
from nnmpi.train.inputs import load_samples

LINK = {"alpha_s": 50e-6, "beta_s_per_byte": 8e-9, "gamma_s_per_byte": 0.0}  # 1 Gbit/s
_REPLICAS, _STEP = ("--model", "mlp", "--hidden", "384", "384"), {"F": 0.06, "B": 0.1, "STEP": 0.04}
WORLDS = (
    *(StepCase(f"dp, {name}", ("--allreduce", name, *_REPLICAS), _STEP, 256, (), 5) for name in ("ring", "tree")),
    StepCase("dp, halving-doubling", ("--allreduce", "halving-doubling", *_REPLICAS), _STEP, 256, (), 5),
)


def tau(pairs):
    """Return Kendall's tau-b of pairs of numbers: 1 where both are in the same order, -1 in the opposite one."""
    agree = against = ties_x = ties_y = 0
    for i, (x, y) in enumerate(pairs):
        for other_x, other_y in pairs[:i]:
            sign = (x - other_x) * (y - other_y)
            agree += sign > 0
            against += sign < 0
            ties_x += x == other_x
            ties_y += y == other_y
    count = len(pairs) * (len(pairs) - 1) / 2
    below = ((count - ties_x) * (count - ties_y)) ** 0.5
    return (agree - against) / below if below else 1.0


def paired(rounds):
    """Return by how much predictions are off, each beside what was measured in the same round: the median."""
    return median(each["step_s"] / each["took_s"] for each in rounds) - 1


def price_links(file, group):
    """Print steps over netlab's links, with paced computing on 2 to 16 hosts, beside what the planner says of them."""
    kept = json.loads(file.read_text())
    cases, pairs = {case.name: case for case in CASES}, []
    print("| rate | case | hosts | measured, ms | predicted, ms | off |")
    print("|" + "---|" * 6)
    for row in kept["rows"]:
        case = cases.get(row["case"])
        if case is None or "--sync" in case.options:
            continue
        predicted_s = price_paced(case, row["hosts"], kept["links"][row["rate"]], group)
        took_s = row["measured_s"]
        pairs.append((predicted_s, took_s))
        times = f"{1e3 * took_s:.1f} | {1e3 * predicted_s:.1f} | {100 * (predicted_s / took_s - 1):+.1f} %"
        print(f"| {row['rate']} | {case.name} | {row['hosts']} | {times} |")
    off = [abs(predicted_s / took_s - 1) for predicted_s, took_s in pairs]
    mean, worst = sum(off) / len(off), max(off)
    print(f"\n{len(off)} layouts: mean {100 * mean:.1f} %, worst {100 * worst:.1f} %, tau {tau(pairs):.2f}")
    return 0


def show_world(ranks, group):
    """Print steps of whole simulated worlds, which compute and sum real gradients, beside the planner's; return 0."""
    for case in WORLDS:
        predicted_s = price_paced(case, ranks, LINK, group)
        with tempfile.TemporaryDirectory() as folder:
            words = (*case.words(Path(folder), ranks), "--simulate", str(ranks), "--network", describe_network(LINK))
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run((sys.executable, *words), env=variables, check=True, stdout=subprocess.DEVNULL)
            simulated_s = case.step_seconds(Path(folder))
        off = 100 * (predicted_s / simulated_s - 1)
        print(f"{case.name}: simulated {1e3 * simulated_s:.1f} ms, predicted {1e3 * predicted_s:.1f} ({off:+.2f} %)")
    return 0


def price_paced(case, hosts, link, group):
    """Return the seconds of a step that the planner predicts of a case of `netlab steps`, a host for each rank."""
    config = parse([*case.options, "--batch-size", str(case.batch_on(hosts)), "--optimizer", "sgd"])
    train, _ = load_samples(config, group, 0, print)
    work, parallel = workload_of(config, train), config.parallel
    forward_s, backward_s, update_s = (case.times_on(hosts)[kind] for kind in ("F", "B", "STEP"))
    stages = 1 if parallel.pp == "auto" else parallel.pp
    whole_s = (forward_s + backward_s) * stages
    one = Candidate(hosts // stages, stages, 1, 1, 0, parallel.pipeline, 1, parallel.microbatches or 1)
    one = replace(one, allreduce=parallel.allreduce or "auto")
    rows, width = one.rows(work.batch_size)[0], 4 * max(config.model.hidden)
    sizes = [sum(p.size for _, m in layer.members for p in m.parameters()) for layer in open_chain(work.build())]
    share = 1 / sum(size > 0 for size in sizes)  # layers without parameters take no time
    times = (whole_s * share, forward_s * stages * share, backward_s * stages * share / 2)
    layers = tuple(
        LayerProfile(
            str(i), times[0] * (size > 0), size, times[1] * (size > 0), rows * width, *[times[2] * (size > 0)] * 2
        )
        for i, size in enumerate(sizes)
    )
    profile = Profile({}, {(1, 1): {rows: StepCost(whole_s, 0.0, 0, unrecorded_s=whole_s)}}, {rows: layers})
    across = Link.line(link["alpha_s"], link["beta_s_per_byte"])
    machine = Machine(across, across, blocks(hosts, 1), Curve.line(0.0, link["gamma_s_per_byte"]))
    network = PlannedNetwork("links of known rate", machine, hosts)
    pricer = Pricer(work, profile, network, ModelShapes(work, profile, numpy_backend()))
    return pricer.price(one).seconds + update_s  # which is paced, too
