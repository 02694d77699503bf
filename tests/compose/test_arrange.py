"""Spreading a model: what each rank gets, and what is refused with what would work."""

from dataclasses import replace

import numpy as np
import pytest

import nnmpi
from nnmpi import GradientExchange, Layout, Tensor, arrange, models, nn
from nnmpi.backend.backend import numpy_backend
from nnmpi.base.errors import DeviceError, LayoutError, UsageError
from nnmpi.compose.arrange import describe_stages
from nnmpi.memory.layers import measure, of_chain
from nnmpi.nn import Module
from nnmpi.nn.chain import open_chain
from nnmpi.parallel.zero.storage import predict_bytes
from tests.equivalence.own import skipping
from tests.harness.refusals import told_on_all, usage_error
from tests.worker_options import arranged, work

# no deeper than the model
UP_TO_12, FROM_2 = (pytest.mark.simulated(min_size=n, max_size=12) for n in (1, 2))
SAMPLE = np.zeros((4, 8, 8, 1), np.float32)


def deep():
    return models.mlp((8, 8, 1), 10, hidden=(40, 30, 20, 20, 20, 20))


def place(group, layout, model=None):
    return arrange(deep() if model is None else model, group, layout, SAMPLE)


@UP_TO_12
def test_the_stages_are_the_whole_model(group):
    where = place(group, Layout(pp=group.size, dp=1))
    where.model.initialize(seed=4)
    full = deep().initialize(seed=4).state()
    parts = group.gather(
        {
            name: [float(v) for v in entry.data.reshape(-1)]
            for name, entry in where.model.entries().items()
        }
    )
    result = {name: values for part in parts for name, values in part.items()}
    right = result.keys() == full.keys() and all(
        np.allclose(result[name], value.reshape(-1)) for name, value in full.items()
    )
    lines = describe_stages(where)
    assert all(group.gather(bool(right)))
    assert all(group.gather(len(lines) == (group.size if group.size > 1 else 0)))
    assert all(group.gather(sum(len(part) for part in parts) == len(full)))


def refuse(group, layout, sentence, error=LayoutError, **options):
    assert sentence in told_on_all(group, lambda: place(group, layout, **options), error)


@pytest.mark.simulated(min_size=2, max_size=4)
def test_ranks_with_other_shards_have_the_same_segments(group):
    """Of layers that the ranks cannot share out evenly, for each limit of a unit's bytes."""
    for unit_bytes in (400, 500, 600, 700, 800, 1000, 1200, 1500, 2000):
        layout = Layout(tp=group.size, dp=1, zero=2, unit_bytes=unit_bytes)
        where = arrange(skipping((4, 4, 1), 3), group, layout, dtype="float64")
        spans = [[cut.start, cut.stop] for (cuts,) in [where.segments] for cut in cuts]
        assert group.gather(spans) == [spans] * group.size


@pytest.mark.simulated(min_size=6, max_size=6)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_ranks_have_alike_keeps_its_bits_beside_uneven_shards(group, zero):
    """A ring adds three replicas' gradients in an order that depends on the place of the chunk."""
    wide = [nn.Linear(16, 65), nn.ReLU(), nn.Linear(65, 16), nn.Linear(16, 40), nn.Tanh()]
    model = nn.Sequential(nn.Flatten(), *wide, nn.Linear(40, 3))
    model.sharding = {"1": nn.Sharding.COLUMN, "3": nn.Sharding.ROW}
    options = GradientExchange(allreduce="auto" if zero else "ring")
    layout = Layout(dp=3, tp=2, zero=zero)
    worker = arranged(model, group, layout, initial=1, exchange=options)
    where = worker.arrangement
    generator = np.random.default_rng(where.data_rank)
    for _ in range(3):
        x = generator.normal(size=(5, 4, 4, 1)).astype("float32")
        worker.step(x, generator.integers(0, 3, 5))
    storage = where.model.storage
    bits = [
        [span.parameter.name, data.tobytes().hex()]
        for span, data, _ in storage.held()
        if span.parameter.region is None
    ]
    assert where.mesh.tp.gather(bits) == [bits, bits]


