"""The benchmark on a device: its cases, its judge, its turns, its arithmetic; and reduced runs on the stand-in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import ceilings, mnist, tables
from benchmarks.gpu.cases import BF16, CASES, FLOAT32, MNIST, MODES, TF32, TINY, CaseArrays, target
from benchmarks.gpu.command import parse
from benchmarks.gpu.facts import collect, short_name
from benchmarks.gpu.judge import TOLERANCES, TrainingCourse, compare, course, examine, rate
from benchmarks.gpu.measure import Timing, fractions, measure, ratios, reference, time_blocks
from benchmarks.gpu.trainer import DeviceTrainer
from benchmarks.gpu.trainer_nnmpi import NnmpiDeviceTrainer
from benchmarks.gpu.work import flops, moved, products, uploaded
from benchmarks.harness.turns import WrongResultError
from benchmarks.training.cases import CASES as ON_CPU
from nnmpi.backend.backend import numpy_backend
from nnmpi.data.dataset import Dataset
from nnmpi.errors import UsageError
from tests.harness.slow import BENCHMARK

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/device/fake"
pytestmark = pytest.mark.host_only("the benchmark's own parts, which choose their backend themselves")


def test_cases_are_those_of_the_cpu_and_larger_ones() -> None:
    """The sizes of the CPU's benchmark are taken from there; every tiny case stands for one of the same model."""
    for name in ("cnn", "mlp-large", "gpt-block"):
        assert CASES[name] is ON_CPU[name]
    assert all(CASES[name].model == case.model and CASES[name].loss == case.loss for name, case in TINY.items())
    assert {case.model for case in TINY.values()} == {case.model for case in CASES.values()}
    assert target("mlp-fill", TF32) == 0.95 and target("mlp-fill", FLOAT32) is None and target(MNIST, FLOAT32) == 2.0


def test_operations_of_a_step() -> None:
    """By hand: 2 m n k a product; three products a layer, two of the first, whose input is data."""
    assert flops(replace(TINY["mlp-fill"], batch=3, sizes=(5, 7, 2))) == 2 * 3 * (2 * 5 * 7 + 3 * 7 * 2)
    cnn = products(replace(TINY["cnn"], batch=2))
    assert [(p.rows, p.inputs, p.outputs) for p in cnn[:3]] == [(128, 9, 32), (32, 288, 64), (2, 256, 128)]
    batch, time, features, hidden = 2, 8, 16, 32
    dense = 6 * batch * time * (3 * features**2 + features**2 + 2 * features * hidden)
    assert flops(TINY["gpt-fill"]) == dense + 3 * 2 * (2 * batch * time * time * features) // 2


def test_bytes_of_a_step() -> None:
    """One layer by hand; half precision moves less, but weights and gradients stay float32."""
    case = replace(TINY["mlp-fill"], batch=3, sizes=(5, 2))
    weights = 10
    assert moved(case, FLOAT32) == 4 * (2 * (15 + 6) + weights) + 4 * 4 * weights
    assert moved(case, BF16) == 2 * (2 * (15 + 6) + weights) + 4 * 4 * weights
    assert uploaded(case) == 15 * 4 + 3 * 8
    assert uploaded(TINY["gpt-fill"]) == 2 * 4 * 2 * 8 * 16


class Machine(DeviceTrainer):
    """A trainer whose steps take as long as it was told."""

    def __init__(self, name: str, device_s: float, told: list[str]) -> None:
        super().__init__(TINY["mlp-fill"], FLOAT32)
        self.name, self._device_s, self._told, self._clock = name, device_s, told, 0.0

    def restore(self) -> None:
        """See `DeviceTrainer.restore`."""

    def weights(self) -> list[Any]:
        """See `DeviceTrainer.weights`."""
        return [np.zeros(1)]

    def upload(self) -> None:
        """Note it."""
        self._told.append(f"{self.name} uploads")

    def step(self) -> Any:
        """Note it, and let time pass."""
        self._told.append(self.name)
        self._clock += self._device_s

    def read(self, loss: Any) -> float:
        """See `DeviceTrainer.read`."""
        return 0.0

    def wait(self) -> None:
        """See `DeviceTrainer.wait`."""

    def mark(self) -> float:
        """Return the time."""
        return self._clock

    def between(self, begin: float, end: float) -> float:
        """Return the difference."""
        return end - begin

    def used_bytes(self) -> int:
        """See `DeviceTrainer.used_bytes`."""
        return 1

    def peak_bytes(self) -> int:
        """See `DeviceTrainer.peak_bytes`."""
        return 100

    def reset_peak(self) -> None:
        """See `DeviceTrainer.reset_peak`."""


