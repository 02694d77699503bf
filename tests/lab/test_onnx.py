"""Models as ONNX files, beside onnxruntime: what they compute, are called, and are refused for."""

import json
from functools import partial

import numpy as np
import pytest

import nnmpi
from benchmarks.training import models as written
from benchmarks.training.zoo import MODELS, TEXT
from nnmpi import Tensor, models, nn, ops
from nnmpi.backend.activations import Activation, Saves
from nnmpi.base.errors import NnmpiError
from nnmpi.commands.export import main as export
from nnmpi.lab.onnx.graph import GraphValue, OnnxGraph
from nnmpi.lab.onnx.operators import WRITERS, converted
from nnmpi.lab.onnx.trace import trace
from nnmpi.ops.attention import KeyValues
from nnmpi.ops.experts import Experts, Gate
from nnmpi.tensor import concatenate, einsum, maximum, where
from nnmpi.tensor.elementwise import RULES, activated
from nnmpi.tensor.function import AsType, Function
from nnmpi.tensor.traits import WRITTEN, NotExported
from nnmpi.train.cli import main as train
from tests.harness.refusals import refuses
from tests.tensor.samples import EACH, OPERATIONS, SAMPLES, VALUES

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.host_only("onnxruntime reads arrays of the host")

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((7, 4)).astype("f4")
MIXTURE = {"experts": 4, "top_k": 2, "capacity": 0.8}
ZOO = {
    **{name: (partial(f, written.our_library()), shape) for name, (f, shape) in MODELS.items()},
    "models.mlp": (partial(models.mlp, (4,), 3), (1, 4)),
    "models.cnn": (partial(models.cnn, (28, 28, 1), 10), (1, 28, 28, 1)),
    "models.resnet": (partial(models.resnet, (32, 32, 3), 10), (1, 32, 32, 3)),
    "models.lstm": (partial(models.lstm, 65, 32, 2), (1, 90)),
    "models.gpt": (partial(models.gpt, 65, 16, 32, 2, 4), (1, 16)),
    "models.gpt, experts": (partial(models.gpt, 65, 16, 32, 2, 4, **MIXTURE), (1, 16)),
    "models.llama": (partial(models.llama, 65, 16, 32, 2, 4, 2, qk_norm=True, bias=True), (1, 16)),
    "models.gpt, adapted": (lambda: nn.adapt(models.gpt(65, 16, 32, 2, 4), 2), (1, 16)),
}


class Own(nn.Module):
    """A forward of one's own, with the layers that it uses.

    Args:
        compute: (module, *inputs) -> results.
        layers: by name.
    """

    def __init__(self, compute, **layers):
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.compute(self, *inputs)


def states(m, x):
    """Return what an LSTM and cells make of states of the batch's length."""
    zeros, ones = (Tensor(f((2, len(x), 5), "f4")) for f in (np.zeros, np.ones))
    h, (last, c) = m.a.with_state(x, (zeros, zeros))
    first, cell = m.b(x[:, 0], (ones[0], zeros[0]))
    second = m.b(x[:, 1], (first, cell))[0] + m.c(x[:, 2], first) + m.d(x[:, 1], first)
    return h, last[0], c[1], first + second


