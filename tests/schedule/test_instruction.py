"""Instructions as text and back, in order, and as the two ends of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.errors import ScheduleError
from nnmpi.schedule.instruction import TRANSFERS, Instruction, Kind, Message, Together, message_of, parts

instructions = st.builds(
    Instruction, st.sampled_from(Kind), st.integers(0, 999), st.none() | st.integers(min_value=0, max_value=999)
)


@given(instructions)
def test_the_text_form_is_read_back(one: Instruction) -> None:
    assert Instruction.parse(str(one)) == one


def test_text_forms_by_heart() -> None:
    assert str(Kind.F.at(2, 0)) == "2F0"
    assert str(Kind.REDUCE.at(3)) == "3REDUCE"
    assert str(Together((Kind.SEND_ACT.at(0, 1), Kind.RECV_GRAD.at(0, 0)))) == "(0SEND_ACT1 0RECV_GRAD0)"


@pytest.mark.parametrize("text", ["", "F0", "2", "2X0", "2f0", "2F0 ", "-1F0", "2F-1", "2F0B0", "²F0"])
def test_what_is_no_instruction_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no instruction; write stage, kind, microbatch like 2F0"):
        Instruction.parse(text)


def test_instructions_are_values() -> None:
    first, second = Kind.F.at(0, 1), Kind.F.at(1, 0)
    assert first == Instruction(Kind.F, 0, 1) and len({first, second, Kind.F.at(0, 1)}) == 2
    assert sorted([second, first]) == [first, second]


def test_only_transfers_are_posted_together() -> None:
    with pytest.raises(ScheduleError, match="only transfers are posted together, but 0F0 is none"):
        Together((Kind.SEND_ACT.at(0, 0), Kind.F.at(0, 0)))
    with pytest.raises(ScheduleError, match="there is none"):
        Together(())


def test_parts() -> None:
    send, receive = Kind.SEND_ACT.at(0, 0), Kind.RECV_GRAD.at(0, 0)
    assert parts(send) == (send,)
    assert parts(Together((send, receive))) == (send, receive)


@given(instructions.filter(lambda one: one.kind in TRANSFERS))
def test_both_ends_of_a_message_name_it(one: Instruction) -> None:
    message = message_of(one)
    assert one in (message.send, message.receive)
    assert message_of(message.send) == message_of(message.receive) == message
    assert abs(message.sender - message.receiver) == 1


def test_messages_by_heart() -> None:
    assert message_of(Kind.SEND_ACT.at(1, 5)) == Message(False, 1, 2, 5)
    assert message_of(Kind.RECV_GRAD.at(1, 5)) == Message(True, 2, 1, 5)
    assert message_of(Kind.SEND_ACT.at(3, 0)).channel(ranks=4) == (3, 0, False)
    with pytest.raises(ValueError, match="0F0 is no transfer"):
        message_of(Kind.F.at(0, 0))
