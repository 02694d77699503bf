"""Modules whose forward nobody knows, with layers that are shared out: equal to the serial run, or
refused.
"""

import numpy as np
import pytest

import nnmpi
from nnmpi import Tensor, nn, ops
from nnmpi.base.errors import LayoutError
from nnmpi.nn import Module, Parameter, Sharding, training
from nnmpi.parallel.tensor import shard
from nnmpi.tensor import concatenate, gather_shards
from tests.harness.refusals import refuses
from tests.parallel.sharded.compare import check_equal, images

C, R, V, X = Sharding.COLUMN, Sharding.ROW, Sharding.VOCAB, Sharding.REPLICATED
HEADS = {"attention.qkv": C, "attention.proj": R}


def blocks(features, heads, count=2, **options):
    """Return transformer blocks and a head."""
    made = [nn.TransformerBlock(features, heads, **options) for _ in range(count)]
    return nn.Sequential(*made, nn.Flatten(), nn.Linear(3 * features, 3))


def everywhere(build, shape, **options):
    """Fail unless a model is the serial one on 2, 3 and 4 simulated ranks: losses, gradients,
    weights.
    """
    for ranks in (2, 3, 4):
        nnmpi.simulate(
            lambda group: check_equal(group, build, shape, **options) and None, ranks=ranks
        )


@pytest.mark.parametrize(
    "features, heads, table",
    [
        *((features, heads, HEADS) for features, heads in ((12, 2), (15, 5), (5, 1))),
        *((12, 3, table) for table in ({**HEADS, "mlp.*": C}, {"mlp.0": C, "mlp.2": R})),
        (15, 5, {"attention.proj": R}),
    ],
)
def test_transformer_blocks(features, heads, table):
    """Attention by heads, also when heads do not divide, and when some ranks have none."""
    everywhere(
        lambda: blocks(features, heads),
        (3, features),
        table={f"*.{name}": s for name, s in table.items()},
    )


@pytest.mark.mpi
def test_blocks_bring_their_table(group):
    """A model without a table takes those of the modules in it: all of a block's wide layers."""
    ours = check_equal(group, lambda: blocks(12, 3, bias=False), (3, 12), sharded_at_least=8)
    if group.size > 1:
        parameters = dict(ours.named_parameters())
        assert (
            parameters["0.attention.qkv.weight"].shape[1]
            == 3 * parameters["0.attention.proj.weight"].shape[0]
        )


class Own(Module):
    """A user's module: `compute` is its forward."""

    def __init__(self, compute):
        self.wide, self.narrow = nn.Linear(4, 6), nn.Linear(6, 4)
        self.table = nn.Embedding(5, 4)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.scale = Parameter((1,), nn.Constant(0.7))
        self.gain = Parameter((6,), nn.Constant(0.7))
        self.compute = compute

    def forward(self, x):
        """Return what `compute` makes of x: (batch, 3, 4)."""
        return self.compute(self, x)


def mean_of_parts(m, x):
    """Return a part: the module's result is made whole."""
    return m.wide(x).mean(1)


def own(compute):
    """Return what builds a model with such a module."""
    features = 6 if compute is mean_of_parts else 12
    return lambda: nn.Sequential(
        nn.Linear(4, 4), Own(compute), nn.Flatten(), nn.Linear(features, 3)
    )


def sqrt_of_width(m, x):
    """Divide by what the shape says: that of the whole."""
    y = m.wide(x)
    y = y / float(y.shape[-1]) ** 0.5
    return m.narrow(y.transpose(0, 2, 1).reshape(len(y), 6, 3)[:, :, ::-1].transpose(0, 2, 1))


