"""Fits: kept as files and read back whole, refused where they do not belong, what they predict and
are told as.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nnmpi.comm.fit
import nnmpi.lab.measure
from nnmpi.comm.algorithms.registry import ALGORITHMS, NATIVE, SHARED
from nnmpi.comm.duration import price
from nnmpi.comm.fit import Fit, default_file, describe_fit, load_fit, save_fit
from nnmpi.comm.machine import Curve, Link, Machine
from nnmpi.comm.saved_fit import facts, find_fit
from nnmpi.lab.measure import SIZES, measure, measure_curves, measure_sums, time_calls
from nnmpi.lab.render.collectives import draw_fit
from tests.harness.refusals import usage_error

EAGER = Curve(((8, 1e-6), (1024, 2e-6), (1025, 5e-6), (4097, 8e-6)))
FACTS = {
    "ranks": 4,
    "nodes": [0, 0, 1, 1],
    "mpi": "Open MPI 5.0.11",
    "host": "Head Node",
    "date": "2026-01-01",
}


def make(**changes):
    machine = Machine(
        Link.line(1e-6, 1e-10),
        Link.line(1e-5, 1e-9),
        nodes=(0, 0, 1, 1),
        add=Curve.line(0.0, 2e-11),
    )
    native, started, shared = (
        Curve.line(3e-6, 2e-9),
        Curve.line(4e-6, 4e-9),
        Curve.line(1e-6, 5e-10),
    )
    return replace(Fit(machine, native, started, shared, FACTS), **changes)


def test_a_fit_is_read_back_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "fit.json"
    apart = Machine(Link(EAGER, Curve.line(0.1, 3e-9)), add=EAGER)
    for fit in (
        make(),
        make(shared=None, facts={**FACTS, "cores": 2}),
        make(machine=apart, native=EAGER),
    ):
        save_fit(fit, file)
        assert load_fit(file) == fit
    assert [item.name for item in file.parent.iterdir()] == ["fit.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    file = tmp_path / "fit.json"
    save_fit(make(), file)
    with pytest.raises(TypeError):
        save_fit(make(facts={**FACTS, "cpu": object()}), file)
    assert load_fit(file) == make()
    assert [item.name for item in tmp_path.iterdir()] == ["fit.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 7, "facts": {}}',
        "null",
        '{"format": 2, "machine": 3}',
    ],
)
def test_what_is_no_fit_is_refused_in_a_sentence(tmp_path, text):
    file = tmp_path / "fit.json"
    file.write_text(text)
    usage_error(r"fit.json: not a readable fit.*nnmpi comm fit", load_fit, file)
    values = make().to_json()
    values["machine"]["inside"]["one_way"]["points"] = [[8, 1e-6], [4, 1e-6]]
    file.write_text(json.dumps(values))
    usage_error("increasing bytes", load_fit, file)


@pytest.mark.parametrize(
    "name, value",
    [
        ("ranks", "4"),
        ("ranks", True),
        ("ranks", 10**30),
        ("nodes", [0, 0, 0, "0"]),
        ("nodes", 4),
        ("mpi", None),
        ("host", 5),
        ("date", {}),
        ("took", [1.0]),
        ("took", "ab"),
        ("took", [0, 10**400]),
    ],
)
def test_facts_of_another_kind_are_refused(tmp_path, name, value):
    file, values = tmp_path / "fit.json", make().to_json()
    values["facts"] = {**values["facts"], name: value}
    file.write_text(json.dumps(values))
    usage_error(r"fit.json: not a readable fit.*nnmpi comm fit", load_fit, file)
    del values["facts"]["mpi"]
    file.write_text(json.dumps(values))
    usage_error(r"fit.json: not a readable fit", load_fit, file)


def test_a_point_of_three_numbers_is_refused(tmp_path):
    file, values = tmp_path / "fit.json", make().to_json()
    values["native"]["points"] = [[8, 1e-6, 5]]
    file.write_text(json.dumps(values))
    usage_error("has 3 values, not 2", load_fit, file)


def test_a_file_that_is_not_there_is_named(tmp_path):
    usage_error(
        r"nowhere.json: not a readable fit.*\(No such file", load_fit, tmp_path / "nowhere.json"
    )


def test_predictions_are_those_of_the_steps_or_what_was_measured():
    fit = make()
    for name, collective in ALGORITHMS.items():
        if not collective.takes_nodes:
            assert fit.predict(name, 10_000) == price(collective, 4, 10_000, fit.machine)
    assert fit.predict("native", 1000) == pytest.approx(5e-6)
    assert fit.predict("native", 1000, started=True) == pytest.approx(8e-6)
    assert fit.predict("shared", 1000) == pytest.approx(1.5e-6)
    usage_error("without shared memory", lambda: make(shared=None).predict("shared", 1000))


def test_hierarchical_is_predicted_for_the_nodes_of_the_fit():
    """Two nodes of two ranks: up inside, around two leaders across, down inside. One has a tree."""
    n, across, inside = 10_000, 1e-5, 1e-6
    expected = 2 * (inside + n * 1e-10) + 2 * (across + n / 2 * 1e-9) + (n + n / 2) * 2e-11
    fit = make()
    assert fit.predict("hierarchical", n) == pytest.approx(expected)
    one = replace(fit, machine=replace(fit.machine, nodes=None))
    assert one.predict("hierarchical", n) == one.predict("tree", n)


def test_the_default_file_tells_host_mpi_and_layout(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        default_file(FACTS)
        == tmp_path / "nnmpi" / "fit-head-node-open-mpi-5.0.11-4-ranks-2-nodes.json"
    )
    one_node = {**FACTS, "nodes": [0] * 4}
    assert (
        default_file(one_node) == tmp_path / "nnmpi" / "fit-head-node-open-mpi-5.0.11-4-ranks.json"
    )


# Measuring this machine: that what comes out is a fit of these ranks, sane and reusable; times are
# another matter.


@pytest.fixture(scope="module")
def fit(group):
    """A fit of these ranks, hastily made; None for a single one."""
    return measure(group, budget_s=0.5) if group.size > 1 else None


@pytest.mark.mpi
def test_a_fit_is_the_same_on_all_ranks_and_never_falls_with_the_bytes(group, fit):
    if fit is None:
        usage_error("nothing to fit; start at least 2", measure, group)
        return
    assert list(map(Fit.from_json, group.gather(fit.to_json()))) == [fit] * group.size
    curves = [
        fit.machine.inside.one_way,
        fit.machine.inside.both_ways,
        fit.machine.add,
        fit.native,
        fit.shared,
    ]
    for curve in curves:
        # by how much is a matter of what else the machine does meanwhile
        assert 0 < curve.alpha_s <= curve(2**26)
    assert fit.machine.across is None
    assert fit.ranks == group.size
    for name in (NATIVE, SHARED, *ALGORITHMS):
        assert fit.predict(name, 2**20) > 0


@pytest.mark.mpi
def test_sums_are_measured_and_drawn_beside_their_predictions(group, fit, tmp_path):
    """A line and points for each all-reduce of steps, and a title that says where."""
    pytest.importorskip("matplotlib")
    if fit is None:
        return
    sums = measure_sums(group, budget_s=0.5)
    assert sums.keys() == ALGORITHMS.keys()
    assert all(curve(2**20) > 0 and curve.points[0][0] == 4 for curve in sums.values())
    draw_fit(fit, sums, tmp_path / "fit.svg")
    said = re.findall(r"<!-- (.*?) -->", (tmp_path / "fit.svg").read_text())
    assert {*said} >= {*ALGORITHMS, "measured", "predicted", "bytes of a buffer"}
    where = f"{group.size} ranks on 1 node under {fit.facts['mpi']}, {fit.facts['host']}"
    assert any(text.startswith(where) for text in said)


@pytest.mark.mpi
def test_a_fit_is_found_where_it_was_kept(group, fit, tmp_path_factory, monkeypatch):
    cache = Path(group.share(str(tmp_path_factory.mktemp("cache"))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert find_fit(group) is None
    if fit is None:
        return
    file = default_file(facts(group))
    if group.is_root:
        save_fit(fit, file)
    assert find_fit(group) == fit
    if group.is_root:
        file.write_text("{")  # damaged: as if there were none, for nobody asked for it
    assert find_fit(group) is None


@pytest.mark.mpi
def test_calls_are_timed_in_turn_from_the_last_start_to_the_last_end(group):
    made = []
    calls = [
        (lambda name=name: made.append(name), lambda name=name: made.append(f"fill {name}"))
        for name in "ab"
    ]
    seconds = time_calls(group, calls, budget_s=0.001)
    assert seconds.shape[0] == 2 and seconds.shape[1] >= 3
    assert made[-4:] in (["fill a", "a", "fill b", "b"], ["fill b", "b", "fill a", "a"])
    assert len(made) == 4 * (1 + seconds.shape[1])
    assert group.gather(seconds.tolist()) == [seconds.tolist()] * group.size


@pytest.mark.parametrize("s_per_byte, longest", [(1e-9, 2**24), (3e-6, 2**17), (1e-4, 2**16)])
def test_on_slow_links_a_fit_ends_with_shorter_messages(group, s_per_byte, longest, monkeypatch):
    """A megabyte was always measured: at 10 Mbit/s a fit of three nodes took minutes."""
    monkeypatch.setattr(nnmpi.lab.measure, "time_calls", lambda *given: np.full((1, 3), given[1]))
    curve = measure_curves(group, lambda n: [s_per_byte * n], SIZES, 60.0)[0]
    assert curve.points[-1][0] == longest


def test_the_lines_have_both_links_and_every_algorithm(monkeypatch):
    monkeypatch.setattr(nnmpi.comm.fit, "EXAMPLES", (1000, 2**20))
    message = list(describe_fit(make()))
    text = "\n".join(message)
    assert "messages inside a node, one way: latency 1 us" in text
    assert "messages between nodes, both ways: latency 10 us, 1.000 ns/B" in text
    table = [line.split() for line in message[message.index("") + 1 :]]
    assert table[0] == ["predicted", "1000", "B", "1", "MiB"] and table[1] == [
        "native",
        "5",
        "us",
        "2.1",
        "ms",
    ]
    assert {line[0] for line in table[2:]} >= {SHARED, *ALGORITHMS}
