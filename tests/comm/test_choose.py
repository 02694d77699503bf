"""What "auto" means: the least prediction of a fit, or a rule of two numbers without one, with the
reason in words.
"""

import math
from dataclasses import replace

import pytest

from nnmpi.comm.algorithms import registry
from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE, SHARED
from nnmpi.comm.collective import ALL_REDUCE, Collective
from nnmpi.comm.fit import Fit, choose
from nnmpi.comm.machine import Curve, Link, Machine, blocks

SIZES = [2**power for power in range(2, 31)]


def make(ranks, native, shared=None, per_node=None):
    nodes = None if per_node is None else blocks(ranks, per_node)
    machine = Machine(
        Link.line(1e-6, 1e-10), Link.line(1e-5, 1e-9), nodes=nodes, add=Curve.line(0, 2e-11)
    )
    return Fit(
        machine, native, native, shared, {"ranks": ranks, "nodes": list(nodes or [0] * ranks)}
    )


SLOW = Curve.line(1.0, 1.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("shared", [False, True])
def test_by_rule_short_messages_go_native_and_long_ones_do_not_go_back(size, shared):
    names = [choose(nbytes, size, shared=shared).algorithm for nbytes in SIZES]
    assert names[0] == NATIVE
    assert set(names) <= {NATIVE, SHARED if shared else "ring"}
    assert sum(name != other for name, other in zip(names, names[1:], strict=False)) == (
        0 if size == 1 else 1
    )


def test_the_rules_reason_names_the_numbers():
    assert "2 bytes" in choose(4, 2).reason
    assert "one rank" in choose(2**30, 1).reason
    assert choose(2**30, 2).algorithm == "ring"
    assert str(2**29) in choose(2**30, 2).reason
    assert math.isnan(choose(2**30, 2).predicted_s)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("nbytes", [4, 1000, 2**16, 2**24])
def test_with_a_fit_the_least_prediction_wins(ranks, nbytes):
    fit = make(ranks, SLOW)
    choice = choose(nbytes, ranks, fit)
    predicted = {
        name: fit.predict(name, nbytes)
        for name, item in ALGORITHMS.items()
        if item.automatic is not None and item.automatic((0,) * ranks)
    }
    assert predicted.keys() >= {"ring", "tree"}
    assert choice.predicted_s == predicted[choice.algorithm] == min(predicted.values())


@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_what_does_not_say_so_is_never_chosen(per_node, monkeypatch):
    """Not even if it would take no time at all."""
    instant = Collective("instant", ALL_REDUCE, (lambda rank, size: (),), "nothing")
    monkeypatch.setitem(registry.ALGORITHMS, "instant", instant)
    monkeypatch.setitem(registry.COLLECTIVES, ("all-reduce", "instant"), instant)
    fit = make(8, SLOW, per_node=per_node)
    assert fit.predict("instant", 1000) == 0
    assert {choose(nbytes, 8, fit).algorithm for nbytes in SIZES} <= ALGORITHMS.keys() - {
        "instant",
        "star",
    }
    monkeypatch.setitem(
        registry.ALGORITHMS, "instant", replace(instant, automatic=registry.anywhere)
    )
    assert choose(1000, 8, fit).algorithm == "instant"


def test_few_latencies_for_short_messages_few_bytes_for_long_ones():
    fit = make(16, SLOW)
    assert choose(4, 16, fit).algorithm in ("tree", "halving-doubling")
    assert choose(2**26, 16, fit).algorithm in ("ring", "halving-doubling")
    odd = make(17, SLOW)
    assert choose(400, 17, odd).algorithm == "tree"
    assert choose(2**26, 17, odd).algorithm == "ring"


def test_what_was_measured_to_be_faster_is_taken_and_the_next_ones_are_named():
    fit = make(4, Curve.line(1e-7, 1e-11), shared=Curve.line(2e-7, 5e-12))
    assert choose(4, 4, fit, shared=True).algorithm == NATIVE
    long = choose(2**20, 4, fit, shared=True)
    assert long.algorithm == SHARED
    assert "for 1 MiB, against native 10.6 us" in long.reason
    assert choose(2**20, 4, fit, shared=False).algorithm == NATIVE  # the array lies elsewhere
    assert choose(2**20, 4, replace(fit, shared=None), shared=True).algorithm == NATIVE


def test_a_started_call_is_chosen_by_what_started_calls_take():
    fit = replace(make(2, Curve.line(0, 1e-12)), native_started=SLOW)
    assert choose(2**20, 2, fit).algorithm == NATIVE
    assert choose(2**20, 2, fit, started=True).algorithm != NATIVE


def test_two_levels_are_taken_where_a_ring_would_cross_at_every_step():
    """Ranks dealt out to the nodes in turn: all neighbours of a ring are on other nodes and share
    the nodes' links.
    """
    nodes = [rank % 4 for rank in range(24)]
    dealt = replace(make(24, SLOW, per_node=6), facts={"ranks": 24, "nodes": nodes})
    dealt = replace(dealt, machine=replace(dealt.machine, nodes=tuple(nodes)))
    assert choose(2**26, 24, dealt).algorithm == "hierarchical"
    assert "hierarchical" not in choose(2**26, 32, make(32, SLOW, per_node=1)).reason