TABLE = {"1.wide": C, "1.narrow": R, "0": C}
EQUAL = {
    "a pair": lambda m, x: m.narrow(ops.gelu(m.wide(x))),
    "a whole scale": lambda m, x: m.narrow(m.wide(x) * m.scale + m.scale),
    "dropout": lambda m, x: m.narrow(m.drop(m.wide(x))),
    "a sum of parts": lambda m, x: m.narrow(m.wide(x) + m.wide(x * 2)),
    "a residual sum": lambda m, x: x + m.narrow(m.wide(x).tanh()),
    "made whole": lambda m, x: m.narrow(m.norm(gather_shards(m.wide(x)))),
    "whole into row": lambda m, x: m.narrow(concatenate([x, x[..., :2]], -1)),
    "a layer's own way": lambda m, x: m.narrow(m.wide(x).transpose(1, 0, 2).transpose(1, 0, 2)),
    "twice": lambda m, x: m.narrow(m.wide(m.narrow(m.wide(x)))),
    "a sequence of parts": lambda m, x: m.narrow(m.wide(m.mlp(m.narrow(m.wide(x))))),
    "a part as the result": mean_of_parts,
    "its own way of scaling": sqrt_of_width,
    "a whole gain": lambda m, x: m.narrow(m.wide(x) * m.gain),
    "a whole mask": lambda m, x: m.narrow(m.wide(x) * (np.arange(6) % 2.0)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name):
    """What a user's module may do with parts."""
    everywhere(own(EQUAL[name]), (3, 4), table={**TABLE, "1.mlp.0": C})


REFUSED = {
    "softmax": (lambda m, x: m.narrow(ops.softmax(m.wide(x))), "Softmax .* layer '1.wide'"),
    "layer norm": (lambda m, x: m.narrow(m.norm(m.wide(x))), "LayerNorm averages over whole rows"),
    "a sum": (lambda m, x: m.wide(x).sum(-1, keepdims=True) + x, "Sum needs all elements"),
    "torn": (lambda m, x: m.wide(x).reshape(-1, 2, 9), "Reshape of .* splits"),
    "a slice": (lambda m, x: m.wide(x)[..., :4], "not whole groups"),
    "its weight": (lambda m, x: m.narrow(x @ m.wide.weight), "cannot be used directly"),
    "its layers": (lambda m, x: m.mlp[0](x), "cannot be used directly"),
    "a look": (lambda m, x: x if (m.wide(x) > 0).all() else x * 2, "reading values"),
    "a mask": (
        lambda m, x: m.narrow(m.wide(x)[m.wide(x).detach().astype("int64")]),
        "takes the values of a whole tensor",
    ),
    "a product": (
        lambda m, x: m.wide(x) @ m.wide(x).transpose(0, 2, 1),
        "(MatMul|Product) adds up along all of that axis",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_refused(name, ranks):
    """What it may not do: one sentence that names the operation, the layer and what would work."""
    compute, words = REFUSED[name]

    def main(group):
        model = own(compute)()
        shard(model, group, {**TABLE, "1.mlp.0": C})
        model.initialize(seed=0, dtype="float64")
        refuses(LayoutError, words, lambda: model(Tensor(images(2, (3, 4), "float64")[0])))

    nnmpi.simulate(main, ranks=ranks)


class Head(Module):
    """A model that is a custom module itself."""

    def __init__(self):
        self.head = nn.Linear(4, 6)

    def forward(self, x):
        """Return what the layer does."""
        return self.head(x)


def test_a_model_of_its_own():
    """What a custom model itself returns is a part, if it ends so: its loss refuses it, and says
    how to go on.
    """

    def main(group):
        model = Head()
        shard(model, group, {"head": C})
        model.initialize(seed=0, dtype="float64")
        x, y = images(5, (4,), "float64")
        refuses(
            LayoutError,
            "CrossEntropy .* layer 'head' leaves",
            lambda: ops.cross_entropy(model(x), y),
        )
        serial = Head().initialize(seed=0, dtype="float64")
        assert ops.cross_entropy(gather_shards(model(x)), y).item() == pytest.approx(
            ops.cross_entropy(serial(x), y).item()
        )

    nnmpi.simulate(main, ranks=2)


def test_compiled_steps_refuse_too():
    """A step is refused when it is recorded; one that is not replays its exchanges."""

    def main(group):
        x, y = images(4, (3, 4), "float64")
        model = own(EQUAL["dropout"])()
        shard(model, group, TABLE)
        model.initialize(seed=0, dtype="float64")

        def loss():
            model.zero_grad()
            value = ops.cross_entropy(model(x), y)
            value.backward()
            return value

        step = nnmpi.compile(loss)
        for number in range(3):
            with training(step=number):
                assert step().item() == loss().item()
        refused = own(REFUSED["softmax"][0])()
        shard(refused, group, TABLE)
        refused.initialize(seed=0, dtype="float64")
        for _ in range(2):
            refuses(LayoutError, "Softmax", lambda: nnmpi.compile(lambda: refused(x))())
        head = Head()
        shard(head, group, {"head": C})
        head.initialize(seed=0, dtype="float64")
        refuses(
            LayoutError,
            "a compiled step's result takes the values of a whole tensor",
            lambda: nnmpi.compile(lambda x: head(x))(np.ones((2, 4))),
        )

    nnmpi.simulate(main, ranks=2)