def test_contestants_take_turns() -> None:
    """Every round all of them, in changing order, as many steps each; the first round does not count."""
    told: list[str] = []
    trainers = [(Machine(name, seconds, told), dict[str, Any]()) for name, seconds in (("a", 0.01), ("b", 0.03))]
    time_blocks(trainers, Timing(rounds=5, block_s=0.1))
    steps = 5  # 0.1 s over the median of 0.01 and 0.03
    for _, row in trainers:
        assert row["steps"] == steps and len(row["device_blocks_s"]) == len(row["host_blocks_s"]) == 5
    assert trainers[0][1]["device_blocks_s"] == pytest.approx([0.01] * 5)
    blocks = [told[i] for i in range(12, len(told), steps * 3)]  # behind the trial steps
    assert len(blocks) == 12 and {blocks[i] == "a" for i in range(0, 12, 2)} == {True, False}
    assert told.count("a uploads") == 6 * steps


@pytest.fixture
def arrays() -> Iterator[CaseArrays]:
    """The smallest case."""
    yield CaseArrays(TINY["mlp-fill"])


def test_the_judge_notices_what_is_wrong(arrays: CaseArrays) -> None:
    """A loss, or a change of the weights, that is further off than the mode's rounding."""
    right = reference(arrays, numpy_backend(), None)
    length = np.sqrt(sum(float((a**2).sum()) for a in right.change))
    weights = np.sqrt(sum(float((np.asarray(a, float) ** 2).sum()) for a in arrays.weights))
    assert 0.005 < length / weights < 0.011  # five steps of 0.2 %
    for mode in (FLOAT32, BF16):
        trainer = NnmpiDeviceTrainer(arrays, mode, numpy_backend(), compiled=False)
        found = examine(trainer, arrays.weights, right)
        assert found.loss <= TOLERANCES[mode][0] and found.change <= TOLERANCES[mode][1]
    trainer = NnmpiDeviceTrainer(arrays, FLOAT32, numpy_backend(), compiled=True)
    worse = [right.losses[0] * (1 + 3e-5), *right.losses[1:]]
    for name, other in (
        ("loss", TrainingCourse(worse, right.change, right.lr)),
        ("change", TrainingCourse(right.losses, [1.01 * array for array in right.change], right.lr)),
        ("loss", TrainingCourse([nan, *right.losses[1:]], right.change, right.lr)),
    ):
        with pytest.raises(WrongResultError, match=f"nnmpi compiled, case mlp-fill in float32: its {name} is off"):
            examine(trainer, arrays.weights, other)
    assert compare(right, right).change == 0


def test_pytorch_is_the_same_model(arrays: CaseArrays) -> None:
    """Its trainer on the CPU, in float64 and in each mode that it has there, for each model."""
    pytest.importorskip("torch")
    from benchmarks.gpu.trainer_torch import TorchDeviceTrainer

    for case in TINY.values():
        arrays = CaseArrays(case)
        right = reference(arrays, numpy_backend(), None)
        exact = TorchDeviceTrainer(arrays, FLOAT32, "cpu", contiguous=True, dtype="float64")
        assert rate(exact, arrays.weights) == pytest.approx(right.lr, rel=1e-6)
        assert compare(course(exact, arrays.weights, right.lr), right).change < 1e-6
        for mode in (FLOAT32, BF16):
            examine(TorchDeviceTrainer(arrays, mode, "cpu"), arrays.weights, right)


@pytest.mark.parametrize("name", TINY)
def test_a_recorded_step_in_bf16_is_the_plain_one(name: str) -> None:
    """Also on the host, where recordings use the memory pool for a dtype that NumPy knows nothing of."""
    arrays = CaseArrays(replace(TINY[name], batch=40))  # long enough for the memory pool
    plain, recorded = (
        course(NnmpiDeviceTrainer(arrays, BF16, numpy_backend(), compiled), arrays.weights, 0.01)
        for compiled in (False, True)
    )
    assert plain.losses == recorded.losses


