"""Gradients in fewer bytes: what is sent, that nothing is lost, the same bits on all replicas, and
bytes as the formula says.
"""

from math import prod

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, arrange, models, optim, simulate
from nnmpi.base.errors import CheckpointError, UsageError
from nnmpi.comm.group import Group
from nnmpi.compose.layout import check_layout
from nnmpi.parallel import SummedReplicas
from nnmpi.parallel.compressed import (
    EXAMPLES,
    compression,
    held_bytes,
    low_rank,
    messages_of,
    parse,
    scale_of,
)
from nnmpi.parallel.data import NUMBERS_BYTES
from tests.harness.refusals import usage_error

WORDS = (*EXAMPLES.values(), "powersgd:1", "powersgd:2", "topk:0.3")
KEEP = [word for word in WORDS if held_bytes(word, [(9, 9)], 4)]  # those with a residual
SHAPES = {"a": (4, 3, 8), "b": (8,), "c": (16, 12), "d": ()}


def gradients(rank, step=0):
    draws = np.random.default_rng([rank, step])
    return {
        name: np.asarray(draws.standard_normal(shape), "float32") for name, shape in SHAPES.items()
    }


def exact(size, steps=(0,)):
    return {
        name: sum(
            gradients(rank, step)[name].astype("float64") for rank in range(size) for step in steps
        )
        for name in SHAPES
    }


def test_the_words_of_the_option():
    assert parse("powersgd:3") == ("powersgd", 3) and parse("topk:1") == ("topk", 1)
    for wrong in (
        "",
        "fp8",
        "fp16:2",
        "topk",
        "topk:",
        "topk:0",
        "topk:nan",
        "topk:1.5",
        "powersgd",
        "powersgd:0",
        "powersgd:1.5",
        "powersgd:inf",
        "none",
    ):
        usage_error(
            "compress is .*; give fp16, bf16, powersgd:RANK", GradientExchange, compress=wrong
        )


@pytest.mark.both_worlds
@pytest.mark.parametrize("word, dtype", [("fp16", "float16"), ("bf16", "bfloat16")])
def test_16_bits_are_rounded_before_and_after_the_sum_and_nowhere_else(group, word, dtype):
    low = nnmpi.backend.precision.dtype_named(dtype)
    own, sums = gradients(group.rank), compression(word)
    sums(group, own).sum(own)
    every = [gradients(rank) for rank in range(group.size)]
    right = []
    for name, array in own.items():
        total, largest = np.zeros_like(array), max(abs(one[name]).max() for one in every)
        scale = np.float32(scale_of(float(largest), group.size) if word == "fp16" else 1)
        for one in every:
            total += (one[name] * scale).astype(low).astype("float32")
        rounded = total.astype(low).astype("float32") / scale
        expected = rounded if group.size > 1 else every[0][name]
        right.append(bool((array == expected).all()))
    assert group.gather(right) == [[True] * len(SHAPES)] * group.size


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1.0, 3e6])
def test_numbers_of_any_size_are_sent_by_16_bits(size):
    """Neither too large for fp16, nor too small, nor some of them."""

    def main(group, word):
        own = {"w": np.float32(size) * gradients(group.rank)["c"]}
        before = own["w"].astype("float64").reshape(-1)
        group.all_reduce(before)
        compression(word)(group, own).sum(own)
        return float(abs(own["w"].reshape(-1) - before).max() / abs(before).max())

    assert max(simulate(lambda group: main(group, "fp16"), 3)) < 2**-10
    assert max(simulate(lambda group: main(group, "bf16"), 3)) < 2**-7
    assert scale_of(65504, 1) == 0.5 and scale_of(1, 4) == 2.0**12 and scale_of(np.inf, 2) == 1
    assert np.isfinite(np.float32(scale_of(1e-44, 2)))


@pytest.mark.both_worlds(max_size=7)
@pytest.mark.parametrize("word", KEEP)
def test_what_is_sent_and_what_is_kept_is_the_sum_of_all_gradients(group, word):
    sums = compression(word)(group, gradients(group.rank))
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    every_step = range(4)
    for step in every_step:
        own = gradients(group.rank, step)
        sums.sum(own)
        if group.size == 1:  # nothing is compressed
            assert all((own[name] == gradients(0, step)[name]).all() for name in own)
        for name in total:
            total[name] = total[name] + own[name]
    digests = group.gather([array.tobytes().hex() for array in total.values()])
    kept = {name: rest.astype("float64") for name, rest in sums.state["residual"].items()}
    wrong = 0.0
    for name, expected in exact(group.size, every_step).items():
        rest = kept.get(name, np.zeros(SHAPES[name])).reshape(-1).copy()
        if name in kept:
            group.all_reduce(rest)
        wrong = max(wrong, abs(total[name] + rest.reshape(SHAPES[name]) - expected).max())
    assert max(group.gather(wrong)) < 1e-4
    assert len({str(item) for item in digests}) == 1


