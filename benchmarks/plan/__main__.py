"""The planner's prices beside what its layouts take here. See README.md."""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout

from benchmarks.netlab.steps import CASES as CASES_OF_LINKS  # noqa: E402
from benchmarks.plan.plots import draw  # noqa: E402
from nnmpi.backend.memory import keep_freed_memory  # noqa: E402
from nnmpi.backend.record import numpy_backend  # noqa: E402
from nnmpi.comm.machine import Curve, Link, Machine, blocks  # noqa: E402
from nnmpi.comm.start import start  # noqa: E402
from nnmpi.memory.ledger import ACTIVATIONS, KINDS  # noqa: E402
from nnmpi.nn.chain import open_chain  # noqa: E402
from nnmpi.parallel.pipeline.profile import LinkCost  # noqa: E402
from nnmpi.planner.machine import PlannedNetwork  # noqa: E402
from nnmpi.planner.price import Pricer  # noqa: E402
from nnmpi.planner.profile import ROUNDS, Profile, StepCost  # noqa: E402
from nnmpi.planner.report import layout_to_json, options  # noqa: E402
from nnmpi.planner.search import plan  # noqa: E402
from nnmpi.planner.shapes import ModelShapes  # noqa: E402
from nnmpi.planner.space import Candidate  # noqa: E402
from nnmpi.train.auto_layout import take_network, take_profile, time_layout, with_options, workload_of  # noqa: E402
from nnmpi.train.cli import parse  # noqa: E402
from nnmpi.train.inputs import load_samples  # noqa: E402

CASES = {
    "mlp": "--model mlp --hidden 512 512 --batch-size 256",
    "cnn": "--model cnn --batch-size 128",
    "gpt": "--model gpt --dataset paradise-lost --batch-size 16",
    "lstm": "--model lstm --dataset paradise-lost --batch-size 16",
}
SMALL = "--model mlp --hidden 16 --batch-size 16"
EVERY = 10**6


