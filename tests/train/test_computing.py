"""Which BLAS a run multiplies with, and when numba's kernels compute: what is kept and said, the same on all ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnmpi import models
from nnmpi.backend import gemm
from nnmpi.backend.backend import numpy_backend
from nnmpi.comm.group import Group
from nnmpi.data.dataset import Dataset
from nnmpi.errors import UsageError
from nnmpi.train import computing
from nnmpi.train.build import build_model
from nnmpi.train.cli import main, parse
from nnmpi.train.computing import BlasChoice, choose_blas, choose_kernels, load_times, multiplications, sizes_of
from nnmpi.train.config import RunConfig

MODEL = models.mlp((784,), 10, (300, 200), "relu")


class Installed:
    """In MKL's place."""

    version = "1.2"


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, float]]:
    """With MKL on all ranks, first the faster and then the slower one; grows each time that they are timed."""
    times = [{"numpy": 2.0, "mkl": 1.6}]

    def time(*_: Any) -> dict[str, float]:
        found = times[-1]
        times.append({"numpy": 1.0, "mkl": 2.0})
        return found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(computing, "may_gain_by_avx2", lambda: False)
    monkeypatch.setattr(computing, "find_mkl", lambda: Path(__file__))
    monkeypatch.setattr(computing, "installed_mkl", Installed)
    monkeypatch.setattr(gemm, "installed_mkl", Installed)
    monkeypatch.setattr(computing, "_time", time)
    monkeypatch.setattr(computing, "_threads", lambda *_: (0, ""))
    return times


def choose(group: Group, **options: Any) -> BlasChoice:
    """Return the choice for a batch of 128."""
    return choose_blas(RunConfig(**options), MODEL, 128, group)


def test_the_matrices_with_most_work() -> None:
    """Of a convolution the kernels as a matrix; no table, bias or matrix of little work, and nothing too large."""
    assert sizes_of(MODEL, 128) == [(128, 784, 300, 1), (128, 300, 200, 1)]
    assert sizes_of(MODEL, 8) == [(8, 784, 300, 1)]
    assert sizes_of(models.mlp((4,), 3, (50,), "relu"), 10**6) == []
    assert sizes_of(models.cnn((28, 28, 1), 10, (), 0.0), 2)[0] == (1024, 288, 64, 1)
    assert max(sizes_of(models.gpt(50257, 64, 768, 2, 12), 10**6)) == (1024, 2048, 768, 1 + 2)


@pytest.mark.simulated(max_size=4)
def test_all_ranks_take_the_same(timed: list[dict[str, float]], group: Group) -> None:
    """The first rank's choice: two that were timed one after the other would differ here."""
    names = group.gather(choose(group).name)
    assert names == ["mkl"] * group.size
    assert len(timed) == 2  # once, and by one of them


def test_timed_once_and_kept(timed: list[dict[str, float]], group: Group) -> None:
    """The second run reads the first one's times; a damaged file, or one of another machine, is measured again."""
    first = choose(group)
    assert first.name == "mkl"
    assert "mkl 1.2, 1.25 times as fast as" in first.line and first.line.endswith("(timed now)")
    assert choose(group).line == first.line.replace("timed now", "kept")
    (file,) = computing.cache_folder().glob("blas-*.json")  # type: ignore[union-attr]
    kept = json.loads(file.read_text())
    for damage in ("", "{", "[]", json.dumps(kept | {"seconds": {"numpy": 0.0, "mkl": 1.0}}),
                   json.dumps(kept | {"facts": {}})):  # fmt: skip
        file.write_text(damage)
        again = choose(group)
        assert again.name == "numpy" and "mkl 1.2 takes 2.00 of its time (timed now)" in again.line
        assert load_times(file, kept["facts"]) == {"numpy": 1.0, "mkl": 2.0}


def test_little_gain_is_none(timed: list[dict[str, float]], group: Group) -> None:
    """Within noise NumPy's own stays."""
    timed.append({"numpy": 1.02, "mkl": 1.0})
    assert choose(group).name == "numpy"


