"""Random programs of whole steps: a compiled one gives the eager one's bits, or says that it may
not; and of one that changes nothing it never says so.
"""

import importlib.util
import random
import warnings
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn
from nnmpi.nn import compiled
from nnmpi.nn.compiled import OldValueError
from tests.harness.slow import MORE_SEEDS
from tests.nn.steps import program

pytestmark = pytest.mark.host_only("a device's graphs cannot be compared")
CALLS, PROGRAMS, TESTS = 24, 30, 10
NUMBERS = count()


def imported(source, folder):
    """Return a program as a module of a file of its own."""
    file = folder / f"program_{next(NUMBERS)}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits(result):
    """Return a step's result as bytes."""
    if isinstance(result, dict):
        return b"".join(map(bits, result.values()))
    return b"".join(map(bits, result)) if isinstance(result, list) else result.data.tobytes()


def run(seed, folder, wrap, failed):
    """Return the bits of each call, with the weights'; None for one that ended in an error."""
    source, _, _ = program(seed)
    module, draw = imported(source, folder), random.Random(seed)
    at, sizes = draw.randint(2, CALLS - 1), draw.choice([(6,), (6, 3), (6, 6, 2)])
    rows, step, found = np.random.default_rng(seed), wrap(module.step), []
    for call in range(CALLS):
        if call == at:
            module.change()
        size = sizes[call % len(sizes)]
        x, y = rows.normal(size=(size, 4)), rows.integers(0, 4, size)
        with nn.training(step=call):
            try:
                result = bits(step(x, y))
            except OldValueError as error:
                failed.append(str(error))
                break
        found.append((result, b"".join(x.tobytes() for x in module.model.storage.data)))
    return found, at, step


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=pytest.mark.slow(MORE_SEEDS)) if first else first
        for first in range(0, TESTS * PROGRAMS, PROGRAMS)
    ],
)
def test_random_steps_are_right_or_refused(first, tmp_path, monkeypatch):
    replayed = 0
    for seed in range(first, first + PROGRAMS):
        failed = []
        monkeypatch.setattr(compiled, "fail_at_end", lambda error, to=failed: to.append(str(error)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right, _, _ = run(seed, tmp_path, lambda step: lambda x, y: step(Tensor(x), y), [])
            came, at, step = run(seed, tmp_path, nnmpi.compile, failed)
            replayed += step.recordings > 0
            step.compare_at_end()
        _, changed, names = program(seed)
        text = f"program {seed}: {changed or 'no change'} at {at}, {names}, {step.refusal}"
        wrong = [
            call for call, pair in enumerate(zip(right, came, strict=False)) if pair[0] != pair[1]
        ]
        assert changed or not failed, f"{text}: {failed}"
        assert failed or not wrong, f"{text}: calls {wrong} are silently wrong"
        assert not wrong or wrong[0] >= at, text
    assert replayed > PROGRAMS / 2


def test_a_program_is_the_same_for_the_same_seed():
    assert program(3) == program(3)
    assert SimpleNamespace(seed=program(3)) != SimpleNamespace(seed=program(4))
