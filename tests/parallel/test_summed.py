"""Sums of one's own: the serial run's gradients, bytes in the report, state that is kept, and what
is refused.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, arrange, models, nn, ops, optim, simulate
from nnmpi.base.errors import CheckpointError, CommError, DivergenceError
from nnmpi.compose.exchange import STRATEGIES
from nnmpi.parallel import GradientSum, SummedReplicas
from nnmpi.parallel.data import NUMBERS_BYTES, DataParallel
from tests.harness.refusals import refuses, usage_error


class Plain(GradientSum):
    def sum(self, gradients):
        for grad in gradients.values():
            grad[...] = sum(self.gather(grad))


class Half(GradientSum):
    """Sends half of what there is, and keeps the rest; a count of sums is the same on all."""

    per_replica = ("rest",)

    def __init__(self, group, gradients):
        super().__init__(group, gradients)
        self.state["rest"] = {name: 0 * grad for name, grad in gradients.items()}
        self.state["count"] = {name: np.zeros(1) for name in gradients}

    def sum(self, gradients):
        for name, grad in gradients.items():
            rest = self.state["rest"][name]
            rest += grad
            rest /= 2
            self.state["count"][name] += 1
            grad[...] = sum(self.gather(rest))


class OnEachItsOwn(GradientSum):
    def sum(self, gradients):
        pass


class Replaced(GradientSum):
    def sum(self, gradients):
        for name in gradients:
            gradients[name] = 0


def build():
    return models.mlp((4,), 3, hidden=(5, 6))


PIPELINE = Layout(pp=2, split=(3, 3))
ROWS = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
LABELS = np.arange(12) % 3


def worker_of(group, kind=None, layout=None, momentum=0.9, model=None, **exchange):
    where = arrange(build() if model is None else model, group, layout or Layout())
    where.model.initialize(seed=0, dtype="float32", storage=where.storage)
    optimizer = optim.SGD(where.model.storage, lr=0.2, momentum=momentum)
    options = GradientExchange(sum=kind, **exchange)
    return nnmpi.Worker(where.model, optimizer, group, exchange=options, arrangement=where)


def step(worker, number):
    """Do a step of 12 rows, of which each replica has a part."""
    group = worker.arrangement.mesh.dp
    mine = slice(group.rank, None, group.size)
    return worker.step(ROWS[mine] + np.float32(number / 8), LABELS[mine])


def weights(worker):
    return worker.state()[0].to_dict(everywhere=True)


def bits(arrays):
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.host_only("the fused update, which is of arrays in the memory of the node")
def test_strategies_say_for_what_they_are_meant():
    """Each is asked in turn; the last one takes what is left."""
    assert STRATEGIES[-1] is DataParallel

    def main(group, layout, **options):
        return type(worker_of(group, layout=layout, **options).strategy).__name__

    for expected, layout, options in (
        ("SummedReplicas", Layout(), {"kind": Plain}),
        ("SummedReplicas", Layout(), {"compress": "fp16"}),
        ("FusedReplicas", Layout(), {}),
        ("DataParallel", Layout(), {"fused_update": False}),
        ("DataParallel", Layout(), {"overlap": True}),
        ("ShardedDataParallel", Layout(zero=2), {}),
        ("DataParallel", Layout(tp=2), {}),
    ):
        assert simulate(lambda group, a=layout, b=options: main(group, a, **b), 2) == [expected] * 2


@pytest.mark.both_worlds
def test_a_sum_of_ones_own_is_the_serial_run_and_its_bytes_are_reported(group):
    worker = worker_of(group, Plain)
    reports = [step(worker, number) for number in range(4)]
    worker.exchange.check_equal()
    found = weights(worker)
    serial = simulate(lambda alone: serial_weights(alone, 4), 1)[0]
    right = [np.allclose(found[name], serial[name], atol=1e-6) for name in serial]
    given = 4 * worker.model.storage.size + NUMBERS_BYTES if group.size > 1 else 0
    right += [report.comm_bytes == given for report in reports]
    right.append("by Plain" in worker.describe_exchange())
    assert group.gather(all(right)) == [True] * group.size


def serial_weights(group, steps):
    worker = worker_of(group)
    for number in range(steps):
        step(worker, number)
    return weights(worker)


@pytest.mark.parametrize("layout", [PIPELINE, Layout(tp=2), Layout(dp=2)], ids=str)
def test_under_each_layout(layout):
    def main(group):
        worker = worker_of(group, Plain, layout)
        for number in range(3):
            step(worker, number)
        worker.exchange.check_equal()
        return weights(worker)

    serial = simulate(lambda group: serial_weights(group, 3), 1)[0]
    for found in simulate(main, 4 if layout.dp == "auto" else 2):
        for name in serial:
            np.testing.assert_allclose(found[name], serial[name], atol=1e-6)


def test_what_is_no_sum_is_refused():
    def made(kind, steps=0, check=False):
        def main(group):
            worker = worker_of(group, kind, check=check)
            for number in range(steps):
                step(worker, number)

        simulate(main, 2)

    usage_error("list is no GradientSum; call GradientExchange", made, lambda group, grads: [])
    refuses(CommError, "weights of .* differ between the ranks", made, OnEachItsOwn, 1, True)
    refuses(TypeError, "does not support item assignment", made, Replaced, 1)
    refuses(NotImplementedError, "GradientSum defines no sum", made, GradientSum, 1)


def kept_by(state, change=None, per_replica=()):
    """Return a class that begins with a state, given by a function, and changes it in each sum."""

    class Kept(Plain):
        def __init__(self, group, gradients):
            super().__init__(group, gradients)
            self.per_replica = per_replica
            self.state |= state(gradients)

        def sum(self, gradients):
            super().sum(gradients)
            return change and change(self, gradients)

    return Kept


@pytest.mark.parametrize(
    "state, sentence",
    [
        (lambda grads: {"own.0": grads}, "state has the name 'own.0'"),
        (lambda grads: {"a/b": grads}, "state has the name 'a/b'"),
        (lambda grads: {"own": {"nobody": np.ones(1)}}, r"state\['own'\] must have an array for"),
        (lambda grads: {"own": dict.fromkeys(grads, 1.0)}, r"state\['own'\] must have an array"),
        (lambda grads: {"own": np.ones(3)}, r"state\['own'\] must have an array"),
    ],
)
def test_a_state_that_no_checkpoint_could_keep_is_refused(state, sentence):
    usage_error(sentence, simulate, lambda group: worker_of(group, kept_by(state)), 2)


def test_a_state_is_made_at_first_and_changed_in_place():
    """Otherwise a refused step, or a resumed run, would go on with other arrays."""

    def zeros(grads):
        return {"own": {name: 0 * grad for name, grad in grads.items()}}

    def replace(sums, gradients):
        sums.state["own"] = zeros(gradients)

    def trains(kind, steps=1):
        simulate(lambda group: [step(worker_of(group, kind), number) for number in range(steps)], 2)

    usage_error("Kept.sum put other arrays into self.state", trains, kept_by(zeros, replace))
    usage_error("put other arrays", trains, kept_by(lambda grads: {}, replace))
    usage_error("per_replica names rest, which", trains, kept_by(zeros, None, ("rest",)))
    usage_error("returned a dict; change the grad", trains, kept_by(zeros, lambda *given: {1: 2}))


def test_what_differs_between_the_replicas_is_saved_of_each_or_refused(tmp_path):
    def main(group):
        def add(sums, gradients):
            for array in sums.state["own"].values():
                array += group.rank

        worker = worker_of(group, kept_by(lambda grads: {"own": {"5.bias": np.zeros(3)}}, add))
        nnmpi.save(tmp_path, worker)
        step(worker, 0)
        nnmpi.save(tmp_path, worker)

    refuses(CommError, "own of 5.bias of Kept differs .* name it in per_replica", simulate, main, 2)


def resumed(folder, before, after, layout=None, former=None, kind=Half):
    """Return the weights and states after two steps on some ranks and one on others."""

    def first(group):
        worker = worker_of(group, kind, former)
        for number in range(2):
            step(worker, number)
        nnmpi.save(folder, worker)
        return worker.state()[1].to_dict(everywhere=True)

    def second(group):
        worker = worker_of(group, kind, layout)
        step(worker, 7)  # of another run: nothing of it is left
        nnmpi.resume(folder, worker)
        state = worker.state()[1].to_dict(everywhere=True)
        step(worker, 2)
        return weights(worker), state, worker.state()[1].to_dict(everywhere=True)

    return simulate(first, before)[0], simulate(second, after)[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_run_has_the_bits_of_one_that_nobody_broke(ranks, tmp_path):
    def unbroken(group):
        worker = worker_of(group, Half)
        for number in range(3):
            step(worker, number)
        return weights(worker), worker.state()[1].to_dict(everywhere=True)

    saved, (found, state, after) = resumed(tmp_path, ranks, ranks)
    expected = simulate(unbroken, ranks)[0]
    assert (bits(found), bits(after)) == tuple(map(bits, expected))
    assert bits(state) == bits(saved)
    assert f"sum.rest.{ranks - 1}/0.weight" in state or f"sum.rest.{ranks - 1}" in str([*state])
    assert all(array == 2 for name, array in state.items() if name.startswith("sum.count/"))


@pytest.mark.parametrize(
    "before, after, former, layout",
    [
        (1, 3, None, None),
        (3, 1, None, None),
        (2, 3, None, None),
        (2, 4, None, PIPELINE),
        (4, 2, Layout(tp=2), None),
        (4, 3, PIPELINE, Layout(tp=3)),
    ],
)
def test_what_the_replicas_keep_has_the_same_sum_on_any_number(
    before, after, former, layout, tmp_path
):
    class Rest(Half):
        """Without an array of another shape, which a part of a parameter could not have."""

        def __init__(self, group, gradients):
            super().__init__(group, gradients)
            self.state["count"] = {name: 0 * grad for name, grad in gradients.items()}

    saved, (_, state, _) = resumed(tmp_path, before, after, layout, former, Rest)

    def sums(arrays):
        result = {}
        for name, array in arrays.items():
            if name.startswith("sum.rest."):
                key = name.partition("/")[2]
                result[key] = result.get(key, 0) + array.astype("float64")
        return result

    expected, found = sums(saved), sums(state)
    assert found.keys() == expected.keys() == {name for name, _ in build().named_parameters()}
    for name, total in expected.items():
        assert abs(total).max() > 0
        np.testing.assert_allclose(found[name], total, rtol=1e-6, atol=1e-9)


def test_a_loop_of_ones_own_saves_it_too(tmp_path):
    def main(group, resume):
        model = build().initialize(seed=0)
        parallel = SummedReplicas(model, group, Half)
        optimizer = optim.SGD(model.storage, lr=0.1)
        loop = (model, optimizer, group)
        if resume:
            nnmpi.resume(tmp_path, loop)
        for number in range(optimizer.steps, 3):
            if number == 2 and not resume:
                nnmpi.save(tmp_path, loop)
            model.zero_grad()
            logits = model(ROWS[group.rank :: group.size])
            loss = ops.cross_entropy(logits, LABELS[group.rank :: group.size], reduction="sum")
            parallel.backward(loss, samples=12)
            optimizer.step()
        return bits(model.state())

    assert simulate(lambda group: main(group, False), 2) == simulate(
        lambda group: main(group, True), 2
    )


def test_a_checkpoint_of_another_way_to_sum_is_refused(tmp_path):
    def first(group):
        worker = worker_of(group, Half)
        step(worker, 0)
        nnmpi.save(tmp_path, worker)

    simulate(first, 2)
    for kind in (None, Plain):
        with pytest.raises(CheckpointError, match="has the state of Half, but .* without a state"):
            simulate(lambda group, a=kind: nnmpi.resume(tmp_path, worker_of(group, a)), 2)


def test_a_step_that_is_refused_leaves_the_state_as_it_was():
    def main(group):
        worker = worker_of(group, Half)
        step(worker, 0)
        before = bits(worker.state()[1].to_dict())
        rows = np.full((4, 4), np.nan, "float32")
        refuses(DivergenceError, "not finite|NaN|nan|diverge", worker.step, rows, LABELS[:4])
        assert bits(worker.state()[1].to_dict()) == before
        refuses(DivergenceError, "not finite|NaN|nan|diverge", worker.step, rows, LABELS[:4])
        step(worker, 1)
        return weights(worker)

    def without(group):
        worker = worker_of(group, Half)
        step(worker, 0)
        step(worker, 1)
        return weights(worker)

    assert bits(simulate(main, 2)[0]) == bits(simulate(without, 2)[0])


def test_frozen_parameters_are_not_summed_and_thawed_ones_are():
    def main(group):
        worker = worker_of(group, Half)
        first = next(iter(worker.model.parameters()))
        step(worker, 0)
        first.requires_grad = False
        kept = worker.strategy.sums.state["rest"][first.name].copy()
        frozen = step(worker, 1).comm_bytes
        same = (worker.strategy.sums.state["rest"][first.name] == kept).all()
        first.requires_grad = True
        return bool(same), step(worker, 2).comm_bytes - frozen == 4 * first.data.size

    assert simulate(main, 2) == [(True, True)] * 2


def test_microbatches_accumulate_and_are_summed_once():
    def main(group):
        worker = worker_of(group, Half)
        dataset = nnmpi.data.Dataset("rows", ROWS, LABELS, 3)
        for batch in nnmpi.data.Loader(dataset, 12, group, microbatches=3, shuffle=False).epoch(0):
            worker.step(batch)
        return {float(item[0]) for item in worker.strategy.sums.state["count"].values()}

    assert simulate(main, 2) == [{1.0}] * 2


def test_a_compiled_step_sums_each_time():
    def main(group, compiled):
        model = nn.Sequential(nn.Linear(4, 3)).initialize(seed=0)
        parallel, optimizer = SummedReplicas(model, group, Half), optim.SGD(model.storage, lr=0.1)

        def one(x, y):
            model.zero_grad()
            parallel.backward(ops.cross_entropy(model(x), y, reduction="sum"), samples=12)
            optimizer.step()

        call = nnmpi.compile(one) if compiled else one
        for number in range(8):
            call(ROWS[group.rank :: group.size] + np.float32(number), LABELS[group.rank :: 2])
        return bits(model.state()), not compiled or call.refusal

    (eager, _), (replayed, why) = (simulate(lambda g, c=c: main(g, c), 2)[0] for c in (0, 1))
    assert eager == replayed and not why
