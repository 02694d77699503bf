"""The layers of the zoo's models for JAX, by PyTorch's names, so that one text makes both.

A layer holds its parameters and its running statistics. `make_step` hands traced ones to all
layers while JAX traces the model, so that `jit` and `grad` see a function of them. Images are
(batch, height, width, channels), the order in which XLA's convolutions are fastest on a processor.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

IMAGES = ("NHWC", "HWIO", "NHWC")
init = initializers.he_normal()


class Module:
    """A layer; `keys` gives one key for each random draw of a step."""

    made: list["Module"] = []  # every layer of the model, in the order in which they were made
    keys: Any = None

    def __init__(self) -> None:
        self.p: dict[str, Any] = {}
        self.s: dict[str, Any] = {}
        Module.made.append(self)

    def forward(self, x: Any) -> Any:
        """Return the layer's output."""
        raise NotImplementedError

    def __call__(self, x: Any) -> Any:
        return self.forward(x)

    def draw(self) -> Any:
        """Return a key for this layer's random numbers in this step."""
        return jax.random.fold_in(Module.keys, Module.made.index(self))


def weight(*shape: int) -> Any:
    """Return first values of the size of He et al.'s; times do not depend on them."""
    return init(jax.random.key(len(Module.made)), shape, jnp.float32)


class Sequential(Module):
    """Layers one after another."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Function(Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.forward = function


class Linear(Module):
    """x @ w + b."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.p = {"w": weight(inputs, outputs)} | ({"b": jnp.zeros(outputs)} if bias else {})

    def forward(self, x: Any) -> Any:
        return x @ self.p["w"] + self.p.get("b", 0)


class Conv2d(Module):
    """A convolution with zeros around it."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.stride, self.padding, self.groups = stride, padding, groups
        self.p = {"w": weight(kernel, kernel, inputs // groups, outputs)}
        self.p |= {"b": jnp.zeros(outputs)} if bias else {}

    def forward(self, x: Any) -> Any:
        strides, pads = (self.stride,) * 2, ((self.padding,) * 2,) * 2
        y = lax.conv_general_dilated(x, self.p["w"], strides, pads, None, None, IMAGES, self.groups)
        return y + self.p.get("b", 0)


class ConvTranspose2d(Conv2d):
    """The transposed convolution: the input is dilated by the stride."""

    def forward(self, x: Any) -> Any:
        pads = ((self.p["w"].shape[0] - 1 - self.padding,) * 2,) * 2
        strides = (self.stride,) * 2
        y = lax.conv_general_dilated(x, self.p["w"], (1, 1), pads, strides, None, IMAGES)
        return y + self.p["b"]


class BatchNorm2d(Module):
    """Batch normalization over all axes but the last one, with running statistics."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.p = {"w": jnp.ones(features), "b": jnp.zeros(features)}
        self.s = {"mean": jnp.zeros(features), "var": jnp.ones(features)}

    def forward(self, x: Any) -> Any:
        axes = tuple(range(x.ndim - 1))
        mean, var = x.mean(axes), x.var(axes)
        self.s = {
            "mean": 0.9 * self.s["mean"] + 0.1 * mean,
            "var": 0.9 * self.s["var"] + 0.1 * var,
        }
        return (x - mean) * (lax.rsqrt(var + 1e-5) * self.p["w"]) + self.p["b"]


class LayerNorm(Module):
    """Layer normalization over the last axis."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.p = {"w": jnp.ones(features), "b": jnp.zeros(features)}

    def forward(self, x: Any) -> Any:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * self.p["w"] + self.p["b"]


class Dropout(Module):
    """Zeros with this probability, the rest larger."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.keep = 1 - p

    def forward(self, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(self.draw(), self.keep, x.shape), x / self.keep, 0)


class Embedding(Module):
    """A table of vectors."""

    def __init__(self, count: int, features: int) -> None:
        super().__init__()
        self.p = {"w": weight(count, features)}

    def forward(self, x: Any) -> Any:
        return self.p["w"][x]


