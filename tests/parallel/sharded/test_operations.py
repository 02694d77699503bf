"""Every operation on a rank's part of a tensor: it is the operation on the whole one, or it is
refused.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

import nnmpi
from nnmpi import Tensor
from nnmpi.base.errors import LayoutError
from nnmpi.ops.collectives import TensorParallelGroup, scatter
from nnmpi.tensor import Function, gather_shards
from nnmpi.tensor.placement import Placement, Shard, is_sharded
from nnmpi.tensor.sharded import mark
from tests.tensor.draws import Case
from tests.tensor.samples import SAMPLES
from tests.tensor.test_operations import TABLE

# Operations, and rows of the table, that take no parts at all.
REFUSED = {
    "sample.attention dropped",
    "sample.embedding",  # whose indices may be parts, which no sample cuts
    "sample.getitem",
    "ops.attention-dropped",
    "ops.gru-any",
    "ops.lstm-any",
    "tensor.getitem-masked",
    "tensor.getitem-picked",
    "tensor.matmul-square",
    "ops.batch_norm-one_rank",
    "ops.binary_cross_entropy",
    "ops.conv2d",
    "ops.conv_relu_pool",
    "ops.cross_entropy",
    "ops.embedding",
    "ops.binary_nll",
    "ops.conv3d",
    "ops.huber",
    "ops.kl_div",
    "ops.mae",
    "ops.mse",
    "ops.nll",
    "ops.rnn",
    "tensor.pad",
}

# A sample that is more than its operation: the bias, which may be a part, is added by another one.
COMPOSED = {"sample.conv_transpose2d"}

# the operations of the rows that are samples of their traits
SAMPLED = {f"sample.{sample.name}": kind for kind, sample in SAMPLES}

# (name, operation, shapes of its inputs): what takes parts, cut along some axis, beside the rows of
# the table.
TAKEN = [
    ("heads apart", lambda x: x.reshape(2, 3, 2, -1).transpose(0, 2, 1, 3), [(2, 3, 8)]),
    ("heads together", lambda x: x.transpose(0, 2, 1, 3).reshape(2, 3, 8), [(2, 2, 3, 4)]),
    ("columns of a product", lambda x: Tensor(np.ones((3, 2))) @ x, [(2, 4)]),
    ("a slice", lambda x: x[1:], [(2, 4)]),
    ("queries", lambda x: x[..., None, :4] * x[1, None, 2, 4:], [(2, 3, 8)]),
    ("attention", lambda x: nnmpi.ops.attention(x, 3, causal=True), [(2, 4, 18)]),
    ("groups", lambda *x: nnmpi.ops.group_norm(*x, 2), [(2, 3, 8), (8,), (8,)]),
    ("heads", nnmpi.ops.scaled_dot_product_attention, [(2, 3, 4, 2)] * 3),
]


def part_of(x, placement, group):
    """Return this rank's part of a tensor, as one that says so."""
    return mark(scatter(x, group, placement), Shard(placement, TensorParallelGroup(group), "made"))


