"""Computing that lasts as long as a table says: simulated steps take what the formulas say, to the last digits."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nnmpi.comm import cost
from nnmpi.comm.machine import Link, Machine
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.errors import UsageError
from nnmpi.train.cli import main
from tests.train.jobs import train

ALPHA_S, BETA_S = 1e-3, 8e-8  # 100 Mbit/s
TIMES = {"F": [0.02], "B": [0.03], "STEP": [0.01]}
WORDS = "--model mlp --max-steps 2 --log-every 1 --batch-size 160 --optimizer sgd --backend numpy"
GRADIENT_BYTES = 4 * 17226  # of the mlp on the digits
STAGES, MICROBATCHES, ROWS, WIDTH = 4, 8, 20, 256
PIPELINE = f"--hidden {WIDTH} {WIDTH} {WIDTH} --pp {STAGES} --microbatches {MICROBATCHES} --split 3,2,1,2"
FORMULAS = {
    "ring": cost.ring_all_reduce,
    "tree": cost.tree_all_reduce,
    "ps": lambda N, M, alpha, beta: 2 * (N - 1) * (alpha + M * beta),  # one worker after another
}


def run_paced(folder: Path, words: str, ranks: int, times: dict[str, list[float]], network: bool = True) -> Path:
    """Train on simulated ranks by a table of times; return the run's folder."""
    table, run = folder / "pace.json", folder / f"run-{len(list(folder.iterdir()))}"
    table.write_text(json.dumps(times))
    link = Link.line(ALPHA_S, BETA_S) if network else Link.line(0.0, 0.0)
    program = partial(main, [*WORDS.split(), *words.split(), "--pace", str(table), "--out", str(run)])
    simulate(program, ranks, Machine(link, link, tuple(range(ranks))), cpu_factor=0.0)
    return run


def last_step(run: Path) -> dict[str, Any]:
    """Return what is recorded of the last step, and its seconds as "step_s"."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    record: dict[str, Any] = [each for each in records if each["kind"] == "train"][-1]
    return {**record, "step_s": 160 / record["samples_per_second"]}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("algorithm", FORMULAS)
def test_a_step_takes_its_computing_and_its_all_reduce(algorithm: str, ranks: int, tmp_path: Path) -> None:
    """The sum of the gradients begins when the backward pass is over, since they are one bucket."""
    step = last_step(run_paced(tmp_path, f"--allreduce {algorithm}", ranks, TIMES))
    numbers_s = cost.levels(ranks) * ALPHA_S  # loss, right answers and targets
    expected_s = 0.06 + FORMULAS[algorithm](ranks, GRADIENT_BYTES, ALPHA_S, BETA_S) + numbers_s
    assert step["step_s"] == pytest.approx(expected_s, rel=0.01)
    assert step["compute_s"] == pytest.approx(0.06, rel=0.01)


def test_sums_begin_under_the_backward_pass(tmp_path: Path) -> None:
    """Gradients are final one after the other while its time goes by, so the first buckets are summed meanwhile."""
    times = {"F": [0.02], "B": [0.2], "STEP": [0.01]}
    words = "--allreduce ring --hidden 512 512 --bucket-mb 0.5"
    hidden, after = (
        last_step(run_paced(tmp_path, f"{words} {overlap}", 2, times)) for overlap in ("--overlap on", "--overlap off")
    )
    assert hidden["hidden_s"] > 0.02
    assert after["hidden_s"] == 0
    assert 0.23 < hidden["step_s"] < after["step_s"] - 0.02


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_takes_what_its_bubble_says(schedule: str, tmp_path: Path) -> None:
    """(M + P - 1)(F + B), and the update; with slow links GPipe waits for 2 (P - 1) messages more, on its way in."""
    times = {"F": [0.008] * STAGES, "B": [0.016] * STAGES, "STEP": [0.01] * STAGES}
    words = f"{PIPELINE} --pipeline {schedule}"
    computing_s = (MICROBATCHES + STAGES - 1) * 0.024 + 0.01
    free = last_step(run_paced(tmp_path, words, STAGES, times, network=False))
    assert free["step_s"] == pytest.approx(computing_s, rel=1e-4)  # and some looks
    slow = last_step(run_paced(tmp_path, words, STAGES, times))
    messages_s = 2 * (STAGES - 1) * (ALPHA_S + 4 * ROWS * WIDTH * BETA_S)
    if schedule == "gpipe":
        assert slow["step_s"] == pytest.approx(computing_s + messages_s, rel=0.03)
    else:  # each microbatch waits for the one before it to come back
        assert slow["step_s"] > computing_s + messages_s + 1e-3


def test_a_run_writes_a_table_that_another_can_take(tmp_path: Path) -> None:
    """Stages of different speed, as they were given; a slow one makes the pipeline slow."""
    times = {"F": [0.01, 0.02, 0.01, 0.01], "B": [0.02, 0.05, 0.02, 0.02], "STEP": [0.0, 0.01, 0.0, 0.0]}
    run = run_paced(tmp_path, PIPELINE, STAGES, times)
    found = json.loads((run / "times.json").read_text())
    for kind, seconds in times.items():
        assert found[kind] == pytest.approx(seconds, abs=1e-6)
    again = run_paced(tmp_path, PIPELINE, STAGES, found)
    assert last_step(again)["step_s"] == pytest.approx(last_step(run)["step_s"], rel=1e-4)


def test_servers_workers_keep_the_pace(tmp_path: Path) -> None:
    """One worker with a server: every step is its computing, its gradient on the way there, and the weights back."""
    words = "--sync ssp --servers 1 --dedicated-servers --log-every 2 --max-steps 8"
    step = last_step(run_paced(tmp_path, words, 2, TIMES))
    message_s = ALPHA_S + GRADIENT_BYTES * BETA_S
    assert step["step_s"] == pytest.approx(0.05 + 2 * message_s, rel=0.02)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "cannot be read"),
        ('{"F": 1}', "a list of seconds for each kind"),
        ('{"F": [1], "B": [-1]}', "a list of seconds for each kind"),
        ('{"F": [1], "X": [1]}', "a list of seconds for each kind"),
        ('{"F": [1, 2], "B": [1]}', "a list of seconds for each kind"),
        ('{"F": [1, 2], "B": [1, 2]}', "has times of 2 stages, but this run has 1"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(text: str, says: str, tmp_path: Path) -> None:
    """In a sentence, before anything is trained."""
    table = tmp_path / "pace.json"
    table.write_text(text)
    with pytest.raises(UsageError, match=says):
        simulate(partial(main, [*WORDS.split(), "--pace", str(table), "--out", str(tmp_path / "run")]), 2)
    assert not (tmp_path / "run").exists()


def test_a_real_step_lasts_at_least_as_long(tmp_path: Path) -> None:
    """And says so."""
    (tmp_path / "pace.json").write_text(json.dumps({"F": [0.1], "B": [0.2], "STEP": [0.05]}))
    ending = train(tmp_path, f"{WORDS} --pace pace.json --out run", 2)
    assert ending.status == 0, ending.output
    assert "computing takes the times in pace.json" in ending.output
    assert last_step(tmp_path / "run")["compute_s"] >= 0.35
    times = json.loads((tmp_path / "run" / "times.json").read_text())
    assert times["F"][0] >= 0.1
    assert times["B"][0] >= 0.2
    assert times["STEP"][0] >= 0.05
