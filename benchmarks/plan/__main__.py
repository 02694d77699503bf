"""The planner's prices beside measured steps of its layouts. See README.md."""

import json
import sys
import time
from functools import partial
from itertools import permutations
from math import nan
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout

from benchmarks.harness import command  # noqa: E402
from benchmarks.harness.command import Parser, positive_count  # noqa: E402
from benchmarks.harness.machine import machine_facts  # noqa: E402
from benchmarks.harness.tables import render  # noqa: E402
from nnmpi.backend.backend import numpy_backend  # noqa: E402
from nnmpi.base.files import rebuilt  # noqa: E402
from nnmpi.comm.fit import Fit, parse_network  # noqa: E402
from nnmpi.comm.machine import Machine  # noqa: E402
from nnmpi.comm.mpi.start import start  # noqa: E402
from nnmpi.comm.simulated.simulated_world import simulate  # noqa: E402
from nnmpi.lab.planner.auto_layout import RACE_S, choose  # noqa: E402
from nnmpi.lab.planner.network import PlannedNetwork, find_network  # noqa: E402
from nnmpi.lab.planner.price import Candidate, Profile, plan  # noqa: E402
from nnmpi.lab.planner.profile import Workload, find_profile, ready, typical_s  # noqa: E402
from nnmpi.memory.ledger import ACTIVATIONS  # noqa: E402
from nnmpi.train.build import build_full_model  # noqa: E402
from nnmpi.train.cli import parse  # noqa: E402
from nnmpi.train.computing import choose_computing, computing  # noqa: E402
from nnmpi.train.inputs import load_samples  # noqa: E402

CASES = {
    "mlp": "--model mlp --hidden 512 512 --batch-size 256",
    "cnn": "--model cnn --batch-size 128",
    "gpt": "--model gpt --dataset paradise-lost --batch-size 16",
    "lstm": "--model lstm --dataset paradise-lost --batch-size 16",
}
SMALL = "--model mlp --hidden 16 --batch-size 16"
NODES = 2  # of simulated ranks
BACKEND = numpy_backend()