# a forward, its layers, the shape of a sample (text for tokens)
OWN = {
    "arithmetic": (
        lambda m, x: (-x + 2 * x - x / 3 + x.exp() * x.sin() - x.cos() + abs(x) ** 1.5, x.max(1)),
        {}, (6,),
    ),
    "bounds": (
        lambda m, x: maximum(x, 0.1) + x.clip(-0.5) + x.clip(None, 0.5) + x.clip(-1, 1)
        + where(np.arange(6) > 2, x, 0.0) + (x * x + 1).log() + (x * x).sqrt(),
        {}, (6,),
    ),
    "reductions": (
        lambda m, x: (x.sum(1) + x.mean((1, 2), keepdims=True)[:, 0] + x.var(2)[:, :1]
                      + x.min(2)[:, :1] + x.var(2, correction=0)[:, 1:2] + x.sum(())[:, 0]
                      + x.max(())[:, 1] + x.mean(())[:, 1] + x.var(())[:, 2]),
        {}, (3, 4),
    ),
    "a number": (lambda m, x: x.sum() * 2 + 1, {}, (3,)),
    "slices": (
        lambda m, x: (x[-3:], x[:9], x[:, 1:9, ::-1], x[:, 9:1:-2], x[:, -9:3, 2:0:-1], x[:, :5],
                      x[:, :-9:-1], x[:, 2, None, -1], x[:, -2:0:-1], x[::-1, -3::-2],
                      x[:, np.array([1, 0], "uint8")], x[:, :, (-1, 2)]),
        {}, (5, 4),
    ),
    "shapes": (
        lambda m, x: concatenate(
            [x[:, 1:, ::-1], x[:, :2].pad(((0, 0), (0, 1), (0, 0)), 2.0)[:, 1:],
             x.transpose(0, 2, 1).reshape(len(x), 3, 4)[:, :2], x[:, -1][:, None],
             x[:len(x), [2, 0]], x[:, np.array([1])].astype("float64").astype("float32")], 1),
        {}, (3, 4),
    ),
    "named axes": (
        lambda m, x: (
            einsum("bij,bkj->bik", x, x * 2), einsum("bij,jk->bk", x, m.a.weight),
            einsum("...i->...", x), einsum("bij,bij->bji", x, x + 1), concatenate(x.split(2, 2), 1),
        ),
        {"a": nn.Linear(4, 3, bias=False)}, (3, 4),
    ),
    "products": (
        lambda m, x: x.swapaxes(1, 2) @ x @ TABLE[:4] + m.a.weight + m.b(x.reshape(len(x), 12))[0],
        {"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(12, 4)}, (3, 4),
    ),
    "activations": (
        lambda m, x: ops.gelu(x) + ops.gelu(x, "tanh") + ops.silu(x) + ops.elu(x, 0.7) + ops.tanh(x)
        + ops.leaky_relu(x, 0.2) + ops.softplus(x, 2.0) + ops.sigmoid(x) + ops.softmax(x)
        + ops.log_softmax(x, 1) + ops.softplus(x, 0.5, 0.1) + ops.softplus(x, 3.0, 0.0),
        {}, (3, 4),
    ),
    "pooled": (
        lambda m, x: m.b(ops.conv_relu_pool(x, m.a.weight, m.a.bias, padding=1).mean((1, 2))),
        {"a": nn.Conv2d(2, 3, 3, padding=1), "b": nn.Linear(3, 5)}, (6, 6, 2),
    ),
    "images": (
        lambda m, x: m.e(m.d(m.c(m.b(m.a(x))))) + x[:, :1, :1, :1],
        {"a": nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2), "b": nn.BatchNorm2d(4),
         "c": nn.GroupNorm(2, 4), "d": nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1),
         "e": nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Upsample(2), nn.MaxPool2d((2, 1)))},
        (9, 8, 2),
    ),
    "pools": (
        lambda m, x: concatenate([
            m.a(x).reshape(len(x), -1), m.b(x).flatten(), m.c(x), m.d(x).flatten(),
            m.e(x).flatten(), m.f(x).flatten(), m.g(x).flatten(), m.h(x).flatten()], 1),
        {"a": nn.AdaptiveAvgPool2d((2, 3)), "b": nn.AdaptiveAvgPool2d(2),
         "c": nn.GlobalAvgPool2d(), "d": nn.AvgPool2d(6, 1, 1), "e": nn.AvgPool2d(6, 2, (0, 3)),
         "f": nn.AvgPool2d(6, 3), "g": nn.AdaptiveMaxPool2d((4, 6)),
         "h": nn.AdaptiveMaxPool2d(2)}, (6, 6, 2),
    ),
    "sequences": (
        lambda m, x: m.d(m.c(m.b(m.a(x)))) + m.e(x),
        {"a": nn.Conv1d(4, 4, 3, padding=1), "b": nn.BatchNorm1d(4), "c": nn.RMSNorm(4),
         "d": nn.LayerNorm((6, 4)), "e": nn.MultiheadAttention(4, 2)}, (6, 4),
    ),
    "attention": (
        lambda m, x: (
            ops.scaled_dot_product_attention(x, x * 2, x + 1, causal=True),
            ops.scaled_dot_product_attention(x[:, :, :2], x * 2, x[..., :1]),
        ), {}, (2, 5, 3),
    ),
    "volumes": (
        lambda m, x: m.b(m.a(x)),
        {"a": nn.Conv3d(2, 3, 2, padding=1), "b": nn.MaxPool3d(2, 1)}, (3, 4, 4, 2),
    ),
    "recurrent": (
        lambda m, x: m.a(x) + m.b(x) + m.c(x),
        {"a": nn.LSTM(3, 4, 2, bidirectional=True), "b": nn.GRU(3, 8, 2), "c": nn.RNN(3, 8)},
        (6, 3),
    ),
    "states": (
        states,
        {"a": nn.LSTM(3, 5, 2), "b": nn.LSTMCell(3, 5), "c": nn.GRUCell(3, 5),
         "d": nn.RNNCell(3, 5, "relu")}, (4, 3),
    ),
    "lengths": (
        lambda m, x, n: m.a(x, lengths=n), {"a": nn.LSTM(3, 4, bidirectional=True)}, (6, 3)
    ),
    "indices": (lambda m, x, n: (x[:, n - 1], m.a.weight[n - 2]), {"a": nn.Linear(5, 4)}, (6, 3)),
}  # fmt: skip