@pytest.mark.both_worlds(max_size=5)
@pytest.mark.parametrize("word", ["topk:1", "powersgd:99"])
def test_the_whole_is_a_plain_sum(group, word):
    own = gradients(group.rank)
    compression(word)(group, own).sum(own)
    expected = exact(group.size)
    wrong = max(abs(own[name] - expected[name]).max() for name in own)
    assert max(group.gather(float(wrong))) < 1e-5


def test_powersgd_finds_a_sum_of_that_rank():
    """A sum of matrices of rank 1 on two replicas has rank 2: nothing is left."""

    def main(group):
        draws = np.random.default_rng(group.rank)
        own = {"w": np.outer(draws.standard_normal(20), draws.standard_normal(30))}
        before = own["w"].copy()
        group.all_reduce(before.reshape(-1))
        sums = compression("powersgd:2")(group, own)
        sums.sum(own)
        return abs(own["w"] - before).max(), abs(sums.state["residual"]["w"]).max()

    assert np.max(simulate(main, 2)) < 1e-12


def test_powersgd_begins_with_the_last_step_and_gets_nearer():
    def main(group):
        own = {"w": np.random.default_rng(7).standard_normal((40, 30)) ** 3}
        sums, errors = compression("powersgd:3")(group, own), []
        for _ in range(6):
            given = {"w": own["w"].copy()}
            sums.sum(given)
            sums.state["residual"]["w"][...] = 0
            errors.append(float(np.linalg.norm(given["w"] - group.size * own["w"])))
        return errors

    errors = simulate(main, 2)[0]
    least = 2 * np.sqrt(
        sum(np.linalg.svd(np.random.default_rng(7).standard_normal((40, 30)) ** 3)[1][3:] ** 2)
    )
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1.05 * least < errors[0]


def test_a_gradient_of_zeros_does_not_end_powersgd():
    def main(group):
        sums = compression("powersgd:2")(group, gradients(0))
        zeros = {name: np.zeros_like(grad) for name, grad in gradients(0).items()}
        sums.sum(zeros)
        own = gradients(group.rank)
        sums.sum(own)
        return float(abs(own["c"]).max())

    assert all(value > 0.1 for value in simulate(main, 2))


def test_a_value_that_is_no_number_is_sent():
    def main(group, word):
        own = gradients(group.rank)
        own["c"][3, 4] = np.nan if group.rank else own["c"][3, 4]
        compression(word)(group, own).sum(own)
        return bool(np.isnan(own["c"]).any())

    for word in WORDS:
        assert simulate(lambda group, a=word: main(group, a), 2) == [True, True], word


# ---- in a Worker ----


def build():
    return models.mlp((6,), 3, hidden=(12, 10))


def worker_of(group, word, layout=None, **options):
    where = arrange(build(), group, layout or Layout())
    where.model.initialize(seed=0, dtype="float32", storage=where.storage)
    optimizer = optim.SGD(where.model.storage, lr=0.05, momentum=0.9)
    exchange = GradientExchange(compress=word)
    return nnmpi.Worker(
        where.model, optimizer, group, exchange=exchange, arrangement=where, **options
    )


def train(worker, steps=4, first=0):
    ranks = worker.arrangement.mesh.dp
    for number in range(first, first + steps):
        draws = np.random.default_rng(number)
        x, y = draws.normal(size=(16, 6)).astype("float32"), draws.integers(3, size=16)
        part = slice(ranks.rank, None, ranks.size)
        report = worker.step(x[part], y[part])
    return report


def weights(worker):
    return {
        name: array.tobytes() for name, array in worker.state()[0].to_dict(everywhere=True).items()
    }


