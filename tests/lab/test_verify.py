"""The verify command: what its words mean, how two runs are compared, and runs on several ranks,
equal or not.
"""

import subprocess
import sys

import numpy as np
import pytest

from nnmpi.base.errors import HelpAsked, LayoutError, UsageError
from nnmpi.compose.passes import BatchPass
from nnmpi.lab.verify import compare, main, parse, table, tolerance, verdict
from nnmpi.parallel.sequence.attention import RingAttention
from tests.harness.commands import on_ranks, over
from tests.harness.refusals import refuses, usage_error

# ---- words ----


def test_words_mean_a_small_contract_and_what_they_say():
    trial, samples, config = parse([])
    rule, parallel = config.optimization, config.parallel
    assert (config.model.model, config.data.dataset, samples.shape, config.run.dtype) == (
        *("cnn", "digits", None),
        "float64",
    )
    assert (trial.samples, rule.batch_size, trial.steps, parallel.microbatches) == (90, 29, 5, 4)
    assert (rule.optimizer, rule.momentum, parallel.dp) == ("sgd", 0.9, "auto")
    text = (
        "--model a/b.py:build --shape 8 8 3 --classes 7 --samples 20 --batch-size 6 --optimizer"
        " adamw --dp 2"
    )
    trial, samples, config = parse(text.split())
    assert (config.model.model, samples.shape, samples.classes, trial.samples) == (
        "a/b.py:build",
        (8, 8, 3),
        7,
        20,
    )
    assert (config.optimization.optimizer, config.optimization.momentum, config.parallel.dp) == (
        "adamw",
        0.0,
        2,
    )


