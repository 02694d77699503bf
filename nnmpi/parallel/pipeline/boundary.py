"""The boundary between two pipeline stages: some tensors cross it forward, the gradients of some of them back.

    stage s    | x, kept values |  -- activation -->  | leaves |    stage s + 1
               | their gradients|  <-- gradient ----  | .grad  |

The first time that a microbatch of some input shape crosses, a header with the shapes goes before it. Later ones of the
same input shape must look the same, and need no header. Each microbatch has buffers of its own. When a receive is
posted is the executor's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.backend.precision import dtype_named
from nnmpi.comm.buffers import from_host, room_for, to_hosts
from nnmpi.comm.execution import MessageRequest
from nnmpi.comm.point_to_point import Messages
from nnmpi.errors import ShapeError, UsageError
from nnmpi.tensor.tensor import Tensor

InputKey: TypeAlias = tuple[Any, ...]  # the input's shape and the mode, which both ends know
HEADER_BYTES = 4096


class BoundaryArrays(NamedTuple):
    """The tensors at a boundary, as arrays.

    Attributes:
        arrays: those of x, then the kept values in order of their names.
        needs: whether each one's gradient goes back.
        single: whether x is one tensor; else it is a tuple of all arrays that are not kept values.
    """

    arrays: tuple[Array, ...]
    needs: tuple[bool, ...]
    single: bool = True


@dataclass(frozen=True)
class Signature:
    """What `BoundaryArrays` look like: shape and dtype of each array, and whether its gradient goes back."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    needs: tuple[bool, ...]
    single: bool

    @classmethod
    def of(cls, values: BoundaryArrays) -> Signature:
        """Return the signature of some values."""
        arrays = values.arrays
        return cls(tuple(a.shape for a in arrays), tuple(str(a.dtype) for a in arrays), values.needs, values.single)

    def encode(self, key: InputKey) -> Array:
        """Return the signature as a message of `HEADER_BYTES` bytes, with the input that it is for.

        Raises:
            UsageError: when it does not fit into the message.
        """
        text = json.dumps([self.shapes, self.dtypes, self.needs, self.single, key]).encode()
        if len(text) > HEADER_BYTES:
            raise UsageError(f"{len(self.shapes)} tensors between two stages are too many to announce; stack some")
        return np.frombuffer(text.ljust(HEADER_BYTES), np.uint8).copy()

    @classmethod
    def decode(cls, message: Array, key: InputKey) -> Signature:
        """Return what `encode` gave.

        Raises:
            UsageError: when it is for another input than this end has.
        """
        shapes, dtypes, needs, single, theirs = json.loads(message.tobytes())
        if theirs != json.loads(json.dumps(key)):
            raise UsageError(
                f"the stages of one pipeline have different microbatches, of shape {tuple(theirs[0])} and {key[0]}; "
                "give all of them the same part of each batch: Loader(rank=arrangement.data_rank, "
                "world=arrangement.data_ranks)"
            )
        return cls(tuple(tuple(shape) for shape in shapes), tuple(dtypes), tuple(needs), single)

    def buffers(self, gradients: bool, xp: ModuleType) -> list[Array]:
        """Return new host memory (pinned for a device) to receive into: tensors, or the gradients that go back."""
        # New each time, as layers may keep it for their backward pass.
        looks = zip(self.shapes, self.dtypes, self.needs, strict=True)
        return [room_for(xp, shape, dtype_named(dtype)) for shape, dtype, need in looks if need or not gradients]


def pack(x: Any, kept: dict[str, Tensor], stage: int) -> tuple[list[Tensor], bool]:
    """Return the tensors at a stage's end in the order in which they travel, and whether x is a single one.

    Args:
        x: what the stage's last layer returned: a tensor, or a tuple of tensors.
        kept: values that later layers need, by name (see `nn.chain`).
        stage: the number of the stage, for messages.

    Raises:
        UsageError: for a value that is neither a tensor nor a tuple of tensors.
    """
    single = isinstance(x, Tensor)
    tensors = [x] if single else list(x) if isinstance(x, tuple | list) else [x]
    tensors += [kept[name] for name in sorted(kept)]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"stage {stage} ends with a {type(tensor).__name__}, which cannot go to the next stage; cut the model "
                "where a tensor or a tuple of tensors passes"
            )
    return tensors, single


