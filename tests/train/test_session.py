"""Runs in this process: what they leave behind, and that every option does what it says."""

import json
import re

import numpy as np
import pytest

from nnmpi.backend.device import expects_device
from nnmpi.base import launcher
from nnmpi.base.errors import DeviceError, DivergenceError
from nnmpi.base.files import read_json, sha256
from nnmpi.comm.mpi.mpi_world import MpiWorld
from nnmpi.comm.simulated.simulated_world import SimulatedWorld
from nnmpi.train.cli import main
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import read_metrics
from tests.device.here import on_device
from tests.harness.commands import over
from tests.harness.refusals import data_error, refuses, usage_error
from tests.train.jobs import arrays, unfolded

# Other programs read these.
TRAIN_KEYS = [
    "kind",
    "global_step",
    "epoch",
    "loss",
    "accuracy",
    "learning_rate",
    "grad_norm",
    "elapsed_s",
]
TRAIN_KEYS += [
    "samples_per_second",
    "step_s",
    "compute_s",
    "wait_s",
    "sync_s",
    "input_s",
    "hidden_s",
    "comm_bytes",
    "comm_calls",
    "predicted_sync_s",
    "memory_parameters",
    "memory_gradients",
    "memory_optimizer",
    "memory_activations",
    "memory_communication",
    "memory_batches",
    "memory_peak",
]
EVAL_KEYS = ["kind", "global_step", "epoch", "loss", "accuracy", "elapsed_s", "runtime"]
EVAL_KEYS += ["samples_per_second", "steps_per_second"]


def same(one, other):
    """Whether two runs have the same weights."""
    return arrays(one)[0] == arrays(other)[0]


def rates(run):
    return [
        item["learning_rate"]
        for item in read_metrics(run / "metrics.jsonl")
        if item["kind"] == "train"
    ]


def test_metrics_have_their_keys(train):
    records = read_metrics(train("--epochs 3 --log-every 2") / "metrics.jsonl")
    assert [item["kind"] for item in records] == ["train", "eval"] * 3 + ["test"]
    assert [item["global_step"] for item in records] == [2, 2, 4, 4, 6, 6, 6]
    for record in records:
        trained = TRAIN_KEYS + ["device_peak_bytes"] * on_device()
        assert list(record) == [*(trained if record["kind"] == "train" else EVAL_KEYS), "time"]
        assert all(value is not None for value in record.values())
    assert records[-1]["accuracy"] == records[-2]["accuracy"]
    assert [item["epoch"] for item in records[:3]] == [1.0, 1.0, 2.0]


def test_the_folder_holds_everything(train):
    run = train("--epochs 5 --save-every 1")
    expected = [
        ".lock",
        "checkpoints",
        "config.json",
        "console.txt",
        "finished.json",
        "metrics.jsonl",
        "starts.jsonl",
    ]
    assert sorted(item.name for item in run.iterdir()) == sorted(expected)
    steps = ["step-00000006", "step-00000008", "step-00000010"]  # the last three
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == ["latest", *steps]
    config = json.loads((run / "config.json").read_text())
    assert (config["epochs"], config["dataset"], config["resume"]) == (5, "iris", None)


def said(capsys):
    """Return what was printed, with lines that are broken between words as one."""
    return unfolded(capsys.readouterr().out)


def test_the_end_of_a_run_is_proved(train, group, capsys):
    """A status of 0 alone is none: MPICH gives it where one rank has left early."""
    run = train("--epochs 1")
    proof = json.loads((run / "finished.json").read_text())
    assert proof["weights_sha256"] == sha256(
        run / "checkpoints" / "step-00000002" / "model.safetensors"
    )
    assert (proof["step"], proof["ranks"]) == (2, group.size)
    assert proof["accuracy"] == read_metrics(run / "metrics.jsonl")[-1]["accuracy"]
    group.barrier()
    if group.is_root:
        (run / "finished.json").unlink()
    group.barrier()
    main(["--resume", str(run), "--epochs", "2"], group)
    assert (
        f"{run} had not come to its end: it has no finished.json" in said(capsys)
    ) == group.is_root
    main(["--resume", str(run), "--epochs", "3"], group)
    assert "had not come to its end" not in said(capsys)
    assert json.loads((run / "finished.json").read_text())["step"] == 6


def test_the_last_line_is_a_command_for_a_shell(group, tmp_path, capsys):
    main(
        [
            "--model",
            "mlp",
            "--dataset",
            "iris",
            "--max-steps",
            "1",
            "--out",
            str(tmp_path / "a run"),
        ],
        group,
    )
    assert f" nnmpi report '{tmp_path}/a run'\n" in capsys.readouterr().out


