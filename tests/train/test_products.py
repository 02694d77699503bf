"""Which BLAS a run multiplies with: what is timed, kept, read and said, and that all ranks take the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from nnmpi import models
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.train import products
from nnmpi.train.config import RunConfig
from nnmpi.train.products import BlasChoice, choose_blas, load_times, sizes_of

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
    monkeypatch.setattr(products, "find_mkl", lambda: Path(__file__))
    monkeypatch.setattr(products, "installed_mkl", Installed)
    monkeypatch.setattr(products, "_time", time)
    monkeypatch.setattr(products, "_threads", lambda *_: (0, ""))
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
    (file,) = products.cache_folder().glob("blas-*.json")  # type: ignore[union-attr]
    kept = json.loads(file.read_text())
    for damage in ("", "{", "[]", json.dumps(kept | {"seconds": {"numpy": 0.0, "mkl": 1.0}}),
                   json.dumps(kept | {"facts": {}})):  # fmt: skip
        file.write_text(damage)
        again = choose(group)
        assert again.name == "numpy" and "MKL takes 2.00 of its time (timed now)" in again.line
        assert load_times(file, kept["facts"]) == {"numpy": 1.0, "mkl": 2.0}


def test_little_gain_is_none(timed: list[dict[str, float]], group: Group) -> None:
    """Within noise NumPy's own stays."""
    timed.append({"numpy": 1.02, "mkl": 1.0})
    assert choose(group).name == "numpy"


def test_without_a_cache_folder(timed: list[dict[str, float]], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is timed each time."""
    monkeypatch.setattr(products, "cache_folder", lambda: None)
    assert [choose(group).name for _ in range(2)] == ["mkl", "numpy"]


def test_where_there_is_no_choice(timed: list[dict[str, float]], group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MKL, or for a model whose matrices are small, NumPy's own, and not a word."""
    small = models.mlp((4,), 3, (50,), "relu")
    assert choose_blas(RunConfig(), small, 64, group) == BlasChoice()
    assert choose(group, blas="numpy") == BlasChoice()
    assert choose(group, blas="mkl") == BlasChoice("mkl", 0, "mkl 1.2, as asked for")
    monkeypatch.setattr(products, "find_mkl", lambda: None)
    assert choose(group) == BlasChoice()


def test_mkl_that_is_not_there(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it is refused in a sentence."""

    def missing() -> None:
        raise UsageError("MKL is not installed")

    monkeypatch.setattr(products, "installed_mkl", missing)
    with pytest.raises(UsageError, match="MKL is not installed"):
        choose(group, blas="mkl")


@pytest.mark.parametrize(("several_s", "threads"), [(0.5, 2), (8.0, 1)])
def test_threads_of_a_single_process(
    group: Group, monkeypatch: pytest.MonkeyPatch, several_s: float, threads: int
) -> None:
    """As many as were faster, where neither a launcher nor the environment nor an option says how many."""
    for name in products.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(products, "blas_pool", lambda _: {"internal_api": "own", "num_threads": 2})
    monkeypatch.setattr(products, "usable_cores", lambda: (2, 2))
    monkeypatch.setattr(products, "read_launch", lambda _: None)
    monkeypatch.setattr(products, "_time", lambda *_: {"1": 1.0, "2": several_s})
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

    monkeypatch.setattr(products, "gemm", multiply)
    times = products._time({"1": "numpy", "2": "numpy"}, [(2, 3, 4, 5)], "float32", lambda: next(ticks), 0)
    assert set(seen) == {((2, 3), (3, 4), (2, 4)), ((3, 2), (2, 4), (3, 4)), ((2, 4), (4, 3), (2, 3))}
    assert len(seen) == 3 * 2 * products.ROUNDS
    assert times == {"1": 15, "2": 15}
