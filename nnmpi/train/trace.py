"""One Chrome trace of a run: every rank's events, on one time axis, in a file that Perfetto opens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nnmpi.comm import mail, wire
from nnmpi.comm.clock import offsets
from nnmpi.comm.group import Group
from nnmpi.errors import NnmpiError
from nnmpi.timeline import Event, Timeline, to_chrome, write_chrome
from nnmpi.train.root import on_root


def write_trace(path: Path, timeline: Timeline, group: Group, names: Sequence[str] | None = None) -> None:
    """Write the events of all ranks into one file, on rank 0. Collective.

    Clocks are compared now, so call it soon after what is to be seen. Rank 0 needs memory for everyone's events.

    Args:
        path: the file, compressed when its name ends in .gz; its folder is made. Only rank 0's is looked at.
        timeline: this rank's events; a message has the same name at both its ends and in all ranks' events.
        group: the ranks.
        names: what to call each rank besides its number, such as its coordinates "d0 p1 t0"; only rank 0's count.

    Raises:
        NnmpiError: on all ranks, when the file cannot be written; nothing is left of it then.
        UsageError: on all ranks, for an event that ends before it begins, or a message that is sent or taken twice.
        CommError: on all ranks, for an event with args that JSON cannot hold.
    """
    ahead_s = offsets(group, timeline.clock)
    texts = _gather(group, wire.encode(timeline.events))

    def write() -> None:
        processes = {rank: [Event(*row) for row in wire.decode(text, rank)] for rank, text in enumerate(texts)}
        titles = {rank: f"rank {rank}: {name}" for rank, name in enumerate(names or ())}
        trace = to_chrome(processes, titles, dict(enumerate(ahead_s)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_chrome(path, trace)
        except OSError as error:
            raise NnmpiError(
                f"the trace cannot be written to {path}: {error.strerror or error}; give a file in a folder with room "
                "that you may write to"
            ) from None

    on_root(group, write)


def _gather(group: Group, text: bytes) -> list[bytes]:
    """Return every rank's text on rank 0, and nothing elsewhere: there is no need for everyone to hold them all."""
    texts = [text] if group.is_root else []
    lengths = group.gather(len(text))
    with mail.opened(group) as post:
        for rank in range(1, group.size):
            if group.rank == rank:
                post.send(np.frombuffer(text, np.uint8), 0)
            elif group.is_root:
                buffer = np.empty(lengths[rank], np.uint8)
                post.receive(buffer, rank)
                texts.append(buffer.tobytes())
    return texts
