"""Compiled kernels: each against a float64 reference, and how they are switched on, kept on disk,
and done without.
"""

import os
import subprocess
import sys
import threading
from contextvars import ContextVar

import numpy as np
import pytest

from nnmpi.backend.kernels import jit, kernels_of, setting
from nnmpi.base.files import locked
from tests.harness.slow import KERNELS


@pytest.fixture
def compiled():
    """The kernels of this process."""
    pytest.importorskip("numba")
    from nnmpi.backend.jit import kernels

    return kernels


# ---------------------------------------------------------------- switching


def test_off_unless_switched_on():
    """Nested contexts switch on and off, and each puts back what was before, after an error too."""
    pytest.importorskip("numba")
    assert setting() is None
    with jit():
        assert setting() is True
        with jit(False):
            assert setting() is False
        with pytest.raises(ZeroDivisionError), jit(False):
            raise ZeroDivisionError
        assert setting() is True
        seen = []
        thread = threading.Thread(target=lambda: seen.append(setting()))
        thread.start()
        thread.join()
        assert seen == [None]  # a mode of the context, not of the process
    assert setting() is None


def run(program, **environment):
    """Run a program in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba():
    """All but `jit` works, and `jit` says what to install."""
    program = """
import sys
sys.modules["numba"] = None
import numpy as np
import nnmpi
from nnmpi import nn, ops, optim
from nnmpi.backend.kernels import jit
model = nn.Sequential(
    nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
)
model.initialize(0)
ops.cross_entropy(
    model(nnmpi.Tensor(np.ones((2, 4, 4, 1), np.float32))), np.array([0, 1])
).backward()
optim.Adam(model.storage).step()
with jit(False):
    pass
try:
    with jit():
        pass
except nnmpi.NnmpiError as error:
    print(error)
"""
    words = run(program)
    assert "numba" in words
    assert "pip install numba" in words


@pytest.mark.slow(KERNELS)
def test_the_next_process_finds_the_machine_code(tmp_path):
    """Kernels for given sizes too: numba tells them apart by the sizes, and knows them again."""
    pytest.importorskip("numba")
    program = """
import numba
from nnmpi.backend.jit import kernels as k
found = [k.loop("lstm_step"), *k.depthwise(2, 3), *k.depthwise(3, 2)]
print(
    sum(sum(f.stats.cache_hits.values()) for f in found),
    sum(sum(f.stats.cache_misses.values()) for f in found),
)
"""
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "0 5"
    assert run(program, NUMBA_CACHE_DIR=str(tmp_path)) == "5 0"


@pytest.mark.slow(KERNELS)
def test_a_changed_helper_is_noticed(tmp_path):
    """Machine code made from another state of the folder is not used, though the kernel's own file
    is the same.
    """
    pytest.importorskip("numba")
    program = """
import sys
from nnmpi.backend.jit import build, kernels, loops
build.sources = lambda: sys.argv[0] + "{}"
found = build.build(loops.lstm_step, *kernels.LOOPS["lstm_step"])
print(sum(found.stats.cache_hits.values()), sum(found.stats.cache_misses.values()))
"""
    result = [
        run(program.format(state), NUMBA_CACHE_DIR=str(tmp_path)) for state in ("old", "old", "new")
    ]
    assert result == ["0 1", "1 0", "0 1"]


@pytest.mark.slow(KERNELS)
def test_one_process_compiles_and_the_others_load(tmp_path):
    """Of several at once; the others have waited."""
    pytest.importorskip("numba")
    program = """
from nnmpi.backend.jit import kernels
print(sum(kernels.loop("lstm_step").stats.cache_misses.values()))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert sorted(process.communicate(timeout=100)[0].strip() for process in running) == [
        "0",
        "0",
        "1",
    ]


def test_a_process_that_keeps_the_lock_is_waited_for_once(compiled, tmp_path, monkeypatch):
    """One that was stopped while it compiled would hold up each kernel of all others."""
    from nnmpi.backend.jit import build

    monkeypatch.setenv("NNMPI_DATA", str(tmp_path))
    monkeypatch.setattr(build, "patience_s", ContextVar("patience_s", default=0.3))
    with locked(build.kernels_folder()):
        for _ in range(2):
            built = build.build(lambda x: None, build.read(1))
            assert built(np.ones(3, np.float32)) is None
            assert build.patience_s.get() == 0


# ---------------------------------------------------------------- dense layers


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_softmax_shows_what_is_not_finite(compiled, bad):
    """The loss is NaN then, at whatever place it stands."""
    logits = np.zeros((20, 20), np.float32)
    np.fill_diagonal(logits, bad)
    with jit(), np.errstate(invalid="ignore"):
        labels = np.zeros(20, np.int64)
        losses, _ = kernels_of(logits).softmax_loss(logits, labels, None, 0)
    assert np.isnan(losses).all()
