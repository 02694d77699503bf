"""The options of a run: one frozen dataclass per subject, checked when it is made.

A field is an option of the command line (see `nnmpi.base.command`) and its docstring is the
option's help. Names are unique over all sections. `None` means "not given". Files hold options by
name:

    flatten(Config())        {"model": "cnn", "hidden": [128, 64], ...}    JSON values only
    assemble({"epochs": 3})  Config with 3 epochs and defaults elsewhere
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints

from nnmpi.backend.precision import ON_HOST
from nnmpi.base.command import (
    Option,
    Switch,
    check_idle,
    check_numbers,
    convert,
    flag_of,
    make_section,
    non_defaults,
    options_of,
    require,
    suggest,
)
from nnmpi.base.custom import Custom, as_option, is_custom, name_of
from nnmpi.base.errors import UsageError
from nnmpi.base.units import Every, Seconds
from nnmpi.comm.agreement import on_root
from nnmpi.comm.fit import parse_network
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.synchrony.slow import Slow
from nnmpi.comm.synchrony.sync import Sync
from nnmpi.comm.world import LIMIT_S, WARNING_S
from nnmpi.compose.layout import GradientExchange, Layout, Numerics, Precision, check_layout
from nnmpi.compose.losses import CROSS_ENTROPY, LossName
from nnmpi.data.catalogue import BUNDLED, SOURCES, TEXTS
from nnmpi.data.readers import first_suffixes
from nnmpi.data.transform import AUGMENTATIONS
from nnmpi.metrics.rows import METRICS
from nnmpi.nn.activation import ActivationName
from nnmpi.optim.updates import OptimizerName, count_state, is_elementwise, taking

T = TypeVar("T")

MODELS = ("mlp", "cnn", "resnet", "lstm", "gpt", "llama")
FIT = "nnmpi.fit"  # the data set of a run whose model and data a program has given
MetricNames: TypeAlias = tuple[Annotated[str, (*METRICS, "FILE.py:NAME")], ...]
# Bound of epochs and widths: far beyond any use, and small enough that results stay finite.
LONG = 1e9
LAYERS = 10_000  # more would be built for minutes, until memory ends


SEQUENCE_MODELS = ("lstm", "gpt", "llama")
TRANSFORMERS = ("gpt", "llama")  # whose ranks may share positions; Hugging Face has them
NO_ADAPTERS: Mapping[str, Any] = {
    "lora": None,
    "lora_alpha": None,
    "lora_targets": "q,v",
    "lora_dropout": 0.0,
    "base_dtype": None,
    "adapter": None,
}
# how a file of samples is read, and which of them are held out
OF_FILES = "target drop sample_weight sample_shape decimal header stratify"
NOT_OF_TOKENS = f"{OF_FILES} augment loss class_weights"
# {option: {sub-option: the values of the option with which it has a meaning}}
ONLY_WITH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "model": {
        "hidden": ("mlp", "cnn", "llama"),
        "activation": ("mlp",),
        "dropout": ("mlp", "cnn", "lstm", "gpt"),
        "context": (*SEQUENCE_MODELS, "FILE.py:NAME"),
        **dict.fromkeys(("layers", "features"), SEQUENCE_MODELS),
        **dict.fromkeys(("heads", "pretrained", "lora"), TRANSFORMERS),
        **dict.fromkeys(("experts", "experts_top", "experts_capacity"), ("gpt",)),
        **dict.fromkeys(("kv_heads", "theta", "tied"), ("llama",)),
    },
    "optimizer": {"momentum": taking("momentum")},
    "loss": dict.fromkeys(("label_smoothing", "class_weights"), (CROSS_ENTROPY,)),
}


class ExchangeConfig(GradientExchange):
    """How gradients are summed, spelled as options."""


@dataclass(frozen=True)
class ParallelConfig(GradientExchange, Layout):
    """The parallel layout."""

    layout: Literal["given", "auto"] = "given"
    """auto: the layout with the shortest predicted step within --memory-limit, as nnmpi plan
    finds it. The other options of this group are then left out.
    """
    microbatches: int | None = None
    """Microbatches per batch: they pass through the pipeline one after another, and without a
    pipeline they save memory (default: 1; 4 per pipeline rank; with --reduction fixed 16 for any
    layout).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "microbatches", 1)


