"""The zoo of benchmarks/gpu: one model on both sides, judged, compared, and ended in time."""

import json
import signal
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import command, measure, tables, train
from benchmarks.gpu.cases import BF16, CASES, COMPILED, EAGER, OURS, PEERS, TF32, TINY, TORCH
from tests.device.library import device_backend
from tests.harness.refusals import usage_error

pytestmark = pytest.mark.host_only("the benchmark has a device of its own")
TIMING = measure.Timing(rounds=2, block_s=1e-9)


def row(name, seconds, part=0, **more):
    """Return a row of a case as it is measured."""
    blocks = [seconds, seconds, 3 * seconds]
    fixed = {"case": "a", "mode": TF32, "batch": 8, "part": part, "name": name}
    return {**fixed, "blocks_s": blocks, "step_s": seconds, "last_loss": 1.0, **more}


@pytest.mark.parametrize("name", sorted({*CASES} - {"gpt2-124M"}))
def test_a_model_is_the_same_on_both_sides(name):
    """Its weights go over in the order of definition. gpt6 is gpt2 with other numbers."""
    torch = pytest.importorskip("torch")
    from benchmarks.training import models

    case = CASES[name]
    x = case.data[0][:2, :5] if case.words else case.data[0][:2]
    theirs = case.make(models.their_library()).eval()
    with torch.no_grad():
        pairs = list(zip(theirs.parameters(), case.torch_weights, strict=False))
        for parameter, value in pairs:
            parameter.copy_(torch.from_numpy(value).view(parameter.shape))
        batch = torch.from_numpy(x)
        right = theirs(batch.permute(0, 3, 1, 2) if x.ndim == 4 else batch).numpy()
    assert len(pairs) == len(list(theirs.parameters()))
    np.testing.assert_allclose(case.first(x).data, right, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mode", [TF32, BF16])
def test_contestants_agree(mode):
    pytest.importorskip("torch")
    names = (*OURS, TORCH)
    made = measure.makers(TINY["char-gru"], mode, names, device_backend(), "cpu")
    rows = measure.measure(TINY["char-gru"], mode, made, TIMING)
    assert [item["name"] for item in rows] == [*names]
    assert not [item for item in rows if "failed" in item or "wrong" in item]
    assert rows[0]["losses"] == rows[1]["losses"]
    assert rows[2]["losses"][-1] < 0.98 * rows[2]["losses"][0]
    assert all(len(item["blocks_s"]) == 2 and item["first_s"] > 0 for item in rows)
    assert rows[0]["peak_bytes"] > 4 * sum(array.nbytes for array in TINY["char-gru"].torch_weights)


def test_without_pytorch_nnmpi_runs_alone():
    made = measure.makers(TINY["lenet5"], TF32, (*OURS, *PEERS), device_backend(), None)
    assert [*made] == [*OURS]


def test_a_wrong_step_and_a_failed_one_are_named(monkeypatch):
    """The compiled step forgets to clear its gradients; the third contestant has no memory."""
    case, device = TINY["lenet5"], device_backend()
    made = dict(measure.makers(case, TF32, OURS, device, None))

    def wrong():
        trainer = right()
        trainer._model.zero_grad = lambda: None
        return trainer

    def failed():
        raise MemoryError("no memory")

    right, made[COMPILED], made["more"] = made[COMPILED], wrong, failed
    rows = measure.measure(case, TF32, made, TIMING)
    monkeypatch.setitem(measure.TOLERANCES, TF32, 1e-5)
    measure.judge(rows, 1e-5)
    assert "failed" not in rows[1] and "wrong" not in rows[0]
    assert rows[1]["wrong"].startswith("losses off by")
    assert rows[2]["failed"] == "MemoryError: no memory"
    assert "blocks_s" not in rows[2]
    text = tables.zoo([{"part": 0, **item} for item in rows])
    assert "see below" in text and f"lenet5 in tf32: {COMPILED}: losses off by" in text
    assert "Failed or wrong: lenet5 in tf32" in tables.verdict(
        [{"part": 0, **item} for item in rows]
    )


def test_losses_that_are_no_numbers_are_wrong():
    rows = [
        row(TORCH, 1.0, losses=[2.0, 1.0]),
        row(COMPILED, 1.0, losses=[2.0, float("nan")]),
        row(EAGER, 1.0, losses=[2.0, 1.0], last_loss=float("inf")),
    ]
    measure.judge(rows, 0.1)
    assert ["wrong" in item for item in rows] == [False, True, True]


def test_the_fastest_peer_of_the_same_rounds_counts():
    """torch.compile is measured later, beside another nnmpi.compile."""
    rows = [
        row(EAGER, 4.0),
        row(COMPILED, 2.0),
        row(TORCH, 3.0),
        row(COMPILED, 4.0, part=1),
        row("torch.compile", 2.0, part=1),
        {**row(COMPILED, 1.0, part=2), "case": "b"},
        {**row(TORCH, 0.25, part=2), "case": "b"},
        {**row(TORCH, 0.25, part=3), "case": "c"},
        {**row(COMPILED, 0.0, part=4, failed="OutOfMemoryError"), "case": "d"},
    ]
    compared = measure.compare(rows)
    assert [item["case"] for item in compared] == ["d", "b", "a", "c"]
    assert [item["ratio"] for item in compared] == [None, 0.25, 0.5, None]
    assert compared[2]["peer"] == "torch.compile"
    assert compared[2]["by_name"][COMPILED]["step_s"] == 2.0
    said = tables.verdict(rows)
    assert said.startswith(
        "Worst: b in tf32, 0.25 of the speed of PyTorch (1000 and 250 ms). Ahead"
    )
    assert "Ahead in 0 of 2 rows. Failed or wrong: d in tf32." in said


def test_torch_compile_comes_last():
    options = Namespace(
        check=False,
        cases=("resnet20", "lenet5"),
        modes=(TF32, BF16),
        without=(EAGER,),
        compile=("resnet20",),
    )
    quick, slow = (COMPILED, TORCH), (COMPILED, *PEERS[1:])
    assert [(case.name, mode, names) for case, mode, names in command.units(options)] == [
        ("resnet20", TF32, quick),
        ("resnet20", BF16, quick),
        ("lenet5", TF32, quick),
        ("lenet5", BF16, quick),
        ("resnet20", BF16, slow),
        ("resnet20", TF32, slow),
    ]
    options.without = PEERS[1:]
    assert len(command.units(options)) == 4


@pytest.mark.parametrize("end", [signal.SIGALRM, signal.SIGTERM])
def test_the_time_is_over(end):
    before = signal.getsignal(end)
    begin = time.monotonic()
    with pytest.raises(command.OutOfTime), command.limited(0.05 if end == signal.SIGALRM else 30):
        if end == signal.SIGTERM:
            signal.raise_signal(end)
        time.sleep(10)
    assert time.monotonic() - begin < 5
    assert signal.getsignal(end) == before


def test_what_cannot_be_measured_is_refused():
    usage_error(
        "'resnet' is unknown; the names are gpt2-124M", command.parse, ["--cases", "resnet"]
    )
    usage_error("--train 19 is too few: give at least 20 steps", command.parse, ["--train", "19"])
    assert command.parse(["--check"]).cases == tuple(TINY)


def test_a_file_of_results_goes_into_the_documents(tmp_path, monkeypatch):
    """In copies of the documents, which have the places."""
    root = Path(__file__).parents[2]
    for name in ("benchmarks/gpu/results/README.md", "docs/gpu.md", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((root / name).read_text())
    monkeypatch.setattr(command, "HERE", tmp_path / "benchmarks/gpu")
    facts = {"date": "2026-11-27", "device": "a card", "python": "3.12"}
    file = tmp_path / "zoo.json"
    rows = [row(EAGER, 4.0), row(COMPILED, 2.0), row(TORCH, 3.0)]
    file.write_text(json.dumps({"facts": facts, "rows": rows}))
    assert command.main(["--readme", str(file)]) == 0
    for name in ("docs/gpu.md", "README.md"):
        said = (tmp_path / name).read_text()
        assert "Worst: a in tf32, 1.50 of the speed of PyTorch (2000 and 3000 ms)." in said
    readme = (tmp_path / "benchmarks/gpu/results/README.md").read_text()
    assert "| a (8) | tf32 | 4000 | 2000 | 3000 | - | - | **1.50 (1.50 to 1.50)** |" in readme
    whole = row("nnmpi train", 8.0, command_s=20.0, steps=10)
    del whole["part"]
    loops = [{**item, "losses": [1.0]} for item in rows[1:]]
    file.write_text(json.dumps({"facts": facts, "rows": [], "train": [*loops, whole]}))
    assert command.main(["--readme", str(file)]) == 0
    readme = (tmp_path / "benchmarks/gpu/results/README.md").read_text()
    assert "| 8000 | 2000 | 3000 | 0.25 | 20.0 (10 steps) |" in readme


def test_random_images_have_the_shapes_of_mnist():
    for part in train.synthetic():
        assert part.sample_shape == (28, 28, 1)
        assert part.rows(np.arange(3)).max() <= 1
