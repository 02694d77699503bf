"""Which weights are in the storage, where an average of them is kept: in every layout, at any time.

Each layout is asked the same questions inside and outside of `averaged()`: what is measured, what a
checkpoint holds, what is loaded; what cannot be answered is refused.
"""

from functools import partial

import numpy as np
import pytest

import nnmpi
from nnmpi import Layout, Numerics, data, models, ops, optim
from nnmpi.base.errors import UsageError
from tests.harness.refusals import usage_error
from tests.worker_options import arranged, grouped

DECAY = 0.9
DRAW = np.random.default_rng(0)
SAMPLES = data.Dataset("d", DRAW.normal(size=(48, 6)), DRAW.integers(0, 4, 48), 4)
SERIAL = (1, {}, {})
each_layout = pytest.mark.parametrize(
    "ranks, layout, options",
    [
        SERIAL,
        (2, {}, {"fused_update": True}),
        (2, {}, {"fused_update": False}),
        (2, {"zero": 1}, {}),
        (2, {"zero": 2}, {}),
        (2, {"zero": 3}, {"allreduce": "ring"}),
        (2, {"pp": 2, "split": [3, 3]}, {}),
        (2, {"tp": 2}, {}),
    ],
)


def network():
    return models.mlp((6,), 4, hidden=[8, 8])


def make_worker(group, layout, options, **more):
    words = {"lr": 0.3, "dtype": "float64", "ema": DECAY, **options, **more}
    return arranged(network(), group, Layout(**layout), **grouped(**words))


def loader_of(worker):
    return data.Loader(SAMPLES, 16, worker.arrangement, dtype="float64", shuffle=False)


def train(worker, epochs=2):
    for epoch in range(epochs):
        for batch in loader_of(worker).epoch(epoch):
            worker.step(batch)


def measure(worker):
    return worker.evaluate(loader_of(worker).epoch(0)).loss


def weights_of(worker):
    return worker.state()[0].to_dict(everywhere=True)


def average_of(worker):
    with worker.averaged():
        return weights_of(worker)


def loss_of(weights):
    """Return the loss of these very weights, by a Worker of one rank that keeps no average."""

    def program(group):
        worker = make_worker(group, {}, {}, ema=0.0)
        worker.model.load_state(weights)
        return measure(worker)

    return nnmpi.simulate(program, 1)[0]


def on(ranks, program, *given):
    """Return rank 0's result of a program of (group, *given)."""
    return nnmpi.simulate(lambda group: program(group, *given), ranks)[0]


def same(ours, theirs):
    return all((ours[name] == theirs[name]).all() for name in theirs)


def measured(group, layout, options):
    worker = make_worker(group, layout, options)
    train(worker)
    raw, losses = weights_of(worker), [measure(worker)]
    with worker.averaged():
        average = weights_of(worker)
        losses.append(measure(worker))
        with worker.averaged():
            losses.append(measure(worker))
        losses.append(measure(worker))
    assert same(weights_of(worker), raw)
    return raw, average, losses


@each_layout
def test_an_evaluation_measures_the_average_wherever_it_is_asked_for(ranks, layout, options):
    raw, average, losses = on(ranks, measured, layout, options)
    assert losses == pytest.approx([loss_of(average)] * 4, rel=1e-9)
    assert abs(loss_of(raw) - loss_of(average)) > 1e-4  # the two are told apart


GIVEN = {name: 2 * array for name, array in network().initialize(3, "float64").state().items()}


def fine_tuned(group, layout, options, trained):
    worker = make_worker(group, layout, options)
    if trained:
        train(worker)
    worker.state()[0].scatter(GIVEN.__getitem__)
    begins, loss = average_of(worker), measure(worker)
    train(worker, 1)
    return begins, loss, measure(worker)


@each_layout
@pytest.mark.parametrize("trained", [False, True])
def test_weights_that_are_loaded_begin_the_average_anew(ranks, layout, options, trained):
    begins, before, after = on(ranks, fine_tuned, layout, options, trained)
    assert same(begins, GIVEN)
    assert before == pytest.approx(loss_of(GIVEN), rel=1e-9)
    assert after == pytest.approx(on(*SERIAL[:1], fine_tuned, {}, {}, trained)[2], rel=1e-9)


@pytest.mark.parametrize("trained", [False, True])
def test_a_state_of_a_part_sets_the_average_of_that_part(trained):
    def program(group):
        worker = make_worker(group, {}, {})
        if trained:
            train(worker)
        before, raw = average_of(worker), weights_of(worker)
        part = worker.model.get("1")
        part.load_state({name: array + 1 for name, array in part.state().items()})
        after = average_of(worker)
        assert same(weights_of(worker), {n: after[n] for n in after if n[0] == "1"})
        rest = [name for name in raw if name[0] != "1"]
        return same({n: after[n] for n in rest}, {n: before[n] for n in rest})

    assert on(2, program)


def test_values_that_are_written_before_the_first_update_are_where_the_average_begins():
    def program(group):
        worker = make_worker(group, {}, {"fused_update": False})
        for name, parameter in worker.model.named_parameters():
            parameter.data[...] = GIVEN[name]
        return average_of(worker)

    assert same(on(2, program), GIVEN)


def test_ranks_that_begin_with_other_weights_have_the_same_average():
    """All begin with rank 0's, and so does the average."""

    def program(group):
        model = network().initialize(group.rank, "float64")
        numerics = Numerics(ema=DECAY)
        worker = nnmpi.Worker(model, optim.SGD(model.storage, 0.1), group, numerics=numerics)
        with worker.averaged():
            return model.state()

    first, second = nnmpi.simulate(program, 2)
    assert same(first, second)


