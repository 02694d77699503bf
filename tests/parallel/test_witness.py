"""What one rank does differently is named at the next comparison, on all ranks, or refused at once;
programs whose ranks may differ are not.
"""

import re
from functools import partial

import numpy as np
import pytest

from nnmpi import (
    DataParallel,
    GradientExchange,
    Layout,
    NnmpiError,
    ShardedDataParallel,
    Worker,
    arrange,
    compile,
    data,
    models,
    nn,
    no_grad,
    ops,
    optim,
    save,
    simulate,
)
from nnmpi.base.errors import UsageError
from nnmpi.comm.agreement import as_text
from nnmpi.parallel.witness import EVERY, RowShare, compare, is_due
from nnmpi.tensor import Tensor
from tests.harness.refusals import caught, told_on_all
from tests.parallel.witnessed import LOOPS, WAYS, Program, Scaled, X, Y
from tests.worker_options import work

TRAIN = data.Dataset("train", X, Y, classes=3)
X64, Y64 = X[:46].astype("float64"), Y[:46]
TABLE = data.Dataset("table", X64, Y64, classes=3)
AT = 3  # the update from which on a rank is different; the next comparison is in update 4
DATA = "x", "y", "batch_size", "loader_seed", "shuffle", "transform", "part"


# ---- what one rank does differently ----


def setting(**values):
    """Return a difference: other values of the program's settings."""

    def change(program):
        for name, value in values.items():
            setattr(program, name, value)
        if program.done and not values.keys().isdisjoint(DATA):
            program.renew()

    return change


def weights(change, of_frozen=False):
    """Return a difference in the arrays of parameters: `change(arrays)`, the largest one first."""

    def differ(program):
        parameters = program.model.parameters()
        arrays = [item.data for item in parameters if of_frozen is not item.requires_grad]
        change(sorted(arrays, key=np.size, reverse=True))

    return differ


def layer(kind, change):
    """Return a difference in a layer of the model: `change(layer)`."""
    return lambda program: [
        change(module) for _, module in program.model.named_modules() if isinstance(module, kind)
    ]


def scaled(arrays):
    arrays[0][...] *= 1.5


def shuffled_rows(arrays):
    arrays[0][...] = arrays[0][::-1].copy()


def signs_in_pairs(arrays):
    arrays[0].reshape(-1)[:2] *= -1


def one_bias(arrays):
    arrays[-1][-1] += 1e-3


def frozen(program):
    program.model.parameters()[-1].requires_grad = False


def rate(program):
    program.optimizer.lr = 0.06


def momentum(program):
    program.optimizer.momentum = 0.5


def loaded(program):
    state = {name: 2 * values for name, values in program.model.state().items()}
    program.model.load_state(state)


def running_mean(program):
    statistics = [item for name, item in program.model.named_buffers() if "mean" in name]
    statistics[0].data[...] += 0.5


def stray_pass(program):
    """A pass without its update, whose gradients stay."""
    program.model.zero_grad()
    program.parallel.backward(program.loss(X[:2], Y[:2]), 2, last=False)
    program.keeps = True


def scaled_gradients(program):
    step = program.optimizer.step

    def step_after_scaling():
        for parameter in program.model.parameters():
            parameter.grad *= 1.5
        step()

    vars(program.optimizer)["step"] = step_after_scaling


def transform_by_attribute(program):
    program.transform.factor = 2.0


def other_activation(program):
    program.model.layers[2] = nn.ReLU()


def own_rows_as_all(program):
    setting(part={"rank": 0, "world": program.group.size})(program)


