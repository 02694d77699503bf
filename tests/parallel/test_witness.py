"""What one rank does differently in a loop of one's own is found at that update or the next."""

import re
from dataclasses import dataclass, field

import numpy as np
import pytest

from nnmpi import (
    DataParallel,
    GradientExchange,
    Group,
    Layout,
    NnmpiError,
    ShardedDataParallel,
    Worker,
    arrange,
    data,
    models,
    nn,
    no_grad,
    ops,
    optim,
    save,
    simulate,
)
from nnmpi.parallel.witness import RowShare
from tests.harness.refusals import told_on_all

UPDATES = 6
DRAW = np.random.default_rng(5)
X, Y = DRAW.standard_normal((46, 4)), DRAW.integers(0, 3, 46)
TRAIN = data.Dataset("train", X, Y, classes=3)


@dataclass
class Loop:
    """A loop of one's own on a rank, which differs on one rank from one update on.

    Args:
        group: of the ranks.
        seed: of the program: strategy, optimizer, dtype, sizes, accumulation, where data come from.
        plant: the method that makes the difference; empty for none.
    """

    group: Group
    seed: int
    plant: str
    done: list[int] = field(default_factory=list)

    def __post_init__(self):
        draw = np.random.default_rng(self.seed)
        self.stage, self.passes = int(draw.integers(4)), int(draw.integers(1, 3))
        by_chance = draw.integers(2) and self.plant != "fewer_rows"
        self.from_loader = bool(by_chance) or self.plant in FROM_LOADER
        self.at, self.who = int(draw.integers(1, UPDATES - 2)), int(draw.integers(self.group.size))
        hidden, dtype = int(draw.integers(3, 40)), ("float32", "float64")[draw.integers(2)]
        layers = [nn.Linear(4, hidden), nn.Tanh(), nn.Dropout(0.0), nn.Linear(hidden, 3)]
        self.model = nn.Sequential(*layers).initialize(seed=0, dtype=dtype)
        self.batch_size, self.loader_seed = int(draw.integers(5, 24)), 3
        self.parallel = (
            ShardedDataParallel(
                self.model, self.group, self.stage, unit_bytes=int(draw.integers(1, 9999))
            )
            if self.stage
            else DataParallel(self.model, self.group, overlap=bool(draw.integers(2)))
        )
        make = (optim.SGD, optim.Adam)[draw.integers(2)]
        odd = self.plant == "decay" and self.group.rank == self.who
        self.optimizer = make(self.model.storage, lr=0.05, weight_decay=0.5 * odd)
        self.order, self.rank, self.x, self.extra = np.arange(46), self.group.rank, X, 0
        self.skips = self.leaves = False
        self.samples = self.drawn = 0
        if self.plant == "fewer_rows":
            self.at, self.batch_size = 3, 17

    def batches(self):
        epoch = 0
        while True:
            if self.from_loader:
                train = data.Dataset("train", self.x, Y, classes=3)
                settings = {"seed": self.loader_seed, "rank": self.rank, "world": self.group.size}
                loader = data.Loader(
                    train, self.batch_size, dtype=str(self.model.storage.dtype), **settings
                )
                before = self.loader_seed, self.rank, id(self.x)
                for batch in loader.epoch(epoch):
                    yield batch.x, batch.y, batch.global_rows
                    if (self.loader_seed, self.rank, id(self.x)) != before:
                        break  # a new loader, as after a change of the program's mind
                else:
                    epoch += 1
                    continue
                epoch += 0
            else:
                for start in range(0, 46, self.batch_size):
                    self.drawn += 1
                    # of several sizes: by a constant a program may divide for a reason
                    rows = self.order[start : start + self.batch_size - self.drawn**2 % 3]
                    mine = np.array_split(rows, self.group.size)[self.rank]
                    mine = mine[: len(mine) - self.extra] if self.extra else mine
                    yield X[mine].astype(self.model.storage.dtype), Y[mine], len(rows)

    def run(self):
        batches = self.batches()
        for update in range(UPDATES):
            if update == self.at and self.plant and self.group.rank == self.who:
                getattr(self, self.plant)()
            if not self.leaves:
                self.model.zero_grad()
            window = [next(batches) for _ in range(self.passes)]
            total = sum(rows for *_, rows in window) + self.samples
            for number, (x, y, _) in enumerate(window):
                loss = ops.cross_entropy(self.model(x), y, reduction="sum")
                self.parallel.backward(loss, total, last=number + 1 == self.passes)
            if not self.skips:
                self.optimizer.step()
            self.skips = self.leaves = False
            self.done.append(update)

    # ---- differences ----

    def rate(self):
        self.optimizer.lr = 0.06

    def decay(self):
        """It is there from the beginning."""

    def skipped_step(self):
        self.skips = True

    def frozen(self):
        self.model.parameters()[0].requires_grad = False

    def activation(self):
        self.model.layers[1] = nn.ReLU()

    def setting(self):
        self.model.layers[2].p = 0.5

    def weights(self):
        self.model.parameters()[0].data[...] *= 1.5

    def kept_gradient(self):
        self.leaves = True

    def pending(self):
        self.model.zero_grad()
        loss = ops.cross_entropy(
            self.model(X[:2].astype(self.model.storage.dtype)), Y[:2], reduction="sum"
        )
        self.parallel.backward(loss, 2, last=False)
        self.leaves = True

    def number_of_samples(self):
        self.samples = 1

    def rows(self):
        self.rank = (self.rank + 1) % self.group.size

    def fewer_rows(self):
        self.extra = 1
        self.from_loader = False

    def order_of_data(self):
        self.loader_seed = 4

    def data_themselves(self):
        self.x = X[::-1].copy()


