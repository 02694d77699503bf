"""Inference with a distributed model: forward passes without an optimizer, and text generation.

x  --> all stages -->  outputs on the last one  --> every rank of the replica has them

Text is generated token by token, and every rank takes part in every token:

    prompt  t0 t1 t2  --> all stages, once -->  logits of t2  --> t3 is drawn
    t3                --> all stages       -->  logits of t3  --> t4

Layers keep keys and values for later tokens: `ops.attention.KeyValues`. When the context is full,
the cache is cleared, and the last half of the context is read again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.kernels import to_float32
from nnmpi.backend.precision import use_precision
from nnmpi.base.errors import DivergenceError, UsageError, counted
from nnmpi.base.shard import split
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.executor import Executor
from nnmpi.compose.walk import Pass
from nnmpi.nn.compiled import Compiled
from nnmpi.nn.mode import continued, evaluation
from nnmpi.ops.collectives import gather
from nnmpi.parallel.pipeline.stage import run_whole
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.placement import features
from nnmpi.tensor.tensor import Tensor


class _ForwardPass(Pass):
    """A forward pass; its outputs are those of the last stage, by microbatch.

    Args:
        executor, inputs, length: see `Pass`.
        mode: see `Inference`.
        keep: (result) -> what is kept of it.
    """

    def __init__(
        self,
        executor: Executor,
        inputs: Sequence[Array],
        length: int,
        mode: Callable[[], AbstractContextManager[Any]],
        keep: Callable[[Array], Array],
    ) -> None:
        super().__init__(executor, inputs, length=length)
        self._mode, self._keep = mode, keep
        self.kept: dict[int, Array] = {}

    def mode(self, microbatch: int, recomputing: bool) -> AbstractContextManager[Any]:
        """See `Pass`."""
        return self._mode()

    def head(self, microbatch: int, result: Tensor) -> Tensor:
        """See `Pass`."""
        result = self.executor.whole(result, self.length)
        self.kept[microbatch] = self._keep(result._data)
        return result


class Inference:
    """Computes a model's outputs. Making and calling it are collective over a replica's ranks.

    Args:
        arrangement: of an initialized model.
        backend: of the computation.
        precision: of products.
        mode: returns the context in which layers are called.
        last: whether to return only the outputs of each sequence's last position.

    Attributes:
        model: computes the result of a model without cuts; an equivalent function may replace it.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        backend: Backend,
        precision: str = "float32",
        mode: Callable[[], AbstractContextManager[Any]] = evaluation,
        last: bool = False,
    ) -> None:
        self.model: Callable[..., Any] = arrangement.model
        self._arrangement = arrangement
        self._backend = backend
        self._precision = precision
        self._last = last
        self._mode = mode
        # the outputs' dtype and shape, by the input's shape
        self._signatures: dict[tuple[int, ...], list[Any]] = {}
        self._executor = Executor(arrangement, backend, run_whole(lambda x: self.model(x)))

    def __call__(self, x: Array) -> Array:
        """Return the outputs for samples, in host memory, on all ranks of the replica. Collective.

        Args:
            x: (rows, *sample_shape), at least one row, the same on all ranks of the replica.
        """
        arrangement, shape, length = self._arrangement, x.shape, 0
        if "storage" in vars(arrangement.model):
            arrangement.model.storage.check_tree()
        if arrangement.sequence is not None:
            length, x = x.shape[1], arrangement.sequence.take(x)
        batch = self._backend.asarray(x)
        cuts = split(len(x), min(len(x), max(len(arrangement.cuts), 1)))
        inputs = [batch[cut.start : cut.stop] for cut in cuts]
        now = _ForwardPass(self._executor, inputs, length, self._mode, self._keep)
        with use_precision(self._precision), no_grad():
            now.run()
        local = np.concatenate([part for _, part in sorted(now.kept.items())]) if now.kept else None
        return self._broadcast(self._complete(local, length), shape)

    def release(self) -> None:
        """Free the communicator. Collective."""
        self._executor.free()

    def _keep(self, result: Array) -> Array:
        """Return the expected outputs of a result, in host memory."""
        expected = to_float32(result[:, -1:] if self._last else result)
        return np.array(Tensor(expected).numpy(), order="C")

    def _complete(self, local: Array | None, length: int) -> Array | None:
        """Return the outputs of all classes and positions on the last stage; None elsewhere."""
        tp = self._arrangement.mesh.tp
        classes = self._arrangement.classes
        sequence = self._arrangement.sequence
        if local is None:
            return None
        with no_grad():
            outputs = Tensor(local)
            if classes:
                outputs = gather(outputs, tp, features(classes))
            if sequence is not None:
                outputs = sequence.gather(outputs, sequence.placement(length))
            return outputs.numpy()

    def _broadcast(self, outputs: Array | None, shape: tuple[int, ...]) -> Array:
        """Return the last stage's outputs on all ranks of the pipeline."""
        pp = self._arrangement.mesh.pp
        if pp.size == 1:
            assert outputs is not None
            return outputs
        root = self._arrangement.layout.home(len(self._arrangement.cuts) - 1, pp.size)
        if shape not in self._signatures:
            self._signatures[shape] = pp.gather(
                None if outputs is None else [str(outputs.dtype), *outputs.shape]
            )[root]
        dtype, *expected = self._signatures[shape]
        result = np.empty(expected, dtype) if outputs is None else outputs
        pp.broadcast(result.reshape(-1), root, check=False)
        return result


