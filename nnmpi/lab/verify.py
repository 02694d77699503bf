"""`nnmpi verify`: train under a layout and on rank 0, compare, print a table.

Sums in another order differ by rounding, which grows with the square root of their length and from
step to step. Errors are relative to the largest value of the array, or to a hundredth of the
largest of all arrays of its kind. Without the second bound, an array of rounding errors alone (the
gradient of a bias before a batch norm, say) would have a relative error near 1.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan, sqrt
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.base.command import SimulatedConfig, check_numbers, require
from nnmpi.base.errors import UsageError, counted
from nnmpi.base.units import aligned
from nnmpi.comm.agreement import agreed
from nnmpi.comm.group import Group
from nnmpi.comm.ranks import parse_together
from nnmpi.commands.start import launch_command, read_with_train_options
from nnmpi.compose.arrange import Arrangement, describe_stages
from nnmpi.compose.layout import Layout
from nnmpi.compose.state import gradient_state
from nnmpi.data.dataset import Dataset
from nnmpi.nn.norm import has_batch_norm
from nnmpi.optim import updates
from nnmpi.train.build import VERIFIED_EPS, build_full_model, trial_run
from nnmpi.train.computing import explain_errors, make_backend
from nnmpi.train.config import (
    SEQUENCE_MODELS,
    Config,
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimizationConfig,
    ParallelConfig,
    RunConfig,
)
from nnmpi.train.derived import build_layout
from nnmpi.train.inputs import SampleConfig, load_samples

PROGRAM = "nnmpi verify"
DESCRIPTION = """Compare training under a layout with training on one rank.

mpirun -n 8 nnmpi verify --model cnn --dp 2 --pp 2 --tp 2
mpirun -n 6 nnmpi verify --model nets/mine.py:build --shape 32 32 3 --dp 3 --pp 2
mpirun -n 4 nnmpi verify --reduction fixed
nnmpi verify --simulate 4 --model mlp --pp 2
mpirun -n 4 nnmpi verify --model gpt --tp 2 --sp 2

Trains a few steps under the layout, and again on rank 0 alone (lstm and gpt on random tokens).
Compares losses, gradients, weights, statistics and an evaluation: bit for bit with --reduction
fixed, else within the rounding of sums in another order. The exit status is 1 if anything differs.
Sends are synchronous, so that no deadlock hides in MPI's buffers."""
# Odd sizes on purpose: a batch, sequence or number of microbatches that divides by the ranks would
# hide faults in uneven shards.
CONTEXT = 13  # tokens of each sample of lstm and gpt
MICROBATCHES = 4  # does not divide the batch; fewer than the stages of some pipelines
# The train command's options that change a compared result.
SHARED: Mapping[type[Any], str] = {
    ModelConfig: "model hidden dropout layers features heads context",
    DataConfig: "dataset",
    OptimizationConfig: "batch_size optimizer lr weight_decay",
    NumericsConfig: "clip",
    ParallelConfig: """dp pp tp sp pipeline virtual_stages microbatches split reduction
    memory_limit activation_memory offload offload_state allreduce zero""",
    RunConfig: "dtype seed backend",
}
# Defaults that differ from the train command's: a prime batch, and an optimizer that does not
# amplify rounding errors (Adam divides by gradients' sizes).
DIFFERENT: Mapping[str, Mapping[str, Any]] = {
    "dataset": {"help": "iris, digits, or the path of a data set."},
    "batch_size": {
        "default": 29,
        "help": "Samples of the global batch; it need not divide by anything.",
    },
    "optimizer": {"default": "sgd", "help": "Rule of the update; sgd has a momentum of 0.9."},
    "lr": {"default": 0.01, "help": "Learning rate."},
    "context": {"help": f"Tokens of each sample of lstm and gpt (default: {CONTEXT})."},
    "microbatches": {"default": MICROBATCHES, "help": "Parts of each batch."},
    "dtype": {"default": "float64"},
    "backend": {"default": "numpy", "help": "Where both runs are; ranks share devices."},
}
# The tolerance assumes rounding of this many layers. With 30, a resnet with Adam exceeded it by a
# factor of 1.2 in a search over random layouts.
LAYERS = 60
# The growth of rounding errors per step: gradients are divided by batch statistics, Adam's updates
# by the gradients' sizes (VERIFIED_EPS).
GROWTH = 2.0
# With batch normalization each row counts as so many in microbatches of one or two: it divides by
# the spread of few pixels, which made a resnet's errors up to 12 times as large as the tolerance.
FEW_ROWS = 4096
LEAST_SCALE = 1e-2
EVALUATION = "evaluation"  # loss and accuracy over all samples
MOST = 2e-3  # the largest tolerance: above it, rounding could not be told from faults