HEAVY = np.where(np.arange(2000) == 1000, 50, 1).astype("float32")
DENSE = nn.Linear, nn.ReLU
# by name: the difference, the update with which it begins (0: it is there from the start), and what
# the sentence says
IN_DATA = {
    "seed of the loader": (setting(loader_seed=3), 0, "batch: .* seed"),
    "a later seed": (setting(loader_seed=3), AT, "batch: .* seed"),
    "size of batches": (setting(batch_size=8), 0, "differ in batch|rows once"),
    "order": (setting(shuffle=False), 0, "batch: .* shuffle"),
    "samples": (setting(x=X[::-1].copy()), 0, "samples with the checksum"),
    "labels": (setting(y=Y[::-1].copy()), 0, "samples with the checksum"),
    "number of samples": (setting(x=X[:40], y=Y[:40]), 0, "40 samples"),
    "one sample": (setting(x=np.where(np.arange(48)[:, None] == 7, 0, X)), 0, "checksum"),
    "part of the batch": (own_rows_as_all, 0, "each rank has rows|have world"),
    "transform": (setting(transform=Scaled(2.0)), 0, "transform"),
    "later transform": (setting(transform=Scaled(2.0)), AT, "batch"),
    "transform that is a function": (setting(transform=lambda x, *_: x * x), 0, "transform"),
    "augmentation": (setting(transform=data.Compose(Scaled(1.0), Scaled(3.0))), 0, "transform"),
    "transform that changes": (transform_by_attribute, AT, "transform"),
}
IN_MODEL = {
    "decay": (setting(decay=0.5), 0, "weight decay"),
    "optimizer": (setting(make=optim.Adam), 0, "Adam|differ"),
    "rate": (rate, AT, "learning rate"),
    "momentum": (momentum, AT, "optimizer"),
    "frozen": (frozen, AT, "frozen"),
    "dropout's p": (layer(nn.Dropout, lambda item: setattr(item, "p", 0.5)), AT, "layers"),
    "eps": (layer(nn.LayerNorm, lambda item: setattr(item, "eps", 0.1)), AT, "layers"),
    "scaled weight": (weights(scaled), AT, "weights"),
    "rows of a weight": (weights(shuffled_rows), AT, "weights"),
    "rows of a frozen weight": (weights(shuffled_rows, of_frozen=True), AT, "weights"),
    "signs in pairs": (weights(signs_in_pairs), AT, "weights"),
    "one bias": (weights(one_bias), AT, "weights"),
    "loaded weights": (loaded, AT, "weights"),
}
IN_LOOPS = {
    "other layer": (setting(layers=[nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)]), 0, "models"),
    "activation": (other_activation, AT, "layers"),
    "loss": (setting(function=ops.nll), AT, "loss"),
    "class weights": (setting(options={"weight": np.array([1, 1, 5.0], "f")}), AT, "loss"),
    "label smoothing": (setting(options={"label_smoothing": 0.3}), AT, "loss"),
    "ignored label": (setting(options={"ignore_index": 2}), AT, "loss"),
    "factor of the loss": (setting(factor=2.0), AT, "factor"),
    "evaluation": (setting(trains=False), AT, "mode"),
    "seed of dropout": (setting(seed=1), AT, "mode"),
    "step of dropout": (setting(step_of=lambda step: step + 1), AT, "mode"),
    "skipped step": (setting(skips=True), AT, "number of updates"),
    "number of samples": (setting(samples=lambda batch: batch.global_rows + 1), AT, "samples"),
    "own number of samples": (setting(samples=lambda batch: len(batch.x)), 0, "samples"),
    "fewer rows": (setting(rows=slice(1, None)), AT, "the ranks' losses are of"),
    "more rows": (setting(rows=[0, 0, 1, 2, 3]), AT, "the ranks' losses are of"),
    "stray pass": (stray_pass, AT, "number of backward passes|backward pass is the last"),
    "running statistics": (running_mean, AT, "weights"),
    "scaled gradients": (scaled_gradients, AT, "weights|each rank keeps only its part"),
    "kept gradients": (setting(keeps=True), AT, "gradients of the last step are still there"),
}
IN_WORKERS = {
    "seed": (setting(seed=1), 0, "seed 0"),
    "loss": (setting(function=ops.nll), AT, "loss"),
    "class weights": (setting(options={"weight": HEAVY[999:1002]}), AT, "loss"),
    "label smoothing": (setting(options={"label_smoothing": 0.3}), AT, "loss"),
    "factor of the loss": (setting(factor=2.0), AT, "factor"),
    "skipped update": (lambda program: setattr(program.optimizer, "steps", 9), AT, "of updates"),
}
# what a rank refuses alone ends the job; the weights that ranks share are read-only
ALONE = (
    "gradients of the last step|read-only|each rank keeps only its part|a later value would change"
    "|has changed since it was divided|meet at different places"
)
# in some ways a rank's own part is changed, which no other rank has, or all ranks do it together
LEFT_OUT = {
    *(("loaded weights", way) for way in ("sharded 1", "sharded 2", "fused", "zero 1", "zero 2")),
    *(("loaded weights", way) for way in ("sharded 3", "zero 3", "pp", "tp")),
    ("scaled gradients", "sharded 1"),
    ("eps", "pp"),  # the last stage has no such layer
}


