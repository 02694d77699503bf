"""A loader's place is that of the batches with an update: a resumed loop ends with the bits of one
that nobody broke, whatever else was read from the loader.
"""

import pickle
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from queue import Queue
from threading import Thread

import numpy as np
import pytest

from nnmpi import DataParallel, Group, ShardedDataParallel, Worker, resume, save, simulate
from nnmpi.base.errors import DivergenceError, UsageError
from nnmpi.data import Dataset, Loader
from nnmpi.nn import BatchNorm, Dropout, Linear, Sequential, Tanh, training
from nnmpi.ops import cross_entropy
from nnmpi.optim import Adam
from tests.harness.refusals import usage_error

RNG = np.random.default_rng(0)
DATA = Dataset("d", RNG.normal(size=(22, 4)).astype("float32"), RNG.integers(0, 3, 22), 3)
BATCHES = 5  # of an epoch, the last one short
EPOCHS = 3
STRATEGIES = {
    "Worker": None,
    "DataParallel": DataParallel,
    "zero 1": lambda *given: ShardedDataParallel(*given, stage=1),
    "zero 3": lambda *given: ShardedDataParallel(*given, stage=3),
}


@dataclass
class Loop:
    """A training of one's own.

    Attributes:
        trained: the batches with an update, as (epoch, number).
        failing: the batch before whose update an exception is raised, once.
    """

    group: Group
    kind: str
    seed: int = 0
    workers: int | None = None
    failing: tuple[int, int] | None = None

    def __post_init__(self):
        self.trained = []
        make = STRATEGIES[self.kind]
        layers = Linear(4, 8), BatchNorm(8), Tanh(), Dropout(0.5), Linear(8, 3)
        self.model = Sequential(*layers).initialize(seed=self.seed)
        self.parallel = make and make(self.model, self.group)
        self.optimizer = Adam(self.model.storage, lr=0.05)
        self.worker = None if make else Worker(self.model, self.optimizer, self.group)
        self.loader = Loader(DATA, 5, self.group, workers=self.workers)

    @property
    def whole(self):
        return self.worker or (self.model, self.optimizer, self.group)

    def step(self, batch):
        if (batch.epoch, batch.number) == self.failing:
            self.failing = None
            raise DivergenceError("once")
        if self.worker is not None:
            self.worker.step(batch)
        else:
            self.model.zero_grad()
            with training(step=self.optimizer.steps, first_row=batch.first_row):
                loss = cross_entropy(self.model(batch.x), batch.y, reduction="sum")
            self.parallel.backward(loss, batch.global_targets)
            self.optimizer.step()
        self.trained.append((batch.epoch, batch.number))

    def evaluate(self):
        """By the Worker, or by hand, over the loader that trains."""
        if self.worker is not None:
            self.worker.evaluate(self.loader)
        else:
            for batch in self.loader:
                self.model(batch.x)

    def end(self):
        if self.kind == "zero 3":
            self.parallel.gather_model()
        else:
            (self.worker or self.parallel).release()
        return [value.tobytes() for value in self.model.state().values()]


def one_by_one(loop):
    while loop.loader.place[0] < EPOCHS:
        yield from loop.loader


ORDER = [(epoch, number) for epoch in range(EPOCHS) for number in range(BATCHES)]


def until(loop, batches, at, before=int):
    """Train until an update; return the batches, which are not closed while somebody has them."""
    for batch in batches:
        before()
        loop.step(batch)
        if loop.trained[-1] == at:
            break
    return batches


def evaluate_before_each_step(loop, at):
    def look():
        loop.evaluate()
        next(iter(loop.loader))

    batches = until(loop, one_by_one(loop), at, look)
    next(iter(loop.loader))
    return batches


def keep_iterators(loop, at):
    kept = [iter(loop.loader), loop.loader.epoch(0)]

    def look():
        for others in kept:
            next(others, None)
        kept.append(iter(loop.loader))

    until(loop, one_by_one(loop), at, look)


def fail(loop, at):
    loop.failing = ORDER[ORDER.index(at) + 1]
    with pytest.raises(DivergenceError) as caught:
        until(loop, one_by_one(loop), None)
    return caught


def parts_of_epochs(loop, at):
    while at not in loop.trained:
        part = until(loop, islice(loop.loader, 2), at)
    return part


WAYS = {
    "break": lambda loop, at: until(loop, one_by_one(loop), at).close(),
    "evaluate": lambda loop, at: (until(loop, one_by_one(loop), at), loop.evaluate()),
    "evaluate before each step": evaluate_before_each_step,
    "keep iterators": keep_iterators,
    "fail": fail,
    "slices": lambda loop, at: until(loop, islice(one_by_one(loop), ORDER.index(at) + 1), None),
    "parts of epochs": parts_of_epochs,
    "epochs by hand": lambda loop, at: until(
        loop, chain.from_iterable(map(loop.loader.epoch, range(EPOCHS))), at
    ),
}