MOST_SIMULATED_RANKS = 1024


@dataclass(frozen=True)
class SyncConfig(Sync):
    """Synchrony: whether ranks wait for one another."""

    slow: str = ""
    """Stragglers on purpose. "ms=20": every step takes at least 20 ms (exactly, with --simulate).
    "rank=2,factor=3": rank 2 takes 3 times as long. "probability=0.25,factor=3": any rank, at
    random. Separate several by semicolons.
    """
    network: str = ""
    """With --simulate: the links, such as alpha_us=50,gbit=10, or alpha=5e-5,beta=8e-10 in seconds;
    add per_node=8,inside_gbit=80 for nodes of several ranks. fit, or the file of a fit: links as
    measured (default: messages take no time).
    """
    simulate: int = 0
    """Run this many ranks in one process, without MPI, on simulated clocks. A step's computing
    takes the time of --slow ms=20, or else its processor time here. --seed also decides what MPI
    leaves open, such as the order of arrivals.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = (self.slowness(0), self.machine)  # each raises UsageError for bad words
        check_numbers(self, "simulate", 0, MOST_SIMULATED_RANKS)
        require(
            self.simulate > 0 or not self.network,
            "--network is for --simulate; real messages take real time: leave it out",
        )

    @property
    def machine(self) -> Machine | None:
        """The machine of simulated links, one rank per node by default; None for free messages."""
        return parse_network(self.network, self.simulate) if self.network else None

    def slowness(self, seed: int) -> Slow:
        """Return the slowdown of each rank; `seed` draws the random ones."""
        return Slow.parse(self.slow, seed)

    def check_parallel(self, parallel: ParallelConfig) -> None:
        """With an asynchronous mode, refuse parallel options that need synchronous replicas."""
        if not self.asynchronous:
            return
        for name, value in non_defaults(parallel).items():
            what = f"{flag_of(name)} cannot be combined with --sync {self.sync}"
            require(
                name in ("dp", "microbatches", "layout")
                or (name in ("pp", "tp", "sp") and value == 1),
                f"{what}, whose workers each have the full model and sum no gradients; leave it"
                " out",
            )


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    model: str = "cnn"
    """mlp: dense layers. cnn: two convolutions and three dense layers. resnet: a small residual
    network. lstm, gpt, llama: language models. FILE.py:NAME or package.module:NAME: your own
    function of (sample_shape, classes). With --pretrained its config.json says which.
    """
    hidden: tuple[int, ...] = (128, 64)
    """Widths of the hidden dense layers of mlp and cnn, in order; no number: a linear mlp. Of
    llama the one inside of each perceptron (default: 8/3 of --features, a multiple of 16).
    """
    activation: ActivationName = "relu"
    """Activation of mlp's hidden layers."""
    dropout: float | None = None
    """Dropout probability: after hidden dense layers of mlp and cnn, between lstm layers, and in
    gpt on embeddings, attention probabilities and residual branches (default: 0; with --pretrained,
    as saved there).
    """
    layers: int | None = None
    """Layers of lstm, blocks of gpt and llama (default: 2; with --pretrained, as saved there)."""
    features: int | None = None
    """Width of lstm, gpt and llama (default: 128; with --pretrained, as saved there)."""
    heads: int | None = None
    """Attention heads of gpt and llama, a divisor of --features (default: 4; with --pretrained, as
    saved there).
    """
    kv_heads: int | None = None
    """Heads of keys and values of llama, a divisor of --heads (default: as many; with --pretrained,
    as saved there).
    """
    theta: float = 10_000.0
    """Base of llama's rotary positions; the longer the context, the larger."""
    tied: bool = False
    """Have llama's output layer be its table of tokens."""
    experts: int | None = None
    """Experts per gpt block, in place of its MLP: a gate sends each token to --experts-top of them
    (default: no experts).
    """
    experts_top: int = 2
    """With --experts: experts per token."""
    experts_capacity: float | None = None
    """With --experts: most tokens of a sequence per expert, as a multiple of an even share, such as
    1.25 (default: unlimited).
    """
    context: int | None = None
    """Tokens per training sample of lstm, gpt and llama, and the longest context of the last two
    (default: 64; with --pretrained, as saved there).
    """
    pretrained: Path | None = None
    """A GPT-2, Llama, Mistral, Qwen 2 or 3, or SmolLM to start from: a finished run of --model gpt
    or llama, or a Hugging Face folder with config.json, model.safetensors and its tokenizer.
    """
    lora: int | None = None
    """Train additions of this rank to linear layers of --pretrained, adapters (LoRA), and leave its
    weights as they are. Checkpoints and RUN/adapter, which PEFT reads, have the additions alone.
    """
    lora_alpha: float | None = None
    """With --lora: additions are multiplied by this over the rank (default: the rank)."""
    lora_targets: str = "q,v"
    """With --lora: names of linear layers, or patterns of full names such as *.mlp.*, separated by
    commas. gpt has a single layer for q, k and v. all-linear: all but the output.
    """
    lora_dropout: float = 0.0
    """With --lora: the probability of dropping an element of an addition's input."""
    base_dtype: Literal["bf16"] | None = None
    """With --lora: keep the tables and matrices of --pretrained in bfloat16, in half of the memory;
    each is widened to --dtype while its layer computes (default: --dtype).
    """
    adapter: Path | None = None
    """Go on with the additions in a folder of PEFT's, such as RUN/adapter of --lora, instead of new
    ones; --lora and the options beside it are then as saved there.
    """

    def __post_init__(self) -> None:
        known = (
            f"choose {', '.join(MODELS)}, or give your own as FILE.py:NAME or package.module:NAME"
        )
        require(self.model in MODELS or is_custom(self.model), f"--model is {self.model}; {known}")
        check_numbers(self, "hidden", 1, LONG)
        check_numbers(self, "dropout", 0, 1)
        check_idle(self, "model", ONLY_WITH["model"])
        check_numbers(self, "layers", 1, LAYERS)
        check_numbers(self, "features heads kv_heads context experts experts_top", 1)
        check_numbers(self, "theta", 0, LONG, above=True)
        check_numbers(self, "experts_capacity", 0, above=True)
        check_numbers(self, "lora", 1)
        check_numbers(self, "lora_alpha", 0, above=True)
        check_numbers(self, "lora_dropout", 0, 1)
        adapters = [name for name, usual in NO_ADAPTERS.items() if getattr(self, name) != usual]
        without_rank = ["lora", "adapter", *(["base_dtype"] if self.adapter else [])]
        settings = [flag_of(name) for name in adapters if name not in without_rank]
        require(
            self.lora is not None or not settings,
            f"{', '.join(settings)}: give --lora RANK, too; an --adapter has its own",
        )
        require(
            self.pretrained is not None or not adapters,
            "--lora and --adapter add to a trained model; give --pretrained, too",
        )
        top, experts = self.experts_top, self.experts
        alone = top == 2 and self.experts_capacity is None
        require(bool(experts) or alone, "--experts-top and --experts-capacity need --experts, too")
        require(
            not experts or experts >= top, f"--experts-top {top} is more than --experts {experts}"
        )
        require(
            not (experts and self.pretrained), "--pretrained has no experts; leave --experts out"
        )
        if self.model in TRANSFORMERS and self.pretrained is None:
            _, features, heads = self.sizes
            require(
                features % heads == 0,
                f"--features {features} is not a multiple of --heads {heads}; choose others",
            )
        if self.model == "llama":
            self._check_llama()

    def _check_llama(self) -> None:
        """Refuse sizes that a Llama cannot have, and those that a pretrained one has already."""
        given = non_defaults(self)
        for name in ("hidden", "theta", "tied"):
            require(
                self.pretrained is None or name not in given,
                f"{flag_of(name)} is in the files of --pretrained; leave it out",
            )
        require(
            "hidden" not in given or len(self.hidden) == 1,
            f"--hidden has {len(self.hidden)} widths; the perceptrons of --model llama have one",
        )
        if self.pretrained is None:
            _, features, heads = self.sizes
            require(
                heads % (self.kv_heads or heads) == 0,
                f"--kv-heads {self.kv_heads} is no divisor of --heads {heads}; choose others",
            )
            require(
                features // heads % 2 == 0,
                f"--features {features} / --heads {heads} is odd, but rotary positions turn pairs"
                " of a head's features; choose others",
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Layers, features and heads of a new model; a pretrained one's are in its files."""
        return self.layers or 2, self.features or 128, self.heads or 4


def check_positions(config: ModelConfig, sp: int) -> None:
    """Refuse --sp for models without positions, or with layers that mix them."""
    model = config.model
    why = "needs them one after another" if model in SEQUENCE_MODELS else "has none"
    require(
        sp == 1 or model not in MODELS or model in TRANSFORMERS,
        f"--sp {sp} shards the positions of sequences, but --model {model} {why}; leave --sp out,"
        " or use --model gpt or llama",
    )


@dataclass(frozen=True)
class DataConfig:
    """The data set."""

    _lists: ClassVar[Mapping[str, str]] = {
        "bundled": ", ".join(name for name in BUNDLED if name not in TEXTS),
        "downloaded": ", ".join(SOURCES),
        "files": first_suffixes("table", "arrays"),
        "texts": ", ".join(TEXTS),
        "documents": first_suffixes("text"),
    }

    dataset: str = "digits"
    """{bundled} (bundled), {downloaded}, the path of a file, {files}, or of a folder of images or
    .npy files. FILE.h5:NAME,NAME names arrays. For language models: {texts} (bundled), or a file,
    {documents}; of tables with --text-columns. FILE.py:NAME: a function () that returns a training
    and a test Dataset.
    """
    tokenizer: str | None = None
    """Tokenizer of text: characters, bytes, or the path of a saved one, a tokenizer.json, which
    needs pip install tokenizers (default: characters; with --pretrained, the one saved there).
    """
    text_columns: str = ""
    """Columns of text of a table, joined by line breaks, such as problem,solution; messages, of a
    .jsonl: conversations, which the tokenizer's chat template makes texts. With --target, the words
    of these columns are features, beside the other columns.
    """
    text_samples: Literal["blocks", "sentences"] = "blocks"
    """Samples of text. blocks: --context tokens each. sentences: one per line or row, in batches of
    similar lengths.
    """
    target: str = ""
    """Column of a table to predict, labels or numbers, by name or by number from 1 (default: the
    last).
    """
    drop: str = ""
    """Columns of a table to leave out, by names or numbers from 1, separated by commas."""
    sample_weight: str = ""
    """Column of a table with the weights of the samples' losses in the training, by name or number
    from 1: a batch's loss is sum(weight x loss) / sum(weight). It is no feature.
    """
    sample_shape: tuple[int, ...] | None = None
    """Shape of a row of a table, such as 28,28,1 for the pixels of an image (default: its
    features).
    """
    decimal: Literal["auto", ".", ","] = "auto"
    """Decimal mark of a table. auto: the one that its numbers show."""
    header: bool = True
    """Whether the first line of a table names its columns; if not, they are called 1, 2, 3 ..."""
    data_dir: Path | None = None
    """Folder of the data set's files. Without it they are downloaded once per node."""
    test_fraction: float = 0.2
    """Fraction of the samples held out for the test, for data sets without a test set."""
    stratify: bool = False
    """Hold out this fraction of each class (default: of all samples together)."""
    augment: str = "none"
    """Random changes of training images, joined by dashes, such as shift-flip. shift: by up to a
    twelfth of the shorter side. flip: left-right. rotate: by up to 10 degrees. color: by up to a
    fifth. cutout: a square of a quarter of the side.
    """
    partition: Literal["none", "iid", "label"] = "none"
    """Samples each worker draws from. none: all. iid: a fixed random part of its own. label: its
    own part of the samples sorted by class, as different between workers as possible.
    """
    shuffle_block: int | None = None
    """Shuffle blocks of so many consecutive samples, and samples within pools of 16 blocks, for
    files that are slow at single rows (default: all samples are shuffled).
    """
    balance: bool = False
    """Draw each class equally often, the samples of rare ones several times in an epoch."""

    normalize: bool = True
    """Subtract the training set's mean and divide by its standard deviation, per channel or column.
    Numbers to predict, too, by one standard deviation; results are in the data's units.
    """

    def __post_init__(self) -> None:
        given = non_defaults(self)
        require(self.dataset != "", "--dataset is empty; give a name such as digits, or a path")
        check_numbers(self, "test_fraction", 0, 1, above=True)
        require(
            self.augment == "none" or {*self.augment.split("-")} <= AUGMENTATIONS.keys(),
            f"--augment {self.augment} is unknown; give none, or {', '.join(AUGMENTATIONS)},"
            " joined by dashes",
        )
        require(
            bool(self.columns) or not self.text_columns,
            f"--text-columns {self.text_columns!r} has an empty name; give names separated by"
            " commas, or leave it out",
        )
        check_numbers(self, "sample_shape", 1)
        check_numbers(self, "shuffle_block", 1)
        orders = [name for name in ("partition", "shuffle_block", "balance") if name in given]
        require(
            len(orders) < 2,
            f"{' and '.join(map(flag_of, orders))} each give an order; leave one of them out",
        )
        require(
            self.tokenizer != "",
            "--tokenizer is empty; give characters, bytes, or the path of a saved one",
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in --text-columns."""
        return _split_names(self.text_columns)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names in --drop."""
        return _split_names(self.drop)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True)
class OptimizationConfig:
    """Optimization."""

    epochs: int = 20
    """Passes over the training set."""
    max_steps: int | None = None
    """Updates after which training ends, if --epochs does not end it first. The learning-rate
    schedule ends with them.
    """
    stop_after: int | None = None
    """Stop after this many updates, in mid-schedule, for --resume to finish."""
    max_time: Seconds | None = None
    """Time after which training ends, with an evaluation and a checkpoint, such as 3h or 1h30m;
    all starts of a run count together.
    """
    batch_size: int | Literal["full"] = 32
    """Samples per update, over all ranks together. full: the whole training set (full gradient
    descent).
    """
    optimizer: OptimizerName | Custom = "adam"
    """Update rule. FILE.py:NAME: your own subclass of optim.Optimizer, called as NAME(storage, lr).
    """
    loss: LossName | Custom = CROSS_ENTROPY
    """Loss: cross-entropy for classes; mse (squared), mae (absolute) or huber for numbers; bce for
    yes or no, with one output. FILE.py:NAME: your own function (logits, labels) that returns the
    loss of each label.
    """
    lr: float = 3e-3
    """Learning rate, the peak of the schedule."""
    momentum: float | None = None
    """Momentum, for an --optimizer that has it (default: the one named there)."""
    weight_decay: float | None = None
    """Weight decay: L2, unless --optimizer calls it decoupled (default: the one named there)."""
    lr_schedule: str = "cosine"
    """Learning rate after the warm-up. constant. cosine: falls to nearly 0. step:10,0.1:
    times 0.1 every 10 epochs. restarts:10,2: a cosine that begins anew after 10 epochs, then 20,
    40 ... plateau:3,0.1: times 0.1 after 3 evaluations without a better one, see --best-by.
    FILE.py:NAME: your own function (step, steps, lr).
    """
    warmup_epochs: float | None = None
    """Epochs of linear warm-up from near 0 (default: 1, at most a tenth of the run)."""
    label_smoothing: float = 0.0
    """Probability moved from the right class to all classes, in the training loss."""
    class_weights: tuple[float, ...] | Literal["balanced"] = ()
    """Weights of the classes in the training loss, in their order, such as 1 2.5 4; balanced:
    inverse to how many training samples each has. None: equal ones.
    """
    freeze: str = ""
    """Parameters that are not trained, by names or patterns, separated by commas, such as
    0.weight,layers.1.*
    """

    def __post_init__(self) -> None:
        check_numbers(self, "epochs max_steps stop_after batch_size", 1)
        check_numbers(self, "max_time", 0, above=True)
        check_numbers(self, "lr", 0, above=True)
        check_numbers(self, "momentum label_smoothing", 0, 1)
        check_numbers(self, "warmup_epochs", 0, LONG)
        check_numbers(self, "weight_decay class_weights", 0)
        _ = self.rate_words  # raises UsageError for a bad --lr-schedule
        for option in ("loss", "optimizer"):
            check_idle(self, option, ONLY_WITH[option])
        require(
            not is_custom(self.optimizer) or self.weight_decay is None,
            f"--weight-decay cannot be combined with --optimizer {self.optimizer}, which sets its"
            " own; leave it out",
        )

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names and patterns in --freeze."""
        return _split_names(self.freeze)

    def rows(self, samples: int) -> int:
        """Return the rows of a batch from a training set of this size."""
        return samples if self.batch_size == "full" else min(self.batch_size, samples)

    @property
    def rate_words(self) -> tuple[str, tuple[float, float]]:
        """The name in --lr-schedule and its two numbers; ("", (0, 0)) for a function.

        Raises:
            UsageError: for an unknown name, and for numbers out of range.
        """
        given = self.lr_schedule
        if is_custom(given):
            return "", (0.0, 0.0)
        name, _, text = given.partition(":")
        known = SCHEDULES.get(name)
        require(
            known is not None and (bool(known.example) or not text),
            f"--lr-schedule is {given}; give {', '.join(map(example_of, SCHEDULES))} or"
            " FILE.py:NAME",
        )
        assert known is not None
        if not known.example:
            return name, (0.0, 0.0)
        try:
            first, second = map(float, (text or known.example).split(","))
        except ValueError:
            first = second = 0.0
        least, most = known.range
        require(
            0 < first < LONG
            and least <= second <= most
            and second > 0
            and (not known.whole or first.is_integer()),
            f"--lr-schedule is {given}; give {known.words}, such as {name}:{known.example}",
        )
        return name, (first, second)


class RateWords(NamedTuple):
    """The numbers of a schedule's name.

    Attributes:
        example: of its two numbers, which are the default; empty for none.
        words: what they are.
        range: of the second one.
        whole: whether the first one is a whole number.
    """

    example: str = ""
    words: str = ""
    range: tuple[float, float] = (0.0, 1.0)
    whole: bool = False


SCHEDULES = {
    "constant": RateWords(),
    "cosine": RateWords(),
    "step": RateWords("10,0.1", "epochs and a factor up to 1"),
    "restarts": RateWords("10,2", "epochs and a growth from 1 to 10", (1.0, 10.0)),
    "plateau": RateWords("3,0.1", "evaluations and a factor up to 1", whole=True),
}
PLATEAU = "plateau"


def example_of(schedule: str) -> str:
    """Return the name of a schedule of the learning rate with its numbers: "step:10,0.1"."""
    return ":".join(filter(None, [schedule, SCHEDULES[schedule].example]))


@dataclass(frozen=True)
class NumericsConfig(Numerics):
    """Precision, gradient clipping, and an average of the weights."""

    precision: Precision = "float32"


@dataclass(frozen=True)
class RunConfig:
    """The run: where it computes and what it saves."""

    ranks: int | Literal["auto"] | None = None
    """Start so many ranks, as mpirun -n does; also -n. auto: one for each idle core (default: those
    that a launcher has started, or one).
    """
    backend: Literal["auto", "numpy", "cupy"] = "auto"
    """Array library. auto: CuPy if a CUDA device is usable, else NumPy."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of weights, inputs and gradients."""
    jit: Switch = "auto"
    """Use compiled kernels (float32 on the CPU; needs pip install numba). auto: if numba is
    installed and the run is long enough to repay loading them.
    """
    seed: int = 0
    """Seed of all randomness: split, initial weights, order, augmentation, dropout."""
    out: Path | None = None
    """Folder of the run (default: runs/DATASET-MODEL-TIME). It must not hold another run."""
    resume: Path | None = None
    """Folder of a run to resume, from its last good checkpoint and with its options."""
    trust: bool = False
    """Execute your code, FILE.py:NAME, that the resumed run names."""
    config: Path | None = None
    """TOML file of options, named as on the command line without dashes. The command line takes
    precedence.
    """
    log_every: int = 10
    """Steps between two lines of training metrics in metrics.jsonl."""
    callback: Custom | None = None
    """FILE.py:NAME: your own function (record), called on rank 0 with each record of metrics.jsonl
    as a dictionary. It ends the training if it returns "stop" or raises nnmpi.StopTraining.
    """
    quiet: bool = False
    """Print errors only. The run's console.txt has the full output in any case."""
    verbose: bool = False
    """After each epoch, print where the time of a step went and how many bytes were sent."""
    eval_every: Every = Every("1")
    """Epochs between two evaluations on the test data, or steps: 100steps. 0: only at the end."""
    save_every: Every | None = None
    """Epochs between two checkpoints, or steps: 100steps. 0: only at the end (default: so that
    saving takes at most 1 % of the time).
    """
    trace: bool = False
    """Write a trace of every rank's first 20 steps to trace.json.gz in the run's folder, for
    ui.perfetto.dev; with --sync other than bsp, of the steps up to the first evaluation. On a CUDA
    device it shows when the host launched the work.
    """
    profile: bool = False
    """Measure some of the first steps, and print the seconds of a step by layer, forward and
    backward, and of what is left.
    """
    metric: MetricNames = ()
    """Further metrics of each evaluation: NAME,NAME. recall:CLASS, and the like: of one class, by
    its name or number. FILE.py:NAME: your own function (outputs, labels) that returns a value of
    each label, or an nnmpi.metrics.Metric.
    """
    best_by: str | None = None
    """The metric, as for --metric, or loss, by which --keep-best and --early-stopping compare
    evaluations (default: accuracy; the loss of tokens and quantities).
    """
    keep_best: bool = False
    """Also save after each evaluation that beats all earlier ones, and keep that checkpoint."""
    early_stopping: int | None = None
    """Stop after this many evaluations, see --eval-every, of which none has beaten the best one by
    --best-by. The best weights are kept as by --keep-best.
    """
    least_gain: float = 0.0
    """By how much an evaluation must beat the best one, such as 0.001 for 0.1 % of accuracy."""
    stall_limit: float = LIMIT_S
    """Seconds after which a stalled job is ended with status 75; each rank leaves a record in
    flight/ of the run's folder. Ten times as long while the missing rank is busy. 0: never.
    """

    def __post_init__(self) -> None:
        check_numbers(self, "ranks log_every early_stopping", 1)
        check_numbers(self, "stall_limit seed least_gain", 0)
        require(
            self.early_stopping is None or bool(self.eval_every.steps or self.eval_every.epochs),
            "--early-stopping counts evaluations, and --eval-every 0 has none; leave one of them"
            " out",
        )
        require(
            not self.least_gain or self.keeps_best,
            "--least-gain is of --keep-best and --early-stopping; give one of them",
        )
        require(
            not self.stall_limit or self.stall_limit >= WARNING_S,
            f"--stall-limit {self.stall_limit:g} is below the warning's {WARNING_S:g} s; give more",
        )
        require(
            None in (self.out, self.resume) or self.out == self.resume,
            f"--resume continues in the run's folder {self.resume}; leave --out {self.out} out",
        )

    @property
    def keeps_best(self) -> bool:
        """Whether the best evaluation's weights are kept."""
        return self.keep_best or self.early_stopping is not None


def having(section: T, values: Mapping[str, Any]) -> T:
    """Return a section with its options among the values: itself, already checked, if so."""
    new = {name: value for name, value in values.items() if vars(section).get(name, value) != value}
    return replace(section, **new) if new else section  # type: ignore[type-var]


@dataclass(frozen=True)
class Config:
    """Every option of a run, by section."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    numerics: NumericsConfig = NumericsConfig()
    parallel: ParallelConfig = ParallelConfig()
    sync: SyncConfig = SyncConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        parallel, numerics = self.parallel, self.numerics
        check_layout(parallel, None, parallel, numerics.precision, numerics.clip)
        self.sync.check_parallel(self.parallel)
        if self.parallel.layout == "auto":
            require(
                not self.sync.asynchronous,
                "--layout auto is for synchronous ranks; leave it or --sync out",
            )
            require(
                self.run.resume is None,
                "--layout auto is for a new run; leave it out: --resume keeps the run's layout",
            )
            for name in non_defaults(self.parallel):
                require(
                    name in ("layout", "memory_limit", "offload", "compress"),
                    f"--layout auto chooses {flag_of(name)} itself; leave one of them out",
                )
        model, given = self.model.model, non_defaults(self.data) | non_defaults(self.optimization)
        for name in NOT_OF_TOKENS.split():
            require(
                model not in SEQUENCE_MODELS or name not in given or is_custom(given[name]),
                f"{flag_of(name)} is not for --model {model}, whose samples and labels are tokens;"
                " leave it out",
            )
        require(
            not self.parallel.expert_parallel or bool(self.model.experts) or is_custom(model),
            "--expert-parallel needs a mixture; give --experts, too, or leave it out",
        )
        require(
            not self.sync.has_server or is_elementwise(self.optimization.optimizer),
            f"--optimizer {name_of(self.optimization.optimizer)} updates whole matrices, but the"
            f" server of --sync {self.sync.sync} flat arrays; leave one of them out",
        )
        check_positions(self.model, self.parallel.sp)
        run, precision = self.run, self.numerics.precision
        require(
            self.optimization.rate_words[0] != PLATEAU
            or bool(run.eval_every.steps or run.eval_every.epochs),
            "--lr-schedule plateau counts evaluations, and --eval-every 0 has none; leave one of"
            " them out",
        )
        require(
            not run.profile or not self.sync.asynchronous,
            "--profile measures single steps, after each of which the ranks of --sync"
            f" {self.sync.sync} would meet, which is another training; leave one of them out",
        )
        require(
            run.ranks is None or not self.sync.simulate,
            "--ranks starts processes, and --simulate has its ranks in one; leave one of them out",
        )
        require(
            run.dtype != "float64" or precision == "float32",
            f"--precision {precision} rounds float32, and --dtype is float64; leave one of them"
            " out",
        )
        require(
            precision in ON_HOST or run.backend != "numpy",
            f"--precision {precision} needs a CUDA device; use --backend cupy, or leave it out",
        )
        compiled = run.dtype == "float32" and precision in ON_HOST and run.backend != "cupy"
        require(
            compiled or run.jit != "on", "--jit compiles only for float32 on the CPU; leave it out"
        )
        require(
            not self.model.experts or self.data.text_samples != "sentences",
            "--experts counts the tokens of a sequence, and --text-samples sentences pads them to"
            " their batch's longest; leave one of them out",
        )
        require(
            self.parallel.reduction != "fixed" or self.data.partition == "none",
            f"--partition {self.data.partition} cannot be combined with --reduction fixed, which"
            " gives any sample to any rank; leave one of them out",
        )

    @property
    def state_arrays(self) -> int:
        """The number of arrays of each parameter's size in the optimizer's state."""
        options, more = self.optimization, bool(self.numerics.ema)
        if is_custom(options.optimizer):
            return 2 + more
        return count_state(options.optimizer, momentum=options.momentum or None) + more

    def having(self, **values: Any) -> "Config":
        """Return a copy with these options replaced, by name."""
        return Config(**{name: having(section, values) for name, section in vars(self).items()})


# ---- options by name ----


@cache
def all_options() -> Mapping[str, Option]:
    """Return the fields of all sections as options by name, in order."""
    sections = get_type_hints(Config).values()
    return types.MappingProxyType(
        {option.name: option for section in sections for option in options_of(section)}
    )


def flatten(config: Config) -> dict[str, Any]:
    """Return options by name as JSON values, in the order of the sections."""
    flat: dict[str, Any] = {}
    for section in vars(config).values():
        flat |= to_json(section)
    return flat


def read_on_root(group: Group, read: Callable[[], Config]) -> Config:
    """Return rank 0's configuration on every rank, checked once on each. Collective."""
    own = cache(read)
    flat = on_root(group, lambda: flatten(own()))
    return own() if group.is_root else assemble(flat)


def to_json(section: Any) -> dict[str, Any]:
    """Return the options of one section by name, as `flatten` does."""
    return {item.name: plain(getattr(section, item.name)) for item in options_of(type(section))}


def plain(value: Any) -> Any:
    """Return an option's value as a JSON value; of a program's object, its name."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float) else as_option(value)


def assemble(flat: Mapping[str, Any]) -> Config:
    """Return the configuration with these values, and defaults otherwise.

    Raises:
        UsageError: for unknown options, and for values of a wrong type or out of range.
    """
    values = check(flat, "options")
    return Config(
        **{name: make_section(section, values) for name, section in get_type_hints(Config).items()}
    )


def check(
    flat: Mapping[str, Any], origin: str, options: Mapping[str, Option] | None = None
) -> dict[str, Any]:
    """Return the values converted to the options' types; names may have dashes.

    Args:
        flat: {name: value of JSON or TOML}.
        origin: of the values, for messages.
        options: by name; those of training by default.

    Raises:
        UsageError: for unknown options (with the nearest names), and for values of a wrong type.
    """
    values: dict[str, Any] = {}
    known = options or all_options()
    for written, value in flat.items():
        name = written.replace("-", "_")
        if name not in known:
            raise UsageError(f"{origin}: {written} is not an option{suggest(name, known)}")
        require(name not in values, f"{origin}: {written} is given twice; leave one of them out")
        values[name] = convert(value, known[name], f"{origin}: {written}")
    return values