@pytest.mark.both_worlds(max_size=5)
@pytest.mark.parametrize("word", WORDS)
def test_replicas_stay_equal_and_the_report_has_the_bytes_of_the_formula(group, word):
    worker = worker_of(group, word)
    report = train(worker)
    worker.exchange.check_equal()
    shapes = [parameter.shape for parameter in worker.model.parameters()]
    expected = sum(nbytes for _, nbytes in messages_of(word, shapes, 4)) + NUMBERS_BYTES
    text = worker.describe_exchange()
    said = "digits differ from the serial run" in text if group.size > 1 else text[:4] == "none"
    right = said and report.comm_bytes == (expected if group.size > 1 else 0)
    assert group.gather(right) == [True] * group.size


@pytest.mark.parametrize("word", WORDS)
def test_one_replica_is_the_serial_run(word):
    def main(group, word, layout):
        worker = worker_of(group, word, layout)
        train(worker)
        return weights(worker)

    assert simulate(lambda g: main(g, word, None), 1) == simulate(lambda g: main(g, None, None), 1)
    pipeline = Layout(pp=2, split=(3, 3))
    assert simulate(lambda g: main(g, word, pipeline), 2) == simulate(
        lambda g: main(g, None, pipeline), 2
    )


@pytest.mark.parametrize("word", WORDS)
def test_a_pipeline_compresses_as_its_replicas_would(word):
    def main(group, layout):
        worker = worker_of(group, word, layout)
        train(worker)
        return {name: np.frombuffer(array, "float32") for name, array in weights(worker).items()}

    replicas = simulate(lambda group: main(group, None), 2)[0]
    piped = simulate(lambda group: main(group, Layout(pp=2, split=(3, 3))), 4)[0]
    for name, array in replicas.items():
        # float32's rounding may choose another number among equal ones, or round to its neighbour
        np.testing.assert_allclose(piped[name], array, atol=2e-3)


@pytest.mark.parametrize("word", ["powersgd:2", "topk:0.2"])
def test_what_stages_share_is_compressed_once_and_resumed(word, tmp_path):
    """The embedding, whose gradient is that of the first stage and of the last one together."""
    tokens = np.random.default_rng(3).integers(17, size=(12, 9))

    def step(worker):
        ranks = worker.arrangement.mesh.dp
        rows = np.roll(tokens, worker.optimizer.steps, axis=1)[ranks.rank :: ranks.size]
        worker.step(rows[:, :-1], rows[:, 1:])

    def main(group, layout, steps, resumes=False):
        where = arrange(models.gpt(17, 8, features=16, layers=2, heads=2), group, layout)
        where.model.initialize(seed=0, storage=where.storage)
        optimizer = optim.SGD(where.model.storage, lr=0.2, momentum=0.9)
        exchange = GradientExchange(compress=word)
        worker = nnmpi.Worker(where.model, optimizer, group, exchange=exchange, arrangement=where)
        if resumes:
            nnmpi.resume(tmp_path, worker)
        for number in range(optimizer.steps, steps):
            if number == 2 and not resumes:
                nnmpi.save(tmp_path, worker)
            step(worker)
        return worker.state()[0].to_dict(everywhere=True)

    replicas = simulate(lambda group: main(group, Layout(), 1), 2)[0]
    pipeline = Layout(pp=2, split=(4, 4))
    piped = simulate(lambda group: main(group, pipeline, 1), 4)[0]
    for name, array in replicas.items():
        np.testing.assert_allclose(piped[name], array, atol=1e-5, err_msg=name)
    unbroken = simulate(lambda group: main(group, pipeline, 4), 4)[0]
    resumed = simulate(lambda group: main(group, pipeline, 4, resumes=True), 4)[0]
    for name, array in unbroken.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)


@pytest.mark.parametrize("word", ["fp16", "bf16", "topk:0.1"])
def test_what_a_tensor_group_has_in_common_stays_equal(word):
    """Each of its ranks sums for itself, with the same bits; some have nothing of a parameter."""

    def main(group, tp):
        worker = worker_of(group, word, Layout(tp=tp))
        train(worker)
        worker.exchange.check_equal()
        return worker.arrangement.mesh.replicas.size

    assert simulate(lambda group: main(group, 2), 4) == [2] * 4
    assert simulate(lambda group: main(group, 11), 22) == [2] * 22