@pytest.mark.simulated(max_size=3)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_resumed_loop_ends_with_the_same_bits(group, tmp_path, kind):
    """From within an epoch, before its last batch and from its end; twice."""
    whole = Loop(group, kind)
    until(whole, one_by_one(whole), None)
    assert whole.trained == ORDER
    expected = whole.end()
    ways = {"Worker": [*WAYS], "DataParallel": [*WAYS][::2]}.get(kind, [*WAYS][:2])
    for number, way in enumerate(ways):
        at = ORDER[BATCHES + (1, BATCHES - 2, BATCHES - 1)[number % 3]]
        folder = group.share(f"{tmp_path}/{way}")
        first = Loop(group, kind, workers=2 if number == 1 else None)
        open_ = WAYS[way](first, at)
        save(folder, first.whole, loader=first.loader)
        del open_
        first.end()
        rest = Loop(group, kind, seed=1)
        resume(folder, rest.whole, loader=rest.loader)
        if not number:  # saved again at once, and resumed again
            save(folder, rest.whole, loader=rest.loader)
            rest.end()
            rest = Loop(group, kind, seed=2)
            resume(folder, rest.whole, loader=rest.loader)
        until(rest, one_by_one(rest), None)
        assert first.trained + rest.trained == ORDER, way
        assert rest.end() == expected, way


EACH_KIND = pytest.mark.parametrize("kind", ["Worker", "DataParallel"])


@pytest.mark.simulated(max_size=4)
@EACH_KIND
def test_a_place_that_the_program_keeps(group, tmp_path, kind):
    folder = group.share(str(tmp_path))
    whole, first, rest = (Loop(group, kind, seed) for seed in (0, 0, 1))
    for loop, at in ((whole, None), (first, (1, 2))):
        until(loop, chain.from_iterable(map(loop.loader.epoch, range(EPOCHS))), at)
    assert resume(folder, first.whole) == {}
    save(folder, first.whole, epoch=1, batch=3)
    assert resume(folder, rest.whole) == {"epoch": 1, "batch": 3}
    until(rest, chain(rest.loader.epoch(1, start=3), rest.loader.epoch(2)), None)
    first.end()
    assert rest.end() == whole.end()


UP_TO_2 = pytest.mark.simulated(max_size=2)


@UP_TO_2
@EACH_KIND
@pytest.mark.parametrize("at", [2, BATCHES - 1])
def test_a_loop_that_would_go_on_with_other_batches_is_refused(group, tmp_path, at, kind):
    """Without its loader, or with one of other batches, within an epoch."""
    folder = group.share(str(tmp_path))
    first = Loop(group, kind)
    until(first, one_by_one(first), (1, at))
    save(f"{folder}/without", first.whole)
    save(f"{folder}/with", first.whole, loader=first.loader)
    first.end()
    rest = Loop(group, kind, seed=1)
    resume(f"{folder}/without", rest.whole)
    epoch, number = ORDER[BATCHES + at + 1]
    goes_on = f"the resumed run goes on with batch {number} of epoch {epoch}"
    batches = one_by_one(rest)
    usage_error(f"epoch 0 again, but {goes_on}", lambda: rest.step(next(batches)))
    rest.end()
    if at == 2:
        rest.loader.batch_size -= 1
        usage_error(
            "within an epoch, with batch_size .*; give it batch_",
            resume,
            f"{folder}/with",
            rest.whole,
            loader=rest.loader,
        )


@pytest.mark.parametrize("by_hand", [False, True])
@UP_TO_2
def test_two_loaders_at_once(group, tmp_path, by_hand):
    """Of other lengths: the longer one goes on where it was, as in a resumed run."""
    kind = "DataParallel" if by_hand else "Worker"

    def run(seed, rounds, stop=None):
        loop = Loop(group, kind, seed)
        pair = {"loader": loop.loader, "other": Loader(DATA, 8, group, seed=1)}
        if seed:
            resume(folder, loop.whole, **pair)
        for _ in range(rounds):
            for ours, theirs in zip(*pair.values(), strict=False):
                if by_hand:  # one update on both: that of the other is opened, too
                    loop.model(theirs.x)
                loop.step(ours)
                if not by_hand:
                    loop.step(theirs)
                read.append((ours.epoch, ours.number, theirs.epoch, theirs.number))
                if len(read) == stop:
                    save(folder, loop.whole, **pair)
                    break
        return loop.end()

    folder, read = group.share(str(tmp_path)), []
    whole = run(0, 4)
    expected, read = read, []
    assert [row[:2] for row in expected] == ORDER[: len(expected)]
    run(0, 2, 4)
    assert run(1, 3) == whole
    assert read == expected