@pytest.mark.simulated(min_size=6, max_size=6)
def test_a_table_that_stages_share_keeps_its_bits_under_zero(group):
    """Its replicas' sums are added in the order of its place, which is the same on both stages."""
    layout = Layout(dp=3, pp=2, zero=1, split=(2, 6))
    ring = GradientExchange(allreduce="ring")
    worker = arranged(models.gpt(19, 5, 12, 2, 3), group, layout, initial=1, exchange=ring)
    where = worker.arrangement
    generator = np.random.default_rng(where.data_rank)
    for _ in range(3):
        worker.step(generator.integers(0, 19, (4, 5)), generator.integers(0, 19, (4, 5)))
    (tie,) = where.ties
    bits = tie.parameter.data.tobytes().hex()
    assert tie.group.gather(bits) == [bits, bits]


@pytest.mark.simulated(max_size=2, min_size=2)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(pp=2, split=(1, 1)), Layout(expert_parallel=True)], ids=str
)
def test_values_that_parts_of_ranks_would_lose(group, layout):
    """A part that was loaded is refused; the sentence's remedy gives each rank its own."""

    def build():
        model = nn.Sequential(nn.MixtureOfExperts(4, 2), nn.Linear(4, 2))
        model.sharding = {"1": nn.Sharding.COLUMN}
        return model

    loaded = build()
    for part in loaded.layers:
        part.initialize(seed=1)
    refuse(group, layout, "the model has its values already", UsageError, model=loaded)
    where = place(group, layout, build())
    model = where.model.initialize(seed=0)
    worker = work(model, group, arrangement=where)
    full = loaded.initialize().state()  # of the parts: the model is theirs
    worker.state()[0].scatter(full.__getitem__)
    np.testing.assert_equal(worker.state()[0].to_dict(everywhere=True), full)


@UP_TO_12
def test_layouts_that_do_not_fit(group):
    if group.size == 1:
        return refuse(
            group,
            Layout(dp=2),
            "1 rank is not dp 2 x pp 1 x tp 1 = 2; these fit: dp 1 x pp 1 x tp 1",
        )
    count = group.size
    refuse(group, Layout(dp=count + 1), f"{count} ranks are not dp {count + 1}")
    tiny = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    refuse(
        group,
        Layout(pp=count, pipeline="interleaved", virtual_stages=9),
        "layers to cut between, fewer than",
        model=tiny,
    )
    refuse(
        group,
        Layout(pp=count, split=(1,) * count),
        f"has {count} stages and {count} layers; this pipeline has {count}",
    )
    return refuse(group, Layout(dp=1, pp=count, memory_limit=1000), "do not fit 1000 bytes a stage")


@UP_TO_12
@pytest.mark.needs_ranks(2, 3)
def test_a_limit_below_the_model_is_refused_for_replicas_alone(group):
    """What all ranks have together is less than the whole model takes, and more than its parts."""
    model = models.mlp((8, 8, 1), 10, hidden=(64,) * 9)
    full = sum(parameter.size for parameter in model.parameters()) * 4 * 4
    limit = round(full / group.size * 1.7)
    layout = Layout(memory_limit=limit)
    refuse(group, layout, "spread the model over at least ", DeviceError, model=model)
    experts = models.gpt(11, 6, features=6, layers=2, heads=2, experts=4)
    layout = Layout(dp=group.size, expert_parallel=True, memory_limit=1)
    refuse(group, layout, "; shard the experts over more replicas", DeviceError, model=experts)
    again = models.mlp((8, 8, 1), 10, hidden=(64,) * 9)
    assert arrange(again, group, Layout(pp=group.size, memory_limit=limit), SAMPLE).stages


@UP_TO_12
@pytest.mark.needs_ranks(2)
def test_a_limit_counts_the_older_versions_that_pipedream_keeps(group):
    """Of the first stage here, which has most of the model."""
    split = (8, len(open_chain(deep())) - 8)
    where = place(group, Layout(pp=2, split=split))
    limit = max(group.gather(predict_bytes(where.model, 0, 0, 1, itemsize=4, state_arrays=2).total))
    assert place(group, Layout(pp=2, split=split, memory_limit=limit)).stages
    refuse(
        group,
        Layout(pp=2, split=split, memory_limit=limit, pipeline="pipedream"),
        "rank 0 needs",
        error=DeviceError,
    )


