"""The boundary of two pipeline stages: activations cross it forward, gradients backward.

    stage s    | x, stashed      |  -- activation -->  | leaves |    stage s + 1
               | their gradients |  <-- gradient ----  | .grad  |

The first microbatch of some input shape is preceded by a header with the shapes. Later ones of the
same input shape must have the same shapes, and need no header. Each microbatch has buffers of its
own. `compose.walk.Inbox` decides when a receive is posted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import dtype_named
from nnmpi.base.errors import ShapeError, UsageError
from nnmpi.comm.buffers import from_host, room_for, to_hosts
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.point_to_point import Messages
from nnmpi.tensor.tensor import Tensor

InputKey: TypeAlias = tuple[Any, ...]  # the input's shape and the mode, the same at both ends
HEADER_BYTES = 4096


class BoundaryArrays(NamedTuple):
    """The tensors at a boundary, as arrays.

    Attributes:
        arrays: x as arrays, then the stashed values in order of their names.
        needs: for each array, whether its gradient goes back.
        single: whether x is one tensor; otherwise x is a tuple of all arrays that are not stashed
            values.
    """

    arrays: tuple[Array, ...]
    needs: tuple[bool, ...]
    single: bool = True


# shape and dtype of each array, and whether its gradient goes back; then `single`
Signature: TypeAlias = list[Any]


def signature_of(values: BoundaryArrays) -> Signature:
    """Return the signature of some values, as a JSON value."""
    rows = zip(values.arrays, values.needs, strict=True)
    return [[[list(array.shape), str(array.dtype), need] for array, need in rows], values.single]


def encode(signature: Signature, key: InputKey) -> Array:
    """Return a signature and its input's key as a message of `HEADER_BYTES` bytes.

    Raises:
        UsageError: when it is too long for the message.
    """
    text = json.dumps([signature, key]).encode()
    if len(text) > HEADER_BYTES:
        raise UsageError(
            f"{len(signature[0])} tensors between two stages are too many to announce; stack some"
        )
    return np.frombuffer(text.ljust(HEADER_BYTES), np.uint8).copy()


def decode(message: Array, key: InputKey) -> Signature:
    """Return the signature in a message of `encode`.

    Raises:
        UsageError: when its key differs from this end's.
    """
    signature, received = json.loads(message.tobytes())
    if received != json.loads(json.dumps(key)):
        raise UsageError(
            "the stages of one pipeline have different microbatches, of shape"
            f" {tuple(received[0])} and {key[0]}; give all of them the same part of each batch:"
            " data.Loader(dataset, batch_size, arrangement)"
        )
    return list(signature)


def pack(x: Any, stashed: dict[str, Tensor], stage: int) -> tuple[list[Tensor], bool]:
    """Return a stage's outputs in sending order, and whether x is a single tensor; see `unpack`.

    Args:
        x: the result of the stage's last layer: a tensor, or a tuple of tensors.
        stashed: values that later layers need, by name (see `nn.chain`).
        stage: the number of the stage, for messages.

    Raises:
        UsageError: for a value that is neither a tensor nor a tuple of tensors.
    """
    single = isinstance(x, Tensor)
    tensors = [*x] if isinstance(x, tuple | list) else [x]
    tensors += [stashed[name] for name in sorted(stashed)]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"stage {stage} ends with a {type(tensor).__name__}, which cannot go to the next"
                " stage; cut the model where a tensor or a tuple of tensors passes"
            )
    return tensors, single


class StageBoundary:
    """One end of the boundary between stage `stage` and the next.

    Args:
        messages: between the ranks of the pipeline.
        peer: the rank at the other end.
        stage: the number of the stage before the boundary.
        backend: of the arrays; messages go through host memory.
    """

    def __init__(self, messages: Messages, peer: int, stage: int, backend: Backend) -> None:
        self._messages, self._peer, self._backend = messages, peer, backend
        self.stage = stage
        self._header_tag, self._forward_tag, self._backward_tag = (3 * stage + i for i in range(3))
        self._agreed: dict[InputKey, Signature] = {}
        self._sends: dict[int, list[MessageRequest]] = {}  # by tag

    def is_agreed(self, key: InputKey) -> bool:
        """Whether this end has the signature of such an input's activation."""
        return key in self._agreed

    # ---- forward ----

    def send(self, key: InputKey, values: BoundaryArrays, waits: bool = False) -> list[Array]:
        """Send a microbatch's activation; return the sent arrays.

        Args:
            key: of its input.
            values: the activation.
            waits: whether to wait until the last activation is sent, and to free it then; otherwise
                it stays in memory until it is sent.

        Raises:
            ShapeError: when its shapes differ from earlier ones of the same input shape.
            UsageError: when other tensors need gradients than before.
        """
        signature = signature_of(values)
        agreed = self._agreed.setdefault(key, signature)
        if agreed is signature:
            self._messages.send(encode(signature, key), self._peer, self._header_tag)
        elif agreed != signature and _as_text(agreed) == _as_text(signature):
            raise UsageError(
                f"stage {self.stage} needs different gradients from the next stage, because"
                " requires_grad of a parameter has changed; release the Worker and make a new one"
                " after changing requires_grad"
            )
        elif agreed != signature:
            raise ShapeError(
                f"stage {self.stage} gave {_as_text(signature)} for an input of shape {key[0]},"
                f" but the next stage expects {_as_text(agreed)}; shapes at a cut must depend only"
                " on the input's shape: cut the model elsewhere, or pad"
            )
        return self._send(values.arrays, self._forward_tag, waits)

    def expect(self, key: InputKey, back: bool) -> Callable[[], BoundaryArrays]:
        """Post the receive of a microbatch's activation early; calling the result waits for it.

        Without a header for such an input yet, nothing can be posted before the wait.

        Args:
            key: of its input.
            back: whether to receive the gradients of a sent activation instead.
        """
        early = self._post(key, back) if key in self._agreed else None

        def wait() -> BoundaryArrays:
            if key not in self._agreed:
                header = self._messages.receive(
                    np.empty(HEADER_BYTES, np.uint8), self._peer, self._header_tag
                )
                self._agreed[key] = decode(header.wait(), key)
            arrivals = self._post(key, back) if early is None else early
            rows, single = self._agreed[key]
            arrays = tuple(from_host(arrival.wait(), self._backend.xp) for arrival in arrivals)
            return BoundaryArrays(arrays, tuple(need for *_, need in rows), single)

        return wait

    def _post(self, key: InputKey, back: bool) -> list[MessageRequest]:
        """Post the receives of activations or gradients into new memory, which layers may keep."""
        tag = self._backward_tag if back else self._forward_tag
        rooms = [
            room_for(self._backend.xp, tuple(shape), dtype_named(dtype))  # pinned for a device
            for shape, dtype, need in self._agreed[key][0]
            if need or not back
        ]
        return [self._messages.receive(room, self._peer, tag) for room in rooms]

    # ---- backward ----

    def send_back(self, grads: Sequence[Array], waits: bool) -> list[Array]:
        """Send the gradients of the activations that need one; `waits` as in `send`."""
        return self._send(grads, self._backward_tag, waits)

    def drop_sent(self) -> None:
        """Drop the references to sent arrays."""
        self._sends.clear()

    def _send(self, arrays: Sequence[Array], tag: int, waits: bool) -> list[Array]:
        hosts = to_hosts(arrays)  # waits until a device has computed and copied them
        with self._messages.timed():
            sent = [self._messages.send(host, self._peer, tag) for host in hosts]
            if waits:
                before, self._sends[tag] = self._sends.get(tag, ()), sent
                for request in before:
                    request.wait()
                self._messages.progress()  # which drops its references, too
        return hosts


def _as_text(signature: Signature) -> str:
    return ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype, _ in signature[0])