@UP_TO_2
def test_the_rest_of_an_epoch_without_updates_is_over(group):
    """Short batches are left out; and a loop that accumulates may end within a window."""
    loop = Loop(group, "DataParallel")
    for _ in range(2):
        for batch in loop.loader:
            if batch.global_rows == 5:
                loop.step(batch)
    assert loop.trained == [item for item in ORDER[: 2 * BATCHES] if item[1] < BATCHES - 1]
    loop.loader.batch_size = 10  # from the next epoch on, in which it is followed
    assert [(batch.epoch, batch.number) for batch in islice(loop.loader, 2)] == [(2, 0), (2, 1)]
    loop.end()


def test_a_loader_without_updates_goes_from_epoch_to_epoch():
    """As for another library's model; a look at a batch is no loop."""
    loader, other = Loader(DATA, 5), Loader(DATA, 5)
    next(iter(loader))
    read = [(batch.epoch, batch.number) for _ in range(2) for batch in loader]
    assert read == ORDER[: 2 * BATCHES]
    for batch in loader:
        if batch.number == 1:
            break
    for _ in range(2):
        other.load(loader.state())
        assert [(batch.epoch, batch.number) for batch in other] == ORDER[2 * BATCHES + 2 :]
        assert other.place == (3, 0)


def ahead(batches, size=3):
    batches, ready = iter(batches), deque()
    ready.extend(islice(batches, size))
    while ready:
        yield ready.popleft()
        ready.extend(islice(batches, 1))


def fed(batches, size):
    """By another thread, which may be many batches ahead."""
    waiting = Queue(size)
    Thread(target=lambda: [*map(waiting.put, chain(batches, [None]))], daemon=True).start()
    return iter(waiting.get, None)


def arrays(batches):
    return ((batch.x, batch.y) for batch in batches)


READERS = {
    "one after the other": iter,
    "a list": lambda loader: iter(list(loader)),
    "one ahead": lambda loader: ahead(loader, 1),
    "three ahead": ahead,
    "more than there are": lambda loader: ahead(loader, 9),
    "a short queue": lambda loader: fed(loader, 1),
    "a long queue": lambda loader: fed(loader, 9),
    "chosen epochs": lambda loader: chain.from_iterable(map(loader.epoch, range(EPOCHS))),
    "pairs": arrays,
}
PAIRS_AHEAD = {
    "pairs ahead": lambda loader: ahead(arrays(loader)),
    "a list of pairs": lambda loader: iter([*arrays(loader)]),
    "pairs ahead, samples changed": lambda loader: ahead((x * 2, y) for x, y in arrays(loader)),
    "a queue of pairs": lambda loader: fed(arrays(loader), 2),
    "a pool's pairs": lambda loader: ThreadPoolExecutor(2).map(tuple, loader),
}


def train_on(read, steps, by_hand):
    """Train on batches that a reader hands over, epoch after epoch; return the loop."""
    (loop,) = simulate(lambda group: Loop(group, "DataParallel" if by_hand else "Worker"), 1)
    done = 0
    while done < steps:
        for item in islice(read(loop.loader), steps - done):
            done += 1
            if loop.worker is not None:
                loop.worker.step(*(item if isinstance(item, tuple) else [item]))
                continue
            x, y = item
            loop.model.zero_grad()
            with training(step=done):
                loss = cross_entropy(loop.model(x), y, reduction="sum")
            loop.parallel.backward(loss, len(y))
            loop.optimizer.step()
    return loop


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_batches_that_wait_were_not_trained_on(reader, by_hand, tmp_path):
    for steps in (1, 3, 4, 5, 7):
        loop = train_on(READERS[reader], steps, by_hand)
        save(tmp_path / str(steps), loop.whole, loader=loop.loader)
        (rest,) = simulate(lambda group: Loop(group, "Worker"), 1)
        resume(tmp_path / str(steps), rest.whole, loader=rest.loader)
        assert rest.loader.place == divmod(steps, BATCHES)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("reader", PAIRS_AHEAD)
