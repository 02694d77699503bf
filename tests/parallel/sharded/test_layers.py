"""The other layers on parts of activations: norms, dropout, pooling, softmax, embeddings, all
convolutions.
"""

import numpy as np
import pytest

from nnmpi import Tensor, nn
from nnmpi.base.errors import ShapeError
from nnmpi.nn import Sharding, training
from nnmpi.ops import cross_entropy
from nnmpi.parallel.sharded.context import LayerContext, ParameterSharder
from nnmpi.parallel.tensor import shard
from nnmpi.tensor.placement import Placement, features, rows
from tests.parallel.sharded.compare import TOLERANCES, check_equal, differences, regions, train

C, R, H, V = Sharding.COLUMN, Sharding.ROW, Sharding.ROWS, Sharding.VOCAB
IMAGE = (6, 5, 4)

CONVOLUTIONS = [
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "dilation": (2, 1), "padding": (2, 1)},
    {"kernel_size": (1, 3), "padding": 3, "bias": False},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": (5, 1), "padding": (2, 0)},
    {"kernel_size": (2, 4), "padding": "same", "dilation": (3, 1)},
]


@pytest.mark.simulated
@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_convolutions(group, options):
    """Stride, padding and dilation of all kinds, by output channels, input channels and rows."""
    for sharding in (C, R, H):
        check_equal(
            group,
            lambda: nn.Sequential(nn.Conv2d(4, 3, **options), nn.GELU(), nn.GlobalAvgPool2d()),
            IMAGE,
            table={"0": sharding},
            sample=IMAGE,
            rows=2,
            sharded_at_least=0 if sharding is H else 1,
        )


@pytest.mark.simulated(max_size=8)  # as many groups
@pytest.mark.parametrize("groups", [8, 24])
def test_groups(group, groups):
    """Groups are dealt out whole; a depthwise convolution needs no exchange."""

    def build():
        return nn.Sequential(
            nn.Conv2d(2, 24, 1),
            nn.Conv2d(24, 24, 3, padding=1, groups=groups),
            nn.ReLU(),
            nn.GlobalAvgPool2d(),
            nn.Linear(24, 3),
        )

    check_equal(group, build, (4, 4, 2), table={"0": C, "1": C, "4": R}, rows=2, sharded_at_least=5)
    check_equal(
        group,
        build,
        (4, 4, 2),
        table={"0": H, "1": H},
        sample=(4, 4, 2),
        rows=2,
        sharded_at_least=0,
    )


@pytest.mark.simulated
@pytest.mark.parametrize("sharding", [C, H])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.MaxPool2d(3, 2, 1), nn.GlobalAvgPool2d()],
        lambda: [nn.AvgPool2d((2, 3), 1, (1, 0)), nn.Flatten(), nn.Linear(3 * 5 * 7, 3)],
        lambda: [
            nn.AvgPool2d(2),
            nn.LayerNorm(5),
            nn.Softmax(1),
            nn.Dropout(0.4),
            nn.GlobalAvgPool2d(),
        ],
        lambda: [
            nn.BatchNorm(5),
            nn.Softmax(-1),
            nn.LayerNorm((5, 5)),
            nn.MaxPool2d((6, 5), 1),
            nn.Flatten(),
        ],
        lambda: [
            nn.LogSoftmax(3),
            nn.ELU(),
            nn.Softplus(),
            nn.Softmax(2),
            nn.Softmax(-3),
            nn.GlobalAvgPool2d(),
        ],
        lambda: [nn.LayerNorm((6, 5, 5)), nn.GlobalAvgPool2d()],
        lambda: [
            nn.PReLU(5),
            nn.PReLU(),
            nn.Upsample(2),
            nn.AdaptiveAvgPool2d((4, 3)),
            nn.GlobalAvgPool2d(),
        ],
        lambda: [nn.Flatten(), nn.SELU(), nn.PReLU(), nn.PReLU(150), nn.Linear(150, 3)],
        lambda: [nn.Upsample((1, 2)), nn.Conv2d(5, 3, 3), nn.PReLU(3), nn.GlobalAvgPool2d()],
        lambda: [nn.Flatten(), nn.LayerNorm(150), nn.Dropout(0.5), nn.Softmax(), nn.Linear(150, 3)],
        lambda: [nn.Linear(5, 4), nn.GlobalAvgPool2d(), nn.Linear(4, 3)],
    ],
)
def test_on_channels_and_rows(group, sharding, layers):
    """Whatever lies before it, each layer does what it does on the whole."""

    def build():
        return nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), *layers())

    table = {"0": sharding, "3": R} if isinstance(layers()[1], nn.Flatten) else {"0": sharding}
    if sharding is C:
        check_equal(group, build, IMAGE, table=table, rows=3)
    ours = check_equal(
        group, build, IMAGE, table=table, sample=IMAGE, rows=3, sharded_at_least=int(sharding is C)
    )
    kinds = {type(module).__name__ for _, module in ours.named_modules()}
    assert all(group.gather(group.size == 1 or sharding is C or "RowsConv2d" in kinds)), kinds