def cases():
    for way in WAYS:
        own = IN_LOOPS if way in LOOPS else IN_WORKERS
        for name, case in (IN_DATA | IN_MODEL | own).items():
            if (name, way) not in LEFT_OUT:
                # on a device's stand-in some of these are not named yet
                is_open = case[-1] == "weights"
                marks = pytest.mark.host_only("not named on a device") if is_open else ()
                yield pytest.param(way, *case, id=f"{way}-{name}", marks=marks)


def differ(way, difference, at, ranks=2):
    """Return what each rank is told, and after how many updates, if the last one is different."""
    told, done = {}, {}

    def program(group):
        one = Program(group, way)
        is_odd = group.rank == group.size - 1
        if difference is transform_by_attribute:
            one.transform = Scaled(1.0)
        if difference is running_mean:
            one.layers[1] = nn.BatchNorm1d(8)
        try:
            if is_odd and not at:
                difference(one)
            one.start()
            one.model.parameters()[0].requires_grad = False
            one.run(8, difference if is_odd and at else None, at)
        except NnmpiError as error:
            told[group.rank] = str(error)
            if any(text in str(error) for text in ALONE.split("|")):
                raise
        finally:
            done[group.rank] = one.done

    try:
        simulate(program, ranks)
    except (NnmpiError, ValueError) as error:
        return [str(error)], max(done.values())
    return [told.get(rank, "") for rank in range(ranks)], max(done.values())


@pytest.mark.parametrize(("way", "difference", "at", "says"), [*cases()])
def test_what_one_rank_does_differently_is_named(way, difference, at, says):
    texts, done = differ(way, difference, at, 4 if way in ("pp", "tp") else 2)
    assert len({*texts}) == 1, texts
    assert re.search(f"{says}|{ALONE}", texts[0]), texts[0]
    # named at the next comparison, before its update: of a step that is skipped after it
    assert done <= 3 if at else done <= 1, (done, texts)


# ---- what ranks may do differently ----


class OnRank:
    """A transform with things of the rank's own, which change nothing."""

    def __init__(self, rank, tmp_path):
        self.rank, self.note = rank, f"of rank {rank}"
        self.names = {f"{name}{rank}" for name in "abc"}
        self.file = tmp_path / f"rank{rank}.txt"
        self.scale = lambda x: (x, rank)[0]
        self.seen = []

    def __call__(self, x, indices, epoch, seed):
        self.seen.append(len(x) * self.rank)
        self.file.write_text(f"{self.rank}")
        return self.scale(x) * 2


def noisy(draw):
    return lambda x, *_: x + draw.normal(0, 1e-3, x.shape).astype(x.dtype)


def used_up(rank):
    items = iter(range(10**6))
    return lambda x, *_: x + 0 * np.float32(next(items) * rank)


def no_rows(one):
    """The last rank has none, as of a batch that is smaller than the ranks are many."""
    rank, size = one.group.rank, one.group.size

    def update(batch):
        rows = np.array_split(np.arange(len(X)), size - 1)[rank] if rank < size - 1 else []
        step_by_arrays(one, rows, len(X))

    one.update = update


def step_by_arrays(one, rows, samples, passes=1, **options):
    """Do an update of some rows of the data, in some passes."""
    one.model.zero_grad()
    parts = np.array_split(np.asarray(rows, int), passes)
    for number, part in enumerate(parts):
        loss = one.loss(X[part], Y[part])
        one.parallel.backward(loss, samples, last=number + 1 == passes)
    one.optimizer.step()


def uneven_rows(one):
    def update(batch):
        cut = 5 + one.done % 7
        rows = range(cut) if one.group.is_root else range(cut, 16)
        step_by_arrays(one, rows, 16)

    one.update = update


def batches_of_all_sizes(one):
    def update(batch):
        count = (16, 12, 7, 3, 1)[one.done % 5]
        rows = np.array_split(np.arange(count), one.group.size)[one.group.rank]
        step_by_arrays(one, rows, count)

    one.update = update


def divided_by_a_constant(one):
    def update(batch):
        count = (16, 16, 9)[one.done % 3]
        rows = np.array_split(np.arange(count), one.group.size)[one.group.rank]
        step_by_arrays(one, rows, 16)

    one.update = update


def accumulated(one, uneven=0):
    def update(batch):
        rows = np.array_split(np.arange(20), one.group.size)[one.group.rank]
        passes = 2 + uneven * (one.group.rank + one.done) % 3
        step_by_arrays(one, rows, 20, passes)

    one.update = update


def unevenly_accumulated(one):
    accumulated(one, 1)


