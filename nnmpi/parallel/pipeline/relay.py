"""The gradient of a parameter that stands in several stages, added up in the order of the serial backward pass.

A microbatch goes back through the later stages first. So each stage that has the parameter begins with what the stages
behind it gave, adds its own, operation by operation as in one long pass, and hands the sum on; the first stage ends up
with the very bits of the serial run:

    stage 3 (output)       B0 --.      B1 --.             table.grad = what the output gives
    stage 0 (embedding)         '-> B0      '-> B1        table.grad = that, then the rows of the tokens are added
"""

from collections.abc import Mapping, Sequence

from nnmpi.backend.array import Array
from nnmpi.backend.backend import Backend
from nnmpi.comm.device.copies import from_host, to_hosts
from nnmpi.comm.point_to_point import Messages
from nnmpi.parallel.pipeline.boundary import new_buffer
from nnmpi.tensor.parameter import Parameter


class GradientRelay:
    """Hands gradients on from stage to stage, for each microbatch.

    Args:
        parameters: this rank's that stand in several stages, by name.
        stages: the stages of each, ascending; of all such parameters of the model, the same on all ranks.
        messages: between the ranks of the pipeline.
        ranks: how many these are; stage s is on rank s % ranks.
        tag: the first one that is free for these messages.
        backend: where the gradients live.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        stages: Mapping[str, Sequence[int]],
        messages: Messages,
        ranks: int,
        tag: int,
        backend: Backend,
    ) -> None:
        self._parameters, self._stages, self._numbers = parameters, stages, {name: i for i, name in enumerate(stages)}
        self._messages, self._ranks, self._tag, self._backend = messages, ranks, tag, backend
        self._kept: dict[tuple[str, int, int], Array] = {}

    def begin(self, stage: int, microbatch: int) -> None:
        """Let the parameters of a stage have the gradients that the stages behind it gave; before its backward pass."""
        for name, parameter, place in self._of(stage):
            if place + 1 < len(self._stages[name]):
                assert parameter.buffer is not None
                parameter.buffer[...] = self._take(
                    name, parameter.buffer, stage, self._stages[name][place + 1], microbatch
                )
                parameter.grad = parameter.buffer

    def end(self, stage: int, microbatch: int) -> None:
        """Hand on the gradients of those parameters that stages before this one have, too; after its backward pass."""
        for name, parameter, place in self._of(stage):
            if place:
                parameter.finish_gradient()
                assert parameter.grad is not None
                self._give(name, parameter.grad.copy(), stage, self._stages[name][place - 1], microbatch)
                parameter.grad = None

    def _of(self, stage: int) -> list[tuple[str, Parameter, int]]:
        """Return those parameters of a stage that other stages have, too, each with its place among these."""
        return [
            (name, parameter, list(self._stages[name]).index(stage))
            for name, parameter in self._parameters.items()
            if stage in self._stages[name]
        ]

    def _give(self, name: str, grad: Array, stage: int, to: int, microbatch: int) -> None:
        if self._is_here(stage, to):
            self._kept[name, to, microbatch] = grad
        else:
            (host,) = to_hosts([grad])
            self._messages.send(host, to % self._ranks, self._tag_of(name, microbatch, to))

    def _take(self, name: str, like: Array, stage: int, source: int, microbatch: int) -> Array:
        if self._is_here(stage, source):
            return self._kept.pop((name, stage, microbatch))
        room = new_buffer(like.shape, str(like.dtype), self._backend.xp)
        arrival = self._messages.receive(room, source % self._ranks, self._tag_of(name, microbatch, stage))
        return from_host(arrival.wait(), self._backend.xp)

    def _is_here(self, stage: int, other: int) -> bool:
        return (stage - other) % self._ranks == 0

    def _tag_of(self, name: str, microbatch: int, to: int) -> int:
        """Return a tag that no other message of a pass has: stages go back in orders of their own."""
        count = 1 + max(stages[-1] for stages in self._stages.values())
        return self._tag + (microbatch * len(self._stages) + self._numbers[name]) * count + to
