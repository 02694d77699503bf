"""`nnmpi.fit`: the train command's loop for a model and data of a program, in one call.

The call's arguments become the command's options, with a program's own objects in the places of
names. `session.begin` and `loop.Loop` then run what they run for the command.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.base.command import Console, require
from nnmpi.base.custom import name_of
from nnmpi.base.errors import DivergenceError, NnmpiError, UsageError, expect
from nnmpi.comm.agreement import agreed, on_root
from nnmpi.comm.group import Group
from nnmpi.comm.mpi.start import start
from nnmpi.compose.arrange import Arrangement, replicate, require_same_options
from nnmpi.compose.evaluation import Evaluation
from nnmpi.compose.layout import Layout
from nnmpi.compose.state import model_state
from nnmpi.compose.worker import Worker
from nnmpi.data.dataset import Dataset, Samples, read_array
from nnmpi.models.torch_weights import save_arrays
from nnmpi.nn.module import Module
from nnmpi.optim.optimizer import Optimizer
from nnmpi.optim.schedule import ReduceOnPlateau
from nnmpi.parallel.zero.strategy import ShardedDataParallel
from nnmpi.train.checkpoint import MemorySaver, find
from nnmpi.train.cli import refuse_changes
from nnmpi.train.config import FIT, Config, DataConfig, ModelConfig, all_options, check, flatten
from nnmpi.train.evaluating import evaluate, match_samples
from nnmpi.train.folder import CONFIG_FILE, read_run
from nnmpi.train.loop import Callback, Loop, Stopped
from nnmpi.train.measures import run_metrics
from nnmpi.train.run import Run, TrainingRun
from nnmpi.train.session import Given, begin

# Options of the command that are arguments of `fit`, follow from them, or are for commands alone.
NOT_TAKEN = {"ranks", "out", "resume", "trust", "config", "callback", "metric", "lr_schedule"}
NOT_TAKEN |= {"quiet", "simulate", "network", "layout"}
OF_DATA = {
    "normalize",
    "augment",
    "partition",
    "shuffle_block",
    "balance",
}  # the only ones for arrays
# the names of options in sentences: those that `fit` calls otherwise
ARGUMENTS = {"out": "checkpoint", "resume": "checkpoint", "lr_schedule": "schedule"}
ARGUMENTS |= {"metric": "metrics", "dataset": "train"}
ROWS_SHOWN = 12  # of a notebook's table


def fit(
    model: Module,
    train: Any,
    test: Any,
    *,
    epochs: int = 20,
    batch_size: int | Literal["full"] = 32,
    optimizer: Any = "adam",
    lr: float | None = None,
    loss: Any = "cross-entropy",
    metrics: Any = (),
    best_by: Any = None,
    early_stopping: int | None = None,
    keep_best: bool = False,
    schedule: Any = "constant",
    callbacks: Callback | Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
    quiet: bool = False,
    **options: Any,
) -> "Fitted":
    """Train a model of your own on data of your own, as `nnmpi train` does. Collective.

    All ranks make the same call, in any layout with the serial run's results. It prints a line for
    each epoch on rank 0; a notebook shows a table and curves.

    Args:
        model: a module. With values (`initialize`) it goes on from these; otherwise they are drawn
            by `seed`. Pipelines and sharded layers need one without, since each rank then has no
            more than its part; for given weights, `worker.state()[0].scatter` in a loop of yours.
        train, test: a `Dataset` or a text each, or a pair of arrays (samples, labels); of `train`
            also three, (samples, labels, weights), see `Dataset`.
        epochs, batch_size: passes over `train`, and samples for each update, over all ranks.
        optimizer: a name, see `optim`; or a class or function of the model's storage, such as
            `optim.Lion` or `partial(optim.SGD, lr=0.1, momentum=0.9)`.
        lr: the learning rate; None for that of `optimizer`, which of a name is 0.003.
        loss, metrics: names, or functions of your own: see `Worker` and its `evaluate`.
        best_by: the metric, or "loss", that decides on the best evaluation; by default accuracy, or
            the loss of quantities and tokens.
        early_stopping: end after so many evaluations without a better one.
        keep_best: end with the weights of the best evaluation; `early_stopping` does, too.
        schedule: constant, cosine, plateau, restarts or step:EPOCHS,FACTOR as for the command,
            whose warm-up all but constant have; or a function of the step, such as `optim.Cosine`.
        callbacks: called on all ranks after each epoch and evaluation, with a `Moment`: they see
            the model, and may set the learning rate.
        checkpoint: a folder for checkpoints and metrics, in which the same call goes on; `nnmpi
            report` draws it.
        layout: how the ranks share the work; by default each has the model and a part of a batch.
        group: the ranks; those of `nnmpi.start()` by default.
        quiet: print nothing.
        options: any option of the command on optimization, precision, sums of gradients,
            synchrony or the run, by name: `clip=1.0`, `ema=0.999`, `eval_every="100steps"`,
            `augment="flip"`. `normalize` is False unless it is given.

    Returns:
        The result. The model then has the final weights, or the best ones; with pipelines and
        sharded layers each rank its part.

    Raises:
        UsageError: on all ranks, for arguments that do not fit one another, the data or the ranks.
        DivergenceError: on all ranks, for a loss or gradient that is not finite.
        CheckpointError: on all ranks, for checkpoints that cannot be read or written.

    Example:
        >>> train, test = data.load("iris")
        >>> def program(group):
        ...     model = models.mlp((4,), 3, hidden=[16])
        ...     fitted = nnmpi.fit(model, train, test, lr=0.02, quiet=True)
        ...     return fitted.step, fitted.history["test_accuracy"][-1] > 0.9
        >>> nnmpi.simulate(program, ranks=2)
        [(80, True), (80, True)]
    """
    expect("nnmpi.fit(model, train, test)", (model, Module))
    group = start() if group is None else group
    with _named_as_arguments():
        with agreed(group):
            samples = _samples(train, test)
            given = {"normalize": False, **_of_values(model), **_options(options, layout)}
            given |= _optimization(optimizer, lr, schedule, given)
            one = isinstance(metrics, str) or callable(metrics) or not isinstance(metrics, Sequence)
            config = Config().having(
                **given,
                model=model,
                dataset=FIT,
                epochs=epochs,
                batch_size=batch_size,
                loss=loss,
                metric=(metrics,) if one else tuple(metrics),
                best_by=best_by,
                early_stopping=early_stopping,
                keep_best=keep_best,
                out=None if checkpoint is None else Path(checkpoint),
            )
            require(
                config.run.out is not None or not config.run.trace,
                "--trace is written into a run's folder; give --out, too",
            )
        require_same_options(group, [f"{name} {text}" for name, text in flatten(config).items()])
        if config.run.out is not None and on_root(group, partial(_is_begun, config)):
            config = config.having(resume=config.run.out)
        called = [callbacks] if callable(callbacks) else list(callbacks)
        screen = _Screen(group.is_root and not quiet)
        with _alone(model):
            return _train(config, group, screen, Given(samples, called, screen.show))


def _train(config: Config, group: Group, screen: "_Screen", given: Given) -> "Fitted":
    """Run the loop, and leave the model with the weights to use. Collective."""
    weights = MemorySaver()
    with begin(config, group, screen.console, ("nnmpi.fit",), given) as loop:
        run = loop.training_run
        try:
            loop.run()
        except (Stopped, DivergenceError):  # on all ranks: the model is usable afterwards
            run.trainer.release()
            raise
        except BaseException:
            if group.size == 1:
                run.trainer.release()
            raise
        keeps_best = config.run.keeps_best and loop.state.best_step > 0
        if isinstance(loop.saver, MemorySaver) and keeps_best:
            weights = loop.saver
        elif config.numerics.ema:
            weights.save(run.trainer, 1, {}, best_step=1)
    where = run.trainer.arrangement
    is_whole = where.mesh.model.size == 1 and not where.layout.expert_parallel
    if is_whole:
        strategy = run.trainer.strategy if isinstance(run.trainer, Worker) else None
        if isinstance(strategy, ShardedDataParallel):
            strategy.gather_model()
        where.free()
        where = replicate(run.model, group, run.backend)
    state = model_state(where)
    if keeps_best and run.has_folder:
        best = find(run.folder, group, best=True)
        assert best is not None
        state.scatter(*best.weights())
    elif keeps_best or config.numerics.ema:
        state.scatter(weights.best.__getitem__)
    fitted = Fitted(run, loop, where)
    if keeps_best and fitted.best_step != fitted.step:
        screen.console.say(f"the model has the best weights, those of step {fitted.best_step}")
    screen.end(fitted)
    return fitted


class Fitted:
    """The result of `nnmpi.fit`: a trained model with its history. A notebook draws it.

    Attributes:
        model: with the weights to use; this rank's part in a pipeline or with sharded layers.
        history: {name: values}, one for each epoch, each evaluation and the end: step, epoch, loss
            and accuracy (or RMSE and R2) of the training, in the epoch so far; learning_rate;
            test_loss and every metric with test_ in front. None where there is no value.
        best_step: the number of updates of the best evaluation; 0 without one.
        step: the number of updates.
        stopped: why the training has ended early; empty if it has not.
    """

    def __init__(self, run: TrainingRun, loop: Loop, where: Arrangement) -> None:
        shared = {item.name: getattr(run, item.name) for item in fields(Run)}
        self._run = Run(**{**shared, "arrangement": where, "model": where.model})
        self._test, self._loss = run.inputs.test, None
        if callable(run.config.optimization.loss):
            self._loss = run.trainer.evaluation_loss
        self.model = where.model
        self._rows, self.history = loop.history.rows, loop.history.columns()
        self.best_step, self.step = loop.state.best_step, loop.state.step
        self.stopped = loop.stopped

    def predict(self, x: Any) -> Array:
        """Return the probability of each class, or quantities: see `Run.predict`.

        Collective in a pipeline and with sharded layers; otherwise each rank may call it alone.
        """
        return self._run.predict(x)

    def evaluate(self, data: Any = None, metrics: Any = (), batch_size: int = 256) -> Evaluation:
        """Return loss and metrics of other data, by default of the test's. Collective.

        Args:
            data: as for `fit`.
            metrics: more than those of the training.
            batch_size: most samples of a forward pass.

        Raises:
            DataError, UsageError: on all ranks, for data or metrics that do not fit the model.
        """
        run = self._run
        samples = self._test if data is None else _samples(data, data)[0]
        samples = match_samples(run.signature, samples)
        more = [metrics] if isinstance(metrics, str) or callable(metrics) else metrics
        with _named_as_arguments():
            chosen = run_metrics(run.config.run, run.signature, samples, more).chosen
        return evaluate(run, samples, batch_size, chosen, self._loss)

    def save(self, file: str | Path) -> None:
        """Write all weights into a safetensors file, on rank 0. Collective.

        `model.load_state(safetensors.numpy.load_file(file))` reads them.

        Raises:
            NnmpiError: on all ranks, when it cannot be written.
        """
        weights = model_state(self._run.arrangement).to_dict()
        metadata = self._run.metadata()
        on_root(self._run.group, partial(save_arrays, Path(file), weights, metadata))

    def release(self) -> None:
        """Free the groups of ranks of a pipeline or of sharded layers. Collective."""
        self._run.arrangement.free()

    def __repr__(self) -> str:
        last = {name: values[-1] for name, values in self.history.items()}
        shown = [f"{name} {value:.4g}" for name, value in last.items() if value is not None]
        return f"Fitted({type(self.model).__name__}: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        return _table(self._rows) + _curves(self.history)


@contextmanager
def _alone(model: Module) -> Iterator[None]:
    """Refuse a model that another `fit` is training, in a callback of which this one is.

    Raises:
        UsageError: with the remedy.
    """
    if "_is_fitted" in vars(model):
        raise UsageError(
            "another nnmpi.fit is training this model, and calls this one in a callback; give it a"
            " copy: copy.deepcopy(model)"
        )
    vars(model)["_is_fitted"] = True
    trainable = [(item, item.requires_grad) for item in model.parameters()]
    try:
        yield
    finally:
        del vars(model)["_is_fitted"]
        for parameter, was in trainable:  # `freeze` is of this training
            parameter.requires_grad = was


# ---- from arguments to options ----


def _options(options: Mapping[str, Any], layout: Any) -> dict[str, Any]:
    """Return the command's options among the arguments, converted, with those of the layout.

    Raises:
        UsageError: for unknown ones, and for those that have an argument of their own.
    """
    of_layout = {item.name for item in fields(Layout)}
    for name in options:
        require(
            name not in of_layout,
            f"{name} is a Layout's: give nnmpi.fit(..., layout=nnmpi.Layout({name}=...))",
        )
        require(
            name != "sample_weight",
            "weights belong to the samples: nnmpi.fit(model, (x, y, weights), test)",
        )
        require(
            name not in ("stratify", "test_fraction"),
            f"{name} is of a split, and fit gets both parts: data.split(dataset, 0.2,"
            " stratify=True) makes them",
        )
    known = {
        name: option
        for name, option in all_options().items()
        if option.section is not ModelConfig
        and (option.section is not DataConfig or name in OF_DATA)
        and name not in NOT_TAKEN | of_layout
    }
    own = {name: value for name, value in options.items() if name in known and callable(value)}
    words = {name: value for name, value in options.items() if name not in own}
    values = check(words, "nnmpi.fit", known) | own
    if layout is None:
        return values
    require(
        layout != "auto",
        "a layout is chosen by models that are built anew for each trial, which a program's is not:"
        " nnmpi plan finds the fastest one, for a model FILE.py:NAME, and that is given here",
    )
    expect("nnmpi.fit(..., layout=nnmpi.Layout(...))", (layout, Layout))
    return values | {name: getattr(layout, name) for name in of_layout}


def _optimization(
    optimizer: Any, lr: float | None, schedule: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of these arguments.

    Raises:
        UsageError: for an optimizer that has its arrays already, and for a rate with a state.
    """
    require(
        isinstance(optimizer, str)
        or (callable(optimizer) and not isinstance(optimizer, Optimizer)),
        f"optimizer is {type(optimizer).__name__}; give a name, or what makes one of a storage:"
        " optim.AdamW, or partial(optim.AdamW, lr=0.01)",
    )
    require(
        isinstance(schedule, str)
        or (callable(schedule) and not isinstance(schedule, ReduceOnPlateau)),
        f"schedule is {type(schedule).__name__}; give a name such as plateau, or a function of the"
        " step",
    )
    values: dict[str, Any] = {"optimizer": optimizer, "lr_schedule": schedule}
    if lr is not None:
        values["lr"] = lr
    if callable(optimizer):

        def make(storage: Any, rate: float) -> Any:
            return optimizer(storage) if lr is None else optimizer(storage, lr=rate)

        make.__name__ = name_of(getattr(optimizer, "func", optimizer))
        make.elementwise = getattr(optimizer, "elementwise", True)  # type: ignore[attr-defined]
        values["optimizer"] = make
    if callable(schedule):

        def rate(step: int, steps: int, lr: float) -> float:
            return float(schedule(step))

        rate.__name__ = name_of(schedule)
        values["lr_schedule"] = rate
    if (callable(schedule) or schedule == "constant") and "warmup_epochs" not in given:
        values["warmup_epochs"] = 0.0
    return values