@FROM_2
def test_a_model_that_is_no_sequence_is_told_why(group):
    class Net(nn.Sequential):
        pass

    model = Net(nn.Flatten(), nn.Linear(64, 10))
    sentence = "only nn.Sequential and nn.Residual are cut open, not a Net"
    refuse(group, Layout(pp=group.size), sentence, model=model)


class Named(Module):
    def forward(self, x):
        return {"x": x}


@pytest.mark.simulated(min_size=2, max_size=2)
def test_what_is_no_tensor_is_not_measured(group):
    model = nn.Sequential(nn.Linear(2, 2), Named(), nn.Linear(2, 2))
    usage_error(
        "a layer returned an instance of dict, .*; give split",
        lambda: arrange(model, group, Layout(pp=2), np.zeros((1, 2), np.float32)),
    )


@pytest.mark.simulated(min_size=2, max_size=2)
def test_busy_sweeps_over_the_layers_do_not_choose_the_cut(group, monkeypatch):
    """Equal layers, of which another process holds up other ones in each of the first sweeps."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    busy = iter([{0, 1, 2, 3}, {0, 1}, {1}, {5}, {4}, {3}] * group.size)

    def sweep(measured, x, backend):
        slow = next(busy)
        return [
            replace(cost, forward_s=s, keep_s=s, backward_s=2 * s)
            for i, cost in enumerate(measure(measured, x, backend))
            for s in [1e-3 * (1 + 50 * (i in slow))]
        ]

    group.barrier()
    if group.is_root:
        monkeypatch.setattr("nnmpi.compose.arrange.measure", sweep)
    group.barrier()
    where = arrange(layers, group, Layout(pp=2), np.zeros((1, 4), np.float32))
    assert [len(cut) for cut in where.cuts] == [3, 3]


@pytest.mark.simulated(min_size=2, max_size=2)
def test_a_first_stage_without_parameters_keeps_the_dtype(group):
    where = arrange(nn.Sequential(nn.Tanh(), nn.Linear(2, 2)), group, Layout(pp=2, split=(1, 1)))
    model = where.model.initialize(dtype="float64")
    worker = work(model, group, arrangement=where)
    assert worker.step(np.ones((3, 2)), np.zeros(3, int)).samples == 3


def test_the_profile_sees_the_heavy_layer():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.Linear(1500, 10)
    )
    backend, x = numpy_backend(), Tensor(np.zeros((64, 8, 8, 1), np.float32))
    with nn.training():
        costs = measure(of_chain(model, open_chain(model), "float32", backend), x, backend)
    assert max(costs, key=lambda cost: cost.seconds).name == "3"
    assert [cost.elements for cost in costs] == [0, 64 * 1500 + 1500, 0, 1500 * 1500 + 1500, 15010]
    assert not hasattr(model[3].weight, "data") or model[3].weight.grad is None


@FROM_2
def test_a_batch_norm_in_two_stages_is_refused(group):
    """Its running statistics would be others on each; within one stage they are the serial
    run's.
    """

    def shared():
        norm = nn.BatchNorm(8)
        return nn.Sequential(
            nn.Linear(64, 8), norm, nn.Linear(8, 8), norm, *(nn.ReLU() for _ in range(group.size))
        )

    ones = (1,) * (group.size - 2)
    apart, together = (Layout(pp=group.size, split=(*cut, *ones)) for cut in ((2, 4), (5, 1)))
    sentence = "the layer of 1.running_mean is in stages 0, 1, which would"
    refuse(group, apart, sentence, model=shared())
    assert all(group.gather(place(group, together, shared()).cuts[0] == range(5)))


# What a layout may be, without a world or a model.


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            {"pipeline": "2f2b"},
            (
                "pipeline is '2f2b'; it must be one of naive, gpipe, 1f1b, interleaved,"
                " zero-bubble, .*, pipedream or a callable"
            ),
        ),
        ({"pipeline": "inference"}, "pipeline is 'inference'; it must be one of naive"),
        (
            {"activation_memory": "most"},
            "activation_memory is 'most'; it must be a number of bytes such as 512MiB or \"least\"",
        ),
        ({"activation_memory": 1.5}, "is 1.5; it must be a number of bytes"),
        ({"memory_limit": "1GB"}, "memory_limit is '1GB'; it must be a number of bytes"),
        ({"dp": "2"}, "dp is '2'; it must be a whole number or \"auto\""),
        ({"dp": None}, 'dp is None; it must be a whole number or "auto"'),
        ({"sp": None}, "sp is None; it must be a whole number"),
        ({"unit_bytes": [4]}, r"unit_bytes is \[4\]; it must be a whole number"),
        ({"state_arrays": "2"}, "state_arrays is '2'; it must be a whole number"),
        ({"state_arrays": -1}, "state_arrays is -1; give a whole number, 0 or more"),
        ({"pipeline": 5}, "pipeline is 5; it must be one of naive"),
        ({"zero": "1"}, "zero is '1'; it must be a whole number"),
        ({"zero": 4}, "zero is 4; ZeRO has stages 1, 2, 3"),
        ({"split": 3}, 'split is 3; it must be "auto" or a list of whole numbers'),
        ({"reduction": "slow"}, "reduction is 'slow'; it must be one of fast, fixed"),
        ({"virtual_stages": 0}, "virtual_stages is 0; give a whole number, 1 or more"),
        (
            {"virtual_stages": 2},
            "virtual_stages 2 is for pipeline interleaved; 1f1b has one stage per rank",
        ),
        ({"split": (3, 0)}, "split is 3,0; give whole numbers, 1 or more"),
        ({"split": "5,4"}, "split is '5,4'; it must be \"auto\" or a list of whole numbers"),
        ({"split": (2.5, 4)}, 'it must be "auto" or a list of whole numbers'),
    ],
)
def test_what_makes_no_sense_is_refused(options, sentence):
    usage_error(sentence, Layout, **options)


@pytest.mark.parametrize("wrong", ["rign", ["ring", "tree"]])
def test_another_all_reduce_is_refused(wrong):
    usage_error(
        "allreduce is .*ring|rign.*; it must be one of auto, native", GradientExchange, wrong
    )


@pytest.mark.parametrize(
    "layout, ranks", [({}, 1), ({"tp": 2}, 2), ({"pp": 2, "split": [7, 7]}, 2), ({"zero": 3}, 2)]
)
def test_the_dtype_of_an_arrangement_is_that_of_its_values_or_refused(layout, ranks):
    def program(group, given, wanted):
        where = arrange(deep(), group, Layout(**layout), SAMPLE, **given)
        where.model.initialize(seed=0, storage=where.storage, **wanted)
        return str(where.model.storage.dtype)

    double, single = {"dtype": np.float64}, {"dtype": "float32"}
    for given, wanted, right in (
        ({}, {}, "float32"),
        (double, {}, "float64"),
        ({}, double, "float64"),
        (double, double, "float64"),
        ({"dtype": None}, single, "float32"),
    ):
        assert nnmpi.simulate(lambda g, a=given, b=wanted: program(g, a, b), ranks)[0] == right
    for given, wanted, sentence in (
        (double, single, r"arranged for float64, .* arrange\(\.\.\., dtype='float32'\)"),
        (single, double, "arranged for float32"),
        ({"dtype": "float16"}, {}, "dtype 'float16' is not supported"),
    ):
        with pytest.raises(UsageError, match=sentence):
            nnmpi.simulate(lambda g, a=given, b=wanted: program(g, a, b), ranks)


def test_values_of_another_dtype_than_the_arrangement_is_given_are_refused():
    def program(group):
        return arrange(deep().initialize(dtype="float64"), group, Layout(), dtype="float32")

    with pytest.raises(UsageError, match="has values of float64, and arrange got dtype 'float32'"):
        nnmpi.simulate(program, 2)
