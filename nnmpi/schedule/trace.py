"""A simulated run as events, which `nnmpi.timeline` writes for Perfetto: the picture that a measured run has, too."""

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.schedule.instruction import RECEIVES, SENDS, Instruction, Kind
from nnmpi.schedule.message import message_of
from nnmpi.schedule.play import Span
from nnmpi.schedule.simulate import Simulation
from nnmpi.timeline import COMPUTE, RECEIVE, REDUCE, SEND, Event

_CATEGORIES: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("forward", COMPUTE),
        Kind.B: ("backward", COMPUTE),
        Kind.I: ("backward", COMPUTE),
        Kind.W: ("backward", COMPUTE),
        Kind.STEP: ("update", COMPUTE),
        Kind.REDUCE: ("reduce", REDUCE),
        Kind.SEND_ACT: ("send", SEND),
        Kind.SEND_GRAD: ("send", SEND),
        Kind.RECV_ACT: ("receive", RECEIVE),
        Kind.RECV_GRAD: ("receive", RECEIVE),
    }
)


def events(simulation: Simulation) -> dict[int, list[Event]]:
    """Return each rank's events: rank -> what it did, a receive with the waiting for it, messages as arrows."""
    found: dict[int, list[Event]] = {rank: [] for rank in range(len(simulation.busy_s))}
    for span in simulation.spans:
        found[span.rank].append(event(span))
    return found


def event(span: Span) -> Event:
    """Return a span as an event."""
    one = span.instruction
    category, track = _CATEGORIES[one.kind]
    about = {"stage": one.stage} | ({} if one.microbatch is None else {"microbatch": one.microbatch})
    sends, takes = (_name(one) if one.kind in ends else "" for ends in (SENDS, RECEIVES))
    return Event(str(one), category, track, span.begin_s, span.end_s, about, sends, takes)


def _name(transfer: Instruction) -> str:
    """Return a message's name, the same at both its ends."""
    return str(message_of(transfer).send)