def _of_values(model: Module) -> dict[str, Any]:
    """Return the options that a model with values has decided.

    Raises:
        UsageError: for one of which the ranks have parts since another training.
    """
    if "storage" not in vars(model):
        require(
            not any(hasattr(parameter, "data") for parameter in model.parameters()),
            "the ranks have parts of this model, from another training; build the model again",
        )
        return {}
    (first, *_) = model.storage.data
    backend = "numpy" if isinstance(first, np.ndarray) else "cupy"
    return {"dtype": str(model.storage.dtype), "backend": backend}


def _samples(train: Any, test: Any) -> tuple[Samples, Samples]:
    """Return two data sets, of pairs of arrays with as many classes as both have.

    Raises:
        UsageError, DataError: for anything else.
    """
    items = {"train": train, "test": test}
    for name, item in items.items():
        lengths = (2, 3) if name == "train" else (2,)
        require(
            isinstance(item, Samples) or (isinstance(item, tuple | list) and len(item) in lengths),
            f"{name} is {type(item).__name__}; give a data.Dataset, or a pair of arrays, (samples,"
            " labels); the training's may have weights, (samples, labels, weights)",
        )
    pairs = {name: item for name, item in items.items() if not isinstance(item, Samples)}
    labels = [read_array(y, f"labels of {name}", True) for name, (_, y, *_) in pairs.items()]
    whole = [y for y in labels if y.dtype.kind in "biu"]
    classes = 1 + max((int(y.max(initial=0)) for y in whole), default=0)
    for name, (x, y, *weights) in pairs.items():
        known = classes if len(whole) == len(labels) else 0
        items[name] = Dataset(name, x, y, known, weights=weights[0] if weights else None)
    return items["train"], items["test"]