def placements(length, axis):
    """Yield ways to share out an axis: by elements, by pairs, and in two repeats."""
    yield Placement(length, 1, 1, axis)
    if length and length % 2 == 0:
        yield Placement(length // 2, 2, 1, axis)
        yield Placement(length // 2, 1, 2, axis)


def ways(inputs):
    """Yield by number the inputs that are cut, and how: each alone, and all of them along one axis
    of the last ones.
    """
    for number, x in enumerate(inputs):
        for axis, length in enumerate(x.shape):
            for placement in placements(length, axis):
                yield {number: placement}
    for behind in range(1, 1 + (max(x.ndim for x in inputs) if len(inputs) > 1 else 0)):
        there = [i for i, x in enumerate(inputs) if x.ndim >= behind]
        axes = [list(placements(inputs[i].shape[-behind], inputs[i].ndim - behind)) for i in there]
        for way in product(*axes) if len(there) < 3 else zip(*axes, strict=False):
            yield dict(zip(there, way, strict=True))


def run(function, inputs, cut):
    """Return an operation's result and the gradients of its inputs."""
    leaves = [Tensor(x, requires_grad=True) for x in inputs]
    y = gather_shards(function(*(cut(i, leaf) for i, leaf in enumerate(leaves))))
    y.backward(np.linspace(1, 2, y.size).reshape(y.shape))
    return [
        y.data,
        *(
            np.zeros_like(x) if leaf.grad is None else leaf.grad
            for x, leaf in zip(inputs, leaves, strict=True)
        ),
    ]


def try_all(case, ranks):
    """Try a case with every way to cut its inputs; return how many were not refused.

    Fails where a result or a gradient is not the serial one, or another error than a refusal comes.
    """
    expected = run(case.function, case.inputs, lambda i, x: x)

    def main(group):
        done = []
        for way in ways(case.inputs):

            def shard(i, x, way=way):
                return part_of(x, way[i], group) if i in way else x

            try:
                ours = run(case.function, case.inputs, shard)
            except LayoutError as error:
                assert "ranks has a part" in str(error), error
                done.append(False)
                continue
            for first, other in zip(expected, ours, strict=True):
                assert first.shape == other.shape, way
                np.testing.assert_allclose(other, first, rtol=1e-11, atol=1e-11, err_msg=str(way))
            done.append(True)
        return done

    everyone = nnmpi.simulate(main, ranks=ranks)
    assert all(done == everyone[0] for done in everyone)
    return sum(everyone[0])


@pytest.mark.parametrize("row", TABLE, ids=[row.name for row in TABLE])
def test_equal_or_refused(row):
    """Each operation of the table, each input cut along each axis, and several of them together."""

    taken = 0

    @settings(max_examples=8)
    @given(row.cases)
    def tried(case: Case) -> None:
        nonlocal taken
        taken += try_all(case, 2) + try_all(case, 3)

    tried()
    kind = SAMPLED.get(row.name)
    if kind is None or row.name in REFUSED | COMPOSED:
        assert (taken > 0) == (not REFUSED & {row.name, row.public})
    else:  # what says nothing of parts refuses them
        assert (taken > 0) == (kind.placed is not Function.placed)


@pytest.mark.parametrize("name, function, shapes", TAKEN, ids=[name for name, *_ in TAKEN])
def test_what_is_not_refused(name, function, shapes):
    """What attention does, which no row of the table does as it is done there."""
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(0.5, 2, shape) for shape in shapes]
    assert try_all(Case(function, inputs), 2) > 0


def test_functions_that_say_nothing_are_refused():
    """A user's own Function takes whole tensors only, and says which layer left a part."""

    class Reverse(Function):
        def forward(self, x):
            return x[..., ::-1]

        def backward(self, grad):
            return (grad[..., ::-1],)

    assert try_all(Case(lambda x: Reverse()(x), [np.ones((2, 3))]), 2) == 0
    assert (
        try_all(
            Case(lambda x: Reverse()(gather_shards(x)), [np.random.default_rng(0).random((2, 3))]),
            2,
        )
        > 0
    )


def test_nobody_sees_values_of_a_part():
    """Shapes are the whole tensor's; values, which differ from rank to rank, are not to be had."""

    def main(group):
        x = part_of(Tensor(np.arange(12.0).reshape(3, 4)), Placement(4, axis=1), group)
        assert (x.shape, x.size, len(x), x.ndim) == ((3, 4), 12, 3, 2)
        assert x.data.shape == (3, 2)
        assert is_sharded(x.detach())
        for look in (
            x.numpy,
            x.item,
            x.argmax,
            x.backward,
            lambda: x > 0,
            lambda: Tensor(x),
            lambda: Tensor([1.0])[x],
        ):
            with pytest.raises(
                LayoutError, match="2 ranks has a part of the 4 elements of axis 1, as layer 'made'"
            ):
                look()
        np.testing.assert_array_equal(
            gather_shards({"a": [x]})["a"][0].numpy(), np.arange(12.0).reshape(3, 4)
        )

    nnmpi.simulate(main, ranks=2)


def test_an_empty_batch_that_becomes_one_with_an_axis_is_refused():
    """Without elements nothing tells which of the new axes has the parts of the old one."""
    assert not try_all(Case(lambda x: x.reshape(0, 2), [np.ones((0, 2, 2))]), 2)
