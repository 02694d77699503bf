"""Training on simulated ranks: the bytes of a run under mpirun, the same for the same seed, and
what is refused.
"""

import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from nnmpi.base.errors import LayoutError
from nnmpi.comm.fit import parse_network
from nnmpi.comm.synchrony.sync import MODES
from nnmpi.compose.layout import Layout
from nnmpi.train.__main__ import launch
from nnmpi.train.cli import main
from nnmpi.train.loop import StopSignals
from nnmpi.train.metrics import read_metrics
from tests.chrome import breaches, standing
from tests.harness.commands import on_ranks
from tests.harness.refusals import refuses, usage_error
from tests.train.jobs import arrays, train, unfolded

SHORT = "--max-steps 8 --batch-size 30 --log-every 4 --backend numpy"
LAYOUTS = {
    "ring": (3, "--allreduce ring"),
    "tree": (6, "--allreduce tree"),
    "parameter server": (3, "--allreduce star"),
    "halving-doubling": (6, "--allreduce halving-doubling --dtype float64"),
    "shared": (3, "--allreduce shared --dtype float64"),
    "fused": (3, ""),
    "1f1b": (4, "--pp 4 --split 2,2,2,2"),
    "interleaved": (2, "--pp 2 --pipeline interleaved --virtual-stages 2 --split 2,2,2,2"),
    "zero-bubble": (4, "--pp 2 --tp 2 --pipeline zero-bubble --split 4,4"),
    "three axes": (8, "--dp 2 --pp 2 --tp 2 --split 4,4"),
    "fixed sums": (3, "--reduction fixed"),
    "ssp": (4, "--sync ssp --staleness 0"),
    "local": (3, "--sync local --local-steps 3"),
    "outer": (3, "--sync local --local-steps 3 --outer-lr 0.7 --outer-momentum 0.9"),
    "gossip": (4, "--sync gossip"),
}


def simulated(folder, words, ranks, seed=0, cpu_factor=1.0):
    """Train on simulated ranks in this process; return the run's folder."""
    run = (
        folder / f"run-{ranks}-{seed}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        f"-{len(list(folder.iterdir()))}"
    )
    on_ranks(main, [*words.split(), "--out", str(run)], ranks, seed=seed, cpu_factor=cpu_factor)
    return run


def test_a_layout_is_checked_once_on_each_rank_before_data_are_read(tmp_path, monkeypatch):
    """Degrees that are left open are checked when the number of ranks gives them."""
    checked, check = Counter(), Layout.__post_init__

    def counted(layout):
        checked[threading.current_thread().name] += 1
        check(layout)

    monkeypatch.setattr(Layout, "__post_init__", counted)
    simulated(tmp_path, "--dataset iris --model mlp --optimizer sgd --pp 2 --max-steps 1", 2)
    assert checked == {"rank 0": 1, "rank 1": 1}
    words = "--dataset missing.csv --dp 1 --tp 1 --reduction fixed --out"
    refuses(
        LayoutError,
        "--reduction fixed cannot be combined with --pp 2",
        lambda: on_ranks(main, [*words.split(), str(tmp_path / "none")], 2),
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs_ranks(ranks))
        for name, (ranks, _) in LAYOUTS.items()
    ],
)
def test_the_bytes_are_those_of_a_run_under_mpirun(group, tmp_path, name):
    """Weights and the optimizer's state at the end, though messages come in another order."""
    ranks, words = LAYOUTS[name]
    if group.size != ranks:
        return
    words += " --model mlp" * ("pp" not in words)
    job = Path(group.share(str(tmp_path / "job")))
    main([*SHORT.split(), *words.split(), "--out", str(job)], group)
    result = group.is_root and arrays(simulated(tmp_path, f"{SHORT} {words}", ranks, seed=1))
    group.barrier()
    assert not group.is_root or result == arrays(job)


