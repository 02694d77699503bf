"""What a run is: one frozen section per subject, each checked when it is made.

The fields are the options of the command line (`options.py` builds them from here), so a field's docstring is the
option's help, and every name must be unique over all sections. `None` stands for "not given".
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nnmpi.train.checks import LONG, at_least_one, fraction, not_negative, positive, require
from nnmpi.train.own import MODELS, is_own
from nnmpi.train.parallel import ParallelConfig
from nnmpi.train.synchrony import SyncConfig


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    model: str = "cnn"
    """mlp: dense layers; cnn: two convolutions and three dense layers; resnet: a small residual network; or one of your
    own, a function of (sample_shape, classes), as FILE.py:NAME or package.module:NAME."""
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the hidden dense layers of mlp and cnn, from the input on; with none an mlp is linear."""
    activation: Literal["relu", "gelu", "tanh", "sigmoid"] = "relu"
    """Activation of the hidden layers of mlp."""
    dropout: float = 0.0
    """Share of the hidden dense layers' values set to zero while training, for mlp and cnn."""

    def __post_init__(self) -> None:
        """Check the values and that the model knows the options given."""
        known = f"choose {', '.join(MODELS)}, or give your own as FILE.py:NAME or package.module:NAME"
        require(self.model in MODELS or is_own(self.model), f"--model is {self.model}; {known}")
        for width in self.hidden:
            require(1 <= width <= LONG, f"--hidden has a layer of width {width}; give whole numbers from 1 to {LONG:g}")
        fraction("--dropout", self.dropout)
        for option, given, models in (
            ("--hidden", self.hidden != (128, 64), ("mlp", "cnn")),
            ("--activation", self.activation != "relu", ("mlp",)),
            ("--dropout", self.dropout != 0, ("mlp", "cnn")),
        ):
            known = " or ".join(models)
            require(not given or self.model in models, f"{option} is for --model {known}, not for {self.model}")


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    dataset: str = "digits"
    """iris, digits (both bundled), mnist, fashion-mnist, cifar10, or the path of a .csv, .npz or folder."""
    data_dir: Path | None = None
    """Folder that holds the data set's files; without it they are downloaded once per node."""
    test_fraction: float = 0.2
    """Share of the samples kept for the test, for data sets that come without a test set."""
    augment: Literal["none", "shift", "flip", "shift-flip"] = "none"
    """Random changes of the training images: shift by a few pixels, mirror left-right, or both."""
    shift_pixels: int | None = None
    """Largest shift in pixels (default: a twelfth of the image's shorter side, at least 1)."""
    partition: Literal["none", "iid", "label"] = "none"
    """Which samples a worker sees: none: any; iid: a random part that is its own for the whole run; label: its own part
    of the samples sorted by class, as different from the others' as can be."""
    normalize: bool = True
    """Shift and scale inputs by the training set's mean and standard deviation (per channel or column)."""

    def __post_init__(self) -> None:
        """Check the values; whether the data set exists is found out when it is loaded."""
        require(self.dataset != "", "--dataset is empty; give a name such as digits, or a path")
        require(
            0 < self.test_fraction < 1,
            f"--test-fraction is {self.test_fraction}; give a number between 0 and 1, such as 0.2",
        )
        if self.shift_pixels is not None:
            at_least_one("--shift-pixels", self.shift_pixels)
            require("shift" in self.augment, f"--shift-pixels does nothing for --augment {self.augment}; give shift")


@dataclass(frozen=True)
class OptimizationConfig:
    """How the weights are found."""

    epochs: int = 20
    """How often the whole training set is gone through."""
    max_steps: int | None = None
    """Stop after this many updates, if the epochs are not over before."""
    batch_size: int | Literal["full"] = 32
    """Samples per update, over all ranks together; full: the whole training set (full gradient descent)."""
    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    """Rule of the update."""
    lr: float = 3e-3
    """Learning rate (the highest one, where a schedule changes it)."""
    momentum: float = 0.0
    """Momentum of --optimizer sgd."""
    nesterov: bool = False
    """Nesterov's form of the momentum."""
    weight_decay: float | None = None
    """Weight decay: L2 for sgd and adam (default 0), decoupled for adamw (default 0.01)."""
    schedule: Literal["constant", "step", "cosine"] = "cosine"
    """How the learning rate goes on after the warm-up; cosine ends at 0 with the last step."""
    step_epochs: float = 10.0
    """For --schedule step: epochs between two drops."""
    step_factor: float = 0.1
    """For --schedule step: what each drop multiplies the rate by."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate first rises linearly from near 0."""
    lr_scaling: Literal["none", "linear"] = "none"
    """linear: multiply --lr by batch size / --base-batch (Goyal et al. 2017)."""
    base_batch: int = 32
    """For --lr-scaling linear: the batch size that --lr was found for."""
    clip: float | None = None
    """Scale gradients down to this global norm where they exceed it."""
    grad_accum: int = 1
    """Compute each rank's share of a batch in this many parts: less memory, the same update."""
    label_smoothing: float = 0.0
    """Probability taken from the right class and spread over all, in the training loss."""

    def __post_init__(self) -> None:
        """Check the values and that no option is given that the others make idle."""
        at_least_one("--epochs", self.epochs)
        at_least_one("--grad-accum", self.grad_accum)
        at_least_one("--base-batch", self.base_batch)
        if self.max_steps is not None:
            at_least_one("--max-steps", self.max_steps)
        if self.batch_size != "full":
            at_least_one("--batch-size", self.batch_size)
        positive("--lr", self.lr)
        fraction("--momentum", self.momentum)
        fraction("--label-smoothing", self.label_smoothing)
        not_negative("--warmup-epochs", self.warmup_epochs, LONG)
        if self.weight_decay is not None:
            not_negative("--weight-decay", self.weight_decay)
        if self.clip is not None:
            positive("--clip", self.clip)
        self._check_schedule()
        sgd = self.optimizer == "sgd"
        require(sgd or not self.momentum, f"--momentum belongs to --optimizer sgd, not to {self.optimizer}")
        require(not self.nesterov or self.momentum > 0, "--nesterov needs --momentum above 0 and --optimizer sgd")

    def _check_schedule(self) -> None:
        positive("--step-epochs", self.step_epochs, LONG)
        require(0 < self.step_factor <= 1, f"--step-factor is {self.step_factor}; give a number above 0, up to 1")
        if self.schedule != "step":
            idle = self.step_epochs != 10.0 or self.step_factor != 0.1
            require(not idle, "--step-epochs and --step-factor belong to --schedule step")
        if self.lr_scaling != "linear":
            require(self.base_batch == 32, "--base-batch belongs to --lr-scaling linear")