WITH_INTEGERS = "lengths", "indices"
CASES = ZOO | {name: (partial(Own, f, **layers), (1, *x)) for name, (f, layers, x) in OWN.items()}


def case(name):
    """Return a model, and its inputs for a number of rows."""
    make, (_, *shape) = CASES[name]
    model = make().initialize(seed=0)
    for _, buffer in model.named_buffers():
        buffer.data = (buffer.data + RANDOM.random(buffer.shape)).astype("f4")

    def batch(n):
        if name in TEXT or name.startswith(("models.lstm", "models.gpt", "models.llama")):
            return (RANDOM.integers(0, 65, (n, *shape)),)
        x = RANDOM.standard_normal((n, *shape)).astype("f4")
        return (x, RANDOM.integers(1, 7, n)) if name in WITH_INTEGERS else (x,)

    return model, batch


@pytest.mark.parametrize("channels", ["last", "first"])
@pytest.mark.parametrize("name", CASES)
def test_a_model(name, channels, tmp_path):
    """It is computed for any batch; parameters are called as they are, and none is superfluous."""
    (model, batch), file = case(name), tmp_path / "x.onnx"

    def planes(x):
        return x.transpose(0, 3, 1, 2) if channels == "first" and x.ndim == 4 else x

    sample = tuple(x.astype("uint32") if x.dtype.kind == "i" else x for x in batch(1))
    nodes = nnmpi.to_onnx(model, sample, file, channels=channels)
    made = onnx.load(file)
    onnx.checker.check_model(made, full_check=True)
    graph, session = made.graph, runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for n in (1, 4, 7):
        inputs = batch(n)
        given = {x.name: planes(y) for x, y in zip(graph.input, inputs, strict=True)}
        right = model(*map(Tensor, inputs))
        right = right if isinstance(right, tuple) else (right,)
        for ours, theirs in zip(right, session.run(None, given), strict=True):
            np.testing.assert_allclose(theirs, planes(ours.numpy()), rtol=0, atol=1e-5)
    names = {x.name for x in graph.initializer}
    assert nodes == len(graph.node) and names <= {x for node in graph.node for x in node.input}
    if name in ZOO:
        assert {name for name, _ in model.named_parameters()} <= names
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def sampled(kind, sample):
    """Return a model that calls an operation as its sample does, and its inputs for some rows."""
    values, sizes = VALUES[sample.values], sample.shapes or ((3, 4),)
    drawn = [values(RANDOM, size).astype("f4") for size in sizes]
    count = len(drawn) - sample.parameters

    def compute(m, *given):
        return sample.call(*given[:count], *m.weights, *given[count:])

    model = Own(compute, weights=[nn.Parameter(x.shape, nn.Constant(0)) for x in drawn[count:]])
    model.initialize(seed=0)
    for parameter, x in zip(model.weights, drawn[count:], strict=True):
        parameter.data[...] = x

    def batch(n):
        rows = [values(RANDOM, (n, *x.shape[1:])).astype("f4") for x in drawn[:count]]
        fixed = [x.astype("f4") if x.dtype.kind == "f" else x for x in sample.arrays]
        return *rows, *(np.resize(x, (n, *x.shape[1:])) for x in fixed)

    return model, batch


