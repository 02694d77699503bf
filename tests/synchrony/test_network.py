"""The links of virtual time, and its queue of events."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.comm.cost import parameter_server
from nnmpi.errors import UsageError
from nnmpi.synchrony.event_queue import EventQueue
from nnmpi.synchrony.network import LinkSpeed, Network, parse_network

ALPHA, BETA = 50e-6, 0.8e-9


@given(st.integers(2, 64), st.integers(0, 10**9))
def test_all_workers_at_once_take_what_the_course_says(workers: int, nbytes: int) -> None:
    network = Network(1, ALPHA, BETA)
    last_s = max(network.push(0, 3.0, nbytes) for _ in range(workers - 1))
    over_s = network.reply(0, last_s, nbytes, workers - 1)
    assert over_s - 3.0 == pytest.approx(parameter_server(workers, nbytes, ALPHA, BETA), rel=1e-9)
    assert (network.messages, network.bytes) == (2 * (workers - 1), 2 * (workers - 1) * nbytes)


def test_a_link_that_is_free_again_does_not_wait() -> None:
    network = Network(1, 1.0, 0.5)
    assert [network.push(0, at_s, 4) for at_s in (0.0, 1.0, 10.0)] == [3.0, 5.0, 13.0]


def test_directions_and_servers_do_not_disturb_one_another() -> None:
    network = Network(2, 1.0, 0.5)
    assert [network.push(0, 0.0, 4), network.reply(0, 0.0, 4), network.push(1, 0.0, 4)] == [3.0, 3.0, 3.0]


def test_replies_sent_together_arrive_together() -> None:
    network = Network(1, 1.0, 0.5)
    assert network.reply(0, 2.0, 4, 3) == 2.0 + 1.0 + 3 * 4 * 0.5
    assert network.reply(0, 2.0, 4) == 2.0 + 1.0 + 4 * 4 * 0.5


def test_a_network_is_given_as_text() -> None:
    speed = parse_network("alpha_us=50, gbit=10")
    assert speed.seconds(10**6) == pytest.approx(50e-6 + 8e6 / 10e9)
    assert speed.describe() == "links of 50 us and 10 Gbit/s"
    assert parse_network("alpha_us=20") == LinkSpeed(20e-6, 0.0)
    assert parse_network("alpha_us=20").describe() == "links of 20 us and any rate"
    assert parse_network("gbit=1").alpha_s == 0


@pytest.mark.parametrize("text", ["", "gbit", "gbit=0", "gbit=-1", "gbit=fast", "mbit=3", "gbit=1,gbit=2", "gbit=inf"])
def test_a_network_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="such as alpha_us=50,gbit=10") as told:
        parse_network(text)
    assert repr(text) in str(told.value)


@pytest.mark.parametrize("value", [-1.0, inf, nan])
def test_a_link_takes_finite_time(value: float) -> None:
    with pytest.raises(UsageError, match="latency of .* is not possible"):
        LinkSpeed(alpha_s=value)
    with pytest.raises(UsageError, match="time per byte of .* is not possible"):
        LinkSpeed(beta_s_per_byte=value)


def test_events_run_by_time_and_then_in_order() -> None:
    events, done = EventQueue(1.0), list[tuple[str, float]]()

    def note(name: str) -> None:
        done.append((name, events.now_s))

    def first() -> None:
        note("first")
        events.add(2.0, lambda: note("added"))
        events.add(0.5, lambda: note("late"))

    events.add(3.0, lambda: note("last"))
    events.add(2.0, first)
    events.add(2.0, lambda: note("second"))
    assert events.next_s == 2.0
    while events.run_next():
        pass
    assert done == [("first", 2.0), ("second", 2.0), ("added", 2.0), ("late", 2.0), ("last", 3.0)]
    assert events.next_s is None
