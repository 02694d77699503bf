"""--precision is refused where nothing computes in it; bf16 on the host is a run like others."""

from threading import get_ident

import numpy as np
import pytest

from nnmpi import load, models, simulate
from nnmpi.backend import onednn
from nnmpi.backend.precision import describe_products, use_precision
from nnmpi.base.errors import UsageError
from nnmpi.compose import trainer
from tests.harness.refusals import told
from tests.worker_options import work


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--precision bf16 --dtype float64",
            "--precision bf16 rounds float32, and --dtype is float64",
        ),
        *(
            (f"--precision {name} --backend numpy", f"--precision {name} needs")
            for name in ("tf32", "fp16")
        ),
        ("--precision fp16 --jit", "--jit compiles only for float32 on the CPU"),
        ("--precision fp8", "fp8"),
    ],
)
def test_what_does_not_go_together(train, words, message):
    with pytest.raises(UsageError, match=message):
        train(f"--model mlp --dataset iris --max-steps 1 {words}")


def weights(run):
    """Return all weights of a run as one array."""
    state = load(run).model.state()
    return np.concatenate([state[name].ravel() for name in sorted(state)])


@pytest.mark.host_only("a device has its own bf16")
def test_a_run_in_bf16(train, capsys):
    """The header says what multiplies. Resumed, it ends with the same bits, which are not
    float32's; evaluated, it has the result that its end printed.
    """
    words = "--epochs 6"
    full = train(f"{words} --precision bf16")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"float32, precision bf16 ({describe_products()}); " in printed
    half = train(f"{words} --precision bf16 --stop-after 5")
    train(f"--resume {half}")
    single = train(words)
    np.testing.assert_array_equal(weights(half), weights(full))
    assert 1e-6 < np.abs(weights(single) - weights(full)).max() < 0.1


@pytest.mark.host_only("a device has its own bf16")
def test_ranks_that_multiply_by_other_means_are_refused(monkeypatch):
    """All say it: replicas would not have the same bits."""

    ranks = {}
    monkeypatch.setattr(trainer, "installed", lambda: f"unit {ranks[get_ident()]}")

    def program(group):
        ranks[get_ident()] = group.rank
        model = models.mlp((4,), 3).initialize(seed=0)
        with use_precision("bf16"):
            return told(UsageError, lambda: work(model, group).release())

    messages = simulate(program, 2)
    said = "rank 0 has products by unit 0; rank 1 has products by unit 1"
    assert all(said in message for message in messages)


def test_without_the_library_the_header_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(onednn, "find", lambda: onednn.Found(None, "is not installed: pip"))
    assert describe_products() == (
        "products of rounded operands by NumPy, slower than float32: oneDNN is not installed: pip"
    )