def test_an_outer_optimizer_goes_on_from_a_checkpoint(tmp_path):
    """Between two of its steps: what it keeps is in the file."""
    words = f"--model mlp --epochs 1 --batch-size 30 {LAYOUTS['outer'][1]} --save-every 7steps"
    full, parts = (simulated(tmp_path, f"{words}{more}", 3) for more in ("", " --stop-after 7"))
    on_ranks(main, ["--resume", str(parts)], 3)
    assert arrays(parts) == arrays(full)


@pytest.mark.parametrize("words", ["--sync asp", "--sync ssp --staleness 4"])
@pytest.mark.parametrize("cpu_factor", [0.0, 1.0])
def test_the_seed_decides(words, cpu_factor, tmp_path):
    """The same seed gives the same bytes and seconds where ranks need not wait; some other seed
    gives others.
    """
    words = f"{SHORT} --model mlp {words}" + (" --slow ms=5" if cpu_factor == 0 else "")
    runs = [
        simulated(tmp_path, words, 5, seed, cpu_factor)
        for seed in ((0, 0, 1, 2) if cpu_factor else (0, 0))
    ]
    result = [arrays(run) for run in runs]
    assert result[0] == result[1]
    assert not cpu_factor or len(set(result)) > 1
    if cpu_factor == 0:
        first, again = (
            (run / "metrics.jsonl").read_text().replace(run.name, "run") for run in runs
        )
        assert first == again


def test_a_simulated_run_goes_on_under_another_number_of_ranks(tmp_path):
    """Its folder is that of any run."""
    words = "--model mlp --batch-size 400 --allreduce ring --backend numpy --lr-schedule constant"
    run = simulated(tmp_path, f"--epochs 2 {words}", 3)
    full = arrays(run)
    half = simulated(tmp_path, f"--epochs 2 --max-steps 4 {words}", 3)
    on_ranks(main, ["--resume", str(half), "--max-steps", "None"], 3, seed=5)
    assert arrays(half) == full
    on_ranks(
        main, ["--resume", str(half), "--epochs", "3", "--simulate", "2", "--network", "gbit=1"], 2
    )
    # the network was that of the simulated ranks
    job = train(tmp_path, f"--resume {half} --epochs 4", 2)
    assert job.status == 0, job.output


def test_seconds_are_simulated_ones_and_said_to_be(tmp_path):
    """Eight steps of 100 ms, on two ranks of which one takes three times as long, take 2.4 s; no
    time goes by here.
    """
    ending = train(
        tmp_path, f"{SHORT} --simulate 2 --slow ms=100;rank=1,factor=3 --out run --model mlp"
    )
    assert ending.status == 0, ending.output
    assert (
        "2 ranks in this process, seed 0; computing takes just the time of --slow, messages no"
        " time" in unfolded(ending.output)
    )
    assert "8 steps in 2.4 s" in ending.output
    assert ending.seconds < 20


def test_a_pipeline_takes_what_its_report_says(tmp_path):
    """On a slow link; an epoch's short last batch does not count."""
    words = (
        "--simulate 2 --model mlp --pp 2 --split 4 2 --network gbit=0.01 --slow ms=40 --epochs 1"
    )
    assert re.search(r"pass (.*), simulated \1;", train(tmp_path, words).output)


def test_a_network_makes_steps_longer(tmp_path):
    """A ring of three ranks: 2 (N-1) latencies and 2 (N-1)/N of the gradient's bytes for each
    step.
    """
    words = "--simulate 3 --model mlp --slow ms=10 --allreduce ring --max-steps 15 --log-every 5"
    ending = train(tmp_path, f"{words} --network alpha_us=500,gbit=0.1 --out run")
    assert ending.status == 0, ending.output
    assert (
        "in each of 1 epoch, 15 steps" in ending.output
        and "epoch 1/1 (15 of 45 batches): loss" in ending.output
    )
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # the last ones, 11 to 15, are none that the ranks compare
    steps = [record for record in records if record["kind"] == "train"]
    gradient = 4 * 17226
    ring_s = 4 * 500e-6 + 2 * 2 / 3 * gradient * 8 / 1e8
    numbers_s = 2 * 500e-6  # loss, accuracy and norm: two levels of a tree
    assert steps[-1]["compute_s"] == pytest.approx(0.01)
    assert steps[-1]["sync_s"] == pytest.approx(ring_s + numbers_s, rel=0.01)


