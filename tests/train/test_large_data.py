"""Training from a mapped set gives the bits of training from memory, in each layout and resumed; a
set that changed under a run is named.
"""

import errno
import re
from os import EX_CANTCREAT

import numpy as np
import pytest

import nnmpi.data.catalogue
from nnmpi.base.errors import DataError, NnmpiError, UsageError
from nnmpi.data.mapped import FileArray
from nnmpi.train.cli import main
from tests.harness.commands import on_ranks
from tests.harness.slow import cases
from tests.train.jobs import arrays

ROWS = 160
RANDOM = np.random.default_rng(0)
X, FIELDS = RANDOM.integers(0, 256, (ROWS, 8, 8, 1)).astype("u1"), RANDOM.random((ROWS, 3)) * 50
FORMS = {
    "bytes": ("--model cnn", {"x": X, "y": X[:, 0, 0, 0] % 4}),
    "double": ("--model mlp", {"x": X.reshape(ROWS, -1) / 7.0, "y": X[:, 0, 0, 0] % 4}),
    "yes or no": ("--model mlp --loss bce", {"x": X, "y": X[:, 0, 0, 0] % 2}),
    "quantities": ("--model mlp --loss mse", {"x": X, "y": FIELDS}),
}
LAYOUTS = {"one rank": (1, ""), "dp": (3, ""), "pp": (2, "--pp 2"), "tp": (2, "--tp 2")}
SHORT = "--backend numpy --max-steps 9 --batch-size 24 --save-every 4"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The folder of data sets; the cache is beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr("nnmpi.train.inputs.SMALL_BYTES", 0)  # nothing is scaled ahead
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def set_small(monkeypatch, nbytes):
    for module in ("catalogue", "arrays"):
        monkeypatch.setattr(f"nnmpi.data.{module}.SMALL_BYTES", nbytes)


def trained(words, out, ranks):
    on_ranks(main, f"{SHORT} {words} --out {out}", ranks)
    return arrays(out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layout",), cases([(name,) for name in LAYOUTS], lambda name: name == "dp")
)
def test_mapped_prepared_and_in_memory_train_alike(form, layout, data, tmp_path, monkeypatch):
    (words, content), (ranks, options) = FORMS[form], LAYOUTS[layout]
    results = []
    for place, save, nbytes in (
        ("memory", np.savez, 2**40),
        ("mapped", np.savez, 0),
        ("prepared", np.savez_compressed, 0),
    ):
        (data / place).mkdir()
        save(data / place / "set.npz", **content)
        set_small(monkeypatch, nbytes)
        words_of = f"{words} {options} --dataset {data / place / 'set.npz'}"
        results.append(trained(words_of, tmp_path / place, ranks))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_resumed_run_ends_alike_and_names_a_changed_set(save, data, tmp_path, monkeypatch):
    set_small(monkeypatch, 0)
    words, content = FORMS["bytes"]
    source = data / "set.npz"
    save(source, **content)
    words = f"{words} --dataset {source}"
    whole = trained(words, tmp_path / "whole", 2)
    trained(f"{words} --stop-after 5", tmp_path / "cut", 2)
    for entry in (tmp_path / "cache" / "sets").iterdir():  # another node's, or removed by hand
        nnmpi.data.cache.remove_folder(entry)
    on_ranks(main, f"--resume {tmp_path / 'cut'}", 3 if save is np.savez else 2)
    if save is not np.savez:
        assert arrays(tmp_path / "cut") == whole
    trained(f"{words} --stop-after 5", tmp_path / "changed", 1)
    save(source, x=content["x"][::-1], y=content["y"])
    with pytest.raises(NnmpiError, match="labels or weights have changed"):
        on_ranks(main, f"--resume {tmp_path / 'changed'}", 1)


def test_a_set_that_is_cut_in_the_middle_of_a_run_is_named(data, tmp_path, monkeypatch):
    set_small(monkeypatch, 0)
    words, content = FORMS["bytes"]
    np.savez(data / "set.npz", **content)
    take, calls = FileArray.take, []

    def cut_later(self, *args, **options):
        calls.append(self)
        if len(calls) == 12:
            with open(data / "set.npz", "r+b") as file:
                file.truncate(400)
        return take(self, *args, **options)

    monkeypatch.setattr(FileArray, "take", cut_later)
    with pytest.raises(DataError, match=f"{re.escape(str(data))}.*was changed while it was in use"):
        trained(f"{words} --dataset {data / 'set.npz'}", tmp_path / "run", 1)


def test_a_full_cache_has_a_status_of_its_own(data, monkeypatch):
    """As other full disks have it, also where the command puts its option before the sentence."""
    np.savez_compressed(data / "set.npz", **FORMS["bytes"][1])
    set_small(monkeypatch, 0)

    def full(file, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nnmpi.data.prepared.write_json", full)
    words = f"--dataset data/set.npz {FORMS['bytes'][0]} {SHORT}"
    with pytest.raises(UsageError, match="NNMPI_DATA") as raised:
        on_ranks(main, words, 1)
    assert raised.value.exit_status == EX_CANTCREAT