def spread(planned, wanted):
    """Return so many of the layouts: the best one, all without a pipeline, and of pipelines from all places."""
    plain = [one for one in planned if one.candidate.pp == 1]
    others = [one for one in planned if one.candidate.pp > 1]
    left = max(wanted - len(plain), 2)
    step = max(1, len(others) // left)
    chosen = {id(one) for one in [planned[0], *plain, *others[::step][:left]]}
    return [one for one in planned if id(one) in chosen]


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


def run(words, group, wanted, say):
    """Measure one model's layouts; return everything as JSON values. Collective."""
    backend, config = numpy_backend(), parse(words.split())
    train, _ = load_samples(config, group, group.rank, say)
    begin = time.perf_counter()
    workload, profile = take_profile(workload_of(config, train), group, group.size, backend, say)
    profiled_s = time.perf_counter() - begin
    network = take_network(group, say)
    group.fit = network.fit
    everything = plan(Pricer(workload, profile, network, ModelShapes(workload, profile, backend)), kept=EVERY)
    quick = plan(Pricer(workload, profile, network, ModelShapes(workload, profile, backend)))
    rows: dict[Candidate, dict[str, Any]] = {}
    for one in spread(everything.best, wanted) * ROUNDS:
        timed = time_layout(with_options(config, options(one)), group, backend, group.rank)
        row = {**layout_to_json(one), "took_s": timed.seconds, "bytes": timed.memory, "words": str(one.candidate)}
        row["took_s"] = min(timed.seconds, rows.get(one.candidate, row)["took_s"])
        rows[one.candidate] = row
    for row in rows.values():
        say(f"{row['words']}: {1e3 * row['step_s']:.3f} ms, took {1e3 * row['took_s']:.3f}")
    same = [a.candidate for a in quick.best] == [b.candidate for b in everything.best[: len(quick.best)]]
    return {
        "command": words,
        "ranks": group.size,
        "layouts": everything.looked_at,
        "priced": quick.priced,
        "search_s": quick.seconds,
        "all_priced_s": everything.seconds,
        "same_as_all": same,
        "profile_s": profiled_s,
        "rows": list(rows.values()),
    }


def price_links(file, group):
    """Print steps over netlab's links, with paced computing on 2 to 16 hosts, beside what the planner says of them."""
    kept = json.loads(file.read_text())
    cases, pairs = {case.name: case for case in CASES_OF_LINKS}, []
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


def price_paced(case, hosts, link, group):
    """Return the seconds of a step that the planner predicts of a case of `netlab steps`, a host for each rank."""
    config = parse([*case.options, "--batch-size", str(case.batch_on(hosts)), "--optimizer", "sgd"])
    train, _ = load_samples(config, group, 0, print)
    work, parallel = workload_of(config, train), config.parallel
    forward_s, backward_s, update_s = (case.times_on(hosts)[kind][0] for kind in ("F", "B", "STEP"))
    stages = 1 if parallel.pp == "auto" else parallel.pp
    whole_s = (forward_s + backward_s) * stages
    one = Candidate(hosts // stages, stages, 1, 1, 0, parallel.pipeline, 1, parallel.microbatches or 1)
    one = replace(one, allreduce=parallel.allreduce or "auto")
    rows, width = one.rows(work.batch_size)[0], 4 * max(config.model.hidden)
    sizes = [sum(p.size for _, m in link.members for p in m.parameters()) for link in open_chain(work.build())]
    share = 1 / sum(size > 0 for size in sizes)  # layers without parameters take no time
    times = (whole_s * share, forward_s * stages * share, backward_s * stages * share / 2)
    links = tuple(
        LinkCost(str(i), times[0] * (size > 0), size, times[1] * (size > 0), rows * width, *[times[2] * (size > 0)] * 2)
        for i, size in enumerate(sizes)
    )
    profile = Profile({}, {(1, 1): {rows: StepCost(whole_s, 0.0, 0, unrecorded_s=whole_s)}}, {rows: links})
    across = Link.line(link["alpha_s"], link["beta_s_per_byte"])
    machine = Machine(across, across, blocks(hosts, 1), Curve.line(0.0, link["gamma_s_per_byte"]))
    network = PlannedNetwork("links of known rate", machine, hosts)
    pricer = Pricer(work, profile, network, ModelShapes(work, profile, numpy_backend()))
    return pricer.price(one).seconds + update_s  # which is paced, too


def judge(found):
    """Return a line of figures about one model's layouts."""
    rows = found["rows"]
    errors = [abs(row["step_s"] / row["took_s"] - 1) for row in rows]
    fastest = min(row["took_s"] for row in rows)
    state = [kind for kind in KINDS if kind != ACTIVATIONS]
    state_off = max(abs(row["memory"].get(kind, 0) - row["bytes"][kind]) for row in rows for kind in state)
    kept_off = [abs(row["memory"][ACTIVATIONS] / max(row["bytes"][ACTIVATIONS], 1) - 1) for row in rows]
    plain = [off for off, row in zip(kept_off, rows, strict=True) if row["pp"] == row["tp"] == row["sp"] == 1]
    return [
        found["command"].split()[1],
        str(found["ranks"]),
        str(len(rows)),
        f"{100 * sum(errors) / len(errors):.1f} / {100 * max(errors):.0f} %",
        f"{tau([(row['step_s'], row['took_s']) for row in rows]):.2f}",
        f"{rows[0]['took_s'] / fastest:.3f}",
        f"{state_off} B",
        f"{100 * max(plain, default=0):.2f} / {100 * max(kept_off):.0f} %",
        f"{found['priced']} of {found['layouts']} in {found['search_s']:.2f} s",
        "yes" if found["same_as_all"] else "NO",
    ]


TITLES = (
    "model",
    "ranks",
    "layouts run",
    "step: mean / worst error",
    "tau",
    "regret",
    "state off",
    "activations off: whole replicas / all",
    "priced",
    "the same as all priced",
)


def main():
    """Print the table; end with status 1 where the search does not find what full enumeration finds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="a small model, few layouts")
    parser.add_argument("--only", default="", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--layouts", type=int, default=24, help="how many are run of each model (24)")
    parser.add_argument("--json", type=Path, help="write everything there, or add to what is there")
    parser.add_argument(
        "--draw", type=Path, help="measure nothing; draw what --json has, and the survey, into a folder"
    )
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="measure nothing; price what `netlab steps --json FILE` has measured"
    )
    given = parser.parse_args()
    if given.draw is not None:
        before = json.loads(given.json.read_text()) if given.json is not None else []
        for file in draw(given.draw, before):
            print(file)
        return 0
    keep_freed_memory()  # as the train command does
    group = start()
    if given.links is not None:
        price_links(given.links, group)
        return 0
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if group.is_root else (lambda line: None)
    cases = [SMALL] if given.check else [words for name, words in CASES.items() if name.startswith(given.only)]
    found = [run(words, group, 4 if given.check else given.layouts, say) for words in cases]
    if group.is_root:
        print("|", " | ".join(TITLES), "|")
        print("|" + "---|" * len(TITLES))
        for each in found:
            print("|", " | ".join(judge(each)), "|", flush=True)
        if given.json is not None:
            before = json.loads(given.json.read_text()) if given.json.exists() else []
            given.json.write_text(json.dumps([*before, *found], indent=1) + "\n")
    return 0 if all(each["same_as_all"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