def unpack(tensors: Sequence[Tensor], single: bool, names: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """Return x and the kept values that `pack` was given.

    Args:
        tensors: what `pack` returned.
        single: whether x was a single tensor.
        names: of the kept values, sorted.
    """
    count = len(tensors) - len(names)
    x = tensors[0] if single else tuple(tensors[:count])
    return x, dict(zip(names, tensors[count:], strict=True))


class StageBoundary:
    """One end of the boundary between stage `stage` and the next.

    Args:
        messages: carries messages between the ranks of the pipeline.
        peer: the rank at the other end.
        stage: the number of the stage before the boundary.
        backend: where the arrays live; messages go through host memory.
    """

    def __init__(self, messages: Messages, peer: int, stage: int, backend: Backend) -> None:
        self._messages, self._peer, self._backend = messages, peer, backend
        self.stage = stage
        self._header_tag, self._forward_tag, self._backward_tag = (3 * stage + i for i in range(3))
        self._agreed: dict[InputKey, Signature] = {}
        self._leaving: dict[int, list[MessageRequest]] = {}  # by tag

    def is_agreed(self, key: InputKey) -> bool:
        """Whether this end knows what crosses for such an input."""
        return key in self._agreed

    # ---- forward ----

    def send(self, key: InputKey, values: BoundaryArrays, waits: bool = False) -> list[Array]:
        """Send a microbatch's activation; return what is sent.

        Args:
            key: of its input.
            values: the activation.
            waits: whether the one before it must have left first; it is kept until then, and else as long as it takes.

        Raises:
            ShapeError: when it does not look like those before it of the same input shape.
            UsageError: when gradients are needed of other tensors than before.
        """
        found = Signature.of(values)
        agreed = self._agreed.setdefault(key, found)
        if agreed is found:
            self._messages.send(found.encode(key), self._peer, self._header_tag)
        elif replace(agreed, needs=found.needs) == found != agreed:
            raise UsageError(
                f"stage {self.stage} needs other gradients from the next stage than before, as requires_grad of some "
                "parameter has changed since; release the Worker and make a new one after changing requires_grad"
            )
        elif agreed != found:
            raise ShapeError(
                f"stage {self.stage} gave {_look(found)} for an input of shape {key[0]}, where {_look(agreed)} was "
                "agreed with the next stage; what crosses must depend on the input's shape alone: cut the model "
                "elsewhere, or pad"
            )
        return self._send(values.arrays, self._forward_tag, waits)

    def expect(self, key: InputKey) -> Callable[[], BoundaryArrays]:
        """Post the receive of a microbatch's activation as early as possible; calling the result waits for it.

        As long as no header has come for such an input, nothing can be posted before the wait.
        """
        arrivals = self._post(key) if key in self._agreed else None

        def wait() -> BoundaryArrays:
            nonlocal arrivals
            if key not in self._agreed:
                header = self._messages.receive(np.empty(HEADER_BYTES, np.uint8), self._peer, self._header_tag)
                self._agreed[key] = Signature.decode(header.wait(), key)
            if arrivals is None:
                arrivals = self._post(key)
            signature = self._agreed[key]
            arrays = tuple(from_host(arrival.wait(), self._backend.xp) for arrival in arrivals)
            return BoundaryArrays(arrays, signature.needs, signature.single)

        return wait

    def _post(self, key: InputKey) -> list[MessageRequest]:
        buffers = self._agreed[key].buffers(gradients=False, xp=self._backend.xp)
        return [self._messages.receive(buffer, self._peer, self._forward_tag) for buffer in buffers]

    # ---- backward ----

    def send_back(self, grads: Sequence[Array], waits: bool = False) -> list[Array]:
        """Send the gradients of what needs some, likewise."""
        return self._send(grads, self._backward_tag, waits)

    def expect_back(self, key: InputKey) -> Callable[[], BoundaryArrays]:
        """Post the receive of a microbatch's gradients, whose activation was sent; calling the result waits."""
        buffers = self._agreed[key].buffers(gradients=True, xp=self._backend.xp)
        arrivals = [self._messages.receive(buffer, self._peer, self._backward_tag) for buffer in buffers]
        return lambda: BoundaryArrays(tuple(from_host(each.wait(), self._backend.xp) for each in arrivals), ())

    def let_go(self) -> None:
        """Forget what has left."""
        self._leaving.clear()

    def _send(self, arrays: Sequence[Array], tag: int, waits: bool) -> list[Array]:
        hosts = to_hosts(arrays)  # waits until a device has computed and copied them
        sent = [self._messages.send(host, self._peer, tag) for host in hosts]
        if waits:
            before, self._leaving[tag] = self._leaving.get(tag, ()), sent
            for request in before:
                request.wait()
            self._messages.progress()  # which lets go of them, too
        return hosts


def _look(signature: Signature) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in zip(signature.dtypes, signature.shapes, strict=True))