def test_the_header_says_what_runs_on_what(train, capsys, monkeypatch):
    monkeypatch.setattr(launcher, "idle_cores", lambda: 4)
    if on_device():
        pytest.skip("what it says of a device is in test_device_header.py")
    train("--epochs 1 --verbose --no-jit")  # without a word on numba, which may be there
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if line.startswith("epoch")) <= 80
    starts = [line.split(":")[0] for line in printed.splitlines() if line[0] != " "]
    names, printed = starts[:11], " ".join(printed.split())
    message = [
        "layout",
        "MPI",
        "backend",
        "cores",
        "chosen",
        "data",
        "batches",
        "model",
        "all-reduce",
        "cost model",
        "run folder",
    ]
    assert names == message
    assert "auto chose numpy: " in printed
    for text in (
        "1 rank on 1 node",
        "numpy on CPU, float32",
        "120 training and 30 test samples",
        "9,091 parameters",
        "3 of 4 cores idle; to use more: nnmpi train --ranks 4 ... (nnmpi speedup",
    ):
        assert text in printed
    assert "ms = compute" in printed
    train("--epochs 1")
    printed = capsys.readouterr().out
    assert "ms = compute" not in printed and expects_device() == ("auto chose numpy" in printed)
    assert "with the final weights; best epoch 1 with" in printed


def test_the_header_says_when_batch_normalization_sees_parts_of_a_batch(train, capsys):
    train("--model resnet --dataset digits --max-steps 1 --batch-size 10 --microbatches 3")
    text = "takes each of 3 microbatches (4 samples) by itself; a run of whole"
    assert text in said(capsys)
    train("--model resnet --dataset digits --max-steps 1 --batch-size 10")
    assert "batch normalization" not in said(capsys)


@pytest.mark.parametrize(
    "words",
    [
        "--hidden 9 --epochs 2",
        "--activation tanh",
        "--dropout 0.5",
        "--test-fraction 0.5",
        "--no-normalize",
        "--epochs 3",
        "--max-steps 3",
        "--batch-size 17",
        "--batch-size full",
        "--optimizer sgd",
        "--optimizer adamw",
        "--lr 0.002",
        "--weight-decay 0.1",
        "--lr-schedule constant",
        "--lr-schedule step:0.5,0.1",
        "--warmup-epochs 1",
        "--clip 0.01",
        "--label-smoothing 0.1",
        "--seed 1",
        "--dtype float64",
    ],
)
def test_options_that_change_the_weights(train, words):
    assert not same(
        train("--epochs 2"), train(f"--epochs 2 {words}" if "--epochs" not in words else words)
    )


@pytest.mark.parametrize(
    "words", ["--augment shift", "--augment flip", "--augment shift-flip", "--model resnet"]
)
def test_options_for_images_change_the_weights(train, words):
    base = "--dataset digits --max-steps 2 --batch-size 32"
    assert not same(
        train(f"--model cnn {base}"),
        train(f"{words} {base}" if "model" in words else f"--model cnn {base} {words}"),
    )


@pytest.mark.parametrize(
    "words",
    [
        "--dp 1",
        "--allreduce ring",
        "--allreduce shared",
        "--log-every 1",
        "--eval-every 0",
        "--eval-every 1steps",
        "--save-every 0",
        "--save-every 1steps",
    ],
)
def test_options_that_must_not_change_the_weights(train, words):
    assert same(train("--epochs 2"), train(f"--epochs 2 {words}"))


