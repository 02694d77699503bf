"""What is to be verified, from the words of the command line.

The options that the train command has, too, have the same names and are checked by the same sections.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nnmpi.backend.select import NAMES as NAMES_OF_BACKENDS
from nnmpi.comm.algorithms.registry import AUTO, NAMES
from nnmpi.command import HelpAsked, Parser
from nnmpi.compose.layout import ALWAYS, EXCEPT_LAST, FAST, FIXED, NEVER, PIPEDREAM, TRAINING_SCHEDULES
from nnmpi.train.checks import at_least_one, not_negative, require
from nnmpi.train.config import ModelConfig, OptimizationConfig
from nnmpi.train.parallel import ParallelConfig

MICROBATCHES = 4  # by default: they do not divide the batch, and are fewer than some pipelines have stages
PROGRAM = "python -m nnmpi.verify"
DESCRIPTION = """Does a model trained under a layout do what it does on one rank?

mpirun -n 8 python -m nnmpi.verify --model cnn --dp 2 --pp 2 --tp 2
mpirun -n 6 python -m nnmpi.verify --model nets/mine.py:build --shape 32 32 3 --classes 10 --dp 3 --pp 2
mpirun -n 4 python -m nnmpi.verify --dp 2 --pp 2 --reduction fixed

Some steps are trained under the layout, and again on rank 0 alone. Losses, gradients, weights, statistics and an
evaluation are compared: to the last bit with --reduction fixed, else within the rounding of sums in another order. The
exit status is 1 if anything differs. Messages leave only when they are awaited, so nothing depends on MPI's buffers."""


@dataclass(frozen=True)
class Options:
    """One contract.

    Attributes:
        model, parallel, optimization: as the train command's.
        dataset: a name or path; random samples if `shape` is given.
        shape, classes: of random samples; None and 0 for those of the data set.
        samples: how many are used.
        steps: updates.
        dtype, seed: of the run.
        backend: where both runs are.
    """

    model: ModelConfig
    parallel: ParallelConfig
    optimization: OptimizationConfig
    dataset: str
    shape: tuple[int, ...] | None
    classes: int
    samples: int
    steps: int
    dtype: str
    seed: int
    backend: str = "numpy"

    def __post_init__(self) -> None:
        """Check what the sections do not know of."""
        at_least_one("--samples", self.samples)
        at_least_one("--steps", self.steps)
        not_negative("--seed", self.seed)
        if self.shape is not None:
            require(bool(self.shape), "--shape is empty; give the lengths of one sample's axes, such as 28 28 1")
            at_least_one("--shape", min(self.shape))
            at_least_one("--classes", self.classes)
        require(
            self.parallel.pipeline != PIPEDREAM,
            "--pipeline pipedream is not the serial run and does not want to be: it updates with weights that are out "
            "of date; choose another schedule, such as 1f1b",
        )

    @property
    def microbatches(self) -> int:
        """Parts of each batch."""
        return MICROBATCHES if self.parallel.microbatches is None else self.parallel.microbatches


def parse(words: Sequence[str]) -> Options:
    """Return what the words ask for.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names, values or combinations.
    """
    parser = _parser()
    given = parser.parse_args(list(words))
    if given.help:
        raise HelpAsked(parser.format_help().rstrip())
    require(given.shape is not None or given.classes is None, "--classes belongs to --shape; leave it out")
    hidden = ModelConfig.hidden if given.hidden is None else tuple(given.hidden)
    momentum = 0.9 if given.optimizer == "sgd" else 0.0
    return Options(
        ModelConfig(model=given.model, dropout=given.dropout, hidden=hidden),
        ParallelConfig(**{name: getattr(given, name) for name in _PARALLEL}),
        OptimizationConfig(
            optimizer=given.optimizer,
            lr=given.lr,
            momentum=momentum,
            weight_decay=given.weight_decay,
            clip=given.clip,
            batch_size=given.batch_size,
        ),
        given.dataset,
        None if given.shape is None else tuple(given.shape),
        10 if given.classes is None else given.classes,
        given.samples,
        given.steps,
        given.dtype,
        given.seed,
        given.backend,
    )


_PARALLEL = (
    *("dp", "pp", "tp", "pipeline", "virtual_stages", "microbatches", "split", "recompute", "reduction"),
    *("memory_limit", "allreduce", "bucket_mb"),
)


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add: Callable[..., Any] = parser.add_argument
    add("-h", "--help", action="store_true", help="print this")
    add("--model", default="cnn", help="mlp, cnn, resnet, FILE.py:NAME or package.module:NAME (cnn)")
    add("--hidden", type=int, nargs="*", help="widths of the hidden layers of mlp and cnn")
    add("--dropout", type=float, default=0.0, help="for mlp and cnn (0)")
    add("--dataset", default="digits", help="iris, digits, or the path of a data set (digits)")
    add("--shape", type=int, nargs="*", help="random samples of this shape instead, such as 28 28 1")
    add("--classes", type=int, help="of random samples (10)")
    add("--samples", type=int, default=90, help="samples that are used (90)")
    add("--batch-size", type=int, default=29, help="of the global batch; it need not divide by anything (29)")
    add("--steps", type=int, default=5, help="updates (5)")
    add("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="sgd has a momentum of 0.9 (sgd)")
    add("--lr", type=float, default=0.01, help="learning rate (0.01)")
    add("--weight-decay", type=float, help="as for the train command")
    add("--clip", type=float, help="as for the train command")
    add("--dtype", choices=("float32", "float64"), default="float64", help="(float64)")
    add("--seed", type=int, default=0, help="(0)")
    add(
        "--backend", choices=NAMES_OF_BACKENDS, default="numpy", help="where both runs are; ranks share devices (numpy)"
    )
    for axis, what in (("dp", "replicas"), ("pp", "ranks in each pipeline"), ("tp", "ranks that share each layer")):
        add(f"--{axis}", type=_ranks, default="auto", help=f"{what} (auto)")
    add("--pipeline", choices=TRAINING_SCHEDULES, default="1f1b", help="its schedule (1f1b)")
    add("--virtual-stages", type=int, default=1, help="stages on each rank, for interleaved (1)")
    add("--microbatches", type=int, help=f"parts of each batch ({MICROBATCHES})")
    add("--split", default="auto", help="where it is cut: auto, or links in each stage, such as 5,4,3 (auto)")
    add("--recompute", choices=(NEVER, ALWAYS, EXCEPT_LAST), default=NEVER, help="activations (never)")
    add("--reduction", choices=(FAST, FIXED), default=FAST, help="how gradients are summed (fast)")
    add("--memory-limit", help="bytes that a rank may use, such as 512MiB")
    add("--allreduce", choices=(AUTO, *NAMES), default=AUTO, help="algorithm of the sums over replicas (auto)")
    add("--bucket-mb", type=float, help="longest message of these sums, in MiB")
    return parser


def _ranks(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; give 1 or more, or auto")
    return int(text)
