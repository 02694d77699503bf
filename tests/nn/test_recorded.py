"""What a step computes with in Python, and what of it replays repeat: no step repeats an old value
beyond the next audit, wherever it lies; what is recorded twice is compared.
"""

import random
import warnings
from typing import Any

import numpy as np
import pytest

import nnmpi
from nnmpi import models, nn, ops, optim
from nnmpi.base.errors import UsageError
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from tests.harness.slow import MORE_SEEDS
from tests.nn.idioms import CHANGES, USES, Idiom, Reads, all_idioms, eager, sources
from tests.nn.tally import Tally

pytestmark = [
    pytest.mark.host_only("a device's graphs cannot be compared"),
    pytest.mark.filterwarnings("ignore:the (step|model) computes with:UserWarning"),
]

CALLS = 20
AUDITS = {2, 4, 8, 15, 16}


def check_idiom(idiom: Idiom, folder: Any) -> None:
    """Compare each call with the eager one: a wrong one is named by the next audit."""
    read, put = sources(folder)[idiom.source]
    use, change = USES[idiom.use], CHANGES[idiom.change]

    def step(x: Any) -> Any:
        return use(x, read())

    compiled, wrong, failed = nnmpi.compile(step), [], 0
    for call in range(1, CALLS + 1):
        put(change(call))
        x = np.arange(4.0) + 1 + call
        right = step(Tensor(x)).data
        try:
            came = compiled(x).data
        except UsageError as error:
            assert "may have used an old value" in str(error)
            failed = call
            since = int(str(error).partition("since number ")[2].split()[0])
            if idiom.change != "in each call":  # one that is seen in every fifth call has no first
                assert all(since <= number < call for number in wrong), (wrong, since)
            wrong = []
            continue
        if came.shape != right.shape or not np.array_equal(came, right):
            wrong.append(call)
            assert call not in AUDITS, "an audit computes eagerly"
    assert not wrong, f"calls {wrong} were silently wrong"
    if idiom.change in ("never", "at call 2"):
        assert not failed
    if idiom.change == "never" and idiom.use != "decided by the input":
        reads_in_use = idiom.use == "a tensor's array"
        assert compiled.recordings == 1 or reads_in_use or compiled.refusal.startswith("Python")


SEEDS = [pytest.param(seed, marks=pytest.mark.slow(MORE_SEEDS)) if seed else seed for seed in range(8)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_idiom_is_silently_wrong_beyond_an_audit(seed, tmp_path):
    """An eighth of 1,400 idioms for each seed."""
    idioms = [*all_idioms(tmp_path)]
    random.Random(0).shuffle(idioms)
    for idiom in idioms[seed::8]:
        try:
            check_idiom(idiom, tmp_path)
        except BaseException as error:
            error.add_note(idiom.text)
            raise