@pytest.mark.parametrize(("kind", "sample"), **EACH)
def test_a_sample(kind, sample, tmp_path):
    """Each operation's own: the runtime computes it, or its traits say that nothing does."""
    (model, batch), file = sampled(kind, sample), tmp_path / "x.onnx"
    if isinstance(kind.traits.onnx, NotExported):
        name = kind.__name__.removesuffix("Function")
        refuses(NnmpiError, rf"{name} \(.* has no counter", nnmpi.to_onnx, model, batch(1), file)
        return
    nnmpi.to_onnx(model, batch(1), file)
    made = onnx.load(file)
    onnx.checker.check_model(made, full_check=True)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for n in (1, 4):
        inputs = batch(n)
        given = {x.name: y for x, y in zip(made.graph.input, inputs, strict=True)}
        (found,) = session.run(None, given)
        right = model(*(Tensor(x) if x.dtype.kind == "f" else x for x in inputs)).numpy()
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_every_operation_that_is_exported_is_tried():
    """By the tests above; and what its traits leave to a writer has one."""
    exported = {
        kind for kind in OPERATIONS.values() if not isinstance(kind.traits.onnx, NotExported)
    }
    models = [*map(case, CASES), *(sampled(*item) for item in SAMPLES if item[0] in exported)]
    traced = (trace(model, batch(1))[0] for model, batch in models)
    assert exported <= {type(item.function) for applied in traced for item in applied}
    assert {kind for kind in exported if kind.traits.onnx is WRITTEN} == WRITERS.keys()


class Doubled(Function):
    def forward(self, x):
        return x * 2


class Tripled(AsType):
    """Inherits the traits of another operation."""

    def forward(self, x):
        return x * 3


def squared(x, keep):
    """An activation of one's own."""
    return x * x, 2 * x


HERE = r"test_onnx\.py:\d+\)"
REFUSED = {
    "a Function": (lambda m, x: Doubled()(x), rf"the operation Doubled \(.*{HERE} has no counter"),
    "what inherits": (
        lambda m, x: Tripled(x.dtype)(x),
        rf"the operation Tripled \(.*{HERE} has no counter",
    ),
    "an own activation": (
        lambda m, x: activated(Activation("mine", squared, Saves.DERIVATIVE, None, ""), x),
        rf"the activation mine \(.*{HERE} has no counterpart",
    ),
    "a slice of the batch": (lambda m, x: x[:3], "other operations for 3 rows than for 2"),
    "a sort of the batch": (lambda m, x: x.sort(0), rf"a sort over the batch \(.*{HERE} has no"),
    "a row of the batch": (lambda m, x: x[-2::-1], rf"numbers that depend on the batch.*{HERE}"),
    "no rows": (lambda m, x: x[:, -9::-1], rf"a slice without elements \(.*{HERE} has"),
    "no elements": (lambda m, x: x[:, :0].reshape(len(x), 0), rf"without elements \(.*{HERE} has"),
    "a cache": (
        lambda m, x: ops.attention(x[:, None], 1, before=KeyValues()),
        rf"a cache .*{HERE} has no",
    ),
    "a loss": (lambda m, x: ops.mse(x, x), rf"the operation Elementwise.*{HERE} has no"),
    "dropout": (lambda m, x: ops.dropout(x, key=(1, 2)), rf"the operation Dropout \(.*{HERE} has"),
    "booleans": (lambda m, x: x[:, np.array([True, False, True])], rf"index of booleans.*{HERE}"),
    "values": (
        lambda m, x: x * float(x.data.max()),
        rf"array \(data\) in a forward .*{HERE}; comp",
    ),
    "a number": (lambda m, x: x * x.sum().item(), rf"a tensor's number .*{HERE}; compute with"),
    "a comparison": (lambda m, x: where(x > 0, x, 0.0), rf"a comparison in a forward.*{HERE}"),
    "a mean by hand": (lambda m, x: x / len(x), rf"numbers that depend on the batch \(.*{HERE}"),
    "a loop": (lambda m, x: sum((x[i] for i in range(len(x))), x), "other operations for 3 rows"),
    "no tensor": (lambda m, x: {"y": x}, "returns a tensor or several; this one returns {'y'"),
}


