"""Proof, without MPI, that a collective is right for a number of ranks.

Every rank's steps are replayed together (`replay`); then each chunk on each rank must hold what the contract promises
(in an all-reduce every rank's part exactly once), with no message left over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nnmpi.comm.collective import ALL_REDUCE, Collective, Contract, count
from nnmpi.comm.replay import Player, replay
from nnmpi.comm.steps import Algorithm, Step, runs
from nnmpi.comm.wording import name_ranks
from nnmpi.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Proof:
    """What a proved collective does.

    Attributes:
        size: number of ranks, and of chunks.
        rounds: time until the last rank is done, when every message takes one round and none is in another's way.
        messages: messages sent by all ranks together (neighbouring chunks travel as one).
        chunk_transfers: chunks sent by all ranks together.
    """

    size: int
    rounds: int
    messages: int
    chunk_transfers: int


def prove(algorithm: Collective | Algorithm, size: int, contract: Contract | None = None) -> Proof:
    """Return the proof that `algorithm` leaves every rank with what its contract promises.

    Args:
        algorithm: gives the steps of each rank.
        size: number of ranks, at least 1.
        contract: of a bare function of (rank, size), which is an all-reduce by default; a `Collective` has its own.

    Raises:
        ScheduleError: names rank, step and chunk of a fault: a part that is missing or counted twice, a message that
            nobody receives or sends, chunks that differ at its two ends, a deadlock, a chunk overwritten while it is
            sent.
    """
    if size < 1:
        raise ScheduleError(f"there is nothing to prove for {size} ranks; give at least 1")
    if contract is None:
        contract = algorithm.contract if isinstance(algorithm, Collective) else ALL_REDUCE
    return prove_steps([algorithm(rank, size) for rank in range(size)], contract)


def prove_steps(steps: Sequence[Sequence[Step]], contract: Contract = ALL_REDUCE) -> Proof:
    """Return the proof for steps that are given outright, one sequence per rank. See `prove`."""
    for rank, own in enumerate(steps):
        for index, step in enumerate(own):
            _check_step(f"rank {rank}, step {index}", step, rank, len(steps))
    players = replay(steps, contract)
    _check_finished(players)
    _check_parts(players, contract)
    return Proof(
        size=len(steps),
        rounds=max(player.clock for player in players),
        messages=sum(len(runs(step.send)) for own in steps for step in own),
        chunk_transfers=sum(len(step.send) for own in steps for step in own),
    )


def _check_step(where: str, step: Step, rank: int, size: int) -> None:
    """Refuse a step that is wrong whatever the other ranks do."""
    for partner in (step.to, step.from_):
        if partner is not None and (partner == rank or not 0 <= partner < size):
            raise ScheduleError(f"{where} talks to rank {partner}, which is not another one of the {size} ranks")
    for chunk in (*step.send, *step.recv):
        if not 0 <= chunk < size:
            raise ScheduleError(f"{where} names chunk {chunk}, but {size} ranks have the chunks 0..{size - 1}")
    torn = sorted(set(step.send) & set(step.recv))
    if torn and not step.reduce:  # what is added waits in scratch until the send is over; what replaces does not
        raise ScheduleError(f"{where} sends chunk {torn[0]} to rank {step.to} while rank {step.from_} overwrites it")


def _check_finished(players: Sequence[Player]) -> None:
    """Refuse ranks that wait for ever: first for a message that can never come, else for one another."""
    stuck = [player for player in players if player.step is not None]
    for player in stuck:
        _check_wanted(player, players)
    if stuck:
        raise ScheduleError(f"deadlock: {_circle(stuck[0], players)}")


def _check_wanted(player: Player, players: Sequence[Player]) -> None:
    """Refuse a message that the other end has no step for, now or later."""
    step = player.step
    assert step is not None
    if not player.sent and step.to is not None:
        ahead = players[step.to].steps[players[step.to].at :]
        if all(other.from_ != player.rank for other in ahead):
            raise ScheduleError(
                f"unmatched message: {player.name} sends chunks {list(step.send)} to rank {step.to}, "
                f"which has no step left that receives from rank {player.rank}"
            )
    if not player.received and step.from_ is not None:
        ahead = players[step.from_].steps[players[step.from_].at :]
        if all(other.to != player.rank for other in ahead):
            raise ScheduleError(
                f"unmatched message: {player.name} waits for chunks {list(step.recv)} from rank {step.from_}, "
                f"which has no step left that sends to rank {player.rank}"
            )


def _circle(player: Player, players: Sequence[Player]) -> str:
    """Follow who waits for whom until a rank comes twice, and tell that circle."""
    path: list[Player] = []
    while player not in path:
        path.append(player)
        player = players[_awaited(player)]
    return ", ".join(_wait(waiting) for waiting in path[path.index(player) :])


def _awaited(player: Player) -> int:
    step = player.step
    assert step is not None
    other = step.from_ if player.sent else step.to
    assert other is not None
    return other


def _wait(player: Player) -> str:
    step = player.step
    assert step is not None
    if player.sent:
        return f"{player.name} waits for chunks {list(step.recv)} from rank {step.from_}"
    return f"{player.name} waits to send chunks {list(step.send)} to rank {step.to}"


def _check_parts(players: Sequence[Player], contract: Contract) -> None:
    """Refuse a chunk that at the end is not what the contract says."""
    size = len(players)
    for player in players:
        for chunk, parts in enumerate(player.held):
            wanted = contract.ends(player.rank, chunk, size)
            if wanted is not None and parts != wanted:
                last = player.written.get(chunk)
                when = "never written" if last is None else f"last written in step {last}"
                raise ScheduleError(
                    f"rank {player.rank} ends {_difference(parts, wanted, size)} in chunk {chunk} ({when})"
                )


def _difference(parts: int, wanted: int, size: int) -> str:
    """Return what is missing, or too much, in words."""
    missing = [rank for rank in range(size) if count(parts, rank) < count(wanted, rank)]
    if missing:
        return f"without the part of {name_ranks(missing)}"
    return f"with the part of {name_ranks([r for r in range(size) if count(parts, r) > count(wanted, r)])} too often"