def _is_begun(config: Config) -> bool:
    """Return whether the folder has a run, which this call goes on with; on rank 0.

    Raises:
        UsageError: for a run of other options, or of the command.
    """
    folder = config.run.out
    assert folder is not None
    if not (folder / CONFIG_FILE).is_file():
        return False
    before = read_run(folder, f"--resume {folder}")
    require(
        before.get("dataset") == FIT,
        f"--resume {folder} is a run of nnmpi train, which continues it; give another folder",
    )
    refuse_changes(config.having(resume=folder), before)
    return True


def _as_arguments(text: str) -> str:
    """Return a sentence with arguments in place of the command's options."""

    def spelled(option: re.Match[str]) -> str:
        name = option[1].replace("-", "_")
        return ARGUMENTS.get(name, name) if name in all_options() else option[0]

    return re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", spelled, text)


@contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Name arguments, and not options of the command, in errors of the body."""
    try:
        yield
    except NnmpiError as error:
        error.args = (_as_arguments(str(error)), *error.args[1:])
        raise


# ---- what a program or a notebook shows ----


class _ArgumentConsole(Console):
    """Prints lines with arguments in place of the command's options."""

    def say(self, *lines: str) -> None:
        super().say(*map(_as_arguments, lines))


class _Screen:
    """Shows a run: lines, or in a notebook a table that is written again, and curves at the end.

    Args:
        is_on: whether this rank shows anything.
    """

    def __init__(self, is_on: bool) -> None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        self._handle = None
        if is_on and hasattr(shell, "kernel"):
            self._handle = self._display("", display_id=True)
        self.console = _ArgumentConsole(quiet=not is_on or self._handle is not None)

    def _display(self, text: str, **options: Any) -> Any:
        displays: Any = sys.modules["IPython"].display
        return displays.display(displays.HTML(text), **options)

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table again."""
        if self._handle is not None:
            displays: Any = sys.modules["IPython"].display
            self._handle.update(displays.HTML(_table(rows)))

    def end(self, fitted: Fitted) -> None:
        """Draw the curves."""
        if self._handle is not None:
            self._display(_curves(fitted.history))


def _table(rows: Sequence[Mapping[str, float | None]]) -> str:
    """Return the last rows of a history as a table in HTML."""
    names = dict.fromkeys(name for row in rows for name in row)
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"]
    for row in rows[-ROWS_SHOWN:]:
        values = ("" if row.get(name) is None else f"{row[name]:.4g}" for name in names)
        lines.append(f"<tr>{''.join(f'<td>{value}</td>' for value in values)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _curves(history: Mapping[str, Sequence[float | None]]) -> str:
    """Return a chart in SVG of the loss and of each metric, over epochs."""
    charts = []
    for name in dict.fromkeys(name.removeprefix("test_") for name in history):
        if name in ("step", "epoch", "learning_rate"):
            continue
        lines = {
            colour: [
                (x, y)
                for x, y in zip(history["epoch"], history.get(key, ()), strict=False)
                if x is not None and y is not None
            ]
            for key, colour in ((name, "#999"), (f"test_{name}", "#1f77b4"))
        }
        charts.append(_chart(name, lines))
    return "".join(charts)


def _chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG of lines by colour, with the least and the largest value."""
    width, height, left = 260, 150, 8
    values = [y for line in lines.values() for _, y in line]
    last = max((x for line in lines.values() for x, _ in line), default=1.0)
    low, high = min(values, default=0.0), max(values, default=1.0)

    def place(x: float, y: float) -> str:
        across = left + (width - 2 * left) * x / (last or 1.0)
        up = height - 20 - (height - 50) * (y - low) / ((high - low) or 1.0)
        return f"{across:.1f},{up:.1f}"

    drawn = [
        f'<polyline fill="none" stroke="{colour}" points="{" ".join(place(*p) for p in line)}"/>'
        for colour, line in lines.items()
    ]
    text = f'<text x="{left}" y="14" font-size="12">{escape(title)}: {low:.4g} to {high:.4g}</text>'
    return f'<svg width="{width}" height="{height}">{text}{"".join(drawn)}</svg>'