def test_a_place_that_nobody_knows_is_not_saved(reader, by_hand, tmp_path):
    for steps in (1, 3):
        # in a context without loops that other tests have left open
        loop = Context().run(train_on, PAIRS_AHEAD[reader], steps, by_hand)
        usage_error(
            "take batch.x and batch.y w",
            lambda: save(tmp_path, loop.whole, loader=loop.loader),  # noqa: B023
        )


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_of_batches_is_one_update(window):
    """Whose samples are not all held; the rest of an epoch may have an update of its own."""
    (loop,) = simulate(lambda group: Loop(group, "DataParallel"), 1)
    for number, (x, y) in enumerate(loop.loader, 1):
        cross_entropy(loop.model(x), y).backward()
        if number % window == 0 or number == BATCHES:
            loop.optimizer.step()
            loop.model.zero_grad()
            assert loop.loader.place == divmod(number, BATCHES)
            assert loop.loader.state()["batch"] == number % BATCHES


def test_a_window_in_a_list_is_saved_if_each_batch_goes_before_the_next():
    for goes in (False, True):
        (loop,) = simulate(lambda group: Loop(group, "DataParallel"), 1)
        window = [*islice(loop.loader, 2)]
        for batch in (window.pop(0) for _ in range(2)) if goes else window:
            cross_entropy(loop.model(batch.x), batch.y).backward()
        loop.optimizer.step()
        if goes:
            assert loop.loader.state()["batch"] == 2
        else:
            usage_error(r"while window: batch = window\.pop\(0\)", loop.loader.state)


@EACH_KIND
@UP_TO_2
def test_a_training_that_would_begin_elsewhere_is_refused(group, kind):
    begun, again, looked, skipped = (Loop(group, kind) for _ in range(4))
    for _ in range(2):  # a loop of its own for each step
        begun.step(next(iter(begun.loader)))
    assert begun.trained == ORDER[:2]
    again.loader.load(begun.loader.state())
    for _ in again.loader:  # it was trained on before
        pass
    assert again.loader.place == (0, 2)
    open_loop = again.loader.epoch(0)
    usage_error(
        r"batch 0 of epoch 0, but the resumed .* batch 2 of epoch 0",
        lambda: again.step(next(open_loop)),
    )
    open_loop.close()
    again.step(next(again.loader.epoch(*again.loader.place)))
    for _ in looked.loader:  # such as for statistics, or an accuracy at the start
        pass
    looks = iter(looked.loader)
    usage_error(
        r"begin with batch 0 of epoch 1, .* loader.epoch\(0\)", lambda: looked.step(next(looks))
    )
    looks.close()
    list(islice(skipped.loader, 3))
    batches = iter(skipped.loader)
    usage_error("would begin with batch 3 of epoch 0", lambda: skipped.step(next(batches)))
    for loop in (looked, skipped, begun, again):
        loop.end()


def test_a_batch_that_is_kept_moves_nothing_back():
    (loop,) = simulate(lambda group: Loop(group, "Worker"), 1)
    (*batches,) = loop.loader
    for batch in (*batches[:2], batches[0]):
        loop.step(batch)
    assert loop.loader.place == (0, 2)


def test_what_a_program_sets_of_a_batch_stays():
    batch = next(iter(Loader(DATA, 5)))
    batch.y = np.zeros(5, int)  # before the batch is opened
    assert batch.x.any()
    assert not batch.y.any()


def test_a_copied_batch_moves_the_place_and_a_pickled_one_has_none():
    (loop,) = simulate(lambda group: Loop(group, "Worker"), 1)
    batch = next(iter(loop.loader))
    batch.x = batch.x + 1
    sent = pickle.loads(pickle.dumps(batch))
    assert sent.loop is None
    assert sent.x.tobytes() == batch.x.tobytes()
    loop.step(deepcopy(batch))
    assert loop.loader.place == (0, 1)


@EACH_KIND
@UP_TO_2
def test_an_evaluation_within_an_epoch_reads_all_batches(group, kind):
    """Beside the training's loop, and after it was left; those that had updates get no more."""
    loop = Loop(group, kind)

    def look():
        return [batch.number for batch in loop.loader]

    for batch in loop.loader:
        loop.step(batch)
        if batch.number == 1:
            assert look() == [2, 3, 4, 0, 1]
            break
    assert look() == [2, 3, 4, 0, 1]
    assert loop.loader.place == (0, 2)
    with pytest.raises(UsageError, match=r"batch 0 of epoch 0 again, .* by loader.epoch\(1\)"):
        for batch in loop.loader:
            if batch.number < 2:  # all others are left out
                loop.step(batch)
    for batch in loop.loader:
        loop.step(batch)
    assert loop.trained == ORDER[:BATCHES]
    assert look() == [0, 1, 2, 3, 4]
    assert loop.loader.place == (1, 0)
    loop.end()
