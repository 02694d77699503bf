"""Models as ONNX files, beside onnxruntime: what they compute, are called, and are refused for."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnmpi
from benchmarks.training import models as written
from benchmarks.training.zoo import MODELS, TEXT
from nnmpi import Tensor, models, nn, ops
from nnmpi.base.errors import NnmpiError
from nnmpi.commands.export import main as export
from nnmpi.lab.onnx.operators import ROWS
from nnmpi.tensor import concatenate, maximum, where
from nnmpi.tensor.function import Function
from nnmpi.train.cli import main as train

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

RANDOM = np.random.default_rng(0)
TABLE = RANDOM.standard_normal((7, 4)).astype("f4")
MIXTURE = {"experts": 4, "top_k": 2, "capacity": 0.8}
ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (partial(f, written.our_library()), shape) for name, (f, shape) in MODELS.items()},
    "models.mlp": (partial(models.mlp, (4,), 3), (1, 4)),
    "models.cnn": (partial(models.cnn, (28, 28, 1), 10), (1, 28, 28, 1)),
    "models.resnet": (partial(models.resnet, (32, 32, 3), 10), (1, 32, 32, 3)),
    "models.lstm": (partial(models.lstm, 65, 32, 2), (1, 90)),
    "models.gpt": (partial(models.gpt, 65, 16, 32, 2, 4), (1, 16)),
    "models.gpt, experts": (partial(models.gpt, 65, 16, 32, 2, 4, **MIXTURE), (1, 16)),
}


class Own(nn.Module):
    """A forward of one's own, with the layers that it uses.

    Args:
        compute: (module, *inputs) -> results.
        layers: by name.
    """

    def __init__(self, compute: Callable[..., Any], **layers: nn.Module) -> None:
        self.compute = compute
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.compute(self, *inputs)


def ends(m: Any, x: Tensor) -> Any:
    """Return an LSTM's states, begun from zeros of the batch's length."""
    zeros = np.zeros((2, len(x), 5), "f4")
    h, (last, c) = m.a.with_state(x, (Tensor(zeros), Tensor(zeros)))
    return h, last[0], c[1]


def cells(m: Any, x: Tensor) -> Tensor:
    h, c = m.a(x[:, 0], (Tensor(np.ones((len(x), 5), "f4")), Tensor(np.zeros((len(x), 5), "f4"))))
    return h + m.a(x[:, 1], (h, c))[0] + m.b(x[:, 2], h) + m.c(x[:, 1], h)


# a forward, its layers, the shape of a sample (text for tokens)
OWN: dict[str, tuple[Callable[..., Any], dict[str, nn.Module], tuple[int, ...]]] = {
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
                      + x.min(2)[:, :1] + x.var(2, correction=0)[:, 1:2]),
        {}, (3, 4),
    ),
    "shapes": (
        lambda m, x: concatenate(
            [x[:, 1:, ::-1], x[:, :2].pad(((0, 0), (0, 1), (0, 0)), 2.0)[:, 1:],
             x.transpose(0, 2, 1).reshape(len(x), 3, 4)[:, :2], x[:, -1][:, None],
             x[:len(x), [2, 0]], x[:, np.array([1])].astype("float64").astype("float32")], 1),
        {}, (3, 4),
    ),
    "products": (
        lambda m, x: x.swapaxes(1, 2) @ x @ TABLE[:4] + m.a.weight + m.b(x.reshape(len(x), 12))[0],
        {"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(12, 4)}, (3, 4),
    ),
    "activations": (
        lambda m, x: ops.gelu(x) + ops.gelu(x, "tanh") + ops.silu(x) + ops.elu(x, 0.7) + ops.tanh(x)
        + ops.leaky_relu(x, 0.2) + ops.softplus(x, 2.0) + ops.sigmoid(x) + ops.softmax(x)
        + ops.log_softmax(x, 1),
        {}, (3, 4),
    ),
    "fused": (
        lambda m, x: ops.linear_gelu(
            ops.conv_relu_pool(x, m.a.weight, m.a.bias, padding=1).mean((1, 2)),
            m.b.weight, m.b.bias, "tanh"),
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
        lambda m, x: concatenate([m.a(x).reshape(len(x), -1), m.b(x).flatten(), m.c(x)], 1),
        {"a": nn.AdaptiveAvgPool2d((2, 3)), "b": nn.AdaptiveAvgPool2d(2),
         "c": nn.GlobalAvgPool2d()}, (6, 6, 2),
    ),
    "sequences": (
        lambda m, x: m.d(m.c(m.b(m.a(x)))) + m.e(x),
        {"a": nn.Conv1d(4, 4, 3, padding=1), "b": nn.BatchNorm1d(4), "c": nn.RMSNorm(4),
         "d": nn.LayerNorm((6, 4)), "e": nn.MultiheadAttention(4, 2)}, (6, 4),
    ),
    "attention": (
        lambda m, x: ops.scaled_dot_product_attention(x, x * 2, x + 1, causal=True), {}, (2, 5, 3),
    ),
    "volumes": (lambda m, x: m.a(x), {"a": nn.Conv3d(2, 3, 2, padding=1)}, (3, 4, 4, 2)),
    "recurrent": (
        lambda m, x: m.a(x) + m.b(x) + m.c(x),
        {"a": nn.LSTM(3, 4, 2, bidirectional=True), "b": nn.GRU(3, 8, 2), "c": nn.RNN(3, 8)},
        (6, 3),
    ),
    "states": (ends, {"a": nn.LSTM(3, 5, 2)}, (4, 3)),
    "cells": (
        cells,
        {"a": nn.LSTMCell(3, 5), "b": nn.GRUCell(3, 5), "c": nn.RNNCell(3, 5, "relu")}, (4, 3),
    ),
    "lengths": (
        lambda m, x, n: m.a(x, lengths=n), {"a": nn.LSTM(3, 4, bidirectional=True)}, (6, 3)
    ),
    "two inputs": (lambda m, x, y: (x * 2, y + m.a(x)), {"a": nn.Linear(3, 3)}, (3,)),
}  # fmt: skip


def draw(shape: tuple[int, ...], text: bool) -> Any:
    return RANDOM.integers(0, 65, shape) if text else RANDOM.standard_normal(shape).astype("f4")


def planes(x: Any, moved: bool) -> Any:
    return x.transpose(0, 3, 1, 2) if moved and x.ndim == 4 else x


def compare(
    file: Path, model: nn.Module, sample: Any, batch: Callable[[int], Any], channels: str = "last"
) -> Any:
    """Export a model, compare it for three batch sizes, and return the file's model."""
    nodes = nnmpi.to_onnx(model, sample, file, channels=channels)
    made = onnx.load(file)
    onnx.checker.check_model(made, full_check=True)
    assert nodes == len(made.graph.node)
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for n in (1, 4, 7):
        inputs = batch(n) if isinstance(sample, tuple) else (batch(n),)
        names = [x.name for x in session.get_inputs()]
        given = [planes(x, channels == "first") for x in inputs]
        found = session.run(None, dict(zip(names, given, strict=True)))
        right = model(*map(Tensor, inputs))
        right = right if isinstance(right, tuple) else (right,)
        for ours, theirs in zip(right, found, strict=True):
            expected = planes(ours.numpy(), channels == "first")
            np.testing.assert_allclose(theirs, expected, rtol=0, atol=1e-5)
    used = {x for node in made.graph.node for x in node.input}
    assert {x.name for x in made.graph.initializer} <= used
    return made