@pytest.mark.parametrize("schedule, network", [("1f1b", ""), ("gpipe", "alpha_us=500,gbit=1")])
def test_a_paced_pipeline_takes_what_its_schedule_says(schedule, network, tmp_path, capsys):
    """(M + S - 1) / M of what a rank computes, and with links what the simulation with their
    messages says.
    """
    words = (
        f"--pp 4 --microbatches 4 --pipeline {schedule} --slow ms=40 --epochs 1 --batch-size 96"
        " --eval-every 0"
    )
    machine = parse_network(network, 4) if network else None
    more = ["--verbose", "--backend", "numpy", "--out", str(tmp_path / "run")]
    on_ranks(main, [*words.split(), *more], 4, machine, cpu_factor=0)
    text = unfolded(capsys.readouterr().out)
    result = re.search(
        r"pass ([\d.]+) ms, simulated ([\d.]+) ms; bubble (\d+)%, simulated (\d+)%; ms .*: ([\d.,"
        r" ]+);",
        text,
    )
    assert result and result[5] == "10.00, 10.00, 10.00, 10.00"
    pass_ms, simulated_ms, bubble, simulated_bubble = map(float, result.groups()[:4])
    assert pass_ms == pytest.approx(simulated_ms, rel=0.01) and bubble == pytest.approx(
        simulated_bubble, abs=1
    )
    assert network or (pass_ms, bubble) == (70.0, 43.0)
    waits = re.findall(r'"wait_s": ([\d.e-]+)', (tmp_path / "run" / "metrics.jsonl").read_text())
    waited = re.search(r"waiting for stages ([\d.]+) ms", text)
    # as the report page has it
    assert waited and float(waited[1]) == pytest.approx(1e3 * float(waits[0]), rel=0.01)
    # six messages' latencies on the way there and back
    assert not network or pass_ms > 70.0 + 6 * 0.5
    assert text.count("% of parameters and activations") == 4 and "% of the time" not in text


