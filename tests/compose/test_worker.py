"""A worker looks at how its batches were shared out, and at what is on several ranks."""

import time
import warnings

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Group, Layout, data, models, nn, ops, optim
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.data import Loader
from tests.compose.small_runs import dataset
from tests.equivalence.reference import Setup, build
from tests.harness.refusals import refuses, told, usage_error
from tests.worker_options import arranged, sgd, work

SAMPLE = np.zeros((4, 8, 8, 1), np.float32)


def make(group, layout, dropout=0.0):
    options = {"hidden": (20,) * 8, "dropout": dropout}
    setup = Setup(models.mlp, options, "sgd", {"lr": 0.1}, "float32", worker={"check": False})
    return build(setup, group, layout)


def refusal(group, worker, loader):
    """Return what each rank was told of a step."""
    result = told(UsageError, lambda: worker.step(next(iter(loader.epoch(0)))))
    return [str(item) for item in group.gather(result)]


@pytest.mark.simulated
@pytest.mark.needs_ranks(2, 4, 8)
def test_a_batch_for_other_replicas_is_refused(group):
    """As when the world's rank and size are given to the Loader of a pipeline."""
    train, _ = data.load("digits")
    worker = make(group, Layout(pp=group.size, dp=1))
    # a batch that they do not divide is another shape to each stage, and the job ends
    answers = refusal(group, worker, Loader(train, 32, group, microbatches=1))
    expected = "different rows", "data.Loader(dataset, batch_size, arrangement)"
    assert all(text in answer for answer in answers for text in expected), answers