def own_shuffle(one):
    draw = np.random.default_rng(one.group.rank)
    mine = np.array_split(np.arange(48), one.group.size)[one.group.rank]

    def update(batch):
        step_by_arrays(one, draw.permutation(mine)[:6], 6 * one.group.size)

    one.update = update


def weighed(one):
    """Each loss has a weight, and the gradient is divided by their sum over all ranks."""

    def update(batch):
        mine = slice(0, 5) if one.group.is_root else slice(5, 16)
        weights = np.linspace(0.5, 2, 16, dtype="float32")[mine] * (1 + one.done)
        total = round(sum(one.group.gather(float(weights.sum()))))
        one.model.zero_grad()
        losses = ops.cross_entropy(one.model(X[mine]), Y[mine], reduction="none")
        one.parallel.backward((losses * weights).sum(), total)
        one.optimizer.step()

    one.update = update


def mean_of_means(one):
    """As PyTorch's DistributedDataParallel averages."""

    def update(batch):
        mine = slice(0, 5 + one.done) if one.group.is_root else slice(24, 40)
        one.model.zero_grad()
        loss = ops.cross_entropy(one.model(X[mine]), Y[mine])
        one.parallel.backward(loss, one.group.size)
        one.optimizer.step()

    one.update = update


def mean_times_rows(one):
    def update(batch):
        mine = slice(0, 5) if one.group.is_root else slice(5, 16)
        one.model.zero_grad()
        loss = ops.cross_entropy(one.model(X[mine]), Y[mine]) * (mine.stop - mine.start)
        one.parallel.backward(loss, 16)
        one.optimizer.step()

    one.update = update


def penalty_on_one_rank(one):
    """A term without rows is added once."""
    loss = one.loss

    def with_penalty(x, y, first_row=0):
        total = loss(x, y, first_row)
        return total + (one.model(x) ** 2).sum() * (1e-3 * one.group.is_root)

    one.loss = with_penalty


def two_losses(one):
    """The second one has rows on some ranks alone."""
    loss = one.loss

    def both(x, y, first_row=0):
        total, rare = loss(x, y, first_row), y == 2
        if rare.any() and one.group.rank == one.done % one.group.size:
            target = np.zeros((int(rare.sum()), 3), "float32")
            total = total + ops.mse(one.model(x[rare]), target, reduction="sum") * 0.1
        return total

    one.loss = both


def every_other_update(one):
    """A loss of other kinds in some updates, on all ranks."""
    one.before = lambda: setattr(one, "function", (ops.cross_entropy, nll)[one.done % 2])


def nll(logits, labels, **options):
    return ops.nll(ops.log_softmax(logits), labels, **options)


def by_one_rank(one):
    """Evaluations, looks at the data, files and prints of rank 0."""

    def after():
        if one.group.is_root and one.way != "sharded 3":
            with no_grad():
                one.model(X)
            with nn.training(seed=9, step=77), no_grad():
                one.model(X)
            next(iter(one.loader.epoch(3)))
            next(iter(data.Loader(TRAIN, 7)))

    one.after = after


def given_up(one):
    """Rank 0 tries a pass, and forgets its gradients."""

    def before():
        if one.group.is_root:
            one.model.zero_grad()
            one.parallel.backward(one.loss(X[:3], Y[:3]), 3, last=False)
            one.model.zero_grad()

    one.before = before


def frozen_and_thawed(one):
    def before():
        one.model.parameters()[2].requires_grad = one.done % 3 != 1

    one.before = before


def changed_rates(one):
    one.before = lambda: setattr(one.optimizer, "lr", 0.05 / (1 + one.done))


def changed_weights(one):
    def before():
        if one.done == 2:
            for item in one.model.parameters():
                item.data[...] *= 0.5

    one.before = before


def refused_alike(one):
    """All ranks refuse the same batch, and go on."""
    loss = one.loss

    def refused(x, y, first_row=0):
        if one.done == 2:
            with pytest.raises(ValueError, match="labels|label"):
                loss(x, y + 10, first_row)
        return loss(x, y, first_row)

    one.loss = refused


def evaluated_alike(one):
    one.before = lambda: setattr(one, "trains", one.done % 2 == 0)


def step_of_each_update(one):
    one.step_of = lambda step: 100 * step


def other_rates_on_shards(one):
    """The optimizer is made anew by all ranks."""

    def before():
        if one.done == 2:
            one.optimizer = one.make(one.model.storage, lr=0.01)

    one.before = before


class Logged(nn.Module):
    """A module of the user's with things of the rank's own."""

    def __init__(self, rank):
        self.rank, self.log, self.name = rank, {f"rank {rank}"}, f"layer of rank {rank}"
        self.count = 0

    def forward(self, x):
        self.count += self.rank
        return x * 1.0