def nonfinite_rows(outputs: Array) -> int:
    """Return the number of rows, (rows, ...), with NaN or infinity."""
    return len(outputs) - int(np.isfinite(outputs.reshape(len(outputs), -1)).all(axis=1).sum())


def check_finite(outputs: int, wrong: float) -> None:
    """Refuse predictions that are not finite: they have no class, no probability, no error.

    Args:
        outputs: the number of samples.
        wrong: how many of them have an output with NaN or infinity.

    Raises:
        DivergenceError: for any.
    """
    if wrong:
        raise DivergenceError(
            f"the model's outputs for {wrong:.0f} of {counted(outputs, 'sample')} are not finite;"
            " use other weights, such as an older checkpoint's, or float64"
        )


# ---- text ----


class TokenGenerator:
    """Generates text. Making one is collective.

    Args:
        arrangement: of an initialized model.
        backend: of the computation.
        precision: of products.
    """

    def __init__(
        self, arrangement: Arrangement, backend: Backend, precision: str = "float32"
    ) -> None:
        self._memory: dict[str, Any] = {}
        self._model = arrangement.model
        self._inference = Inference(
            arrangement, backend, precision, lambda: continued(self._memory), last=True
        )

    def write(
        self, prompt: Sequence[int], context: int | None, choose: Callable[[Array], int]
    ) -> Iterator[int]:
        """Yield one token after another, without end. Collective.

        Args:
            prompt: the tokens at the beginning.
            context: the maximum number of tokens that the model sees; None for no limit.
            choose: (logits) -> token; must return the same token on all ranks.

        Raises:
            UsageError: for an empty prompt, or a prompt longer than the context.
        """
        if not prompt:
            raise UsageError("the prompt is empty; give at least one token")
        if context is not None and len(prompt) > context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, but the model sees at most {context};"
                " shorten it"
            )
        tokens, read = list(prompt), 0
        while True:
            if context is not None and len(tokens) > context:
                tokens, read = tokens[-max(1, context // 2) :], 0
            if not read:
                self._memory.clear()
                # a new one, because a recording refers to the keys and values just cleared
                self._inference.model, compiled = self._model, Compiled(self._model)
            logits = self._inference(np.array([tokens[read:]], np.int64))[0, -1]
            # single tokens make the same calls each time, so they are compiled
            self._inference.model, read = compiled, len(tokens)
            tokens.append(choose(logits.astype(np.float64)))
            yield tokens[-1]

    def release(self) -> None:
        """Free the communicator. Collective."""
        self._inference.release()


def choose_token(
    logits: Array,
    draw: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """Draw a token with the probabilities softmax(logits / temperature).

    Args:
        logits: (vocabulary,).
        draw: the source of the one random number.
        temperature: below 1, likely tokens become likelier; 0 chooses the likeliest.
        top_k: draw from this many of the likeliest tokens; 0 for all.
        top_p: draw from the fewest likeliest tokens whose probabilities add up to this (Holtzman et
            al., "The curious case of neural text degeneration", 2020); 1 for all.

    Raises:
        DivergenceError: for logits that are not finite, which have no likeliest token.
    """
    if not np.isfinite(logits).all():
        raise DivergenceError(
            "the model's outputs are not finite, so no token can be drawn; use other weights"
        )
    if temperature == 0:
        return int(logits.argmax())
    candidates = (
        np.argpartition(-logits, top_k - 1)[:top_k]
        if 0 < top_k < len(logits)
        else np.arange(len(logits))
    )
    if top_p < 1:  # only then: sorting the vocabulary takes longer than the rest of this function
        candidates = candidates[np.argsort(-logits[candidates], kind="stable")]
    with np.errstate(over="ignore"):  # a very small temperature overflows
        weights = np.exp((logits[candidates] - logits.max()) / temperature)
    if top_p < 1:
        before = np.cumsum(weights) - weights  # the weights of all likelier tokens
        weights[before >= top_p * weights.sum()] = 0
    sums = np.cumsum(weights)
    return int(
        candidates[
            min(
                int(np.searchsorted(sums, draw.random() * sums[-1], side="right")),
                len(candidates) - 1,
            )
        ]
    )
