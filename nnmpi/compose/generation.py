"""Text generation, token by token, with a model, wherever its parts lie: every rank takes part in every token.

    prompt  t0 t1 t2  --> all stages, once -->  logits of t2  --> t3 is drawn      layers keep what later tokens need:
    t3                --> all stages       -->  logits of t3  --> t4               `ops.attention.KeyValues`

When the context is full, the last half of it is read again as a new beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import to_float32
from nnmpi.compose.arrange import Arrangement
from nnmpi.compose.executor import Executor
from nnmpi.errors import DivergenceError, UsageError
from nnmpi.nn.compiled import Compiled
from nnmpi.nn.mode import continued
from nnmpi.parallel.pipeline.stage import Scope
from nnmpi.shard import part
from nnmpi.tensor.function import no_grad
from nnmpi.tensor.tensor import Tensor


class TokenGenerator:
    """Gives the logits of the next token, again and again. Making one is collective.

    Args:
        where: the arrangement of a model that has its values.
        backend: where it computes.
        vocabulary: how many tokens there are.
    """

    def __init__(self, where: Arrangement, backend: Backend, vocabulary: int) -> None:
        self._where, self._backend, self.vocabulary = where, backend, vocabulary
        self._memory: dict[str, Any] = {}
        self._again = Compiled(where.model)  # one token behind others: the same calls each time
        self._logits: Array | None = None
        self._model: Callable[..., Any] = where.model
        scope: Scope = lambda _microbatch, _again: continued(self._memory)  # noqa: E731 - it is one word
        self._executor = Executor(lambda x: self._model(x), where, backend, scope, self._keep)

    def begin(self, tokens: Sequence[int]) -> Array:
        """Forget what was, read the beginning of a text, and return the logits of the token after it. Collective.

        Args:
            tokens: at least one.

        Returns:
            (vocabulary,), in host memory, the same on all ranks.
        """
        self._memory.clear()
        self._again = Compiled(self._where.model)  # what is recorded knows what was remembered
        return self._read(tokens, self._where.model)

    def go_on(self, token: int) -> Array:
        """Read one more token, and return the logits of the one after it. Collective."""
        return self._read([token], self._again)

    def release(self) -> None:
        """Give back what it holds of MPI. Collective."""
        self._executor.free()

    def _read(self, tokens: Sequence[int], model: Callable[..., Any]) -> Array:
        batch, mesh = self._backend.asarray(np.array([tokens], np.int64)), self._where.mesh
        self._logits, self._model = None, model
        with no_grad():
            self._executor.run([batch])
        logits = np.zeros(self.vocabulary)
        if self._logits is not None:  # on the last stage; where ranks share the classes out, each has some
            shared = self._where.classes > 0
            own = part(self.vocabulary, mesh.tp.size, mesh.tp.rank) if shared else range(self.vocabulary)
            logits[own.start : own.stop] = self._logits
            if shared:
                mesh.tp.all_reduce(logits)
        mesh.pp.broadcast(logits, max(len(self._where.cuts) - 1, 0) % mesh.pp.size)
        return logits

    def _keep(self, result: Tensor, microbatch: int) -> Tensor:
        last = Tensor(to_float32(self._backend.xp, result.data[0, -1]))
        self._logits = np.ascontiguousarray(last.numpy(), np.float64)
        return result


def generate(
    generator: TokenGenerator, prompt: Sequence[int], context: int | None, choose: Callable[[Array], int]
) -> Iterator[int]:
    """Yield one token after another, for ever. Collective.

    Args:
        generator: whose model writes.
        prompt: what the text begins with.
        context: the most tokens that the model sees; None for any number.
        choose: (logits) -> token; the same on all ranks.

    Raises:
        UsageError: for an empty prompt, or one that is longer than the context.
    """
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    if context is not None and len(prompt) > context:
        raise UsageError(f"the prompt has {len(prompt)} tokens, but the model sees at most {context}; shorten it")
    seen = list(prompt)
    logits = generator.begin(seen)
    while True:
        token = choose(logits)
        yield token
        seen.append(token)
        if context is not None and len(seen) > context:
            seen = seen[-max(1, context // 2) :]
            logits = generator.begin(seen)
        else:
            logits = generator.go_on(token)


def choose_token(
    logits: Array, draw: np.random.Generator, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> int:
    """Return a token, drawn by its probability under softmax(logits / temperature).

    Args:
        logits: (vocabulary,).
        draw: draws one number.
        temperature: below 1 likely tokens become likelier; with 0 it is the likeliest.
        top_k: only so many of the likeliest can be drawn; 0 for all.
        top_p: only the likeliest ones that together have this probability can be drawn (Holtzman et al., "The curious
            case of neural text degeneration", 2020); 1 for all.

    Raises:
        DivergenceError: for logits that are not finite, of which no token is the likeliest.
    """
    if not np.isfinite(logits).all():
        raise DivergenceError("the model's outputs are not finite, so that no token can be drawn; take other weights")
    if temperature == 0:
        return int(logits.argmax())
    places = np.argpartition(-logits, top_k - 1)[:top_k] if 0 < top_k < len(logits) else np.arange(len(logits))
    if top_p < 1:  # only then the whole vocabulary is sorted, which takes longer than all else here
        places = places[np.argsort(-logits[places], kind="stable")]
    with np.errstate(over="ignore"):  # of the least temperatures
        weights = np.exp((logits[places] - logits.max()) / temperature)
    if top_p < 1:
        before = np.cumsum(weights) - weights  # of the likelier ones
        weights[before >= top_p * weights.sum()] = 0
    sums = np.cumsum(weights)
    return int(places[min(int(np.searchsorted(sums, draw.random() * sums[-1], side="right")), len(places) - 1)])