@pytest.mark.parametrize("channels", ["last", "first"])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(name: str, channels: str, tmp_path: Path) -> None:
    """Its parameters are called as they are, and the first axis is any batch's."""
    make, (_, *shape) = ZOO[name]
    text = name in TEXT or name.startswith(("models.lstm", "models.gpt"))
    model = make().initialize(seed=0)
    of_one = np.zeros((1, *shape), int if text else "f4")
    batch = lambda n: draw((n, *shape), text)  # noqa: E731
    made = compare(tmp_path / "x.onnx", model, of_one, batch, channels)
    names = {x.name for x in made.graph.initializer}
    assert {name for name, _ in model.named_parameters()} <= names
    assert made.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("channels", ["last", "first"])
@pytest.mark.parametrize("name", OWN)
def test_a_forward_of_ones_own(name: str, channels: str, tmp_path: Path) -> None:
    compute, layers, shape = OWN[name]
    model = Own(compute, **layers).initialize(seed=0)
    for _, buffer in model.named_buffers():
        buffer.data = (buffer.data + RANDOM.random(buffer.shape)).astype("f4")
    second = {
        "lengths": lambda n: RANDOM.integers(1, 7, n),
        "two inputs": lambda n: draw((n, 3), False),
    }

    def batch(n: int) -> Any:
        x = draw((n, *shape), False)
        return (x, second[name](n)) if name in second else x

    compare(tmp_path / "x.onnx", model, batch(2), batch, channels)


