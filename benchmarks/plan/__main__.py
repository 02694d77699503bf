"""The planner's prices beside measured steps of its layouts. See README.md."""

import json
import sys
import time
from itertools import permutations
from math import nan
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout

from benchmarks.harness import command  # noqa: E402
from benchmarks.harness.command import Parser, positive_count  # noqa: E402
from benchmarks.harness.tables import render  # noqa: E402
from nnmpi.backend.backend import numpy_backend  # noqa: E402
from nnmpi.comm.mpi.start import start  # noqa: E402
from nnmpi.lab.planner.auto_layout import RACE_S, choose  # noqa: E402
from nnmpi.lab.planner.network import find_network  # noqa: E402
from nnmpi.lab.planner.price import plan  # noqa: E402
from nnmpi.lab.planner.profile import Workload, find_profile, ready, typical_s  # noqa: E402
from nnmpi.memory.ledger import ACTIVATIONS, KINDS  # noqa: E402
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


def row_of(item):
    """Return a layout, its price and its bytes as JSON values."""
    return {
        **vars(item.candidate),
        "split": list(item.split),
        "step_s": item.price.seconds,
        **vars(item.price),
        "memory": dict(item.memory),
        "words": str(item.candidate),
        "rounds": [],
    }


def run(words, group, count, rounds, say):
    """Measure one model's layouts with the kernels and BLAS of a run; return everything as JSON
    values. Collective.
    """
    backend, config = numpy_backend(), parse(words.split())
    samples = load_samples(config, group, say)
    model = build_full_model(config, samples[0], backend, group)
    config, _ = choose_computing(config, model, samples[0], backend, group)
    with computing(config):
        workload = Workload(config, samples)
        profile, _ = find_profile(workload, group, group.size, backend, say)
        network = find_network(group, say, group.size)
        group.fit = network.fit
        pricer = workload.pricer(profile, network, backend)
        begin = time.perf_counter()
        everything = plan(pricer, count=10**6)
        search_s = time.perf_counter() - begin
        chosen = spread(everything.best, count)
        rows = {item.candidate: row_of(item) for item in chosen}
        for _ in range(rounds):
            for element in chosen:
                with ready(workload, element.options(), group, backend) as (worker, batches):
                    took_s = typical_s(
                        group,
                        lambda batch, local=worker: local.step(batch, lr=0.0),
                        batches,
                        RACE_S,
                    )
                    peaks = group.gather(dict(worker.ledger.report().peaks))
                rows[element.candidate]["rounds"].append(took_s)
                rows[element.candidate]["bytes"] = max(peaks, key=lambda kinds: sum(kinds.values()))
            # a drift of the machine's speed within rounds then affects both ends alike
            chosen.reverse()
        for row in rows.values():
            row["took_s"] = min(row["rounds"])
            say(f"{row['words']}: {1e3 * row['step_s']:.3f} ms, took {1e3 * row['took_s']:.3f}")
        left_open = config.having(layout="auto")
        auto = choose(left_open, group, backend, say).config.parallel
    won = next(
        (
            rows[item.candidate]
            for item in chosen
            if config.having(**item.options(), layout="given").parallel == auto
        ),
        None,
    )
    return {
        "command": words,
        "ranks": group.size,
        "layouts": everything.considered,
        "search_s": search_s,
        "auto_took_s": nan if won is None else won["took_s"],
        "rows": list(rows.values()),
    }


def judge(result):
    """Return a row of figures about one model's layouts, by title."""
    rows = result["rows"]
    errors = [abs(row["step_s"] / row["took_s"] - 1) for row in rows]
    again = [
        abs(item / other - 1) for row in rows for item, other in permutations(row["rounds"], 2)
    ] or [nan]
    fastest = min(row["took_s"] for row in rows)
    state = [kind for kind in KINDS if kind != ACTIVATIONS]
    state_off = max(
        abs(row["memory"].get(kind, 0) - row["bytes"][kind]) for row in rows for kind in state
    )
    kept_off = [
        abs(row["memory"][ACTIVATIONS] / max(row["bytes"][ACTIVATIONS], 1) - 1) for row in rows
    ]
    plain = [
        off
        for off, row in zip(kept_off, rows, strict=True)
        if row["pp"] == row["tp"] == row["sp"] == 1
    ]
    return {
        "model": result["command"].split()[1],
        "ranks": result["ranks"],
        "layouts run": len(rows),
        "step: mean / worst error": _mean_and_worst(errors),
        "the same layout in another round": _mean_and_worst(again),
        "regret: predicted to be the best / --layout auto": (
            f"{rows[0]['took_s'] / fastest:.3f} / {result['auto_took_s'] / fastest:.3f}"
        ),
        "state off": f"{state_off} B",
        "activations off: whole replicas / all": (
            f"{100 * max(plain, default=0):.2f} / {100 * max(kept_off):.0f} %"
        ),
        "priced": f"{result['layouts']} in {result['search_s']:.2f} s",
    }


def _mean_and_worst(off):
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
        ("--json", command.file, None, "file for everything, added to what is there"),
    )
    given = parser.parse_args()
    group = start()
    say = (
        (lambda line: print(line, file=sys.stderr, flush=True))
        if group.is_root
        else (lambda line: None)
    )
    cases = (
        [SMALL]
        if given.check
        else [words for name, words in CASES.items() if name.startswith(given.only)]
    )
    result = [
        run(words, group, 4 if given.check else given.layouts, given.rounds, say) for words in cases
    ]
    if group.is_root:
        rows = [judge(item) for item in result]
        print(render([(title, title) for title in rows[0]], rows))
        if given.json is not None:
            before = json.loads(given.json.read_text()) if given.json.exists() else []
            given.json.write_text(json.dumps([*before, *result], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(command.run("python benchmarks/plan", main))