def test_a_function_without_an_operator_is_refused(tmp_path, monkeypatch):
    """It is not taken for an operator of its name."""
    rules = {**RULES, "exp": RULES["exp"]._replace(onnx="")}
    monkeypatch.setattr("nnmpi.tensor.elementwise.RULES", rules)
    model = Own(lambda m, x: x.exp()).initialize(seed=0)
    refuses(
        NnmpiError,
        "exp \\(",
        lambda: nnmpi.to_onnx(model, np.ones((2, 3), "f4"), tmp_path / "x.onnx"),
    )


def test_experts_of_other_ranks_are_refused():
    """A file has those of this rank alone."""
    function = Experts(Gate(1, None, 0.0), "ranks", None, int)
    x = GraphValue(OnnxGraph(), np.ones((1, 2, 3), "f4"))
    refuses(
        NnmpiError,
        "over several ranks has no counterpart",
        converted,
        x.graph,
        function,
        x.like,
        [x],
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path):
    """In one sentence, with the line; and no file is left."""
    compute, sentence = REFUSED[name]
    refuses(
        NnmpiError,
        sentence,
        lambda: nnmpi.to_onnx(
            Own(compute).initialize(seed=0), np.ones((2, 3), "f4"), tmp_path / "x.onnx"
        ),
    )
    assert not list(tmp_path.iterdir())


def test_a_base_in_bfloat16_is_refused(tmp_path):
    model = nn.adapt(models.gpt(65, 16, 32, 2, 4), 2, base_dtype="bf16").initialize(seed=0)
    given = model, np.zeros((1, 16), int), tmp_path / "x.onnx"
    refuses(NnmpiError, "KeptWeight .*with its adapters merged", nnmpi.to_onnx, *given)


def test_arguments(tmp_path, monkeypatch):
    model, x = models.mlp((4,), 3).initialize(seed=0), np.ones((1, 4), "f4")
    for sample, file, channels, sentence, patch in (
        (x[:0], "a", "last", "a sample is an array with a row", {}),
        (x, "a", "middle", "channels is 'first' or 'last', not 'middle'", {}),
        (x, "none/a", "last", "cannot be written", {}),
        (x, "a", "last", "does not fit an ONNX file", {"LARGEST": 100}),
        (x, "a", "last", "pip install onnx", {"find_spec": lambda name: None}),
    ):
        for name, value in patch.items():
            monkeypatch.setattr(f"nnmpi.lab.onnx.export.{name}", value)
        refuses(
            NnmpiError, sentence, nnmpi.to_onnx, model, sample, tmp_path / file, channels=channels
        )


def test_a_run(tmp_path, monkeypatch, capfd):
    """Its file has the data's scale and classes, and predicts as the run does, in its units."""

    def call(command, words):
        nnmpi.simulate(lambda group: command(words.split(), group), 1)

    monkeypatch.chdir(tmp_path)
    x = RANDOM.random((40, 6, 6, 1)).astype("f4")
    np.savez("numbers.npz", x=x, y=500 + 200 * x.sum((1, 2, 3)))
    for data, model in (("digits", "cnn"), ("numbers.npz", "cnn --loss mse")):
        folder = data[:3]
        call(train, f"--dataset {data} --model {model} --hidden 8 --epochs 1 --out {folder}")
        call(export, f"{folder} --format onnx --channels first")
        assert f"nodes of ONNX are in {folder}/model.onnx" in capfd.readouterr().out
        run, session = nnmpi.load(folder), runtime.InferenceSession(f"{folder}/model.onnx")
        samples = RANDOM.random((5, *run.signature.sample_shape)).astype("f4")
        (found,) = session.run(None, {"input": run.transform(samples).transpose(0, 3, 1, 2)})
        right = run.predict(samples)
        if data == "digits":
            found = np.exp(found) / np.exp(found).sum(1, keepdims=True)
        np.testing.assert_allclose(found.reshape(right.shape), right, rtol=1e-5)
        (kept,) = session.get_modelmeta().custom_metadata_map.values()
        signature = json.loads(kept)["signature"]
        assert signature["scale"] == run.signature.scale
        assert signature["class_names"] == [*run.signature.class_names]
    refuses(NnmpiError, "for --format onnx", call, export, f"{folder} --channels first")