def test_rows_ratios_and_tables() -> None:
    """The fastest way of each trainer counts; one that failed is told of; targets are looked up."""
    arrays = CaseArrays(TINY["mlp-fill"])
    made = [lambda: Machine("nnmpi", 0.02, []), lambda: Machine("torch", 0.01, [])]
    right = TrainingCourse([0.0], [np.zeros(1)], 1.0)
    failed = measure(arrays, TF32, made, right, Timing(1, 0.0))
    assert all("failed" in row for row in failed)  # a machine learns nothing
    rows = [
        {"case": "mlp-fill", "mode": TF32, "name": name, "device_s": seconds, "device_blocks_s": [seconds, 2 * seconds]}
        | {"host_blocks_s": [1.0, 1.0], "host_s": 1.0, "peak_bytes": peak}
        for name, seconds, peak in (("nnmpi", 0.02, 10), ("nnmpi compiled", 0.01, 20), ("torch", 0.012, 40))
    ]
    (found,) = ratios([*rows, *failed])
    assert (found["nnmpi"], found["torch"]) == ("nnmpi compiled", "torch")
    assert found["device"] == pytest.approx(1.2) and found["memory"] == 2 and found["reached"] is True
    text = tables.speeds(rows, markdown=True)
    assert (
        "| mlp-fill | tf32 | nnmpi compiled | torch | 1.20 (1.20 to 1.20) | 1.00 (1.00 to 1.00) | 2.00 | 0.95 | yes |"
        in text
    )
    assert "mlp-fill in tf32: nnmpi failed: " in tables.contestants(failed, {})
    row = {"mode": TF32, "flops": 10, "device_s": 2.0, "moved_bytes": 8, "uploaded_bytes": 3, "host_s": 3.0}
    limits = {"products": [{"mode": TF32, "flops_per_s": 20}]}
    limits |= {"copies": {"within_bytes_per_s": 16, "up_bytes_per_s": 4}}  # type: ignore[dict-item]
    assert fractions(row, limits) == {"products": 0.25, "within": 0.25, "up": 0.25}


def test_ceilings_are_measured() -> None:
    """On the host too: each mode has a rate, each direction a speed."""
    backend = numpy_backend()
    found = {"products": ceilings.products(backend, None, ceilings.SMALL)}
    found["copies"] = ceilings.copies(backend, ceilings.SMALL)  # type: ignore[assignment]
    assert [row["mode"] for row in found["products"]] == list(MODES)
    assert all(row["flops_per_s"] == row["nnmpi_flops_per_s"] > 0 for row in found["products"])
    assert "product of 16 x 16 in bf16" in tables.ceilings(found)


def test_mnist_or_what_is_made_up(tmp_path: Path) -> None:
    """Made-up images can be learnt, and say that they are; real ones are taken where they are."""
    train, test, what = mnist.load(tmp_path, (600, 100))
    assert what == mnist.MADE_UP and len(train) == 600 and train.x.dtype == np.uint8
    task = mnist.MnistTask(train, test, what, epochs=3)
    row = mnist.train_nnmpi(task, numpy_backend(), compiled=True)
    assert row["accuracy"] > 0.9 and len(row["epochs_s"]) == 3 and row["data"] == mnist.MADE_UP
    other = {**row, "name": "torch", "total_s": 3 * row["total_s"]}
    assert mnist.total_ratio([row, other])["total"] == pytest.approx(3)  # type: ignore[index]
    assert mnist.total_ratio([row]) is None and "made up" in tables.mnist([row])


def test_pytorchs_epochs() -> None:
    """The same images through its DataLoader, on the CPU."""
    pytest.importorskip("torch")
    part = mnist.made_up(64, 0)
    assert isinstance(part, Dataset)
    row = mnist.train_torch(mnist.MnistTask(part, part, mnist.MADE_UP, epochs=1), "cpu", workers=0)
    assert row["name"] == "torch, DataLoader with 0 workers" and 0 <= row["accuracy"] <= 1


def test_facts_of_the_host() -> None:
    """A report from no device says so."""
    found = collect(numpy_backend())
    assert found["stand_in"] is True and found["device"] == "CPU" and short_name(numpy_backend()) == "stand-in"


def test_options() -> None:
    """Names are checked; --check has cases of its own."""
    assert parse([]).cases == (*CASES, MNIST) and parse(["--check"]).cases == (*TINY, MNIST)
    for words in (["--cases", "lstm"], ["--modes", "fp8"], ["--cases", ","], ["--rounds", "0"]):
        with pytest.raises(UsageError):
            parse(words)


def run(*words: str, stand_in: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, on the stand-in, or where there is no device."""
    paths = [str(STAND_IN)] * stand_in
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "benchmarks/gpu", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)


def test_without_a_device() -> None:
    """One sentence, and status 1."""
    done = run("--check", stand_in=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("python benchmarks/gpu: nothing can be measured, for this benchmark needs a device: ")


@pytest.mark.slow(BENCHMARK)
def test_a_reduced_run_on_the_stand_in(tmp_path: Path) -> None:
    """All of a run: judged, timed, compared with ceilings, written."""
    file = tmp_path / "found.json"
    done = run("--check", "--without-torch", "--modes", "bf16", "--cases", "cnn,gpt-fill,mnist", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [(row["case"], row["name"]) for row in found["rows"]] == [
        (case, name) for case in ("cnn", "gpt-fill") for name in ("nnmpi", "nnmpi compiled")
    ]
    assert all(row["device_s"] > 0 and row["host_s"] > 0 and "failed" not in row for row in found["rows"])
    assert found["checked_only"] and found["facts"]["stand_in"] and len(found["mnist"]) == 2
