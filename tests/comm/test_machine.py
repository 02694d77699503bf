"""Curves and machines: values between the points, refusals, and JSON both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnmpi.base.errors import UsageError
from nnmpi.comm.fit import parse_network
from nnmpi.comm.machine import Curve, Link, Machine, blocks
from tests.harness.refusals import usage_error

EAGER = Curve(((8, 1e-6), (1024, 2e-6), (1025, 5e-6), (4097, 8e-6)))


@pytest.mark.parametrize(
    "nbytes, seconds",
    [(0, 1e-6), (8, 1e-6), (516, 1.5e-6), (1024, 2e-6), (2561, 6.5e-6), (7169, 11e-6)],
)
def test_between_below_and_beyond_the_points(nbytes, seconds):
    assert EAGER(nbytes) == pytest.approx(seconds, rel=1e-12)


@given(st.floats(0, 1e-2), st.floats(1e-13, 1e-6), st.integers(0, 2**40))
def test_a_line_is_exact(alpha_s, beta_s, nbytes):
    assert Curve.line(alpha_s, beta_s)(nbytes) == pytest.approx(
        alpha_s + beta_s * nbytes, rel=1e-13
    )


def test_alpha_and_beta():
    assert EAGER.alpha_s == 1e-6
    assert EAGER.beta(4097) == pytest.approx(7e-6 / 4097)
    # a curve that falls at its end does not go on into the past
    assert Curve(((0, 2.0), (10, 1.0)))(100) == 1.0


@pytest.mark.parametrize(
    "points", [(), ((1, 1), (1, 2)), ((2, 1), (1, 2)), ((1, -1),), ((1, float("nan")),)]
)
def test_no_curve(points):
    usage_error("a curve", Curve, points)


def test_what_does_not_fit_is_named():
    link = Link.line(1.0, 1.0)
    usage_error(
        "places 4 ranks on nodes, so 3 ranks", lambda: Machine(link, nodes=blocks(4, 2)).nodes_of(3)
    )


def test_places():
    assert blocks(5, 2) == (0, 0, 1, 1, 2)
    assert Machine.uniform(1.0, 1.0).nodes_of(3) == (0, 0, 0)


def test_a_sender_that_receives_has_a_curve_of_its_own():
    machine = Machine(Link(Curve.line(1.0, 0.0), Curve.line(2.0, 0.0)))
    assert [machine.message(False, both, [8])[0] for both in (False, True)] == [1.0, 2.0]


def test_groups_that_share_a_node_are_one_part_and_equal_parts_are_one():
    groups = [(0, 1), (1, 2), (0, 3), (6, 9), (4, 7)]  # two inside a node; two, and one that joins
    parts = Machine(Link.line(1.0, 1.0), nodes=blocks(12, 3)).parts(groups, 12)
    assert [part.nodes for part in parts] == [(0, 0), (0, 1, 2, 3, 1, 2)]


def test_a_network_is_given_as_text():
    machine = parse_network("alpha_us=50, gbit=10", 3)
    assert machine.nodes_of(3) == (0, 1, 2)
    assert machine.link(across=True).one_way(10**6) == pytest.approx(50e-6 + 8e6 / 10e9)
    assert machine.link(across=True).both_ways(10**6) == pytest.approx(50e-6 + 8e6 / 10e9)
    assert parse_network("alpha_us=20", 2).inside == Link.line(20e-6, 0.0)
    assert parse_network("gbit=1", 2).inside.one_way.alpha_s == 0
    assert parse_network("alpha=5e-5,beta=8e-10", 3) == machine
    assert parse_network("alpha_us=50,gbit=10", 3, per_node=3) == Machine.uniform(50e-6, 8e-10)
    several = parse_network("beta=8e-10,inside_alpha_us=1,gamma=1e-10,per_node=2", 3)
    assert several == Machine(
        Link.line(1e-6, 0.0), Link.line(0.0, 8e-10), (0, 0, 1), Curve.line(0.0, 1e-10)
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gbit",
        "gbit=0",
        "gbit=-1",
        "gbit=fast",
        "mbit=3",
        "gbit=1,gbit=2",
        "gbit=inf",
        "gbit=1,beta=1",
        "per_node=0",
        "per_node=3",
        "gamma=1e-9",
    ],
)
def test_a_network_that_cannot_be_is_refused(text):
    with pytest.raises(UsageError, match="such as alpha_us=50,gbit=10") as message:
        parse_network(text, 2)
    assert repr(text) in str(message.value)