@pytest.mark.parametrize(
    "words, text",
    [
        ("--pipeline pipedream", "--pipeline pipedream differs from the serial run"),
        ("--dp 0", "--dp is 0"),
        ("--shape", r"--shape is \(\); give"),
        ("--shape 3 0", r"--shape is \(3, 0\); give"),
        ("--classes 3", "--classes is for --shape"),
        ("--model gpt --shape 3", "--model gpt is verified on random tokens"),
        ("--samples 0", "--samples is 0"),
        ("--step 3", "--step is not an option; did you mean --steps"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(words, text):
    usage_error(text, lambda: parse(words.split()))


def test_simulated_ranks_need_no_mpi():
    words = "-m nnmpi verify --simulate 2 --model mlp --hidden 5 --pp 2"
    ran = subprocess.run(
        [sys.executable, *words.split()], capture_output=True, text=True, check=False
    )
    assert (
        ran.returncode == 0 and "layout dp 1 x pp 2" in ran.stdout and "equal within" in ran.stdout
    ), ran.stderr


@pytest.mark.parametrize(
    "words, steps",
    [("--steps 60", 34), ("--steps 20 --dtype float32", 5), ("--steps 35 --batch-size 29", 34)],
)
def test_steps_after_which_a_fault_would_pass_for_rounding_are_refused(group, words, steps):
    """The tolerance doubles with each: after 60 of them it would be 40,000."""
    usage_error(
        f"which could hide a fault; give --steps {steps} or less",
        lambda: main(f"--model mlp --hidden 5 {words}".split(), group),
    )


# ---- two runs ----

SERIAL = {
    "loss of step 1": {"": np.array([2.0])},
    "gradients of step 1": {"0.weight": np.array([[1.0, -2.0]]), "0.bias": np.array([1e-18])},
    "losses of 2 steps": {"": np.array([2.0, 1.5])},
    "norms of the gradients": {"": np.array([1.0, 0.5])},
    "weights after step 2": {"0.weight": np.array([[0.5, 0.25]]), "0.bias": np.array([0.0])},
    "statistics after step 2": {"1.running_mean": np.array([0.1])},
    "evaluation": {"": np.array([1.4, 0.3])},
}
GRADIENTS, WEIGHTS = SERIAL["gradients of step 1"], SERIAL["weights after step 2"]


def findings(exact=False, **changes):
    result = compare({**SERIAL, **changes}, SERIAL, 2, "float64", 16, exact)
    return {item.what: item for item in result}


def test_equal_runs_are_equal_to_the_last_bit():
    result = list(findings(exact=True).values())
    assert all(item.bitwise and item.holds for item in result)
    assert verdict(result) == "equal to the last bit"
    assert [line.split()[-1] for line in table(result)[1:]] == ["bitwise"] * 7


def test_rounding_is_allowed_unless_the_bits_must_be_equal():
    rounded = {
        "gradients of step 1": {**GRADIENTS, "0.weight": GRADIENTS["0.weight"] * (1 + 1e-15)}
    }
    item = findings(**rounded)["gradients of step 1"]
    assert item.holds and not item.bitwise and item.where == "0.weight"
    assert verdict([item, item]) == "equal within the tolerance"
    assert not findings(exact=True, **rounded)["gradients of step 1"].holds


@pytest.mark.parametrize("factor", [0.5, 1 + 1e-9, float("nan")])
def test_more_is_not(factor):
    weights = {**WEIGHTS, "0.weight": WEIGHTS["0.weight"] * factor}
    result = list(findings(**{"weights after step 2": weights}).values())
    wrong = [item for item in result if not item.holds]
    assert [item.what for item in wrong] == ["weights after step 2"]
    assert verdict(result) == "NOT EQUAL: weights after step 2"
    assert any("DIFFERS   (most: 0.weight)" in line for line in table(result))


def test_errors_are_relative_but_not_to_what_is_nothing():
    """A gradient that is 0 but for rounding is measured by the others; a small array by its own
    size, down to 1 %.
    """
    noise = {**GRADIENTS, "0.bias": np.array([-3e-18])}
    assert findings(**{"gradients of step 1": noise})["gradients of step 1"].holds
    small = {"gradients of step 1": {"a": np.array([100.0]), "b": np.array([2.0])}}
    off = {"gradients of step 1": {"a": np.array([100.0]), "b": np.array([2.0 + 1e-9])}}
    (item,) = compare(off, small, 2, "float64", 16, False)
    assert item.error == pytest.approx(5e-10, rel=1e-3) and not item.holds


def test_tolerance_grows_with_steps_and_the_square_root_of_the_samples():
    assert tolerance("float64", 64, 0) == 2 * tolerance("float64", 16, 0)
    assert tolerance("float32", 16, 2) == 4 * tolerance("float32", 16, 0)


# ---- ranks ----

OWN = """
from nnmpi.nn.activation import Tanh
from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Linear
from nnmpi.nn.sharding import Sharding

def build(sample_shape, classes):
    model = Sequential(Linear(sample_shape[0], 9), Tanh(), Linear(9, 7), Tanh(), Linear(7, 7),
                       Tanh(), Linear(7, 6), Tanh(), Linear(6, classes))
    model.sharding = {"0": Sharding.COLUMN, "2": Sharding.ROW}
    return model

def apart(sample_shape, classes):
    model = build(sample_shape, classes)
    model.sharding = {"0": Sharding.COLUMN, "2": Sharding.ROW, "8": Sharding.VOCAB}
    return model
"""


def layouts(size):
    """Return a layout of each kind, in words."""
    result = [f"--dp {size}", f"--pp {size}", f"--tp {size}"]
    return result + ([f"--dp {size // 4} --pp 2 --tp 2"] if size % 4 == 0 else [])


@pytest.mark.mpi
def test_a_users_own_model_is_the_serial_run(group, tmp_path, capsys):
    """Of random samples; every rank gets the answer, and the first one prints the table."""
    file = tmp_path / "net.py"
    file.write_text(OWN)
    for layout in layouts(group.size):
        name = "apart" if "--tp" in layout else "build"
        words = (
            f"--model {file}:{name} --shape 5 --classes 3 --samples 31 --batch-size 14 --steps 3"
            f" {layout}"
        )
        assert main(words.split(), group)
        out = capsys.readouterr().out
        assert ("gradients of step 1" in out and "equal" in out.splitlines()[-1]) == group.is_root
        assert bool(out) == group.is_root


@pytest.mark.mpi
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_makes_no_updates_of_rounding(group, optimizer):
    """Normalized convolutions have gradients that are 0 but for rounding, which Adam with its own
    eps makes large.
    """
    words = (
        f"--model resnet --samples 31 --batch-size 14 --steps 3 --optimizer {optimizer} --dp"
        f" {group.size}"
    )
    assert main(words.split(), group)


@pytest.mark.mpi
def test_what_lies_out_of_memory_is_the_serial_run(group, tmp_path):
    """The serial run has all in memory, and no stage of ZeRO, which weights out of memory want."""
    plain = "--model mlp --hidden 12 8 7 --samples 31 --batch-size 14 --steps 2"
    assert main(
        f"{plain} --dp {group.size} --zero 3 --offload {tmp_path} --offload-state all".split(),
        group,
    )


@pytest.mark.mpi
def test_fixed_sums_are_the_serial_run_to_the_last_bit(group, capsys):
    words = (
        f"--model mlp --hidden 12 8 7 --dp {group.size} --reduction fixed --dtype float32 --steps 3"
    )
    assert main(words.split(), group)
    assert not group.is_root or capsys.readouterr().out.splitlines()[-1] == "equal to the last bit"


@pytest.mark.mpi
def test_a_fault_is_found(group, capsys, monkeypatch):
    if group.size == 1:
        return
    right = BatchPass._make_seeds
    monkeypatch.setattr(
        BatchPass,
        "_make_seeds",
        lambda self: [np.asarray((1 + self._owner.is_pipeline) * seed) for seed in right(self)],
    )
    words = f"--model mlp --hidden 12 8 7 6 5 --pp {group.size} --steps 2"
    assert not main(words.split(), group)
    if group.is_root:
        out = capsys.readouterr().out
        assert "NOT EQUAL: gradients of step 1" in out
        assert "DIFFERS" in out


@pytest.mark.mpi
@pytest.mark.parametrize(
    "words, error, text",
    [
        ("--dp 99", LayoutError, "not dp 99"),
        ("--dataset iris", UsageError, "model cnn needs images"),
        ("--model mlp --dp {size} --split 2 --clip 0", UsageError, "--clip"),
        ("--model nowhere.py:build --dp {size}", UsageError, "there is no file nowhere.py"),
    ],
)
def test_what_does_not_fit_is_one_sentence_on_all_ranks(group, words, error, text):
    with pytest.raises(error) as caught:
        main(words.format(size=group.size).split(), group)
    assert text in str(caught.value)
    assert len(set(group.gather(str(caught.value)))) == 1


@pytest.mark.mpi
def test_more_stages_than_layers_are_refused(group):
    if group.size > 1:
        words = f"--model mlp --pp {group.size} --hidden --pipeline interleaved --virtual-stages 2"
        refuses(
            LayoutError,
            "the model has 2 layers to cut between, fewer than",
            lambda: main(words.split(), group),
        )


@pytest.mark.mpi
def test_help_is_the_same_on_all_ranks(group):
    refuses(HelpAsked, "mpirun -n 8 nnmpi verify", main, ["--help"], group)


GPT = (
    "--model gpt --features 12 --heads 3 --layers 1 --context 7 --batch-size 5 --samples 9 --steps"
    " 2 --microbatches 1"
)


def verify(words, ranks):
    return on_ranks(main, words, ranks)


def test_normalizing_few_rows_may_round_more():
    words = "--model resnet --batch-size 5 --microbatches 5 --tp 3 --steps 1 --seed 5"
    assert all(verify(words, 3))


def test_few_rows_without_normalization_may_not():
    """In float32 the wider tolerance would hide a fault, so it would be refused."""
    words = "--model mlp --dataset iris --batch-size 8 --microbatches 4 --dtype float32"
    assert all(verify(words, 2))


@pytest.mark.parametrize("heads", [1, 3])  # by ring attention, and by Ulysses
def test_shared_positions_are_the_serial_run(heads, capfd):
    assert all(verify(over(GPT, f"--dp 1 --sp 2 --heads {heads}"), 2))
    assert "equal within the tolerance" in capfd.readouterr().out


def test_a_model_whose_layers_take_one_position_after_the_other(capfd):
    words = (
        "--model lstm --features 5 --context 4 --classes 7 --batch-size 5 --samples 9 --steps 2"
        " --microbatches 2"
    )
    assert all(verify(f"{words} --dp 1 --pp 2", 2))


def test_a_fault_among_positions_is_found(monkeypatch, capfd):
    """The keys of the other ranks are passed over."""
    right = RingAttention.visible
    monkeypatch.setattr(
        RingAttention,
        "visible",
        lambda self, source, *how: (
            right(self, source, *how) if source == self._group.rank else iter(())
        ),
    )
    assert not any(verify(over(GPT, "--dp 1 --sp 2 --heads 1"), 2))
    assert "NOT EQUAL: loss of step 1, gradients of step 1" in capfd.readouterr().out