@dataclass(frozen=True)
class TrialConfig(SimulatedConfig):
    """The two runs."""

    samples: int = 90
    """Samples."""
    steps: int = 5
    """Updates."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_numbers(self, "samples steps", 1)


Asked = tuple[TrialConfig, SampleConfig, Config]


def parse(words: Sequence[str]) -> Asked:
    """Parse the command line.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations.
    """
    sections = TrialConfig, SampleConfig
    trial, samples, config, given = read_with_train_options(
        words, sections, SHARED, PROGRAM, DESCRIPTION, DIFFERENT
    )
    require(
        not build_layout(config).asynchronous,
        f"--pipeline {config.parallel.pipeline} differs from the serial run by design: it updates"
        " with stale weights; choose another schedule, such as 1f1b",
    )
    model = config.model.model
    if model in SEQUENCE_MODELS:
        require(
            samples.shape is None and "dataset" not in given,
            f"--model {model} is verified on random tokens; leave --shape and --dataset out",
        )
        samples = replace(samples, shape=(config.model.context or CONTEXT,))
    require(
        samples.classes is None or samples.shape is not None,
        "--classes is for --shape; leave it out",
    )
    momentum = 0.9 if config.optimization.optimizer == "sgd" else 0.0
    return trial, samples, config.having(momentum=momentum)


def main(words: Sequence[str], group: Group) -> bool:
    """Compare both runs and print the table; return whether all is equal. Collective.

    Raises:
        UsageError: on all ranks, for wrong options, and a model or layout that does not fit.
        NnmpiError: for every other expected error.
    """
    console, asked = parse_together(words, parse, group)
    trial, _, config = asked
    dataset = _samples(asked, group)
    batch = config.optimization.rows(len(dataset))
    exact = config.parallel.reduction == "fixed"
    parts = min(config.parallel.microbatches or 1, batch)
    config = config.having(microbatches=parts)
    with agreed(group):
        layout = build_layout(config)
    backend = make_backend(config.run.backend, group)
    model = build_full_model(config, dataset, backend, group)
    samples = FEW_ROWS * batch if batch // parts <= 2 and has_batch_norm(model) else batch
    if not exact:
        _check_steps(trial.steps, config.run.dtype, samples)
    with explain_errors(backend):
        actual, header = run(config, trial.steps, dataset, group, layout, backend)
        device = [f"backend {backend.name} on {backend.device}"] if backend.is_device else []
        console.say(*header, *device, "")
        alone = group.split(group.rank)
        findings = []
        if group.is_root:
            one_rank = Layout(1, 1, 1, reduction=layout.reduction)
            serial, _ = run(config, trial.steps, dataset, alone, one_rank, backend)
            findings = compare(actual, serial, trial.steps, config.run.dtype, samples, exact)
        alone.free()
    console.finish(*table(findings), "", verdict(findings))
    return bool(group.share(all(finding.holds for finding in findings)))


def _check_steps(steps: int, dtype: str, batch: int) -> None:
    """Refuse a comparison whose tolerance would hide a fault."""
    allowed = tolerance(dtype, batch, steps)
    if allowed > MOST:
        fewer = max((n for n in range(steps) if tolerance(dtype, batch, n) <= MOST), default=0)
        instead = f"--steps {fewer} or less" if fewer else "--dtype float64"
        raise UsageError(
            f"after {counted(steps, 'step')} of {dtype} rounding alone may cause a difference of"
            f" {allowed:.1g}, which could hide a fault; give {instead}, or --reduction fixed,"
            " which is compared bit for bit"
        )


def _samples(asked: Asked, group: Group) -> Dataset:
    """Return the samples. Collective."""
    trial, samples, config = asked
    if samples.shape is not None:
        with agreed(group):
            return samples.draw(trial.samples, config)
    train, _ = load_samples(config, group, lambda _: None)
    with agreed(group):
        if not isinstance(train, Dataset):
            raise UsageError(
                f"--dataset {config.data.dataset} is a text; leave it out, and give --model gpt"
            )
        return train.take(np.arange(min(trial.samples, len(train))))


# ---- a short training run as values ----


RunResults = Mapping[str, Mapping[str, Array]]
"""A run's results on rank 0, by the table's names: losses, gradients, weights of the full model."""


def run(
    config: Config, steps: int, dataset: Dataset, group: Group, layout: Layout, backend: Backend
) -> tuple[RunResults, list[str]]:
    """Train under a layout of the group's ranks; return results and header lines. Collective.

    Args:
        config: the model and its optimizer.
        steps: number of steps.
        dataset: the samples.
        group: the ranks that train; rank 0 alone for the serial run.
        layout: of the model on these ranks.
        backend: this rank's.

    Raises:
        LayoutError, UsageError: on all ranks, when the layout does not fit.
        CommError: on all ranks, when copies of a weight differ after a step.
    """
    losses, norms, gradients = [], [], dict[str, Array]()
    with trial_run(config, (dataset, dataset), layout, group, backend, verified=True) as (
        worker,
        inputs,
        batches,
    ):
        where = worker.arrangement
        for batch in islice(batches, steps):
            report = worker.step(batch)
            losses.append(report.loss)
            norms.append(report.grad_norm)
            if len(losses) == 1:
                gradients = gradient_state(where).to_dict()
        evaluated = worker.evaluate(inputs.test_loader.epoch(0))
        arrays = worker.state()[0].to_dict()
        lines = _header(config, dataset, layout, where)
    weights = {name: arrays[name] for name in where.parameters if name in arrays}
    result: RunResults = {
        "loss of step 1": {"": np.array(losses[:1])},
        "gradients of step 1": gradients,
        f"losses of {steps} steps": {"": np.array(losses)},
        "norms of the gradients": {"": np.array(norms)},
        f"weights after step {steps}": weights,
        f"statistics after step {steps}": {
            name: array for name, array in arrays.items() if name not in weights
        },
        EVALUATION: {"": np.array([evaluated.loss, evaluated.accuracy])},
    }
    return result, lines


def _header(config: Config, dataset: Dataset, layout: Layout, where: Arrangement) -> list[str]:
    parallel, optimizer = config.parallel, str(config.optimization.optimizer)
    optimizer += f", eps {VERIFIED_EPS}" if optimizer in updates.taking("eps") else ""
    return [
        (
            f"model {config.model.model}, {where.elements:,} parameters, {config.run.dtype};"
            f" {optimizer}"
        ),
        (
            f"data {dataset.name}, {len(dataset)} samples of shape {dataset.sample_shape}, in"
            f" batches of {config.optimization.batch_size}; microbatches of each:"
            f" {parallel.microbatches}"
        ),
        (
            f"reduction {parallel.reduction}, activation memory"
            f" {parallel.activation_memory or 'any'}, pipeline {parallel.pipeline}, allreduce"
            f" {parallel.allreduce}"
        ),
        f"layout {where.mesh.sizes}" + (f", zero {layout.zero}" if layout.zero else ""),
        *describe_stages(where),
    ]


# ---- the comparison ----


@dataclass(frozen=True)
class Finding:
    """One line of the comparison.

    Attributes:
        what: its name.
        error: the largest relative error; NaN if a value is NaN.
        tolerance: the largest permitted error; 0 if all bits must be equal.
        bitwise: whether all bits are equal.
        where: the array with the largest error, of several.
    """

    what: str
    error: float
    tolerance: float
    bitwise: bool
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether the error is permitted."""
        return self.bitwise or self.error <= self.tolerance


