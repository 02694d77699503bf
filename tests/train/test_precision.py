"""--precision: what runs in half precision say, keep and restore."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from safetensors.numpy import load_file

from nnmpi.errors import UsageError
from nnmpi.train.metrics import read_metrics
from tests.harness.slow import ONCE_MORE
from tests.train.jobs import train as job

Train: TypeAlias = Callable[[str], Path]

# A model whose gradient grows on its way back, so that the first scales are too much for float16.
STEEP = """
from nnmpi import nn


class Steep(nn.Module):
    def forward(self, x):
        return x * 256


def steep(sample_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 20), nn.Tanh(), Steep(), nn.Linear(20, classes))
"""


@pytest.fixture
def overflows(tmp_path: Path) -> str:
    """Return the options of a run in which gradients overflow at first."""
    (tmp_path / "steep.py").write_text(STEEP)
    return f"--model {tmp_path}/steep.py:steep --dataset iris --batch-size 8 --optimizer sgd --lr 1e-4 --precision fp16"


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def scale(run: Path) -> dict[str, Any]:
    """Return the loss scale in a run's last checkpoint."""
    found: dict[str, Any] = json.loads((checkpoint(run) / "state.json").read_text())["optimizer"]["loss_scale"]
    return found


def records(run: Path) -> list[dict[str, Any]]:
    return [each for each in read_metrics(run / "metrics.jsonl") if each["kind"] == "train"]


def test_skipped_steps_and_the_scale_are_in_the_metrics(train: Train, overflows: str) -> None:
    """A skipped step has no gradient's length; the step after it has half the scale."""
    told = records(train(f"{overflows} --max-steps 30 --log-every 1"))
    skipped = [each["skipped_steps"] for each in told]
    assert 0 < skipped[-1] < 10
    for before, now in zip(told, told[1:], strict=False):
        if before["grad_norm"] is None:
            assert now["loss_scale"] == before["loss_scale"] / 2
    assert sum(each["grad_norm"] is None for each in told) == skipped[-1]


def test_other_precisions_say_nothing_of_it(train: Train) -> None:
    pytest.importorskip("ml_dtypes")  # which bf16 needs
    run = train("--model mlp --dataset iris --precision bf16 --epochs 1 --log-every 1")
    assert not {"loss_scale", "skipped_steps"} & set(records(run)[0])
    assert json.loads((checkpoint(run) / "state.json").read_text())["optimizer"].keys() == {"steps"}
    assert all(array.dtype == np.float32 for array in load_file(checkpoint(run) / "model.safetensors").values())


def test_a_resumed_run_goes_on_with_its_scale(train: Train, overflows: str) -> None:
    """It ends with the bits of one that was not interrupted: weights, scale and the count of skipped steps."""
    whole = train(f"{overflows} --schedule constant --max-steps 40")
    broken = train(f"{overflows} --schedule constant --max-steps 13")
    assert scale(broken)["value"] < 2.0**16
    train(f"--resume {broken} --max-steps 40")
    assert scale(broken) == scale(whole)
    one, other = (load_file(checkpoint(run) / "model.safetensors") for run in (whole, broken))
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.timeout(200)
@pytest.mark.slow(ONCE_MORE)
def test_the_scale_goes_from_one_layout_to_another(tmp_path: Path, overflows: str) -> None:
    """From two replicas to a pipeline of two stages."""
    out = tmp_path / "run"
    assert job(tmp_path, f"{overflows} --schedule constant --max-steps 12 --out {out}", ranks=2).status == 0
    before = scale(out)
    assert before["skipped"] > 0
    ending = job(tmp_path, f"--resume {out} --max-steps 13 --dp 1 --pp 2 --log-every 1", ranks=2)
    assert ending.status == 0, ending.output
    assert records(out)[-1]["loss_scale"] == before["value"]
    assert scale(out)["skipped"] >= before["skipped"]


def test_the_header_names_it(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ml_dtypes")  # which bf16 needs
    train("--model mlp --dataset iris --max-steps 1 --precision bf16")
    train("--model mlp --dataset iris --max-steps 1 --precision fp16")
    train("--model mlp --dataset iris --max-steps 1")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("backend:")]
    assert ", float32, products and activations in bf16;" in lines[0]
    assert ", float32, products and activations in fp16, losses scaled;" in lines[1]
    assert ", float32;" in lines[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--precision bf16 --dtype float64", "--precision bf16 rounds float32, and --dtype is float64"),
        ("--precision tf32 --backend numpy", "--precision tf32 needs a CUDA device; use --backend cupy"),
        ("--precision fp16 --jit", "--jit compiles for float32 on the CPU alone"),
        ("--precision fp8", "fp8"),
        ("--precision fp16 --sync asp", "with asp they do not meet in every step; use bf16"),
    ],
)
def test_what_does_not_go_together(train: Train, words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(f"--model mlp --dataset iris --max-steps 1 {words}")