class Lstm(Module):
    """One layer of long short-term memory over (batch, time, features), from zeros."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.p = {"x": weight(features, 4 * features), "h": weight(features, 4 * features)}
        self.p["b"] = jnp.zeros(4 * features)

    def forward(self, x: Any) -> Any:
        def cell(state: Any, gates_x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(gates_x + h @ self.p["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], x.shape[2]))
        gates = (x @ self.p["x"] + self.p["b"]).swapaxes(0, 1)
        return lax.scan(cell, (zeros, zeros), gates)[1].swapaxes(0, 1)


class Block(Module):
    """The pre-LN transformer block, causal."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv = LayerNorm(features), Linear(features, 3 * features)
        self.proj, self.norm2 = Linear(features, features), LayerNorm(features)
        self.fc1, self.fc2 = Linear(features, 4 * features), Linear(4 * features, features)

    def forward(self, x: Any) -> Any:
        q, k, v = (
            part.reshape(*x.shape[:2], self.heads, -1)
            for part in jnp.split(self.qkv(self.norm1(x)), 3, -1)
        )
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.reshape(x.shape))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x))))


def max_pool(size: int) -> Module:
    """Return max-pooling of size x size places."""
    window = (1, size, size, 1)
    return Function(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"))


def flatten() -> Module:
    """Return the layer that makes a row of each sample."""
    return Function(lambda x: x.reshape(x.shape[0], -1))


def gpt(vocabulary: int, context: int, features: int, layers: int, heads: int) -> Module:
    """Return GPT-2 with tied tables."""
    table, positions = Embedding(vocabulary, features), Embedding(context, features)
    blocks = [Block(features, heads) for _ in range(layers)]
    inside = Sequential(*blocks, LayerNorm(features))
    return Function(lambda x: inside(table(x) + positions.p["w"][: x.shape[1]]) @ table.p["w"].T)


def lstm(vocabulary: int, features: int, layers: int) -> Module:
    """Return layers of long short-term memory between untied tables."""
    inside = [Lstm(features) for _ in range(layers)]
    return Sequential(Embedding(vocabulary, features), *inside, Linear(features, vocabulary))


def library() -> SimpleNamespace:
    """Return what the zoo's models ask of a library."""
    layers = SimpleNamespace(
        **{
            item.__name__: item
            for item in (Module, Sequential, Linear, Conv2d, ConvTranspose2d, BatchNorm2d, Dropout)
        },
        BatchNorm1d=BatchNorm2d,
        MaxPool2d=max_pool,
        ReLU=lambda: Function(jax.nn.relu),
        Flatten=flatten,
    )
    end = lambda width: (Function(lambda x: x.mean((1, 2))), Linear(width, 10))  # noqa: E731
    join = lambda a, b: jnp.concatenate((a, b), -1)  # noqa: E731
    return SimpleNamespace(nn=layers, relu=jax.nn.relu, join=join, end=end, gpt=gpt, lstm=lstm)


def make_step(model: Module, x: Any, y: Any) -> Callable[[], object]:
    """Return a training step with AdamW, compiled, which waits for its loss."""

    def mean_loss(params: Any, states: Any, key: Any, x: Any, y: Any) -> Any:
        Module.keys = key
        for layer, p, s in zip(Module.made, params, states, strict=True):
            layer.p, layer.s = p, s
        rows = jax.nn.log_softmax(model(x).reshape(y.size, -1))
        loss = -jnp.take_along_axis(rows, y.reshape(-1, 1), 1).mean()
        return loss, [layer.s for layer in Module.made]

    def update(w: Any, g: Any, m: Any, v: Any, t: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        scaled = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return w * (1 - 1e-3 * 0.01) - 1e-3 * scaled, m, v

    def step(params: Any, moments: Any, states: Any, t: Any, x: Any, y: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), t)
        (loss, states), grads = jax.value_and_grad(mean_loss, has_aux=True)(
            params, states, key, x, y
        )
        flat, tree = jax.tree.flatten(params)
        parts = zip(flat, jax.tree.leaves(grads), *map(jax.tree.leaves, moments), strict=True)
        new = [update(w, g, m, v, t + 1.0) for w, g, m, v in parts]
        params, *moments = (tree.unflatten(column) for column in zip(*new, strict=True))
        return params, moments, states, t + 1, loss

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    params = [layer.p for layer in Module.made]
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    held = [params, zeros, [layer.s for layer in Module.made], jnp.int32(0)]
    x, y = jnp.asarray(x), jnp.asarray(y)

    def run() -> object:
        *held[:], loss = compiled(*held, x, y)
        return float(loss)

    return run