def ignored_labels(one):
    one.options = {"ignore_index": 2}


def of_squares(one):
    one.function = lambda logits, labels, **options: ops.mse(
        logits, np.eye(3, dtype="float32")[labels], **options
    )


# by name: what is set before the start, and after it
IN_LOOPS_ALIKE = {
    name.__name__: (None, name)
    for name in (
        *(no_rows, uneven_rows, batches_of_all_sizes, divided_by_a_constant, accumulated),
        *(unevenly_accumulated, own_shuffle, weighed, mean_of_means, mean_times_rows),
        *(penalty_on_one_rank, two_losses, every_other_update, by_one_rank, given_up),
        *(frozen_and_thawed, changed_rates, changed_weights, refused_alike, evaluated_alike),
        *(step_of_each_update, other_rates_on_shards, ignored_labels),
        *(of_squares,),
    )
}


def before_start(**values):
    return lambda one: [setattr(one, name, value(one)) for name, value in values.items()], None


IN_ALL_ALIKE = {
    "plain": (None, None),
    "rates": (None, changed_rates),
    "own module": (lambda one: one.layers.__setitem__(2, Logged(one.group.rank)), None),
    "adam": before_start(make=lambda one: optim.Adam),
    "small batches": before_start(batch_size=lambda one: 3),
    "one batch": before_start(batch_size=lambda one: 48),
    "last batch": before_start(batch_size=lambda one: 13),
    "lambda": before_start(transform=lambda one: lambda x, *_, rank=one.group.rank: (x, rank)[0]),
    "partial": before_start(transform=lambda one: Scaled(2.0, f"of rank {one.group.rank}")),
    "noise": before_start(transform=lambda one: noisy(np.random.default_rng(one.group.rank))),
    "iterator": before_start(transform=lambda one: used_up(one.group.rank)),
    "augmentation": before_start(transform=lambda one: data.Compose(Scaled(1.5), Scaled(2.0))),
    "own things": (lambda one: setattr(one, "transform", OnRank(one.group.rank, one.path)), None),
    "class weights": before_start(options=lambda one: {"weight": HEAVY[999:1002].copy()}),
    "smoothing": before_start(options=lambda one: {"label_smoothing": 0.1}),
    "statistics": (lambda one: one.layers.__setitem__(1, nn.BatchNorm1d(8)), None),
}
# passes in which ranks meet are as many on all ranks; in some ways weights are the ranks' together
UNLIKE = {
    *((name, f"sharded {n}") for n in (2, 3) for name in ("unevenly_accumulated", "given_up")),
    *(("changed_weights", f"sharded {n}") for n in (1, 2, 3)),
    *((name, way) for way in ("pp", "tp") for name in ("statistics", "noise")),
}


def alike():
    for way in WAYS:
        own = IN_LOOPS_ALIKE if way in LOOPS else {}
        for name, case in (own | IN_ALL_ALIKE).items():
            if (name, way) not in UNLIKE:
                yield pytest.param(way, *case, id=f"{way}-{name}")


@pytest.mark.parametrize(("way", "before", "after"), [*alike()])
def test_what_ranks_may_do_differently_is_not_refused(way, before, after, tmp_path):
    def program(group):
        one = Program(group, way)
        one.path = tmp_path
        if before is not None:
            before(one)
        one.start()
        if after is not None:
            after(one)
        one.run(9)
        return one.done

    assert simulate(program, 4 if way in ("pp", "tp") else 3 if after is no_rows else 2)


# ---- compiled steps ----


def trained(group, way, sizes, compiles, passes=1, **options):
    """Return the weights and losses of updates of these numbers of rows, and the step."""
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.1 * (passes == 1)), nn.Linear(5, 3)
    model = nn.Sequential(*layers).initialize(seed=0)
    parallel, optimizer = LOOPS[way](model, group), optim.Adam(model.storage, lr=0.01)

    def step(x, y, samples):
        model.zero_grad()
        for number in range(passes):
            loss = ops.cross_entropy(model(x), y, reduction="sum", **options) * 0.5
            parallel.backward(loss, samples, last=number + 1 == passes)
        optimizer.step()
        return loss

    run, losses, draw = compile(step) if compiles else step, [], np.random.default_rng(0)
    for count in sizes:
        rows = draw.permutation(48)[:count]
        mine = np.array_split(rows, group.size)[group.rank]
        with nn.training(step=optimizer.steps):
            losses.append(run(*(item(X[mine], Y[mine], compiles)), count * passes).numpy().item())
    return [values.tobytes() for values in model.state().values()], losses, run


