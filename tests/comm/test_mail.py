"""Arrays from rank to rank: they arrive whole, and a rank that cannot send or receive keeps nobody waiting."""

import numpy as np
import pytest

from nnmpi.backend.array import Array
from nnmpi.comm import mail as module
from nnmpi.comm.group import Group
from nnmpi.comm.mail import opened
from nnmpi.errors import ShapeError

pytestmark = pytest.mark.mpi

ARRAYS: list[Array] = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2, 1],
    np.asarray(2.5),
    np.zeros((0, 3)),
    np.asarray([True, False, True]),
]


def test_arrays_of_any_kind_arrive(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 20)  # the longer ones travel in pieces
    for array in ARRAYS:
        found = np.full(array.shape, 1, array.dtype)
        with opened(group) as mail:  # from rank to rank, as a bucket is passed on
            sent = mail.receive(found, group.rank - 1) if group.rank else True
            if group.rank < group.size - 1:
                sent = mail.send(array, group.rank + 1) and sent
        assert all(group.gather(sent and (group.rank == 0 or np.array_equal(found, array))))


def test_nothing_moves_unless_both_can(group: Group) -> None:
    partner = group.rank ^ 1
    found = np.zeros(2)
    answers = []
    with opened(group) as mail:
        if partner < group.size:
            for sends, takes in ((False, True), (True, False), (False, False)):
                if group.rank % 2:
                    answers.append(mail.receive(found if takes else None, partner))
                else:
                    answers.append(mail.send(np.ones(2) if sends else None, partner))
    assert not any(map(any, group.gather(answers)))
    assert all(group.gather(not found.any()))


def test_an_array_with_gaps_cannot_receive(group: Group) -> None:
    with opened(group) as mail, pytest.raises(ShapeError, match="has gaps"):
        mail.receive(np.zeros((4, 4))[:, 1], 0)


def test_messages_do_not_meet_those_of_the_group(group: Group) -> None:
    sums = np.ones(5)
    pending = group.start_all_reduce(sums, "ring")
    found = np.zeros(3)
    with opened(group) as mail:
        if group.rank == 1:
            mail.receive(found, 0)
        elif group.rank == 0 and group.size > 1:
            mail.send(np.full(3, 7.0), 1)
    pending.wait()
    assert all(group.gather(bool((sums == group.size).all())))
    assert all(group.gather(group.rank != 1 or bool((found == 7).all())))