def test_schedules_give_the_rates_they_promise(train):
    words = "--epochs 4 --log-every 1 --lr 0.1 --warmup-epochs 0"  # 8 steps, 2 per epoch
    assert rates(train(f"{words} --lr-schedule constant")) == [0.1] * 8
    stepped = rates(train(f"{words} --lr-schedule step:2,0.5"))
    assert stepped == pytest.approx([0.1] * 4 + [0.05] * 4)
    cosine = rates(train(over(words, "--lr-schedule cosine --warmup-epochs 1")))
    assert cosine[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert cosine[2:] == sorted(cosine[2:], reverse=True)
    assert rates(train(over(words, "--warmup-epochs 9")))[-1] < 0.1  # longer than the run


def test_evaluations_and_checkpoints_come_when_they_are_due(train):
    run = train("--epochs 6 --eval-every 3 --save-every 5steps")
    records = read_metrics(run / "metrics.jsonl")
    assert [record["global_step"] for record in records if record["kind"] == "eval"] == [6, 12]
    assert [item.name[-2:] for item in sorted((run / "checkpoints").glob("step-*"))] == [
        "05",
        "10",
        "12",
    ]
    run = train("--epochs 6 --eval-every 3steps")  # 2 steps an epoch
    evals = [item for item in read_metrics(run / "metrics.jsonl") if item["kind"] == "eval"]
    assert [item["global_step"] for item in evals] == [3, 6, 9, 12]
    assert [item["epoch"] for item in evals] == [1.5, 3, 4.5, 6]
    run = train("--epochs 6 --eval-every 0 --save-every 0")
    assert [item["kind"] for item in read_metrics(run / "metrics.jsonl")] == [
        "train",
        "train",
        "test",
    ]
    assert len(list((run / "checkpoints").glob("step-*"))) == 1


def test_progress_is_printed_inside_an_epoch(train, capsys, monkeypatch):
    """Rewritten on a terminal; in console.txt a line when one of a log is due; none if quiet."""
    monkeypatch.setattr("nnmpi.train.log.SHOW_EVERY_S", 0.0)
    for words, is_watched, log_s in (
        ("", False, 0.0),
        ("", False, 99.0),
        ("", True, 0.0),
        ("", True, 99.0),
        ("--quiet", True, 0.0),
    ):
        monkeypatch.setattr("nnmpi.train.log.LOG_EVERY_S", log_s)
        monkeypatch.setattr("nnmpi.base.command._is_terminal", lambda _, is_it=is_watched: is_it)
        run = train(f"--epochs 2 --max-steps 3 {words}")
        printed, kept = capsys.readouterr().out, (run / "console.txt").read_text()
        assert kept.count(" left: loss ") == 3 * (log_s == 0)
        shown = re.findall(r"  step (\d)/3, [0-9.]+ s left: loss [^\r\n]*, \d+ samples/s", printed)
        assert shown == list("123" if is_watched or log_s == 0 else "") * (words == "")
        assert printed.count("\r") == 2 * len(shown) * is_watched
        assert "left" not in re.sub(r"(?m)^.*\r", "", printed) or not is_watched


@pytest.mark.parametrize(
    "words, text",
    [
        ("--model cnn --dataset iris", "needs images"),
        ("--dataset irs", "data set 'irs' is unknown; did you mean iris"),
        ("--dataset absent.csv", "absent.csv"),
        ("--augment flip", r"--augment flip is for images, but samples of iris have shape \(4,\)"),
        ("--microbatches 65", "--microbatches 65 is more than the 64 samples of a batch"),
        ("--dp 2", "1 rank is not dp 2 x pp 1 x tp 1 = 2; these fit: dp 1 x pp 1 x tp 1"),
        (
            "--split 2,2",
            "--split is for a pipeline, but dp 1 x pp 1 x tp 1 has none; give --pp 2 or more",
        ),
        ("--data-dir here", "^--dataset iris --data-dir here: .* is bundled; leave out data_dir"),
        (
            "--model cnn --dataset mnist --data-dir absent",
            "--dataset mnist --data-dir absent: data_dir absent lacks",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(train, tmp_path, words, text):
    usage_error(text, train, words)
    assert list(tmp_path.iterdir()) == []


def test_a_model_above_the_limit_is_refused_before_anything_is_written(train, tmp_path):
    with pytest.raises(
        DeviceError,
        match=r"^rank 0 needs .* more than the limit of 1 KiB; spread the model over at least",
    ):
        # a device would keep the limit for the tests to come
        train("--memory-limit 1KiB --backend numpy")
    assert list(tmp_path.iterdir()) == []


def test_what_the_first_step_refuses_leaves_no_folder(train, tmp_path):
    """So that a corrected command may name it again; files of others stay."""
    for left in ([], ["run1/mine"]):
        for name in left:
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text("")
        usage_error(
            r"^1 bytes are too few for the activations of this model",
            train,
            "--activation-memory 1",
        )
        assert [
            str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*") if item.is_file()
        ] == left


def test_a_model_without_memory_is_one_sentence(train, monkeypatch, tmp_path):
    def full(*_):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr("nnmpi.train.build.build_model", full)
    refuses(
        DeviceError, r"^the model does not fit into memory \(Unable to allocate 9 TiB\)", train, ""
    )
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_small_sets_converted_once_give_the_same_bits(train, monkeypatch):
    def seen():
        folder = RunFolder(train("--epochs 3"))
        losses = [item["loss"] for item in read_metrics(folder.metrics)]
        return read_json(folder.finished)["weights_sha256"], losses

    once = seen()
    monkeypatch.setattr("nnmpi.train.inputs.SMALL_BYTES", 0)
    assert seen() == once


def test_by_default_checkpoints_take_little_of_the_time(train, monkeypatch):
    """One after the first epoch, one at the end, and others if they are quick."""
    monkeypatch.setattr("nnmpi.train.checkpoint._prune", lambda *_: None)
    seconds = iter(range(10**9))
    with monkeypatch.context() as patched:
        # each look at the clock is a second later than the one before
        patched.setattr("nnmpi.train.loop.clock.now", lambda: float(next(seconds)))
        slow = train("--epochs 5")
    assert sorted(item.name for item in (slow / "checkpoints").glob("s*")) == [
        "step-00000002",
        "step-00000010",
    ]
    monkeypatch.setattr("nnmpi.train.loop.SAVING", 1e9)
    monkeypatch.setattr(MpiWorld, "beside", SimulatedWorld.beside)  # the disk is never behind
    quick = train("--epochs 5")
    assert len(list((quick / "checkpoints").glob("s*"))) == 5


def test_divergence_keeps_earlier_checkpoints(train, tmp_path):
    refuses(
        DivergenceError,
        "not finite",
        train,
        "--optimizer sgd --lr 1e6 --epochs 9 --save-every 1steps",
    )
    assert (tmp_path / "run0" / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(
    "change, says",
    [
        (
            {"rows": 40},
            (
                "of a run with 80 training samples, but the data set now gives 32; resume with the"
                " original data"
            ),
        ),
        (
            {"feature": 9.0},
            "of a run on different data, but the samples, labels or weights have changed since",
        ),
        (
            {"label": 1},
            "of a run on different data, but the samples, labels or weights have changed since",
        ),
    ],
    ids=["length", "a feature", "a label"],
)
def test_a_run_does_not_go_on_with_other_data(train, group, tmp_path, change, says):
    def write(rows=100, feature=0.0, label=0):
        x, y = np.arange(2.0 * rows).reshape(-1, 2), np.arange(rows, dtype=int) % 2
        x[0, 0], y[0] = feature, label
        np.savez(tmp_path / "changed.npz", x=x, y=y)

    write()
    # stops at batch 7 of 8
    run = train("--model mlp --dataset changed.npz --batch-size 10 --max-steps 7")
    before = (run / "metrics.jsonl").read_bytes()
    write(**change)
    data_error(says, main, ["--resume", str(run), "--max-steps", "9"], group)
    assert (run / "metrics.jsonl").read_bytes() == before
    write()
    main(["--resume", str(run), "--max-steps", "9"], group)


def test_a_run_that_goes_on_says_if_its_schedule_is_another_one(train, group, capsys):
    """A cosine ends with the run: with more epochs its rate rises again."""
    run = train("--epochs 2 --stop-after 3")
    said = capsys.readouterr().out
    assert ("stops after 3 of 4 steps, the limit of --stop-after" in said) == group.is_root
    for more, says in (([], False), (["--epochs", "3"], True), (["--epochs", "3"], False)):
        capsys.readouterr()
        main(["--resume", str(run), *more], group)
        told = "the learning rate follows another schedule, of 6 steps: step 4 had the rate"
        assert (told in capsys.readouterr().out) == (says and group.is_root)


def test_a_finished_run_is_told_again_and_goes_on_with_more_epochs(train, group, capsys):
    run = train("--epochs 2 --lr-schedule constant")
    before = read_metrics(run / "metrics.jsonl")
    main(["--resume", str(run)], group)
    after = read_metrics(run / "metrics.jsonl")
    assert [(item["kind"], item["global_step"], item["loss"]) for item in after] == [
        (item["kind"], item["global_step"], item["loss"]) for item in before
    ]
    main(["--resume", str(run), "--epochs", "3"], group)
    records = read_metrics(run / "metrics.jsonl")
    assert [(record["kind"], record["global_step"]) for record in records][-3:] == [
        ("train", 6),
        ("eval", 6),
        ("test", 6),
    ]
    assert sum(record["kind"] == "test" for record in records) == 1
    assert same(run, train("--epochs 3 --lr-schedule constant"))
    assert f"resuming from {run}" in said(capsys)