class Shifted(nn.Tanh):
    """A layer of the user's own, which inherits what another computes element by element."""

    def forward(self, x):
        """Return the difference of neighbours."""
        return super().forward(x) - x.mean(-1, keepdims=True)


class Cubed(nn.Module):
    """A layer of the user's own that says what it needs of its input."""

    reach = nn.Reach.ELEMENT

    def __init__(self):
        self.factor = nn.Parameter((1,), nn.Constant(0.5))

    def forward(self, x):
        """Return a multiple of the cube."""
        return x * x * x * self.factor


class CubedChannels(Cubed):
    """The same, of whole channels."""

    reach = nn.Reach.CHANNEL


@pytest.mark.simulated
@pytest.mark.parametrize("layer", [Shifted, Cubed, CubedChannels])
def test_a_layer_of_ones_own_follows_what_its_own_class_says(group, layer):
    """What a subclass inherits may be wrong for it, so it gets full inputs."""

    def build():
        return nn.Sequential(nn.Linear(4, 7), layer(), nn.Linear(7, 3))

    ours = check_equal(group, build, (4,), table={"0": C, "2": R}, rows=3, sharded_at_least=2)
    if group.size > 1:
        gives_parts = ours.layers[1]._after is not None
        assert gives_parts == (layer is not Shifted)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "placement", [features(7), Placement(3, 1, None), Placement(4, 3), rows(5)]
)
def test_dropout_drops_what_the_whole_layer_drops(group, placement):
    """Bit for bit."""
    shape = (4, 5, 3, 2) if placement.has_rows else (4, 12) if placement.units != 7 else (4, 3, 7)
    axis = 1 if placement.has_rows else -1
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    region = placement.resolve(shape[axis]).region(shape, axis, group.size, group.rank)
    full = nn.Dropout(0.4)
    local, _ = LayerContext("2.drop", placement, None, None, ParameterSharder(group)).on_parts(full)
    full.path = "2.drop"
    with training(seed=3, step=4, first_row=17):
        expected = full(x).data
    with training(seed=3, step=4, first_row=17):
        result = local(np.ascontiguousarray(region.take(x))).data
    assert all(group.gather(np.array_equal(result, region.take(expected))))


@pytest.mark.simulated
@pytest.mark.parametrize("sharding", [C, V])
def test_embedding(group, sharding):
    """Entries or features are cut; an index that comes twice gets both gradients."""

    def build():
        return nn.Sequential(
            nn.Embedding(11, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Flatten(), nn.Linear(12, 3)
        )

    x, y = np.array([[0, 10, 3], [3, 3, 7], [5, 4, 10]]), np.array([0, 2, 1])
    full, ours = build().initialize(seed=3, dtype="float64"), build()
    shard(ours, group, {"0": sharding, "2": C, "4": R}, sample=(3,))
    ours.initialize(seed=3, dtype="float64")

    def run(model):
        return train(model, x, y, cross_entropy)

    problems = differences(
        run(full), run(ours), regions(ours), TOLERANCES["float64"], group.size == 1
    )
    assert not any(group.gather(problems)), problems


@pytest.mark.host_only("labels and indices that are looked at; a device's kernels answer with NaN")
@pytest.mark.simulated
@pytest.mark.parametrize("sharding", [C, V])
def test_an_index_outside_of_the_table_is_refused(group, sharding):
    """By every rank, whoever would have the entry."""
    model = nn.Sequential(nn.Embedding(11, 5))
    shard(model, group, {"0": sharding}, sample=(3,))
    model.initialize(seed=3)
    with pytest.raises(ShapeError, match="embedding index 11"):
        model(Tensor(np.array([[0, 1, 11]])))
    group.barrier()


# Shapes told without running the model are those that it gives; placements refuse what does not
# fit.
