"""What is written to a public object after it is made: followed, or refused in a sentence."""

import inspect
from functools import cache, partial

import numpy as np
import pytest

import nnmpi
from nnmpi import data, memory, models, nn, ops, optim
from nnmpi.base.errors import UsageError
from nnmpi.compose.losses import LabelLoss, SumCrossEntropy, SumError
from nnmpi.data.tokenizer import ByteTokenizer, CharacterTokenizer
from nnmpi.nn.activation import ACTIVATIONS
from nnmpi.optim.clip import LossScale
from nnmpi.optim.updates import OPTIMIZERS
from tests.harness.refusals import told
from tests.worker_options import arranged

pytestmark = pytest.mark.host_only("settings are read on the host")


@cache
def alone():
    return nnmpi.simulate(lambda group: group, 1)[0]


def small(*more):
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *more, nn.Linear(6, 3)).initialize(seed=0)


def trained(make, *more):
    """Return a trainer of a small model."""
    model = small()
    return make(model, optim.SGD(model.storage, lr=0.1), alone(), *more)


def optimizer(kind):
    return kind(small().storage, lr=0.1)


def made(*args, may="", **named):
    """Return what makes an object of a class, and the attributes that may be written to it."""
    return lambda kind: kind(*args, **named), may


# Public classes: what makes an object of one, and the attributes that may be written to it. The
# tests below try that each of them is followed; of layers the parts may be written, too.
OBJECTS = {
    nn.Linear: made(3, 2),
    nn.LoRA: (lambda kind: kind(nn.Linear(3, 2), 2), "alpha"),
    nn.Conv2d: made(2, 4, 3, may="stride padding dilation groups"),
    nn.Conv1d: made(2, 4, 3, may="stride padding dilation groups"),
    nn.Conv3d: made(2, 4, 3, may="options"),
    nn.InstanceNorm: made(3, affine=True, may="eps"),
    nn.RNN: made(2, 3, 2),
    nn.RNNCell: made(2, 3, may="nonlinearity"),
    nn.GRUCell: made(2, 3),
    nn.LSTMCell: made(2, 3),
    nn.ConvTranspose2d: made(2, 4, 3, may="options"),
    nn.AdaptiveAvgPool2d: made(2, may="output_size"),
    nn.AdaptiveMaxPool2d: made(2, may="output_size"),
    nn.MaxPool3d: made(2),
    nn.AvgPool3d: made(2),
    nn.RotaryAttention: made(8, 2, norm_eps=1e-6),
    nn.RotaryScaling: made(2.0),
    nn.SwiGLU: made(4, 6),
    nn.LlamaBlock: (lambda kind: kind(nn.RotaryAttention(8, 2), nn.SwiGLU(8, 6)), ""),
    nn.Upsample: made(2, may="scale_factor"),
    nn.PReLU: made(3),
    nn.BatchNorm: made(3, may="eps momentum all_reduce observe"),
    nn.LayerNorm: made(3, may="eps"),
    nn.RMSNorm: made(3, may="eps"),
    nn.GroupNorm: made(2, 4, may="eps num_groups"),
    nn.Dropout: made(may="p"),
    nn.Dropout2d: made(may="p"),
    nn.LSTM: made(2, 3, 2),
    nn.GRU: made(2, 3, 2),
    nn.CausalSelfAttention: made(4, 2, may="causal dropout"),
    nn.MultiheadAttention: made(4, 2, may="causal dropout"),
    nn.TransformerBlock: made(4, 2),
    nn.RotaryAttention: made(8, 2),
    nn.RotaryScaling: made(2.0),
    nn.SwiGLU: made(4, 6),
    nn.LlamaBlock: (lambda kind: kind(nn.RotaryAttention(8, 2), nn.SwiGLU(8, 6)), ""),
    nn.MixtureOfExperts: made(4, 3, may="chooses all_reduce ranks exchange"),
    nn.Embedding: made(3, 2),
    nn.TiedLinear: (lambda kind: kind(nn.Embedding(3, 2)), ""),
    nn.Stash: made("a"),
    nn.Pop: made("a", may="shortcut"),
    nn.Sequential: (lambda kind: kind(nn.Linear(3, 2)), ""),
    nn.Residual: (lambda kind: kind(nn.ReLU()), "shortcut"),
    nn.Branches: (lambda kind: kind(nn.ReLU(), nn.Tanh()), "join"),
    nn.Softmax: made(may="dim"),
    nn.LogSoftmax: made(may="dim"),
    nn.Normal: (lambda kind: kind(0.1), ""),
    nn.Uniform: (lambda kind: kind(0.1), ""),
    nn.Constant: (lambda kind: kind(0.1), ""),
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.Units), made(2)),
    **{getattr(nn, name): made(may="options") for name in nn.__all__ if name.endswith("Loss")},
    **{
        row.kind: (optimizer, "lr steps run_id" + " factors" * issubclass(row.kind, optim.RMSprop))
        for row in OPTIMIZERS.values()
    },
    **{
        kind: made(may=" ".join({*inspect.signature(kind).parameters} - {"args", "kwargs"}))
        for kind in ACTIVATIONS.values()
    },
    optim.ConstantRate: (lambda kind: kind(0.1), ""),
    optim.Cosine: (lambda kind: kind(0.1, 9), ""),
    optim.StepDecay: (lambda kind: kind(0.1, 9), ""),
    optim.MultiStep: (lambda kind: kind(0.1, (3, 6)), ""),
    optim.OneCycle: (lambda kind: kind(0.1, 9), ""),
    optim.WarmRestarts: (lambda kind: kind(0.1, 9), ""),
    optim.Warmup: (lambda kind: kind(3, optim.ConstantRate(0.1)), ""),
    optim.ReduceOnPlateau: (lambda kind: kind(0.1), "lr factor patience threshold best waited"),
    optim.Arrays: (
        lambda kind: kind([np.ones(2)], [np.ones(2)]),
        # an optimizer refuses other arrays
        "data grads moves node_shared distributed replicas strategy state_store extra_slots"
        " spent unsummed updated_by averaging shown",
    ),
    data.Loader: (
        lambda kind: kind(rows(), 30),
        "dataset batch_size seed rank world microbatches whole_microbatches shuffle shuffle_block"
        " balance partition transform dtype workers",
    ),
    data.Dataset: (lambda kind: kind("mine", np.ones((2, 3)), np.array([0, 1]), 2), ""),
    data.Compose: (lambda kind: kind(data.Flip()), "transforms"),
    data.Shift: made(1),
    data.Rotate: made(3),
    data.Cutout: made(2),
    data.ColorJitter: (lambda kind: kind(0.1), ""),
    data.Normalize: (lambda kind: kind.fit(rows()), ""),
    CharacterTokenizer: made("abc", may="beside"),
    ByteTokenizer: made(may="beside"),
    nnmpi.Group: (lambda kind: kind(alone().comm), "fit turns"),
    nnmpi.Worker: (trained, ""),
    nnmpi.AsynchronousWorker: (lambda kind: trained(kind, nnmpi.Sync("local")), "steps"),
    # what the passes of a Worker write
    nnmpi.DataParallel: (lambda kind: kind(small(), alone()), "before_sum microbatch"),
    nnmpi.ShardedDataParallel: (lambda kind: kind(small(), alone()), "before_sum microbatch"),
    SumError: made("mse"),
    LabelLoss: (lambda kind: kind(ops.cross_entropy), ""),
    LossScale: made(may="value good skipped"),
    memory.RecomputedModel: (lambda kind: kind(small(), None), "plan bandwidth"),
    type(nnmpi.compile(abs)): (lambda kind: kind(abs), ""),
    **dict.fromkeys(
        (
            nn.GlobalAvgPool2d,
            nn.Flatten,
            data.Flip,
            nnmpi.Layout,
            nnmpi.Numerics,
            nnmpi.GradientExchange,
            nnmpi.Sync,
            SumCrossEntropy,
        ),
        made(),
    ),
}
# of arrays and of what has happened, and what others implement or a function makes
OTHERS = {
    *(
        nnmpi.NnmpiError,
        nnmpi.StopTraining,
        nnmpi.Tensor,
        nn.Parameter,
        nn.Buffer,
        nn.Module,
        nn.Reach,
        nn.Sharding,
    ),
    *(optim.Optimizer, data.Batch, data.Tokenizer, data.Transform),
    *(data.Text, data.TextSource, memory.MemoryReport),
}
# which of every layer may be written: those of a tree, of its names and of its shards
OF_MODULES = {"path", "sharding", "units", "storage"}