FROM_LOADER = "rows", "order_of_data", "data_themselves"
# by difference: what the sentence says
PLANTS = {
    **{name: f"differ in {what}: rank.*;" for name, what in (
        ("rate", "learning rate"), ("decay", "optimizer"), ("weights", "weights"))},
    **dict.fromkeys((
        *("skipped_step", "frozen", "activation", "setting", "kept_gradient", "pending"),
        *("number_of_samples", "fewer_rows", *FROM_LOADER)), ""),
}  # fmt: skip


def run(seed, plant, ranks):
    loops = {}

    def program(group):
        loops[group.rank] = loop = Loop(group, seed, plant)
        loop.run()

    try:
        simulate(program, ranks)
    except (NnmpiError, ValueError) as error:
        return [*loops.values()], error
    return [*loops.values()], None


@pytest.mark.parametrize("plant", PLANTS)
def test_what_one_rank_does_differently_is_found(plant):
    for seed in (0, 1, 4, 11, 27):  # each strategy, on 2 to 4 ranks
        loops, error = run(seed, plant, 2 + seed % 3)
        what = f"seed {seed}, stage {loops[0].stage}, update {loops[0].at}: {error}"
        assert error is not None, what
        if plant == "weights" and loops[0].stage:  # the ranks share them, or each has a part
            assert "model.load_state on all ranks" in error.__notes__[0]
            continue
        assert max(len(loop.done) for loop in loops) <= loops[0].at + 1, what
        assert isinstance(error, NnmpiError) and re.search(PLANTS[plant], str(error)), what


def test_no_rank_is_refused_without_a_difference():
    for seed in range(20):
        loops, error = run(seed, "", 1 + seed % 5)
        assert error is None, f"seed {seed}, stage {loops[0].stage}: {error}"
        assert {len(loop.done) for loop in loops} == {UPDATES}


def worker_of(group, model=None):
    model = nn.Linear(4, 3).initialize(seed=0) if model is None else model
    return Worker(model, optim.SGD(model.storage, lr=0.1), group)


@pytest.mark.both_worlds(min_size=2, max_size=5)
@pytest.mark.parametrize("kind", ["seed", "length", "twice", "uneven", "uneven pairs", "right"])
def test_an_evaluation_sees_what_a_step_sees(group, kind):
    rank, size = group.rank, group.size
    worker, last = worker_of(group), rank == size - 1
    train = data.Dataset("part", X[: 46 - 3 * last], Y[: 46 - 3 * last], classes=3)
    batches = {
        "seed": lambda: data.Loader(TRAIN, 10, group, seed=rank).epoch(0),
        "length": lambda: data.Loader(train, 10, group).epoch(0),
        "twice": lambda: data.Loader(TRAIN, 10).epoch(0),
        "uneven": lambda: [*data.Loader(TRAIN, 10, group).epoch(0)][: 5 - last],
        "uneven pairs": lambda: [(X[:2], Y[:2])] * (3 - last),
        "right": lambda: data.Loader(TRAIN, 10, group).epoch(0),
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
    batches = [*data.Loader(TRAIN, 10, where).epoch(0)][: 4 + (group.rank == 0)]
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
        text = told_on_all(group, lambda: worker_of(group, model).step(X[:4], Y[:4]), NnmpiError)
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
    loader = data.Loader(TRAIN, 10, group)
    if group.is_root:
        next(iter(loader))
    for _ in range(2):
        model.zero_grad()
        loss = ops.cross_entropy(model(X[:4]), Y[:4], reduction="sum")
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
            parallel.backward(ops.cross_entropy(model(X[rows]), Y[rows], reduction="sum"), 24)
            for parameter in model.parameters():
                parameter.grad *= 0.5
            optimizer.step()
        with no_grad():
            return float(np.abs(model(X).numpy()).sum())

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
        loss = ops.cross_entropy(model(X[rows]), Y[rows], reduction="sum")
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


def test_rows_add_up_if_and_only_if_each_is_there_once():
    draw = np.random.default_rng(0)
    for trial in range(300):
        ranks, whole = int(draw.integers(2, 6)), int(draw.integers(1, 40))
        ends = sorted(draw.integers(0, whole + 1, ranks - 1).tolist())
        rows = [*zip([0, *ends], [*ends, whole], strict=True)]
        draw.shuffle(rows)
        right = trial % 2 == 0
        if not right:
            place = int(draw.integers(ranks))
            start, stop = rows[place]
            rows[place] = (start, stop + 1) if draw.integers(2) else rows[place - 1]
            covered = sorted(row for begin, end in rows for row in range(begin, end))
            right = covered == [*range(whole)]
        numbers = [
            RowShare((tuple(part),), whole).number(trial, rank == 0)
            for rank, part in enumerate(rows)
        ]
        assert (sum(numbers) % 2**20 == 0) == right, (rows, whole)
