"""metrics.jsonl: whole lines, a cut last line is dropped, and no step stands twice after a
resume.
"""

import json
import resource
from dataclasses import asdict

import pytest

from nnmpi.base.errors import CheckpointError
from nnmpi.compose.stats import Totals
from nnmpi.train.checkpoint import CheckpointWriter
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import MetricsRecorder, cut_metrics, read_metrics
from tests.harness.refusals import refuses, usage_error


def train(step):
    return {"kind": "train", "global_step": step, "loss": 1 / step}


def write(file, *records):
    with MetricsRecorder(RunFolder(file.parent)) as recorder:
        for record in records:
            recorder.write(record)
            assert record["global_step"] in steps(file)  # at once
        recorder.sync()


def steps(file):
    return [item["global_step"] for item in read_metrics(file)]


def test_an_existing_file_is_continued(tmp_path):
    write(tmp_path / "metrics.jsonl", train(1))
    write(tmp_path / "metrics.jsonl", train(2))
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]


def test_values_that_are_not_finite_become_null(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        {"kind": "train", "global_step": 1, "loss": float("nan"), "x": float("inf"), "y": 1.0},
    )
    (result,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (result["loss"], result["x"], result["y"]) == (None, None, 1.0)


@pytest.mark.parametrize(
    "rest", ['{"kind": "tra', '{"kind": "train", "global_step": 3, "loss": 0.3', "\x00\x00"]
)
def test_a_cut_last_line_is_dropped(tmp_path, rest):
    file = tmp_path / "metrics.jsonl"
    write(file, train(1), train(2))
    with file.open("a") as stream:
        stream.write(rest)
    assert steps(file) == [1, 2]
    cut_metrics(file, 2)
    write(file, train(3))
    assert steps(file) == [1, 2, 3]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    refuses(ValueError, "Expecting", read_metrics, tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"loss": "0.5"}, "loss: '0.5' is given for float"),
        ({"loss": True}, "loss: True is given for float"),
        ({"accuracy": 10**400}, "accuracy: 10.* is no finite number"),
        ({"epoch": [1]}, "epoch: .1. is given for float"),
        ({"kind": None}, "kind: None is given for str"),
        ({"global_step": 1.5}, "global_step: 1.5 is given for int"),
        ({"global_step": -1}, "global_step is -1"),
        ({"workers": [{}]}, "workers: "),
        ({"kind": "staleness"}, "'workers' is missing"),
        ({"kind": "staleness", "workers": [{"histogram": [[0, "1"]]}]}, "'1' is given for int"),
        ({"kind": "staleness", "workers": [{"histogram": [[0, -1]]}]}, "counts below 0"),
        ({"kind": "staleness", "workers": "x" * 10**7}, "string indices must be integers"),
    ],
)
def test_a_record_that_no_run_writes_is_named(tmp_path, change, reason):
    write(tmp_path / "metrics.jsonl", train(1), train(2))
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(train(3) | change) + "\n")
    usage_error(rf"metrics.jsonl: .*\(line 3: .*{reason}", read_metrics, tmp_path / "metrics.jsonl")


def test_a_line_without_end_is_read_once(tmp_path):
    """A hostile file takes no more than its length: no line is joined to the one before."""
    (tmp_path / "metrics.jsonl").write_text("[" * 3_000_000 + "\n" + json.dumps(train(1)))
    usage_error(
        "line 1: its values are nested too deeply", read_metrics, tmp_path / "metrics.jsonl"
    )


def test_lines_after_the_checkpoint_and_the_final_test_go(tmp_path):
    file = tmp_path / "metrics.jsonl"
    evaluation = {"kind": "eval", "global_step": 2}
    write(file, train(1), train(2), evaluation, {"kind": "test", "global_step": 2}, train(3))
    assert cut_metrics(file, 2) == 2
    assert [(item["kind"], item["global_step"]) for item in read_metrics(file)] == [
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    assert cut_metrics(tmp_path / "absent", 2) == 0


def test_a_full_disk_leaves_whole_lines_and_gets_the_rest_later(tmp_path):
    """Half a line stayed, and the run ended in the middle of a step."""
    file, records = (
        tmp_path / "metrics.jsonl",
        [{"kind": "train", "global_step": step} for step in range(3)],
    )
    metrics = MetricsRecorder(RunFolder(tmp_path))
    metrics.write(records[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10, before[1]))
    try:
        metrics.write(records[1])
        assert steps(file) == [0]
        assert file.read_text().endswith("}\n")
        refuses(OSError, "File too large", metrics.flush)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with metrics:
        metrics.write(records[2])
    assert steps(file) == [0, 1, 2]


@pytest.mark.parametrize("moved", ["run", "run/metrics.jsonl"])
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_was_removed_is_not_made_again(tmp_path, moved, again):
    """Half of it came back, which nothing could be resumed from; a file's lines went nowhere."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with MetricsRecorder(folder) as recorder:
        recorder.flush()
        (tmp_path / moved).rename(tmp_path / "elsewhere")
        if again:
            (tmp_path / moved).mkdir()
        refuses(CheckpointError, r"run/metrics.jsonl was removed or moved", recorder.flush)
    with pytest.raises(FileNotFoundError):
        CheckpointWriter(tmp_path / "gone" / "checkpoints", 1).begin()


# Totals are sums over samples and steps, divided once.


def test_a_mean_weighs_samples_not_steps():
    full = Totals(steps=1, samples=60, targets=60, loss_sum=60 * 1.0, score_sum=30)
    short = Totals(steps=1, samples=20, targets=20, loss_sum=20 * 3.0, score_sum=20)
    both = full.plus(short)
    assert (both.steps, both.samples, both.loss, both.accuracy) == (2, 80, 1.5, 0.625)


def test_json_keeps_every_bit():
    totals = Totals(3, 7, 9, 0.1 + 0.2, 1 / 3, 1e-9, 2**-40, 0.7, 1.1)
    assert Totals(**json.loads(json.dumps(asdict(totals)))) == totals


def test_breakdown_adds_up_to_the_step():
    totals = Totals(steps=10, samples=100, compute_s=0.6, sync_s=0.2, input_s=0.1, wall_s=1.0)
    assert (
        totals.breakdown()
        == "step 100.00 ms = compute 60.00 ms (60 %) + synchronization 20.00 ms (20 %) "
        "+ input 10.00 ms (10 %) + other 10.00 ms (10 %)"
    )
    assert totals.samples_per_second == pytest.approx(100.0)


def test_communication_is_told_per_step_beside_its_prediction():
    totals = Totals(steps=10, sync_s=0.3, hidden_s=0.1, comm_bytes=20 * 2**20, comm_calls=25)
    assert (
        totals.communication()
        == "communication per step: 2.5 calls, 2 MiB of arrays; exposed 30.00 ms, hidden by"
        " computing 10.00 ms (25 %); no fit to predict it by"
    )
    known = totals.plus(Totals(steps=10, predicted_s=0.05, predicted_steps=10))
    assert known.communication().endswith("predicted 5 ms")


def test_several_workers_gradients_add_up_to_the_steps_time():
    """Two workers, one of which computes a whole segment of 4 steps at one gradient."""
    totals = (
        Totals(steps=4, compute_s=3.6, sync_s=0.4)
        .plus(Totals(steps=1, compute_s=4.0))
        .mean_over(2, 4)
    )
    assert totals.compute_s + totals.sync_s == pytest.approx(4.0)
    assert totals.steps == 4