def test_every_row_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the two tests above: no row is left that they do not need."""
    seen: set[type[Function]] = set()
    rows = {kind: _noted(row, kind, seen) for kind, row in ROWS.items()}
    monkeypatch.setattr("nnmpi.lab.onnx.export.ROWS", rows)
    for name in OWN:
        test_a_forward_of_ones_own(name, "last", tmp_path)
    for name in ("models.gpt, experts", "char-lstm"):
        test_the_zoo(name, "last", tmp_path)
    assert not {kind.__name__ for kind in ROWS.keys() - seen}


def _noted(row: Any, kind: type[Function], seen: set[type[Function]]) -> Any:
    def noted(*given: Any) -> Any:
        seen.add(kind)
        return row(*given)

    return noted


class Doubled(Function):
    def forward(self, x: Any) -> Any:
        return x * 2


HERE = r"test_onnx\.py:\d+\)"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a Function": (lambda m, x: Doubled()(x), rf"the operation Doubled \(.*{HERE} has no counter"),
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    """In one sentence, with the line; and no file is left."""
    compute, sentence = REFUSED[name]
    with pytest.raises(NnmpiError, match=sentence):
        nnmpi.to_onnx(Own(compute).initialize(seed=0), np.ones((2, 3), "f4"), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.mlp((4,), 3).initialize(seed=0)
    x = np.ones((1, 4), "f4")
    for sample, file, words, sentence in (
        (x[:0], "a", {}, "a sample is an array with a row"),
        (x, "a", {"channels": "middle"}, "channels is 'first' or 'last', not 'middle'"),
        (x, "none/a", {}, "cannot be written"),
    ):
        with pytest.raises(NnmpiError, match=sentence):
            nnmpi.to_onnx(model, sample, tmp_path / file, **words)  # type: ignore[arg-type]
    monkeypatch.setattr("nnmpi.lab.onnx.export.LARGEST", 100)
    with pytest.raises(NnmpiError, match="does not fit an ONNX file"):
        nnmpi.to_onnx(model, x, tmp_path / "a")
    monkeypatch.setattr("nnmpi.lab.onnx.export.find_spec", lambda name: None)
    with pytest.raises(NnmpiError, match=r"pip install onnx"):
        nnmpi.to_onnx(model, x, tmp_path / "a")


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Its file has the data's scale and classes, and predicts as the run does, in its units."""
    monkeypatch.chdir(tmp_path)
    x = draw((40, 6, 6, 1), False)
    np.savez("numbers.npz", x=x, y=(500 + 200 * x.sum((1, 2, 3))).astype("f4"))
    for data, model in (("digits", "cnn"), ("numbers.npz", "cnn --loss mse")):
        folder = data[:3]
        words = f"--dataset {data} --model {model} --hidden 8 --epochs 1 --out {folder}"
        nnmpi.simulate(lambda group, words=words: train(words.split(), group), 1)
        line = f"{folder} --format onnx --channels first"
        nnmpi.simulate(lambda group, line=line: export(line.split(), group), 1)
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
    with pytest.raises(NnmpiError, match="for --format onnx"):
        nnmpi.simulate(lambda group: export([folder, "--channels", "first"], group), 1)