@pytest.mark.parametrize("word", ["fp16", "powersgd:2", "topk:0.3"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resumed_run_goes_on_to_the_same_bits(word, ranks, tmp_path):
    def main(group, resumes):
        worker = worker_of(group, word)
        if resumes:
            train(worker, first=9)  # of another run
            nnmpi.resume(tmp_path, worker)
        else:
            train(worker, 3)
            nnmpi.save(tmp_path, worker)
        train(worker, 3, first=3)
        return weights(worker)

    assert simulate(lambda g: main(g, False), ranks) == simulate(lambda g: main(g, True), ranks)


def test_another_compression_is_refused_on_resume(tmp_path):
    def first(group):
        worker = worker_of(group, "topk:0.1")
        train(worker)
        nnmpi.save(tmp_path, worker)

    simulate(first, 2)
    for word in (None, "powersgd:2"):
        with pytest.raises(CheckpointError, match="has the state of LargestSum"):
            simulate(lambda group, a=word: nnmpi.resume(tmp_path, worker_of(group, a)), 2)


@pytest.mark.parametrize(
    "layout, words",
    [
        ({"zero": 1}, "compress topk:0.1 cannot be combined with zero 1"),
        ({"reduction": "fixed"}, "compress topk:0.1 cannot be combined with reduction fixed"),
        ({"pp": 2, "pipeline": "pipedream"}, "compress .* with pipeline pipedream"),
        ({"expert_parallel": True}, "compress .* with expert_parallel"),
    ],
)
def test_a_layout_that_it_cannot_mix_with_is_refused(layout, words):
    exchange = GradientExchange(compress="topk:0.1")
    usage_error(words, check_layout, Layout(**layout), exchange=exchange)


@pytest.mark.parametrize(
    "options",
    [
        {"allreduce": "ring"},
        {"bucket_bytes": 64},
        {"overlap": False},
        {"fused_update": True},
        {"sum": list},
    ],
    ids=str,
)
def test_another_way_to_sum_is_refused(options):
    exchange = GradientExchange(compress="fp16", **options)
    usage_error("both say how gradients are summed", check_layout, Layout(), exchange=exchange)


def test_the_loss_scale_of_fp16_is_refused_and_so_are_parts_of_matrices():
    exchange = GradientExchange(compress="powersgd:2")
    usage_error("a loss scale", check_layout, Layout(), exchange=exchange, precision="fp16")
    usage_error("whole matrices", check_layout, Layout(tp=2), exchange=exchange)
    check_layout(Layout(tp=2), exchange=GradientExchange(compress="topk:0.1"))


def test_what_is_no_shorter_is_summed_as_it_is():
    assert low_rank(2, (40, 30)) == low_rank(2, (4, 10, 30)) == 2
    assert low_rank(18, (40, 30)) is low_rank(1, (40,)) is low_rank(1, ()) is None
    assert messages_of("powersgd:2", [(40, 30), (7,), ()], 4) == [
        ("all-reduce", 4 * (80 + 7 + 1)),
        ("all-reduce", 4 * 60),
    ]


# ---- 16 bits ----


@pytest.mark.both_worlds
@pytest.mark.parametrize("length", [0, 1, 2, 7, 1000])
def test_an_all_reduce_of_16_bits_is_rounded_once_and_the_same_everywhere(group, length):
    draws = [np.random.default_rng(rank).standard_normal(length) for rank in range(group.size)]
    array = draws[group.rank].astype("float16")
    pending = group.bind(array, tag=3)
    for run in (pending.run, lambda: (pending.start(), pending.wait())):
        array[...] = draws[group.rank]
        run()
    total = np.zeros(length, "float32")
    for one in draws:
        total += one.astype("float16")
    assert group.gather(bool((array == total.astype("float16")).all())) == [True] * group.size


def test_16_bits_are_sent_as_16_bits():
    """On links of a known bandwidth: half the seconds of the same sum of 32 bits."""
    machine = nnmpi.comm.machine.Machine.uniform(alpha_s=0, beta_s=1e-9)

    def main(group: Group, dtype, algorithm):
        array, begin = np.ones(60_000, dtype), nnmpi.base.clock.now()
        group.all_reduce(array, algorithm)
        return nnmpi.base.clock.now() - begin

    def seconds(*how):
        run = simulate(lambda group: main(group, *how), 4, machine=machine, cpu_factor=0)
        return max(run)

    assert seconds("float16", "native") < 0.6 * seconds("float32", "ring")


def test_a_loop_of_ones_own_may_compress():
    def main(group):
        model = build().initialize(seed=0)
        parallel = SummedReplicas(model, group, compression("topk:0.2"))
        return parallel.describe()

    assert all("topk:0.2, error feedback" in text for text in simulate(main, 2))
    assert prod(SHAPES["a"]) == 96
    with pytest.raises(UsageError, match="compress is topk"):
        compression("topk")