@dataclass(frozen=True)
class RunConfig:
    """Where it runs and what it leaves behind."""

    backend: Literal["auto", "numpy", "cupy"] = "auto"
    """Array library; auto: CuPy where a CUDA device can be used, NumPy elsewhere."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of weights, inputs and gradients."""
    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"
    """What products of matrices and convolutions read: float32; tf32: float32 with 10 bits of the fraction, on a CUDA
    device; bf16 and fp16: half precision, in which activations are, too (weights and their gradients stay float32)."""
    convolution: Literal["auto", "im2col", "cudnn", "tuned"] = "auto"
    """Convolutions on a CUDA device; auto: by cuDNN where it is installed (pip install nnmpi[cudnn]), else as products
    of matrices (im2col); tuned: by the fastest of cuDNN's plans, which are timed when a size is first met."""
    jit: bool = False
    """Compute with compiled kernels, float32 on the CPU only; needs numba (pip install nnmpi[jit])."""
    seed: int = 0
    """Seed of everything random: split, initial weights, order, augmentation, dropout."""
    out: Path | None = None
    """Folder of the run (default: runs/DATASET-MODEL-TIME); it must not hold another run."""
    resume: Path | None = None
    """Folder of a run to go on with, from its last good checkpoint and with its options."""
    config: Path | None = None
    """TOML file with options, as on the command line without the dashes; the command line is stronger."""
    log_every: int = 10
    """Steps between two lines of training metrics in metrics.jsonl."""
    print_every: float = 5.0
    """Seconds between two printed lines of progress inside an epoch; 0: one per line of metrics."""
    eval_every: int = 1
    """Epochs between two evaluations on the test data; 0: only at the end."""
    save_every: int = 1
    """Epochs between two checkpoints; 0: only at the end."""
    save_steps: int = 0
    """Steps between two checkpoints, besides --save-every; 0: none."""
    trace: bool = False
    """Write what every rank did in the first steps into trace.json.gz in the run's folder, for ui.perfetto.dev; on a
    CUDA device, when the host asked for it."""
    trace_steps: int = 20
    """For --trace: how many steps."""
    keep: int = 3
    """How many checkpoints stay on disk; older ones are removed."""

    def __post_init__(self) -> None:
        """Check the values and combinations; the folders are looked at when the run starts."""
        at_least_one("--log-every", self.log_every)
        at_least_one("--keep", self.keep)
        self._check_products()
        compiled = self.dtype == self.precision == "float32" and self.backend != "cupy"
        require(compiled or not self.jit, "--jit compiles for float32 on the CPU alone; leave it out otherwise")
        at_least_one("--trace-steps", self.trace_steps)
        require(self.trace or self.trace_steps == 20, "--trace-steps belongs to --trace")
        not_negative("--seed", self.seed)
        not_negative("--print-every", self.print_every)
        not_negative("--eval-every", self.eval_every)
        not_negative("--save-every", self.save_every)
        not_negative("--save-steps", self.save_steps)
        both = self.out is not None and self.resume is not None and self.out != self.resume
        require(not both, f"--resume goes on in its own folder {self.resume}; leave --out {self.out} out")

    def _check_products(self) -> None:
        wide = self.dtype == "float64" and self.precision != "float32"
        require(not wide, f"--precision {self.precision} rounds float32, and --dtype is float64; leave one of them out")
        there = self.precision != "tf32" or self.backend != "numpy"
        require(there, "--precision tf32 needs a CUDA device; use --backend cupy, or --precision float32 or bf16")
        chosen = self.convolution == "auto" or self.backend != "numpy"
        require(
            chosen, f"--convolution {self.convolution} belongs to a CUDA device; use --backend cupy, or leave it out"
        )


@dataclass(frozen=True)
class Config:
    """Every option of a run, by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Check that the sections go together."""
        self.sync.check(self.parallel)
        fixed = self.parallel.reduction == "fixed" and self.data.partition != "none"
        require(
            not fixed, f"--partition {self.data.partition} does not go with --reduction fixed, which deals any sample"
        )
        traced = self.run.trace and self.sync.virtual_workers
        require(not traced, "--trace shows what ranks did, and virtual workers are none; leave it out")