def item(x, y, compiles):
    return (x, y) if compiles else (Tensor(x), y)


@pytest.mark.both_worlds(min_size=2, max_size=3)
@pytest.mark.parametrize("way", ["DataParallel", "overlapped", "sharded 1"])
@pytest.mark.parametrize(
    ("sizes", "recordings"), [([12] * 20, 1), ([12, 9] * 12, 2), ([12, 12, 12, 5] * 7, 2)]
)
def test_compiled_steps_are_replayed(group, way, sizes, recordings):
    """With one batch size, two in turns, and a short last batch; the ranks compare meanwhile."""
    weights, losses, step = trained(group, way, sizes, True)
    assert (step.recordings, step.refusal) == (recordings, "")
    assert (weights, losses) == trained(group, way, sizes, False)[:2]


@pytest.mark.both_worlds(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "options", [{"weight": np.array([1, 2, 3.0])}, {"ignore_index": 1}, {"label_smoothing": 0.1}]
)
def test_compiled_steps_of_several_passes_and_options(group, options):
    weights, losses, step = trained(group, "DataParallel", [12] * 20, True, 2, **options)
    assert (step.recordings, step.refusal) == (1, "")
    assert (weights, losses) == trained(group, "DataParallel", [12] * 20, False, 2, **options)[:2]


@pytest.mark.simulated(min_size=2, max_size=2)
@pytest.mark.parametrize("name", ["one bias", "rate", "seed of dropout"])
def test_what_a_rank_does_beside_a_compiled_step_is_named(group, name):
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), nn.Linear(5, 3)).initialize(seed=0)
    parallel, optimizer = DataParallel(model, group), optim.SGD(model.storage, lr=0.1)
    seed, done = 0, 0

    @compile
    def step(x, y):
        model.zero_grad()
        parallel.backward(ops.cross_entropy(model(x), y, reduction="sum"), 4 * group.size)
        optimizer.step()

    def train():
        nonlocal seed, done
        for done in range(40):
            if done == 20 and group.rank == 1:
                if name == "rate":
                    optimizer.lr = 0.2
                elif name == "one bias":
                    model.parameters()[-1].data[-1] += 1e-3
                else:
                    seed = 1
            with nn.training(seed=seed, step=done):
                step(X[:4], Y[:4])

    text = told_on_all(group, train, NnmpiError)
    assert done == 31 and text.startswith("update 32: the ranks differ in ")


def worker_of(group, model=None):
    model = nn.Linear(4, 3).initialize(seed=0) if model is None else model
    return Worker(model, optim.SGD(model.storage, lr=0.1), group)


@pytest.mark.both_worlds(min_size=2, max_size=5)
@pytest.mark.parametrize("kind", ["seed", "length", "twice", "uneven", "uneven pairs", "right"])
def test_an_evaluation_sees_what_a_step_sees(group, kind):
    rank, size = group.rank, group.size
    worker, last = worker_of(group), rank == size - 1
    train = data.Dataset("part", X64[: 46 - 3 * last], Y64[: 46 - 3 * last], classes=3)
    batches = {
        "seed": lambda: data.Loader(TABLE, 10, group, seed=rank).epoch(0),
        "length": lambda: data.Loader(train, 10, group).epoch(0),
        "twice": lambda: data.Loader(TABLE, 10).epoch(0),
        "uneven": lambda: [*data.Loader(TABLE, 10, group).epoch(0)][: 5 - last],
        "uneven pairs": lambda: [(X64[:2], Y64[:2])] * (3 - last),
        "right": lambda: data.Loader(TABLE, 10, group).epoch(0),
    }[kind]()
    if kind == "right":
        assert worker.evaluate(batches).samples == 46
        return
    text = told_on_all(group, lambda: worker.evaluate(batches), NnmpiError)
    assert {
        "seed": "the ranks differ in batch: rank 0 has seed 0",
        "length": f"46 samples; rank {size - 1} has 43 samples",
        "twice": "each rank has rows 0-9 of the batch's 10",
        "uneven": f"ranks differ in number of batches: rank{'s' * (size > 2)} 0",
        "uneven pairs": f"different numbers of batches, rank {size - 1} fewer",
    }[kind] in text