@pytest.mark.simulated(max_size=3)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_are_those_of_a_loop_of_ones_own(group, microbatches):
    """Which knows nothing of workers: the serial runs of other tests go the way that they are held
    against.
    """
    train, _ = data.load("iris")
    ours, theirs = (
        models.mlp((4,), 3, hidden=(5,)).initialize(seed=1, dtype="float64") for _ in range(2)
    )
    worker = work(ours, group, lr=0.2)
    loader = Loader(train, 50, group, microbatches=microbatches, shuffle=False, dtype="float64")
    losses = [worker.step(batch).loss for batch in loader.epoch(0)]
    optimizer = sgd(theirs, 0.2)
    for number, batch in enumerate(Loader(train, 50, shuffle=False, dtype="float64").epoch(0)):
        theirs.zero_grad()
        loss = nnmpi.ops.cross_entropy(theirs(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(losses[number], loss.item(), rtol=1e-12)
    np.testing.assert_allclose(ours.storage.data[0], theirs.storage.data[0], rtol=1e-11, atol=1e-13)
    worker.release()


@pytest.mark.simulated
@pytest.mark.parametrize("way", ["closure", "list", "frozen"])
def test_a_layer_that_the_model_does_not_hold_is_told_of(group, way):
    """It has weights of its own already, gets gradients, and would never be updated."""
    stranger = nn.Linear(10, 10).initialize(seed=1)
    if way == "frozen":
        for parameter in stranger.parameters():
            parameter.requires_grad = False

    class Net(nn.Module):
        def __init__(self):
            self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
            if way == "list":
                self.rest = [stranger]
            self.act = lambda x: stranger(x)

        def forward(self, x):
            return self.act(self.first(x))

    model = Net().initialize(seed=0)
    worker = work(model, group)
    train, _ = data.load("digits")
    batches = iter(Loader(train, 32, group).epoch(0))
    with warnings.catch_warnings(record=True) as result:
        warnings.simplefilter("always")
        for _ in range(2):
            worker.step(next(batches))
        group.share(0)  # all have warned
    told = [str(item.message) for item in result if "is not in the model" in str(item.message)]
    # the root's, which any of the threads that are simulated ranks may have recorded
    assert sum(group.gather(len(told))) == (way == "closure")


@pytest.mark.simulated
def test_whole_microbatches_belong_to_a_fixed_order(group):
    train, _ = data.load("digits")
    worker = make(group, Layout())
    # of two rows each: one row would be the first rank's, which had all of a batch then
    many = 2 * group.size
    loader = Loader(train, 2 * many, worker.arrangement, microbatches=many, whole_microbatches=True)
    fixed = make(group, Layout(reduction="fixed"))
    shared = Loader(train, 2 * many, fixed.arrangement, microbatches=many)
    for answers, text in (
        (refusal(group, worker, loader), "leave it out"),
        (refusal(group, fixed, shared), "a Loader with whole_microbatches=True"),
    ):
        assert all(text in item if group.size > 1 else item == "" for item in answers)


@pytest.mark.simulated(min_size=2, max_size=16)  # no deeper than the model
@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_a_part_of_a_model_needs_its_arrangement(group, axis):
    """Without it, rank 0's part would be everybody's."""
    where = make(group, Layout(**{"dp": 1, axis: group.size})).arrangement
    usage_error("give the Worker the arrangement that made it", work, where.model, group)


@pytest.mark.simulated(check=False)  # the other stage waits for nobody
@pytest.mark.needs_ranks(2)
def test_freezing_between_steps_wants_a_new_worker(group):
    """What crosses between two stages was agreed once; the first stage's rank notices."""
    train, _ = data.load("digits")
    worker = make(group, Layout(pp=group.size, dp=1))
    where = worker.arrangement
    loader = Loader(train, 32, where, microbatches=4)
    batch = next(iter(loader.epoch(0)))
    for _ in range(2):  # the ranks do not compare the third update, and so wait for nobody there
        worker.step(batch)
    for parameter in where.model.parameters():
        parameter.requires_grad = False
    result = told(UsageError, lambda: worker.step(batch)) if group.rank == 0 else ""
    assert group.rank or "make a new one after changing requires_grad" in result


@pytest.mark.mpi
@pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")
def test_a_slow_rank_does_not_undo_what_others_write_into_a_nodes_weights(group, monkeypatch):
    real = Group.broadcast

    def slow(self, *args):
        real(self, *args)
        if self.rank == self.size - 1:
            time.sleep(0.05)

    model = nn.Sequential(nn.Linear(7, 3)).initialize(seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "broadcast", slow)
        fused = GradientExchange(fused_update=True if group.size > 1 else None)
        worker = work(model, group, exchange=fused)
    for array in model.storage.data if group.is_root else ():
        array[...] = 5.0
    group.barrier()
    expected = worker.strategy.is_fused or group.is_root
    right = [bool((array == 5.0).all()) == expected for array in model.storage.data]
    worker.release()
    assert all(map(all, group.gather(right)))


@pytest.mark.simulated
@pytest.mark.needs_ranks(1, 2, 4, 6)
def test_rows_of_ones_own_are_a_batch(group):
    """As many as each replica likes, one of them none: losses and evaluation of the rows
    together.
    """
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((3, 11, 8, 8, 1)), draw.integers(0, 10, (3, 11))

    def train(group, layout):
        # whose masks go by the place in the whole batch
        worker = make(group, layout, dropout=0.2)
        where = worker.arrangement
        ends = [0, *(11 - (11 >> number) for number in range(1, where.data_ranks)), 11]
        mine = (
            slice(*ends[where.data_rank : where.data_rank + 2])
            if where.data_ranks > 1
            else slice(None)
        )
        losses = [worker.step(x[step][mine], y[step][mine], lr=0.2).loss for step in range(3)]
        assert worker.optimizer.lr == 0.2
        losses.append(
            worker.evaluate(x[0][mine].tolist() if len(x[0][mine]) else x[0][mine], y[0][mine]).loss
        )
        worker.release()
        return losses

    serial = (
        nnmpi.simulate(lambda alone: train(alone, Layout()), ranks=1)[0] if group.is_root else None
    )
    layouts = [
        Layout(dp=group.size),
        Layout(pp=group.size),
        *([Layout(dp=2, pp=group.size // 2)] if group.size > 2 else []),
    ]
    for layout in layouts:
        result = train(group, layout)
        assert not group.is_root or result == pytest.approx(serial, rel=1e-5)


@pytest.mark.parametrize(
    "step, text",
    [
        (lambda worker, x: worker.step(x), "samples and labels, not only a ndarray"),
        (lambda worker, x: worker.step(x, [1, 2]), "4 samples have 2 labels"),
        (lambda worker, x: worker.step(x, [1, -1, 0, 2]), "-1 .*outside"),
        (
            lambda worker, x: worker.step(
                next(iter(Loader(data.load("digits")[0], 4).epoch(0))), 0.1
            ),
            "by keyword",
        ),
    ],
)
def test_what_is_no_batch_is_refused(step, text):
    def main(group):
        step(make(group, Layout()), SAMPLE)

    refuses((UsageError, ShapeError), text, nnmpi.simulate, main, ranks=1)


@pytest.mark.simulated(max_size=4)
@pytest.mark.parametrize(
    "options",
    [
        *({"zero": stage} for stage in range(4)),
        {"dp": 1, "pipeline": "1f1b"},
        {"dp": 1, "pipeline": "pipedream"},
        {"reduction": "fixed"},
    ],
    ids=str,
)
@pytest.mark.host_only("it writes to arrays that NumPy can lock")
def test_what_is_done_to_weights_between_two_runs_survives(group, options):
    """Frozen ones stay, with momentum and decay; others begin where they were set to."""
    pipelined = "pipeline" in options
    options = options | ({"pp": group.size, "split": (1,) * group.size} if pipelined else {})
    layers = [nn.Linear(6, 6) for _ in range(max(group.size, 2) - 1)]
    if pipelined and group.size == 1:
        options |= {"pipeline": "1f1b", "split": "auto"}
    net, sample = nn.Sequential(*layers, nn.Linear(6, 3)), np.zeros((2, 6))
    worker = arranged(net, group, Layout(**options), sample, make=optim.AdamW)
    model, where = worker.model, worker.arrangement
    loader = Loader(
        dataset(), 12, where, microbatches=4, whole_microbatches=options.get("reduction") == "fixed"
    )
    worker.run(loader, 0, 0, 3, 0, lambda step: 0.1)
    parameters = [*model.parameters()] if worker.model.storage.data else []
    if parameters and not parameters[0].data.flags.writeable:  # ZeRO 3's, in a slot
        parameters = []
    for parameter in parameters:
        parameter.data[...] = 0.25
        parameter.requires_grad = parameter is not parameters[0]
    worker.run(loader, 1, 0, 2, 3, lambda step: 0.0)
    same = [bool((parameter.data == 0.25).all()) for parameter in parameters]
    worker.run(loader, 1, 2, 4, 5, lambda step: 0.1)
    kept = [bool((parameter.data == 0.25).all()) for parameter in parameters]
    worker.release()
    where.free()
    assert all(same)
    assert kept == [True] * bool(parameters) + [False] * (len(parameters) - 1)


@pytest.mark.parametrize("layout, ranks", [({}, 2), ({"zero": 1}, 3), ({"zero": 2}, 2)])
def test_averaged_weights_go_in_and_out(layout, ranks):
    """The ranks share one copy of the weights, which one writes while another still reads."""
    train, test = data.load("iris")

    def program(group, **layout):
        net = models.mlp((4,), 3, hidden=[8])
        worker = arranged(net, group, Layout(**layout), dtype="float64", lr=0.2)
        model = worker.model
        part = {"rank": group.rank, "world": group.size, "dtype": "float64"}
        average, losses = model.state(), []
        for batch in Loader(train, 40, **part).epoch(0):
            losses.append(worker.step(batch).loss)
            now = model.state()
            average = {name: (average[name] + now[name]) / 2 for name in now}
            model.load_state(average)
            losses.append(worker.evaluate(Loader(test, 30, **part).epoch(0)).loss)
            model.load_state(now)
        return losses

    (serial,) = nnmpi.simulate(program, 1)
    for seed in range(3):
        for result in nnmpi.simulate(lambda group: program(group, **layout), ranks, seed=seed):
            assert result == pytest.approx(serial, rel=1e-9)


@pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_after_a_step_are_the_global_ones_or_none(fused):
    """A fused update leaves parts and products in their memory, which are neither."""
    x, y = np.random.default_rng(0).normal(size=(8, 5)), np.arange(8) % 3

    def program(group, options):
        model = models.mlp((5,), 3, hidden=[4]).initialize(dtype="float64")
        worker = work(model, group, exchange=options)
        mine = np.array_split(np.arange(8), group.size)[group.rank]
        worker.step(x[mine], y[mine])
        grads = [None if p.grad is None else p.grad.copy() for p in model.parameters()]
        return [*grads, optim.global_norm(model.parameters())]

    options = GradientExchange(fused_update=fused)
    (*serial, norm), *_ = nnmpi.simulate(lambda group: program(group, GradientExchange()), 1)
    for *grads, found in nnmpi.simulate(lambda group: program(group, options), 2):
        if fused:
            assert grads == [None] * len(serial) and found == 0
        else:
            assert found == pytest.approx(norm)
            for ours, right in zip(grads, serial, strict=True):
                np.testing.assert_allclose(ours, right, rtol=1e-12)


@pytest.mark.parametrize(
    "schedule, own", [("gpipe", False), ("1f1b", True), ("zero-bubble", False)]
)
def test_a_label_that_the_last_stage_refuses_is_told_to_all(schedule, own):
    """In the first step, and in a replayed one; the next good step is the serial run's."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(8, 6)).astype("float32"), np.arange(8) % 3

    def refusing(logits, labels):
        return ops.cross_entropy(logits, labels, reduction="none")

    def program(group):
        layout = Layout(pp=2, split=(3, 3), pipeline=schedule) if group.size > 1 else Layout()
        model, loss = models.mlp((6,), 3, hidden=[8, 8]), refusing if own else None
        worker = arranged(model, group, layout, loss=loss)
        found = []
        for bad in (True, False, False, False, False, True, False):
            labels = np.where(np.arange(8) == 5, y + 7 * bad, y)
            batches = Loader(data.Dataset("d", x, labels, 10), 8, microbatches=4, shuffle=False)
            for call in (worker.step, worker.evaluate):
                try:
                    found.append(call(next(iter(batches.epoch(0)))).loss)
                except ShapeError as error:
                    assert "label 9" in str(error) and "outside 0..2" in str(error)
                    assert group.size == 1 or "rank 1: " in str(error)
                    found.append(-1.0)
        return found

    (serial,) = nnmpi.simulate(program, 1)
    assert serial.count(-1.0) == 4
    for found in nnmpi.simulate(program, 2):
        assert found == pytest.approx(serial, rel=1e-5)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "layout",
    [*(Layout(zero=stage) for stage in range(4)), Layout(tp=2), Layout(pp=2, split=(3, 3))],
    ids=str,
)
def test_a_loss_that_uses_weights_sees_all_of_them(layout, again):
    """A penalty, or the model once more; where ranks have parts they are refused."""
    x, y = np.random.default_rng(0).normal(size=(4, 6)).astype("float32"), np.arange(4) % 3

    def program(group, layout):
        where = nnmpi.arrange(models.mlp((6,), 3, hidden=[8, 8]), group, layout)
        model = where.model.initialize(seed=0, storage=where.storage)

        def loss(logits, labels):
            if again:
                logits = logits + model(np.ones((1, 6), "float32"))
            each = ops.cross_entropy(logits, labels, reduction="none")
            return each if again else each + sum((p * p).sum() for p in model.parameters())

        worker = work(model, group, loss=loss, arrangement=where)
        ranks = where.mesh.replicas
        rows = slice(ranks.rank, None, ranks.size)
        return [worker.step(x[rows], y[rows]).loss for _ in range(3)]

    if layout in (Layout(), Layout(zero=1)):
        (serial,) = nnmpi.simulate(lambda group: program(group, Layout()), 1)
        for found in nnmpi.simulate(lambda group: program(group, layout), 2):
            assert found == pytest.approx(serial, rel=1e-5)
    else:
        usage_error(
            "is sharded over ranks|only some of the model's",
            nnmpi.simulate,
            lambda group: program(group, layout),
            2,
        )


@pytest.mark.host_only("cores that are idle beside a device are not named")
def test_a_lone_workers_notice_names_idle_cores(group, monkeypatch):
    monkeypatch.setattr("nnmpi.base.launcher.idle_cores", lambda: 4)
    model = models.mlp((4,), 3).initialize(seed=0)
    expected = "3 of 4 cores idle; to use more: mpirun -n 4 python ..." * (group.size == 1)
    assert work(model, group).notice == expected
