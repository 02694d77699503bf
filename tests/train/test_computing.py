"""When numba's kernels compute, the same on all ranks, and how many threads the BLAS has."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import threadpoolctl

from nnmpi import models, simulate
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.blas import loaded_pools
from nnmpi.base.launcher import VARIABLES
from nnmpi.data import Dataset
from nnmpi.train import computing
from nnmpi.train.build import build_model
from nnmpi.train.cli import main, parse
from nnmpi.train.computing import choose_computing, multiplications
from nnmpi.train.config import Config


def threads():
    """Return how many threads each BLAS has."""
    return {
        item["num_threads"]
        for item in threadpoolctl.threadpool_info()
        if item["user_api"] == "blas"
    }


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a BLAS has one thread here in any case")
def test_a_rank_has_one_thread_unless_told_otherwise(monkeypatch):
    """A process of its own and simulated ranks; what was there comes back."""
    loaded_pools.cache_clear()  # another test may have loaded a second BLAS since, as SciPy has one
    with threadpoolctl.threadpool_limits(2, "blas"):
        monkeypatch.setenv(VARIABLES[0], "2")
        with computing.computing(Config()):
            assert threads() == {2}
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        with computing.computing(Config()):
            assert threads() == {1}
        assert simulate(lambda group: threads(), 2) == [{1}, {1}]
        assert threads() == {2}


# ---------------------------------------------------------------- numba's kernels

IRIS = [
    "--dataset",
    "iris",
    "--model",
    "mlp",
    "--hidden",
    "50",
    "--batch-size",
    "64",
    "--epochs",
    "100",
]
MNIST = ["--model", "cnn", "--batch-size", "64", "--epochs", "1"]


def samples(count, *shape, tokens=False):
    """Return as many samples of nothing, of ten classes."""
    x = np.broadcast_to(np.zeros((), np.int64 if tokens else np.float32), (count, *shape))
    return Dataset("nothing", x, np.zeros((count, *shape) if tokens else count, np.int64), 10)


def work(words, train):
    """Return how much the run of a command multiplies."""
    config = parse(words)
    return multiplications(
        config.optimization, build_model(config.model, train.sample_shape, train.classes), train
    )


def test_how_much_a_run_multiplies():
    """A convolution's weights once for each pixel, a language model's for each token; --max-steps
    may end it early.
    """
    assert work(IRIS, samples(120, 4)) == (4 * 50 + 50 * 3 - 150 + 500) * 120 * 100
    images = samples(60000, 28, 28, 1)
    entire = work(MNIST, images)
    assert entire > 60000 * 784 * (9 * 32 + 9 * 32 * 64)
    assert work([*MNIST, "--max-steps", "10"], images) == entire * 640 / 60000
    full = "--model cnn --batch-size full --epochs 1 --max-steps 10"
    assert work(full.split(), images) == entire
    gpt = ["--model", "gpt", "--layers", "1", "--features", "8", "--heads", "1", "--epochs", "1"]
    short, long = (work(gpt, samples(5, length, tokens=True)) for length in (16, 32))
    assert long > 2 * short


ON_HOST = pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")


@ON_HOST
@pytest.mark.parametrize(
    "words, version, chosen, said",
    [
        (MNIST, "1.0", "on", "numba's, which are faster"),
        ([*MNIST, "--max-steps", "100"], "1.0", "off", "NumPy's; loading numba's"),
        (MNIST, "", "off", "NumPy's; numba's are faster"),
        ([*MNIST, "--max-steps", "100"], "", "off", ""),
        ([*MNIST, "--dtype", "float64"], "1.0", "off", ""),
        ([*MNIST, "--precision", "bf16"], "1.0", "on", "numba's, which are faster"),
        ([*MNIST, "--precision", "fp16"], "1.0", "off", ""),
        ([*MNIST, "--no-jit"], "1.0", "off", ""),
        ([*MNIST, "--max-steps", "1", "--jit"], "1.0", "on", ""),
    ],
)
def test_when_numbas_kernels_compute(group, monkeypatch, words, version, chosen, said):
    """Where it is installed and the run is long enough, or where it is asked for."""
    monkeypatch.setattr(computing, "installed_numba", lambda: version)
    monkeypatch.setattr(computing, "_loads", lambda: True)
    config, result = choose_computing(
        parse(words), models.cnn((28, 28, 1), 10), samples(60000, 28, 28, 1), numpy_backend(), group
    )
    assert config.run.jit == chosen
    assert result.removeprefix("kernels: ").startswith(said) and bool(result) == bool(said)


@ON_HOST
@pytest.mark.simulated(max_size=4)
@pytest.mark.parametrize(
    "name, has, lacks", [("installed_numba", "1.0", ""), ("_loads", True, False)]
)
def test_one_rank_without_numba_is_enough(group, monkeypatch, name, has, lacks):
    """All ranks take the same kernels: those that each of them has."""
    if group.is_root:
        answers = iter([has] * (group.size - 1) + [lacks])
        monkeypatch.setattr(computing, "installed_numba", lambda: "1.0")
        monkeypatch.setattr(computing, "_loads", lambda: True)
        monkeypatch.setattr(computing, name, lambda: next(answers))
    group.barrier()
    config, result = choose_computing(
        parse(MNIST), models.cnn((28, 28, 1), 10), samples(60000, 28, 28, 1), numpy_backend(), group
    )
    assert config.run.jit == "off"
    assert ("pip install" in result) == (name == "installed_numba")


def weights(folder):
    """Return the hashes of a run's weights, and whether it has used numba's kernels."""
    ended, saved = (
        json.loads((folder / name).read_text()) for name in ("finished.json", "config.json")
    )
    return [ended["weights_sha256"], saved["jit"]]


@ON_HOST
def test_a_choice_is_that_of_the_option_and_stays(group, monkeypatch, tmp_path):
    """A run that takes numba's kernels by itself has the bits of one that is told to, and when it
    goes on, too.
    """
    pytest.importorskip("numba")
    digits = [
        "--epochs",
        "1",
        "--max-steps",
        "4",
        "--quiet",
        "--model",
        "mlp",
        "--hidden",
        "16",
        "--out",
    ]
    main([*digits, str(tmp_path / "told"), "--jit"], group)
    main([*digits, str(tmp_path / "plain")], group)
    with monkeypatch.context() as patch:
        patch.setattr(computing, "PAYS", 1.0)
        main([*digits, str(tmp_path / "own"), "--stop-after", "2"], group)
    main(["--resume", str(tmp_path / "own"), "--quiet"], group)  # so short a run has NumPy's
    assert (
        "kernels:     numba's, which are faster" in (tmp_path / "own" / "console.txt").read_text()
    )
    assert (
        "kernels:     NumPy's; loading numba's" in (tmp_path / "plain" / "console.txt").read_text()
    )
    assert weights(tmp_path / "own") == weights(tmp_path / "told")
    assert weights(tmp_path / "plain")[0] != weights(tmp_path / "told")[0]
    assert weights(tmp_path / "plain")[1] == "off"


def test_a_short_run_does_not_load_numba(tmp_path):
    """Loading it takes longer than iris."""
    words = [*IRIS[:-1], "2", "--quiet", "--out", str(tmp_path / "run")]
    program = (
        f"import sys\nfrom nnmpi.train.__main__ import launch\nlaunch({words})\nprint('numba' in"
        " sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=90
    )
    assert ended.stdout.split() == ["False"]