def spread(planned, count):
    """Return about `count` layouts: the best of each kind, all without a pipeline, and pipelines
    evenly from the ranking.
    """
    plain = [item for item in planned if item.candidate.pp == 1]
    others = [item for item in planned if item.candidate.pp > 1]
    left = max(count - len(plain), 2)
    best = {item.candidate.kind: item for item in reversed(planned)}.values()
    chosen = {id(item) for item in [*best, *plain, *others[:: max(1, len(others) // left)][:left]]}
    return [item for item in planned if id(item) in chosen]


def load(words, group, say):
    """Return the workload of a command's options. Collective."""
    config = parse(words.split())
    samples = load_samples(config, group, say)
    model = build_full_model(config, samples[0], BACKEND, group)
    return Workload(
        choose_computing(config, model, samples[0], BACKEND, group)[0], samples, BACKEND
    )


def measure(words, count, rounds, group, say=str):
    """Return, as JSON values, all that was measured of one model's layouts. Collective."""
    workload = load(words, group, say)
    config = workload.config
    with computing(config):
        network = find_network(group, say, group.size)
        profile, _ = find_profile(workload, group, group.size, say, remeasure=True)
        group.fit = network.fit
        pricer = workload.pricer(profile, network)
        chosen = spread(plan(pricer, count=10**6).best, count)
        rows = {str(item.candidate): {"layout": vars(item.candidate), "s": []} for item in chosen}
        for _ in range(rounds):
            for element in chosen:
                name = str(element.candidate)
                with ready(workload, element.options(), group) as (worker, batches):
                    step = partial(worker.step, lr=0.0)
                    rows[name]["s"] += typical_s(group, [(step, batches)], RACE_S)
                    # a recording is made at the third step
                    rows[name]["bytes"] = group.gather(
                        [worker.arrangement.mesh.pp.rank, dict(worker.ledger.report().peaks)]
                    )
                say(f"{name}: {1e3 * rows[name]['s'][-1]:.3f} ms")
            # a drift of the machine's speed within rounds then affects both ends alike
            chosen.reverse()
        auto = choose(config.having(layout="auto"), group, BACKEND, say).config.parallel
    return {
        "command": words,
        "ranks": group.size,
        "machine": machine_facts(),
        "profile": profile.to_json(),
        "fit": network.fit and network.fit.to_json(),
        "layouts": list(rows.values()),
        "auto": [
            str(item.candidate)
            for item in chosen
            if config.having(**item.options(), layout="given").parallel == auto
        ],
    }


def judge(result, group):
    """Return today's figures of what was measured, by title, and a row for each layout."""
    workload, ranks = load(result["command"], group, str), result["ranks"]
    fit = result["fit"] and Fit.from_json(result["fit"])
    machine = fit.machine if fit else Machine.uniform(0.0, 0.0)
    profile, network = (
        rebuilt(Profile, result["profile"]),
        PlannedNetwork("", machine, ranks, fit),
    )
    with computing(workload.config):
        pricer = workload.pricer(profile, network)
        begin = time.perf_counter()
        layouts = plan(pricer, count=10**6).considered
        search_s = time.perf_counter() - begin
        rows = [row_of(pricer, item) for item in result["layouts"]]
    fastest = min(row["took"] for row in rows)
    best = min(rows, key=lambda row: row["predicted"])
    (auto,) = [row["took"] for row in rows if row["layout"] in result["auto"]] or [nan]
    again = [a / b - 1 for item in result["layouts"] for a, b in permutations(item["s"], 2)]
    return {
        "model": result["command"].split()[1],
        "ranks": ranks,
        "layouts": len(rows),
        "step: mean / worst error": _mean_and_worst(row["error"] for row in rows),
        "another round of the same": _mean_and_worst(again or [nan]),
        "regret: the first / --layout auto": (
            f"{best['took'] / fastest:.3f} / {auto / fastest:.3f}"
        ),
        **{
            title: _mean_and_worst(row[title] for row in rows)
            for title in ("state", "activations", "peak")
        },
        "priced": f"{layouts} in {search_s:.2f} s",
    }, rows


def row_of(pricer, measured):
    """Return a layout's measured step beside its price, and the errors of its bytes."""
    layout, took_s = Candidate(**measured["layout"]), min(measured["s"])
    price, off = pricer.price(layout), {"state": [], "activations": [], "peak": []}
    for stage, kinds in enumerate(pricer.memory_of_ranks(layout)):
        counted = [item for place, item in measured["bytes"] if place == stage]
        most = {kind: max(item[kind] for item in counted) for kind in kinds}
        state = sum(most.values()) - most[ACTIVATIONS]
        off["state"].append((sum(kinds.values()) - kinds[ACTIVATIONS]) / max(state, 1) - 1)
        off["activations"].append(kinds[ACTIVATIONS] / max(most[ACTIVATIONS], 1) - 1)
        off["peak"].append(sum(kinds.values()) / sum(most.values()) - 1)
    return {
        "layout": str(layout),
        "took": took_s,
        "predicted": price.seconds,
        "error": price.seconds / took_s - 1,
        **vars(price),
        **{name: max(errors, key=abs) for name, errors in off.items()},
    }


def _mean_and_worst(errors):
    off = [abs(error) for error in errors]
    return f"{100 * sum(off) / len(off):.1f} / {100 * max(off):.0f} %"


def main():
    """Print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="a small model, few layouts")
    command.add_options(
        parser,
        ("--only", str, "", f"one of {', '.join(CASES)}"),
        ("--layouts", positive_count, "24", "how many are run of each model"),
        ("--rounds", positive_count, "3", "how often each is run"),
        ("--simulate", positive_count, None, f"simulated ranks on {NODES} nodes"),
        ("--json", command.file, None, "file for all that is measured, added to what is there"),
        ("--replay", command.file, None, "such a file, judged by today's prices; measures nothing"),
    )
    given = parser.parse_args()
    group, result = start(), []
    say = partial(print, file=sys.stderr, flush=True) if group.is_root else str
    for name, words in (CASES if not given.check else {"": SMALL}).items():
        if given.replay is None and name.startswith(given.only):
            count, rounds = (4, 1) if given.check else (given.layouts, given.rounds)
            if given.simulate is None:
                result.append(measure(words, count, rounds, group, say))
            else:
                machine = parse_network(
                    "alpha_us=20,gbit=10,inside_gbit=80", given.simulate, given.simulate // NODES
                )
                call = partial(measure, words, count, rounds)
                result.append(simulate(call, given.simulate, machine)[0])
    alone = group.split(group.rank)
    if not group.is_root:
        return
    if given.json is not None:
        before = json.loads(given.json.read_text()) if given.json.exists() else []
        given.json.write_text(json.dumps([*before, *result]) + "\n")
    if given.replay is not None:
        result = json.loads(given.replay.read_text())
    judged = [judge(item, alone) for item in result]
    if given.replay is not None:
        for _, rows in judged:
            print(render([(title, title) for title in rows[0]], rows))
    print(render([(title, title) for title in judged[0][0]], [figures for figures, _ in judged]))


if __name__ == "__main__":
    sys.exit(command.run("python benchmarks/plan", main))
