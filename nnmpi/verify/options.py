"""What is to be verified, from the words of the command line.

The options that the train command has, too, are fields of the same sections: they have the same names, are read in the
same way, and are checked by the same sentences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nnmpi.command import Option, options_of, read_words
from nnmpi.compose.layout import PIPEDREAM
from nnmpi.train.config import (
    SEQUENCE_MODELS,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    check_numbers,
    check_positions,
    require,
)

MICROBATCHES = 4  # by default: they do not divide the batch, and are fewer than some pipelines have stages
DEFAULT_CLASSES = 10  # of random samples
DEFAULT_CONTEXT = 13  # of random tokens: it need not divide by anything
PROGRAM = "python -m nnmpi.verify"
DESCRIPTION = """Does a model trained under a layout do what it does on one rank?

mpirun -n 8 python -m nnmpi.verify --model cnn --dp 2 --pp 2 --tp 2
mpirun -n 6 python -m nnmpi.verify --model nets/mine.py:build --shape 32 32 3 --dp 3 --pp 2
mpirun -n 4 python -m nnmpi.verify --reduction fixed
mpirun -n 4 python -m nnmpi.verify --model gpt --tp 2 --sp 2

Some steps are trained under the layout, and again on rank 0 alone, lstm and gpt on random tokens. Losses, gradients,
weights, statistics and an evaluation are compared: to the last bit with --reduction fixed, else within the rounding of
sums in another order. The exit status is 1 if anything differs. Messages leave only when they are awaited, so nothing
depends on MPI's buffers."""


@dataclass(frozen=True)
class TrialConfig:
    """The samples, the number of steps, and where it runs."""

    dataset: str = "digits"
    """iris, digits, or the path of a data set."""
    shape: tuple[int, ...] | None = None
    """Random samples of this shape instead, such as 28 28 1."""
    classes: int | None = None
    """Classes of random samples, or tokens of lstm and gpt (default: 10)."""
    samples: int = 90
    """Samples that are used."""
    steps: int = 5
    """Updates."""
    dtype: Literal["float32", "float64"] = "float64"
    """Type of weights, inputs and gradients."""
    seed: int = 0
    """Seed of weights, samples, order and dropout."""
    backend: Literal["auto", "numpy", "cupy"] = "numpy"
    """Where both runs are; ranks share devices."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_numbers(self, "samples steps classes", 1)
        check_numbers(self, "seed", 0)
        if self.shape is not None:
            require(bool(self.shape), "--shape is empty; give the lengths of one sample's axes, such as 28 28 1")
            require(min(self.shape) > 0, f"--shape is {min(self.shape)}; give lengths of 1 or more")

    @property
    def random_classes(self) -> int:
        """The classes of random samples."""
        return DEFAULT_CLASSES if self.classes is None else self.classes


@dataclass(frozen=True)
class Options:
    """One contract.

    Attributes:
        model, parallel, optimization: as the train command's.
        trial: what is trained on, and how long.
    """

    model: ModelConfig
    parallel: ParallelConfig
    optimization: OptimizationConfig
    trial: TrialConfig

    def __post_init__(self) -> None:
        """Check that they go together."""
        require(
            self.parallel.pipeline != PIPEDREAM,
            "--pipeline pipedream is not the serial run and does not want to be: it updates with weights that are out "
            "of date; choose another schedule, such as 1f1b",
        )
        model, trial, parallel = self.model.model, self.trial, self.parallel
        if self.is_language:
            plain = trial.shape is None and trial.dataset == TrialConfig.dataset
            require(plain, f"--model {model} is verified on random tokens; leave --shape and --dataset out")
        else:
            given = trial.classes is not None and trial.shape is None
            require(not given, "--classes belongs to --shape; leave it out")
        check_positions(model, parallel.sp)

    @property
    def is_language(self) -> bool:
        """Whether samples are tokens."""
        return self.model.model in SEQUENCE_MODELS

    @property
    def context(self) -> int:
        """The tokens of each sample of a language model."""
        return DEFAULT_CONTEXT if self.model.context is None else self.model.context

    @property
    def microbatches(self) -> int:
        """Parts of each batch."""
        return MICROBATCHES if self.parallel.microbatches is None else self.parallel.microbatches


# The train command's options that mean something here; the others change nothing that is compared.
SHARED = {
    ModelConfig: ("model", "hidden", "dropout", "layers", "features", "heads", "context", "tied"),
    OptimizationConfig: ("batch_size", "optimizer", "lr", "weight_decay", "clip"),
    ParallelConfig: (
        *("dp", "pp", "tp", "sp", "pipeline", "virtual_stages", "microbatches", "split"),
        *("reduction", "memory_limit", "activation_memory", "offload", "offload_state", "allreduce", "zero"),
    ),
}
# What is different here: a batch that divides by nothing, and an optimizer that does not blow up rounding errors.
DIFFERENT: dict[str, dict[str, Any]] = {
    "batch_size": {"default": 29, "help": "Samples of the global batch; it need not divide by anything."},
    "optimizer": {"default": "sgd", "help": "Rule of the update; sgd has a momentum of 0.9."},
    "lr": {"default": 0.01, "help": "Learning rate."},
    "context": {"help": f"Tokens of each sample of lstm and gpt (default: {DEFAULT_CONTEXT})."},
    "microbatches": {"default": MICROBATCHES, "help": "Parts of each batch."},
}


def parse(words: Sequence[str]) -> Options:
    """Return what the words ask for.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations.
    """
    options = _all_options()
    given = {option.name: option.default for option in options} | read_words(words, options, PROGRAM, DESCRIPTION)

    def values(section: type) -> dict[str, Any]:
        return {option.name: given[option.name] for option in options if option.section is section}

    momentum = 0.9 if given["optimizer"] == "sgd" else 0.0
    return Options(
        ModelConfig(**values(ModelConfig)),
        ParallelConfig(**values(ParallelConfig)),
        OptimizationConfig(**values(OptimizationConfig), momentum=momentum),
        TrialConfig(**values(TrialConfig)),
    )


def _all_options() -> list[Option]:
    """Return this command's own options and those that it shares with the train command."""
    shared = [
        replace(option, **DIFFERENT.get(option.name, {}))
        for section, names in SHARED.items()
        for option in options_of(section)
        if option.name in names
    ]
    return [*options_of(TrialConfig), *shared]