TRACED = {  # ranks, words, and whether messages take time
    "ring": (3, "--allreduce ring", True),
    "halving-doubling": (4, "--allreduce halving-doubling", True),
    "fused": (3, "", False),
    "zero 1": (3, "--zero 1", True),
    "zero 3": (2, "--zero 3", True),
    "fixed sums": (3, "--reduction fixed --microbatches 4", True),
    "local": (3, "--sync local --local-steps 3", True),
    "gossip": (4, "--sync gossip", False),
    "tensor": (2, "--tp 2", True),
    "1f1b": (3, "--pp 3 --microbatches 6", True),
    "gpipe": (3, "--pp 3 --microbatches 6 --pipeline gpipe", False),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_and_the_console_tell_of_the_same_shares(name, tmp_path, capsys):
    """Of every moment of a rank one of computing, exchanging and waiting is true; a straggler is
    waited for.
    """
    ranks, words, costs = TRACED[name]
    words = (
        f"{words} --model mlp --batch-size 96 --epochs 1 --eval-every 0 --slow"
        " ms=20;rank=1,factor=3"
    )
    more = ["--verbose", "--trace", "--backend", "numpy", "--out", str(tmp_path / "run")]
    machine = parse_network("alpha_us=200,gbit=0.2", ranks) if costs else None
    on_ranks(main, [*words.split(), *more], ranks, machine, cpu_factor=0)
    message = capsys.readouterr().out
    slowest = (
        "" if name in ("local", "gossip") else ", the slowest is rank 1: 60.00 ms of computing"
    )
    assert f"; mean over {ranks} ranks{slowest}" in unfolded(message)
    lines = message.replace("\n    ", " ")
    text = dict(re.findall(r"(?:[=+] |  )([a-z ]+) ([\d.]+) ms", lines.partition("  step ")[2]))
    trace = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))
    assert breaches(trace) == []
    result = [standing(trace, rank) for rank in range(ranks)]
    for entry in result:
        assert entry["all"] == pytest.approx(sum(entry.values()) - entry["all"])
    steps_us, totals = (
        15 * 1000,
        {kind: sum(item.get(kind, 0.0) for item in result) / ranks for kind in result[0]},
    )
    waited = float(text["synchronization"]) + float(text.get("waiting for stages", 0.0))
    assert totals["compute"] / steps_us == pytest.approx(float(text["compute"]), rel=0.01)
    assert (totals["waiting"] + totals.get("exchange", 0.0)) / steps_us == pytest.approx(
        waited, rel=0.02
    )
    if name not in ("gossip", "1f1b", "gpipe"):  # there it spreads, or waits itself
        assert result[0]["waiting"] > 40 * steps_us * 0.95 > 40 * result[1].get("waiting", 0.0)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--simulate -1", "--simulate"),
        ("--simulate 2 --network fast", "network 'fast' is not understood; give numbers, such as"),
        ("--simulate 3 --slow rank=3,factor=2", "rank 3 does not exist"),
        ("--simulate 2 --dp 3", "3"),
        ("--network gbit=1", "--network is for --simulate"),
    ],
)
def test_what_does_not_go_together_is_refused(words, text, tmp_path):
    """In a sentence, and nothing is left behind."""
    if "--simulate " in words:
        usage_error(text, lambda: launch([*words.split(), "--out", str(tmp_path / "run")]))
    else:
        usage_error(text, simulated, tmp_path, words, 2)
    assert not list(tmp_path.iterdir())


def test_a_launcher_of_several_processes_is_refused(tmp_path):
    """Each would simulate all ranks."""
    ending = train(tmp_path, "--simulate 2", ranks=2)
    assert ending.status not in (0, None)
    assert "--simulate runs all ranks in one process" in ending.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_a_checkpoint(number, tmp_path):
    """Python gives signals to the main thread, which is none of the ranks."""
    run = tmp_path / "run"
    words = (
        "--simulate 3 --model mlp --epochs 1000 --no-jit --batch-size 30 --backend numpy --out"
        f" {run}"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "nnmpi.train", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # it may be ignored here
    ) as job:
        while "epoch 1/" not in job.stdout.readline():
            pass
        job.send_signal(number)
        text = job.stdout.read()
    step = re.search(rf"stopped by {number.name} after step (\d+); continue with", text)
    assert step and job.returncode == 128 + number, text
    assert (run / "checkpoints" / f"step-{int(step[1]):08d}").is_dir()


def test_a_closed_terminal_ends_it_like_sigterm_but_under_nohup():
    noted = []
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, handler)
            with StopSignals() as caught:
                os.kill(os.getpid(), signal.SIGHUP)
                noted.append(caught.noted())
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert noted == [signal.SIGHUP, 0]


@pytest.mark.parametrize("mode", MODES)
def test_rates_are_those_of_all_workers(mode, tmp_path):
    """A step's samples are the global batch's, whoever writes the record."""
    words = (
        f"--sync {mode} --model mlp --hidden 4 --dataset digits --batch-size 66 --max-steps 12"
        " --log-every 4 --slow ms=10 --eval-every 0 --quiet --out"
    )
    on_ranks(main, [*words.split(), str(tmp_path / "run")], 3, cpu_factor=0)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [item for item in records if item["kind"] == "train"]
    assert found
    for item in found:
        assert item["samples_per_second"] * item["step_s"] == pytest.approx(66, rel=0.02)
        assert item["step_s"] == pytest.approx(0.01, rel=0.1)
    (test,) = [item for item in records if item["kind"] == "test"]
    assert (test["runtime"], test["samples_per_second"]) == (0, None)  # no time, which is no rate