def tolerance(dtype: str, samples: int, steps: int) -> float:
    """Return the permitted relative error.

    Args:
        dtype: of the arithmetic.
        samples: of a batch: the length of the sums, whose rounding grows with its square root.
        steps: number of updates before; rounding grows from step to step.
    """
    return float(LAYERS * sqrt(samples) * np.finfo(dtype).eps * GROWTH**steps)


def compare(
    actual: RunResults, serial: RunResults, steps: int, dtype: str, samples: int, exact: bool
) -> list[Finding]:
    """Return the comparison's findings.

    Args:
        actual: the run under the layout.
        serial: the run on one rank.
        steps: of both.
        dtype: of both.
        samples: of a batch.
        exact: whether the bits must be equal, except for the evaluation, whose sums have no fixed
            order.
    """
    result = []
    for what, expected in serial.items():
        limit = tolerance(dtype, samples, 0 if exact or what.endswith(" of step 1") else steps)
        if expected:
            result.append(
                _compare(
                    what, actual[what], expected, 0.0 if exact and what != EVALUATION else limit
                )
            )
    return result


def _compare(
    what: str, actual: Mapping[str, Array], expected: Mapping[str, Array], limit: float
) -> Finding:
    largest = max(map(_size, expected.values()))
    worst, where, bitwise = 0.0, "", actual.keys() == expected.keys()
    for name, array in expected.items():
        bitwise = bitwise and bool(np.array_equal(actual[name], array))
        error = _size(actual[name] - array) / (max(_size(array), LEAST_SCALE * largest) or 1.0)
        if not isnan(worst) and not error <= worst:  # NaN is the worst
            worst, where = error, name
    return Finding(what, worst, limit, bitwise, where)


def _size(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def table(findings: Sequence[Finding]) -> list[str]:
    """Return the findings as a table, one line each."""
    rows = [["compared with one rank", "largest error", "tolerance", ""]]
    for finding in findings:
        result = "bitwise" if finding.bitwise else "equal" if finding.holds else "DIFFERS"
        if not finding.bitwise and finding.where:
            result += f"   (most: {finding.where})"
        limit = f"{finding.tolerance:9.2g}" if finding.tolerance else f"{'none':>9}"
        rows.append([finding.what, f"{finding.error:13.2g}", limit, result])
    return aligned(rows)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the result as a line."""
    wrong = [finding for finding in findings if not finding.holds]
    if not wrong:
        exact = all(finding.bitwise for finding in findings[:-1])
        return "equal to the last bit" if exact else "equal within the tolerance"
    return f"NOT EQUAL: {', '.join(item.what for item in wrong)}"


if __name__ == "__main__":
    equal = launch_command(parse, main)
    sys.exit(equal is False or (isinstance(equal, list) and not all(equal)))