@each_layout
def test_what_needs_the_weights_is_refused_while_the_average_is_in_their_place(
    ranks, layout, options, tmp_path
):
    def program(group):
        worker = make_worker(group, layout, options)
        model, optimizer = worker.model, worker.optimizer
        train(worker)
        nnmpi.save(tmp_path, worker)
        raw, batches = weights_of(worker), [*loader_of(worker).epoch(0)]
        again = partial(nnmpi.Worker, model, optimizer, group, arrangement=worker.arrangement)
        scatter = worker.state()[0].scatter
        needing = {
            "a step": partial(worker.step, batches[0]),
            "a checkpoint": partial(nnmpi.save, tmp_path, worker),
            "loading a checkpoint": partial(nnmpi.resume, tmp_path, worker),
            "loading values": partial(scatter, GIVEN.__getitem__),
            "drawing initial values": partial(model.initialize, 1),
            "an average": partial(optimizer.keep_average, 0.5),
            "a Worker": again,
            r"release\(\)": worker.release,
        }
        with worker.averaged():
            for what, call in needing.items():
                usage_error(f"^{what}.* needs the weights, in whose place their average", call)
        assert same(weights_of(worker), raw)
        worker.step(batches[0])

    on(ranks, program)


@each_layout
def test_an_exception_within_and_a_block_that_is_left_late_give_the_weights_back(
    ranks, layout, options
):
    def held(worker):
        with worker.averaged():
            yield

    def program(group):
        worker = make_worker(group, layout, options)
        train(worker)
        raw, average = weights_of(worker), average_of(worker)
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), worker.averaged():
                raise error
            assert same(weights_of(worker), raw)
        # a generator that is suspended within, while another block begins and ends
        one, other = held(worker), held(worker)
        next(one)
        next(other)
        one.close()
        assert same(weights_of(worker), average)
        usage_error("a step needs the weights", train, worker)
        other.close()
        assert same(weights_of(worker), raw)
        train(worker, 1)

    on(ranks, program)


def test_an_interrupt_while_the_weights_come_back_leaves_none_behind():
    """Ctrl-C between two arrays: what is kept beside is written again."""
    model = models.mlp((6,), 4, hidden=[8]).initialize(0, group=lambda name, _: name)
    optimizer = optim.SGD(model.storage, lr=0.1)
    optimizer.keep_average(DECAY)
    for _ in range(2):
        model.zero_grad()
        ops.cross_entropy(model(SAMPLES.x), SAMPLES.y).backward()
        optimizer.step()
    raw = model.state()
    arrays, storage = model.storage.data, model.storage

    class Interrupted(list):
        left = 2

        def __iter__(self):
            for array in super().__iter__():
                Interrupted.left -= 1
                if not Interrupted.left:
                    raise KeyboardInterrupt
                yield array

    with pytest.raises(KeyboardInterrupt), optimizer.averaged():
        assert not same(model.state(), raw)
        storage._own_data = Interrupted(arrays)
    storage._own_data = arrays
    assert same(model.state(), raw)
    optimizer.apply()


def test_a_later_worker_without_an_average_ends_that_of_the_one_before(tmp_path):
    """Also in its checkpoints, whose readers take the average where there is one."""

    def program(group, releases):
        model = network().initialize(0, "float64")
        optimizer = optim.Adam(model.storage, lr=0.1)
        make = partial(nnmpi.Worker, model, optimizer, group)
        first = make(numerics=Numerics(ema=DECAY))
        train(first)
        if releases:
            first.release()
        second = make()
        train(second, 1)
        assert "ema" not in optimizer.slots()
        assert measure(second) == pytest.approx(loss_of(model.state()))
        if not releases:
            with pytest.raises(UsageError, match=r"made with an average .* by 0.9, and a later"):
                measure(first)
        second.release()
        third = make(numerics=Numerics(ema=DECAY))
        return same(average_of(third), model.state())

    assert on(1, program, False)
    assert on(2, program, True)


def test_an_average_of_the_program_itself_stays_and_two_are_told_apart():
    def program(group):
        model = network().initialize(0, "float64")
        optimizers = [optim.SGD(model.storage, lr=0.1) for _ in range(2)]
        for optimizer in optimizers:
            optimizer.keep_average(DECAY)
        one, other = (nnmpi.Worker(model, optimizer, group) for optimizer in optimizers)
        train(one)
        assert abs(measure(one) - loss_of(model.state())) > 1e-4
        with one.averaged():
            usage_error("the average of another optimizer is in the place", measure, other)
            usage_error("an update needs the weights", optimizers[1].step)
        train(other, 1)
        optimizers[0].keep_average(0)
        assert measure(one) == pytest.approx(loss_of(model.state()))
        usage_error("keeps no average", optimizers[0].averaged().__enter__)

    on(1, program)


@pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")
def test_an_average_that_begins_in_the_middle_is_kept_or_refused():
    def program(group, options):
        worker = make_worker(group, {}, options, ema=0.0)
        train(worker)
        if options.get("fused_update"):
            usage_error("call keep_average before the Worker", worker.optimizer.keep_average, 0.5)
            return train(worker, 1)
        worker.optimizer.keep_average(0.5)
        train(worker, 1)
        return measure(worker)

    on(2, program, {"fused_update": True})
    (serial,), both = on(1, lambda g: [program(g, {})]), {"fused_update": False}
    assert on(2, program, both) == pytest.approx(serial)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_average_that_is_restored_with_the_state_stays_in_either_order(order):
    def program(group):
        first, second = (make_worker(group, {}, {"fused_update": False}) for _ in range(2))
        train(first)
        kept, average = [state.to_dict(True) for state in first.state()], average_of(first)
        states = second.state()
        for number in order:
            states[number].scatter(kept[number].__getitem__)
        return same(average_of(second), average) and same(weights_of(second), kept[0])

    assert on(2, program)