@cache
def rows():
    return data.load("digits")[0]


def public(thing):
    """Yield the names of the public attributes of an object, of its class too, but methods."""
    for name in dir(thing):
        item = getattr(type(thing), name, None)
        if name[0] != "_" and (isinstance(item, property) or not callable(item)):
            yield name


def written(thing):
    """Return the names of the attributes to which their own value can be written."""
    names = set()
    for name in public(thing):
        try:
            value = getattr(thing, name)
            setattr(thing, name, value)
        except (AttributeError, UsageError) as error:
            assert name in str(error) or "has" in str(error)
        else:
            if not isinstance(value, nn.Module | nn.Parameter | nn.Buffer | list):
                names.add(name)
    return names


def test_no_public_class_is_left_out():
    found = {
        value
        for package in (nnmpi, nn, optim, data, memory)
        for name in package.__all__
        if inspect.isclass(value := getattr(package, name)) and value.__module__[:5] == "nnmpi"
    }
    assert found <= OBJECTS.keys() | OTHERS


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_an_attribute_is_followed_or_cannot_be_written(kind):
    make, followed = OBJECTS[kind]
    thing = make(kind)
    more = OF_MODULES if isinstance(thing, nn.Module) else set()
    lists = {"transforms", "data", "grads"}
    assert written(thing) - more == {*followed.split()} - lists
    for name in ("lr_rate", "no_such_setting"):
        with pytest.raises(AttributeError, match=name):
            setattr(thing, name, 3)
    assert "no_such_setting" not in dir(thing)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in OBJECTS
        if issubclass(kind, nn.Module | optim.Optimizer)
        or kind in (nnmpi.Worker, nnmpi.DataParallel, nnmpi.ShardedDataParallel, data.Loader)
    ],
    ids=lambda kind: kind.__name__,
)
def test_a_class_of_ones_own_may_have_more(kind):
    """In `__init__`, and later if it is a module; what its base has read stays refused."""

    def init(self, *args, **named):
        self.before = 1
        super(mine, self).__init__(*args, **named)
        self.mine = 2

    mine = type("Mine", (kind,), {"__module__": "elsewhere", "__init__": init})
    make, _ = OBJECTS[kind]
    thing = make(mine)
    thing.mine = 3
    if kind is not data.Loader:
        thing.later = 4
    if isinstance(thing, optim.Optimizer):
        with pytest.raises(UsageError, match="weight_decay is read when Mine is made"):
            thing.weight_decay = 0.1
    assert (thing.before, thing.mine) == (1, 3)


IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype(np.float32)
ROWS = IMAGES.reshape(16, 32)[:, :4]
TEXT = IMAGES.reshape(4, 32, 4)
CHANGES = [
    # a layer; an argument, to whose value the attribute is set: then it is a layer made with it
    *(
        (partial(nn.Conv2d, 4, 4, 3), name, value, IMAGES)
        for name, value in (("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (2, 2)))
    ),
    (partial(nn.AdaptiveAvgPool2d, output_size=2), "output_size", (4, 4), IMAGES),
    (partial(nn.Upsample, scale_factor=2), "scale_factor", (3, 3), IMAGES),
    *(
        (partial(kind, *sizes), "eps", 0.5, ROWS)
        for kind, *sizes in (
            (nn.BatchNorm, 4),
            (nn.LayerNorm, 4),
            (nn.RMSNorm, 4),
            (nn.GroupNorm, 2, 4),
        )
    ),
    (partial(nn.BatchNorm, 4), "momentum", 0.5, ROWS),
    (partial(nn.GroupNorm, num_groups=2, num_channels=4), "num_groups", 4, ROWS),
    (nn.Dropout, "p", 0.1, ROWS),
    (nn.Dropout2d, "p", 0.1, ROWS),
    (partial(nn.CausalSelfAttention, 4, 2), "dropout", 0.5, TEXT),
    (nn.LeakyReLU, "negative_slope", 0.5, ROWS),
    (nn.ELU, "alpha", 0.5, ROWS),
    (nn.Softplus, "beta", 2, ROWS),
    (nn.GELU, "approximate", "tanh", ROWS),
    (nn.Softmax, "dim", 0, ROWS),
    (nn.LogSoftmax, "dim", 0, ROWS),
    (lambda **more: nn.Branches(nn.ReLU(), nn.Tanh(), **more), "join", "add", ROWS),
]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make, name, value, x", CHANGES, ids=[str(case[1]) for case in CHANGES])
def test_a_changed_layer_is_the_one_that_is_made_so(make, name, value, x, compiled):
    """Also after it has computed, been fused with its neighbour, and been recorded."""

    def compute(layer, change):
        after = nn.ReLU() if x is IMAGES else nn.Tanh()
        model = nn.Sequential(layer, after).initialize(seed=0)
        call = nnmpi.compile(lambda x: model(x)) if compiled else model

        def passed(step):
            with nn.training(step=step):
                return call(x).numpy().copy()

        first = [passed(1) for _ in range(3)]
        for buffer in dict(layer.named_buffers()).values():
            buffer.data[...] = 0
        if change:
            setattr(layer, name, value)
        results = [passed(2) for _ in range(2)]
        return [first, *results, *(item.data.copy() for _, item in layer.named_buffers())]

    (before, *unchanged), (_, *changed) = compute(make(), False), compute(make(), True)
    _, *expected = compute(make(**{name: value}), False)
    assert before
    assert not all(map(np.array_equal, unchanged, changed))
    assert all(map(np.array_equal, changed, expected))


@pytest.mark.simulated(max_size=4)
def test_a_setting_of_a_layer_is_followed_by_replayed_steps_of_every_layout(group):
    """Under tensor parallelism the layer is another one, and the first refuses to be written to."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    results = []
    for layout in (nnmpi.Layout(dp=group.size), nnmpi.Layout(tp=group.size)):
        drop = nn.Dropout(0.5)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), drop, nn.Linear(8, 3))
        model.sharding = {"0": nn.Sharding.COLUMN, "3": nn.Sharding.ROW}
        worker = arranged(model, group, layout)
        where = worker.arrangement
        part = np.array_split(np.arange(12), where.data_ranks)[where.data_rank]
        losses = []
        for step in range(8):
            if step == 5:
                now = where.model.get("2")
                if now is not drop:
                    sentence = told(UsageError, lambda drop=drop: setattr(drop, "p", 0.1))
                    assert "write to arrangement.model.get('2')" in sentence
                now.p = 0.1
            losses.append(worker.step(x[part], part % 3).loss)
        results.append(losses)
        worker.release()
        where.free()
    assert np.allclose(results[0], results[1], rtol=1e-5)
    assert results[0][5] != results[0][4]


def test_settings_of_a_loader_are_followed_from_the_next_epoch_on():
    """Each as if it had been given; a wrong one is refused, and changes nothing."""
    changes = {
        "batch_size": 40,
        "seed": 3,
        "shuffle_block": 8,
        "shuffle": False,
        "microbatches": 3,
        "world": 2,
        "rank": 1,
        "transform": data.Cutout(8),
        "dtype": "float64",
        "partition": "iid",
        "workers": 2,
        "dataset": data.load("iris")[0],
    }
    loader, given = data.Loader(rows(), 30), {"batch_size": 30, "rank": 0, "world": 1}
    begun = loader.epoch(0)
    for name, value in changes.items():
        if name == "dataset":
            given["transform"] = loader.transform = None  # which is of images
        if name == "shuffle":
            given["shuffle_block"] = loader.shuffle_block = None
        if name == "partition":  # each gives an order
            given["shuffle"] = loader.shuffle = True
        setattr(loader, name, value)
        given[name] = value
        other = data.Loader(**{"dataset": rows(), **given})
        for now, expected in zip(loader.epoch(1), other.epoch(1), strict=True):
            assert now.cuts == expected.cuts
            assert (now.x.dtype, now.x.tolist()) == (expected.x.dtype, expected.x.tolist())
    assert [len(batch.x) for batch in begun][:-1] == [30] * (len(rows()) // 30)
    for name, value in {"batch_size": 0, "dtype": int, "rank": 5, "partition": "none of"}.items():
        with pytest.raises(UsageError):
            setattr(loader, name, value)
        assert getattr(loader, name) == given[name]
    assert next(iter(loader.epoch(0))).global_rows == 40


def test_a_tuple_of_settings_of_a_worker_names_the_way_out():
    worker = trained(nnmpi.Worker)
    for name in ("optimizer", "loss", "clip", "seed", "precision", "slow", "group"):
        with pytest.raises(UsageError, match=rf"{name} is read when Worker is made.* release\(\)"):
            setattr(worker, name, None)


def test_a_pool_whose_windows_were_fused_keeps_them():
    with pytest.raises(UsageError, match="over is read when MaxPool2d is made"):
        nn.MaxPool2d(2).over = nn.MaxPool2d(3).over


def test_a_model_that_has_its_values_has_been_sharded_already():
    model = small()
    with pytest.raises(UsageError, match="sharding is read when a model is arranged"):
        model.sharding = {"0": nn.Sharding.COLUMN}
    with pytest.raises(UsageError, match="storage holds its own parameters"):
        model.storage = small().storage
    with pytest.raises(UsageError, match="replayable is read from the class"):
        model.replayable = True


def test_models_of_the_package_take_parts_under_new_names():
    """As an adapter is added, which a forward of one's own calls."""
    model = models.mlp((4,), 3, [5])
    model.adapter = nn.Linear(3, 3)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'scale'"):
        model.scale = 2.0