def test_without_a_cache_folder(timed: list[dict[str, float]], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed each time."""
    monkeypatch.setattr(computing, "cache_folder", lambda: None)
    assert [choose(group).name for _ in range(2)] == ["mkl", "numpy"]


def test_where_there_is_no_choice(timed: list[dict[str, float]], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MKL, or for a model whose matrices are small, NumPy's own, and not a word."""
    small = models.mlp((4,), 3, (50,), "relu")
    assert choose_blas(RunConfig(), small, 64, group) == BlasChoice()
    assert choose(group, blas="numpy") == BlasChoice()
    assert choose(group, blas="mkl") == BlasChoice("mkl", 0, "mkl 1.2, as asked for")
    monkeypatch.setattr(computing, "find_mkl", lambda: None)
    assert choose(group) == BlasChoice()


def test_code_for_avx2_takes_part(timed: list[dict[str, float]], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor may gain by it, but for a model with convolutions; the fastest of all is taken."""
    monkeypatch.setattr(computing, "may_gain_by_avx2", lambda: True)
    timed.append({"numpy": 2.1, "avx2": 2.0, "mkl": 2.05})
    chosen = choose(group)
    assert chosen.name == "avx2"
    assert chosen.line.startswith("OpenBLAS's code for AVX2, 1.05 times as fast as ")
    assert computing._candidates(models.cnn((28, 28, 1), 10)) == ["numpy", "mkl"]


def test_mkl_that_is_not_there(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is refused in a sentence."""

    def missing() -> None:
        raise UsageError("MKL is not installed")

    monkeypatch.setattr(gemm, "installed_mkl", missing)
    with pytest.raises(UsageError, match="MKL is not installed"):
        choose(group, blas="mkl")


@pytest.mark.parametrize(("several_s", "threads"), [(0.5, 2), (8.0, 1)])
def test_threads_of_a_single_process(
    group: Group, monkeypatch: pytest.MonkeyPatch, several_s: float, threads: int
) -> None:
    """As many as were faster, where neither a launcher nor the environment nor an option says how many."""
    for name in computing.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(computing, "blas_pool", lambda _: {"internal_api": "own", "num_threads": 2})
    monkeypatch.setattr(computing, "usable_cores", lambda: (2, 2))
    monkeypatch.setattr(computing, "read_launch", lambda _: None)
    monkeypatch.setattr(computing, "_time", lambda *_: {"1": 1.0, "2": several_s})
    choice = choose(group, blas="numpy")
    assert choice.threads == threads
    assert choice.line == ("2 threads, 2.00 times as fast as one" if threads == 2 else
                           "1 thread, as 2 take 8.00 times as long now")  # fmt: skip
    assert choose(group, blas="numpy", blas_threads=2) == BlasChoice("numpy", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose(group, blas="numpy") == BlasChoice()


def test_times_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three products of a layer are multiplied by each way in turns, and the least of each way counts."""
    seen: list[tuple[tuple[int, ...], ...]] = []
    ticks = iter(range(10**6))

    def multiply(xp: Any, a: Any, b: Any, out: Any) -> None:
        seen.append((a.shape, b.shape, out.shape))

    monkeypatch.setattr(computing, "gemm", multiply)
    times = computing._time({"1": "numpy", "2": "numpy"}, [(2, 3, 4, 5)], "float32", lambda: next(ticks), 0)
    assert set(seen) == {((2, 3), (3, 4), (2, 4)), ((3, 2), (2, 4), (3, 4)), ((2, 4), (4, 3), (2, 3))}
    assert len(seen) == 3 * 2 * computing.ROUNDS
    assert times == {"1": 15, "2": 15}


# ---------------------------------------------------------------- numba's kernels

IRIS = ["--dataset", "iris", "--model", "mlp", "--hidden", "50", "--batch-size", "64", "--epochs", "100"]
MNIST = ["--model", "cnn", "--batch-size", "64", "--epochs", "1"]


def samples(count: int, *shape: int, tokens: bool = False) -> Dataset:
    """Return as many samples of nothing, of ten classes."""
    x = np.broadcast_to(np.zeros((), np.int64 if tokens else np.float32), (count, *shape))
    return Dataset("nothing", x, np.zeros((count, *shape) if tokens else count, np.int64), 10)


def work(words: list[str], train: Dataset) -> float:
    """Return how much the run of a command multiplies."""
    config = parse(words)
    return multiplications(config.optimization, build_model(config.model, train.sample_shape, train.classes), train)


def test_how_much_a_run_multiplies() -> None:
    """A convolution's weights once for each pixel, a language model's for each token; --max-steps may end it early."""
    assert work(IRIS, samples(120, 4)) == (4 * 50 + 50 * 3 - 150 + 500) * 120 * 100
    images = samples(60000, 28, 28, 1)
    whole = work(MNIST, images)
    assert whole > 60000 * 784 * (9 * 32 + 9 * 32 * 64)
    assert work([*MNIST, "--max-steps", "10"], images) == whole * 640 / 60000
    full = ["--batch-size", "full", "--max-steps", "10"]
    assert work([*MNIST, *full], images) == whole
    gpt = ["--model", "gpt", "--layers", "1", "--features", "8", "--heads", "1", "--epochs", "1"]
    short, long = (work(gpt, samples(5, length, tokens=True)) for length in (16, 32))
    assert long > 2 * short


@pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")
@pytest.mark.parametrize(
    ("words", "version", "chosen", "said"),
    [
        (MNIST, "1.0", "on", "numba's, which are faster"),
        ([*MNIST, "--max-steps", "100"], "1.0", "off", "NumPy's; loading numba's"),
        (MNIST, "", "off", ""),
        ([*MNIST, "--dtype", "float64"], "1.0", "off", ""),
        ([*MNIST, "--precision", "bf16"], "1.0", "off", ""),
        ([*MNIST, "--no-jit"], "1.0", "off", ""),
        ([*MNIST, "--max-steps", "1", "--jit"], "1.0", "on", ""),
    ],
)
def test_when_numbas_kernels_compute(
    group: Group, monkeypatch: pytest.MonkeyPatch, words: list[str], version: str, chosen: str, said: str
) -> None:
    """Where it is installed and the run is long enough, or where it is asked for."""
    monkeypatch.setattr(computing, "installed_numba", lambda: version)
    monkeypatch.setattr(computing, "_loads", lambda: True)
    config, line = choose_kernels(
        parse(words), models.cnn((28, 28, 1), 10), samples(60000, 28, 28, 1), numpy_backend(), group
    )
    assert config.run.jit == chosen
    assert line.startswith(said) and bool(line) == bool(said)


@pytest.mark.simulated(max_size=4)
@pytest.mark.parametrize(("name", "has", "lacks"), [("installed_numba", "1.0", ""), ("_loads", True, False)])
def test_one_rank_without_numba_is_enough(
    group: Group, monkeypatch: pytest.MonkeyPatch, name: str, has: Any, lacks: Any
) -> None:
    """All ranks take the same kernels: those that each of them has."""
    if group.is_root:
        answers = iter([has] * (group.size - 1) + [lacks])
        monkeypatch.setattr(computing, "installed_numba", lambda: "1.0")
        monkeypatch.setattr(computing, "_loads", lambda: True)
        monkeypatch.setattr(computing, name, lambda: next(answers))
    group.barrier()
    config, line = choose_kernels(
        parse(MNIST), models.cnn((28, 28, 1), 10), samples(60000, 28, 28, 1), numpy_backend(), group
    )
    assert (config.run.jit, line) == ("off", "")


def weights(folder: Path) -> list[Any]:
    """Return the hashes of a run's weights, and whether it has used numba's kernels."""
    ended, kept = (json.loads((folder / name).read_text()) for name in ("finished.json", "config.json"))
    return [ended["weights_sha256"], kept["jit"]]


@pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")
def test_a_choice_is_that_of_the_option_and_stays(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that takes numba's kernels by itself has the bits of one that is told to, and when it goes on, too."""
    pytest.importorskip("numba")
    digits = ["--epochs", "1", "--max-steps", "4", "--quiet", "--model", "mlp", "--hidden", "16", "--out"]
    main([*digits, str(tmp_path / "told"), "--jit"], group)
    main([*digits, str(tmp_path / "plain")], group)
    with monkeypatch.context() as patch:
        patch.setattr(computing, "PAYS", 1.0)
        main([*digits[:3], "2", *digits[4:], str(tmp_path / "own")], group)
    main(["--resume", str(tmp_path / "own"), "--max-steps", "4", "--quiet"], group)  # so short a run has NumPy's
    assert "kernels:     numba's, which are faster" in (tmp_path / "own" / "console.txt").read_text()
    assert "kernels:     NumPy's; loading numba's" in (tmp_path / "plain" / "console.txt").read_text()
    assert weights(tmp_path / "own") == weights(tmp_path / "told")
    assert weights(tmp_path / "plain")[0] != weights(tmp_path / "told")[0]
    assert weights(tmp_path / "plain")[1] == "off"


def test_a_short_run_does_not_load_numba(tmp_path: Path) -> None:
    """Loading it takes longer than iris."""
    words = [*IRIS[:-1], "2", "--quiet", "--out", str(tmp_path / "run")]
    program = f"import sys\nfrom nnmpi.train.cli import launch\nlaunch({words})\nprint('numba' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=90)
    assert ended.stdout.split() == ["False"]