@pytest.mark.simulated(min_size=4, max_size=4)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, split=(2, 2)), Layout(zero=3)])
def test_uneven_batches_where_layers_communicate(group, layout):
    where = arrange(models.mlp((4,), 3, hidden=(7,)), group, layout)
    model = where.model.initialize(seed=0, storage=where.storage)
    sgd = optim.SGD(model.storage, lr=0.1)
    worker = Worker(model, sgd, group, arrangement=where)
    batches = [*data.Loader(TABLE, 10, where).epoch(0)][: 4 + (group.rank == 0)]
    text = told_on_all(group, lambda: worker.evaluate(batches), NnmpiError)
    assert text.startswith("the ranks give evaluate different numbers of batches, ranks 1-3 fewer")


@pytest.mark.simulated(min_size=2, max_size=4)
@pytest.mark.parametrize("way", ["Worker", "DataParallel", "ShardedDataParallel", "arrange"])
def test_models_with_other_settings(group, way):
    """They have the same parameters."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1 + 0.4 * (group.rank == 1)))
    if way == "arrange":
        text = told_on_all(group, lambda: arrange(model, group, Layout(tp=group.size)), NnmpiError)
    elif way == "Worker":
        model.initialize(seed=0)  # one that does not fuse its updates is refused when it is made
        text = told_on_all(
            group, lambda: worker_of(group, model).step(X64[:4], Y64[:4]), NnmpiError
        )
    else:
        make = DataParallel if way == "DataParallel" else ShardedDataParallel
        text = told_on_all(group, lambda: make(model.initialize(seed=0), group), NnmpiError)
    assert "have 1 Dropout(p=0.1)" in text or "rank 0 has 1 Dropout(p=0.1)" in text
    assert "rank 1 has 1 Dropout(p=0.5)" in text


BOTH_ON_2_TO_3 = pytest.mark.both_worlds(min_size=2, max_size=3)


@BOTH_ON_2_TO_3
def test_one_ranks_look_at_the_first_batch_is_no_difference(group):
    model = nn.Linear(4, 3).initialize(seed=0, dtype="float64")
    parallel, sgd = DataParallel(model, group), optim.SGD(model.storage, lr=0.1)
    loader = data.Loader(TABLE, 10, group)
    if group.is_root:
        next(iter(loader))
    for _ in range(2):
        model.zero_grad()
        loss = ops.cross_entropy(model(X64[:4]), Y64[:4], reduction="sum")
        parallel.backward(loss, 4 * group.size)
        sgd.step()


@BOTH_ON_2_TO_3
@pytest.mark.parametrize("stage", range(4))
def test_gradients_that_all_ranks_scale(group, stage):
    """As the one rank does it, or refused; with shared memory it depended on timing."""
    rows = slice(*np.linspace(0, 24, group.size + 1).astype(int)[group.rank :][:2])

    def train(parallel, model, rows):
        optimizer = optim.SGD(model.storage, lr=0.3, momentum=0.9)
        for _ in range(4):
            model.zero_grad()
            parallel.backward(ops.cross_entropy(model(X64[rows]), Y64[rows], reduction="sum"), 24)
            for parameter in model.parameters():
                parameter.grad *= 0.5
            optimizer.step()
        with no_grad():
            return float(np.abs(model(X64).numpy()).sum())

    def make():
        layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)
        return nn.Sequential(*layers).initialize(seed=0, dtype="float64")

    model = make()
    parallel = ShardedDataParallel(model, group, stage) if stage else DataParallel(model, group)
    if stage > 1:
        text = told_on_all(group, lambda: train(parallel, model, rows), NnmpiError)
        assert "each rank keeps only its part: change model.storage.grads" in text
        return
    alone = make()
    right = train(DataParallel(alone, simulate(lambda one: one, 1)[0]), alone, slice(0, 24))
    assert max(group.gather(abs(train(parallel, model, rows) - right))) < 1e-9


@pytest.mark.simulated(min_size=1, max_size=3)
@pytest.mark.parametrize("saves", [False, True])
def test_a_window_of_accumulation_ends_or_is_refused(group, saves, tmp_path):
    model = nn.Linear(4, 3).initialize(seed=0, dtype="float64")
    parallel, optimizer = DataParallel(model, group), optim.SGD(model.storage, lr=0.1)
    rows = slice(2 * group.rank, 2 * group.rank + 2)
    count = 2 * group.size

    def backward(last):
        loss = ops.cross_entropy(model(X64[rows]), Y64[rows], reduction="sum")
        parallel.backward(loss, 2 * count, last=last)

    backward(False)
    if saves:
        text = told_on_all(group, lambda: save(tmp_path, (model, optimizer, group)), NnmpiError)
        assert "the model has some that no update has used" in text
    elif group.size > 1:
        assert "was not the last of its update" in told_on_all(group, optimizer.step, NnmpiError)
    backward(True)
    optimizer.step()
    save(tmp_path, (model, optimizer, group))
    model.zero_grad()  # a window that is given up
    backward(False)
    model.zero_grad()
    save(tmp_path, (model, optimizer, group))


@pytest.mark.host_only("memory that the ranks of a node share")
@BOTH_ON_2_TO_3
@pytest.mark.parametrize("way", ["Worker", 1, 2, 3])
def test_weights_that_ranks_share_are_read_only(group, way):
    """Each rank would change the one copy; `load_state` writes it on all."""
    model = nn.Linear(4, 3).initialize(seed=0)
    if way == "Worker":
        exchange = GradientExchange(fused_update=True)
        Worker(model, optim.SGD(model.storage, lr=0.1), group, exchange=exchange)
    else:
        ShardedDataParallel(model, group, int(way))
    before = model.weight.data.copy()
    with pytest.raises(ValueError, match="read-only"):
        model.weight.data *= 2
    if way != 3:
        model.load_state({name: 2 * value for name, value in model.state().items()})
        before *= 2
    assert max(group.gather(float(np.abs(model.weight.data - before).max()))) == 0


# ---- when, and by which words ----


def test_comparisons_become_rare():
    due = [number for number in range(1, 3 * EVERY + 1) if is_due(number)]
    assert due == sorted({*(2**n for n in range(12)), *(EVERY * n for n in (1, 2, 3))})


@pytest.mark.simulated(min_size=2, max_size=2)
def test_a_loop_compares_these_updates(group, monkeypatch):
    monkeypatch.setattr("nnmpi.parallel.witness.EVERY", every := 100)
    one = Program(group, "DataParallel").start()
    compared, compare_words = [], one.parallel._witness._compare_words
    vars(one.parallel._witness)["_compare_words"] = lambda when: compared.append(
        int(when.split()[1])
    )
    one.run(2 * every)
    assert compare_words is not None
    assert compared == [*(2**n for n in range(7)), 100, 128, 200]


@pytest.mark.simulated(min_size=2, max_size=5)
def test_rows_are_complete_if_and_only_if_each_is_there_once(group):
    draw = np.random.default_rng(0)
    for trial in range(60):
        whole = int(draw.integers(1, 40))
        ends = sorted(draw.integers(0, whole + 1, group.size - 1).tolist())
        rows = [*zip([0, *ends], [*ends, whole], strict=True)]
        draw.shuffle(rows)
        if trial % 2:
            place = int(draw.integers(group.size))
            start, stop = rows[place]
            rows[place] = (start, stop + 1) if draw.integers(2) else rows[place - 1]
        covered = sorted(row for begin, end in rows for row in range(begin, end))
        share = RowShare((tuple(rows[group.rank]),), whole)
        error = caught(lambda share=share: compare(group, "update 1", [], [share]), UsageError)
        assert (error is None) == (covered == [*range(whole)]), (rows, whole)


def test_values_as_text():
    long = np.zeros(5000, "float32")
    other = long.copy()
    other[2500] = 1
    texts = {as_text(partial(ops.cross_entropy, weight=item)) for item in (long, other)}
    assert len(texts) == 2
    assert as_text({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert " at 0x" not in as_text([lambda: 0, {"key": object()}])
    assert as_text(Tensor(long)) == as_text(long)


@pytest.mark.simulated(min_size=2, max_size=3)
def test_losses_with_factors_of_their_own_are_not_compared(group):
    """All of a rank's may be equal, as those of its only class."""
    weights = np.array([1.0, 2.0, 3.0], "float32")

    def loss(logits, labels):
        return ops.cross_entropy(logits, labels, reduction="none") * weights[labels]

    worker = work(models.mlp((4,), 3).initialize(seed=0), group, loss=loss)
    worker.step(np.ones((2, 4), "float32"), np.full(2, group.rank))


@pytest.mark.simulated(min_size=2, max_size=2)
def test_long_class_weights_of_a_worker(group):
    weight = HEAVY if group.rank else np.ones(2000, "float32")
    model = nn.Linear(4, 2000).initialize(seed=0)
    loss = partial(ops.cross_entropy, weight=weight, reduction="none")
    optimizer = optim.SGD(model.storage, lr=0.5)
    text = told_on_all(group, lambda: Worker(model, optimizer, group, loss=loss), UsageError)
    assert "the ranks' options differ" in text and "checksum" in text
