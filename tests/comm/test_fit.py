"""Fits: kept as files and read back whole, refused where they do not belong, what they predict and are told as."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nnmpi.comm.algorithms.registry import ALGORITHMS
from nnmpi.comm.fitting.fit import Fit, check_place, default_file, load_fit, save_fit
from nnmpi.comm.fitting.measure import _kept, facts, find_fit, measure, time_calls
from nnmpi.comm.fitting.report import describe_fit, find_eager_limit, predictions, segments
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Curve, Link, Machine
from nnmpi.comm.simulate import simulate_collective
from nnmpi.errors import UsageError

FACTS = {"ranks": 4, "nodes": [0, 0, 1, 1], "mpi": "Open MPI 5.0.11", "host": "Head Node", "date": "2026-01-01"}


def make(**changes: object) -> Fit:
    machine = Machine(Link.line(1e-6, 1e-10), Link.line(1e-5, 1e-9), nodes=(0, 0, 1, 1), add=Curve.line(0.0, 2e-11))
    native, started, shared = Curve.line(3e-6, 2e-9), Curve.line(4e-6, 4e-9), Curve.line(1e-6, 5e-10)
    return replace(Fit(machine, native, started, shared, FACTS), **changes)


def test_a_fit_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "fit.json"
    for fit in (make(), make(shared=None, facts={**FACTS, "cores": 2})):
        save_fit(fit, file)
        assert load_fit(file) == fit
    assert [each.name for each in file.parent.iterdir()] == ["fit.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    save_fit(make(), file)
    with pytest.raises(TypeError):
        save_fit(make(facts={**FACTS, "cpu": object()}), file)
    assert load_fit(file) == make()
    assert [each.name for each in tmp_path.iterdir()] == ["fit.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 7, "facts": {}}', "null", '{"format": 1, "machine": 3}']
)
def test_what_is_no_fit_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fit.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"fit.json is no fit .*python -m nnmpi.comm fit"):
        load_fit(file)
    values = make().to_json()
    values["machine"]["inside"]["one_way"] = [[8, 1e-6], [4, 1e-6]]
    file.write_text(json.dumps(values))
    with pytest.raises(UsageError, match="growing bytes"):
        load_fit(file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranks": 0, "nodes": []}, "it is of 0 ranks"),
        ({"ranks": 3}, r"it is of 3 ranks on the nodes \[0, 0, 1, 1\]"),
        ({"mpi": None}, "it does not say its mpi"),
        ({"host": 3}, "it does not say its host"),
    ],
)
def test_facts_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    values = make().to_json()
    values["facts"] = {**values["facts"], **change}
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(values))
    with pytest.raises(UsageError, match=f"fit.json is no fit .*{sentence}"):
        load_fit(file)


def test_a_place_is_looked_at_before_anything_is_measured(tmp_path: Path) -> None:
    check_place(tmp_path / "new" / "fit.json")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")  # a file would come in its place, as in a device's
    for place in (tmp_path / "file" / "fit.json", tmp_path / "new", tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"Not a directory|not an ordinary file|File exists"):
            check_place(place)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.json cannot be read \(No such file"):
        load_fit(tmp_path / "nowhere.json")


def test_a_stale_fit_says_what_differs_and_what_would_work() -> None:
    fit = make()
    fit.check(4, [0, 0, 1, 1], "Open MPI 5.0.11")
    with pytest.raises(
        UsageError, match=r"made with 4 ranks on 2 nodes under Open MPI 5.0.11, but this run has 2 ranks"
    ):
        fit.check(2, [0, 1], "Open MPI 5.0.11")
    with pytest.raises(UsageError, match="mpirun -n 4 python -m nnmpi.comm fit"):
        fit.check(4, [0, 0, 1, 1], "MPICH 5.0.2")
    with pytest.raises(UsageError, match="4 ranks on 1 node under"):
        fit.check(4, [0, 0, 0, 0], "Open MPI 5.0.11", "the fit here")


def test_predictions_are_those_of_the_steps_or_what_was_measured() -> None:
    fit = make()
    for name, collective in ALGORITHMS.items():
        if name != "hierarchical":
            assert fit.predict(name, 10_000) == simulate_collective(collective, 4, 10_000, fit.machine).seconds
    assert fit.predict("native", 1000) == pytest.approx(5e-6)
    assert fit.predict("native", 1000, started=True) == pytest.approx(8e-6)
    assert fit.predict("shared", 1000) == pytest.approx(1.5e-6)
    with pytest.raises(UsageError, match="without shared memory"):
        make(shared=None).predict("shared", 1000)


def test_hierarchical_is_predicted_for_the_nodes_of_the_fit() -> None:
    """Two nodes of two ranks: up inside, around two leaders across, down inside."""
    n, across, inside = 10_000, 1e-5, 1e-6
    expected = 2 * (inside + n * 1e-10) + 2 * (across + n / 2 * 1e-9) + (n + n / 2) * 2e-11
    assert make().predict("hierarchical", n) == pytest.approx(expected)


def test_the_default_file_tells_host_mpi_and_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_file(FACTS) == tmp_path / "nnmpi" / "fit-head-node-open-mpi-5.0.11-4-ranks-2-nodes.json"
    one_node = {**FACTS, "nodes": [0] * 4}
    assert default_file(one_node) == tmp_path / "nnmpi" / "fit-head-node-open-mpi-5.0.11-4-ranks.json"


def curve(**changed: float) -> Curve:
    points = {8: 2e-6, 4096: 3e-6, 8192: 6e-6, 2**20: 1e-4, 2**24: 2e-3}
    return Curve(tuple((float(n), changed.get(f"b{n}", seconds)) for n, seconds in points.items()))


@pytest.mark.parametrize(
    ("changed", "doubt"),
    [
        ({}, ""),
        ({"b8192": 8e-3, "b1048576": 8.1e-3, "b16777216": 1e-2}, "from 4096 to 8192 bytes a message one way takes"),
        (
            {"b8": 9e-3, "b4096": 9e-3, "b8192": 9e-3, "b1048576": 9e-3, "b16777216": 9e-3},
            "messages one way",
        ),
        (
            {"b8": 2e-3, "b4096": 2e-3, "b8192": 2e-3, "b1048576": 3e-3, "b16777216": 9e-3},
            "a message one way",
        ),
    ],
)
def test_what_was_taken_on_a_busy_machine_is_not_followed(
    changed: dict[str, float], doubt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 ms for a handshake, or nothing for a byte: auto followed it for ever."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    fit = make(machine=Machine(Link(curve(**changed), curve())), facts={**FACTS, "nodes": [0] * 4, "date": today})
    assert fit.doubt().startswith(doubt) and bool(fit.doubt()) == bool(doubt)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = default_file(fit.facts)
    assert file is not None
    save_fit(fit, file)
    assert _kept(fit.facts) == (None if doubt else fit)
    save_fit(replace(fit, facts={**fit.facts, "date": "2020-01-01"}), file)
    assert _kept(fit.facts) is None


def test_ranks_that_share_cores_are_told() -> None:
    fit = make(facts={**FACTS, "nodes": [0] * 4, "cores": 2})
    assert "4 ranks share 2 cores of a node: what was measured is how they take turns, too" in describe_fit(fit)


# Measuring this machine: that what comes out is a fit of these ranks, sane and reusable; times are another matter.


@pytest.fixture(scope="module")
def fit(group: Group) -> Fit | None:
    """A fit of these ranks, hastily made; None for a single one."""
    return measure(group, budget_s=0.5) if group.size > 1 else None


@pytest.mark.mpi
def test_a_fit_is_the_same_on_all_ranks_and_never_falls_with_the_bytes(group: Group, fit: Fit | None) -> None:
    if fit is None:
        with pytest.raises(UsageError, match="nothing to fit; start at least 2"):
            measure(group)
        return
    assert group.gather(fit.to_json()) == [fit.to_json()] * group.size
    assert Fit.from_json(fit.to_json()) == fit
    curves = [fit.machine.inside.one_way, fit.machine.inside.both_ways, fit.machine.add, fit.native, fit.shared]
    for curve in curves:
        assert curve is not None
        assert 0 < curve.alpha_s <= curve(2**26)  # by how much is a matter of what else the machine does meanwhile
    assert fit.machine.across is None
    assert fit.ranks == group.size
    for name in ("native", "shared", "ring", "tree", "ps", "halving-doubling"):
        assert fit.predict(name, 2**20) > 0


@pytest.mark.mpi
def test_a_fit_is_found_where_it_was_kept(
    group: Group, fit: Fit | None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Path(group.share(str(tmp_path_factory.mktemp("cache"))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert find_fit(group) is None
    if fit is None:
        return
    file = default_file(facts(group))
    assert file is not None
    if group.is_root:
        save_fit(fit, file)
    assert find_fit(group) == fit
    if group.is_root:
        file.write_text("{")  # damaged: as if there were none, for nobody asked for it
    assert find_fit(group) is None


@pytest.mark.mpi
def test_a_file_that_is_asked_for_must_be_a_fit_of_these_ranks(
    group: Group, fit: Fit | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(group.share(str(tmp_path_factory.mktemp("fits"))))
    with pytest.raises(UsageError, match=r"^the fit .*none.json cannot be read"):
        find_fit(group, folder / "none.json")
    if fit is None:
        return
    values = fit.to_json()
    values["facts"] = {**values["facts"], "ranks": group.size + 1, "nodes": [0] * (group.size + 1)}
    if group.is_root:
        save_fit(Fit.from_json(values), folder / "more.json")
    with pytest.raises(
        UsageError, match=f"made with {group.size + 1} ranks on 1 node .* but this run has {group.size}"
    ):
        find_fit(group, folder / "more.json")


@pytest.mark.mpi
def test_calls_are_timed_in_turn_from_the_last_start_to_the_last_end(group: Group) -> None:
    made: list[str] = []
    calls = [(lambda name=name: made.append(name), lambda name=name: made.append(f"fill {name}")) for name in "ab"]
    seconds = time_calls(group, calls, budget_s=0.001)
    assert seconds.shape[0] == 2 and seconds.shape[1] >= 3
    assert made[-4:] in (["fill a", "a", "fill b", "b"], ["fill b", "b", "fill a", "a"])
    assert len(made) == 4 * (1 + seconds.shape[1])
    assert group.gather(seconds.tolist()) == [seconds.tolist()] * group.size


STEP = tuple(
    [(float(n), 1e-6 + n * 1e-10) for n in (8, 256, 1024, 2048, 4096)]
    + [(float(n), 3e-6 + n * 1e-10) for n in (6144, 8192, 16384, 65536, 2**22)]
    + [(float(2**24), 3e-6 + 2**22 * 1e-10 + (2**24 - 2**22) * 2e-10)]
)


def test_the_step_between_eager_and_rendezvous_is_found() -> None:
    assert find_eager_limit(Curve(STEP)) == 4096
    assert find_eager_limit(Curve(STEP[:5])) is None
    assert find_eager_limit(Curve.line(1e-6, 1e-10)) is None


def test_a_curve_has_three_segments_with_their_alpha_and_beta() -> None:
    eager, rendezvous, out = segments(Curve(STEP), cache_bytes=2**22)
    assert (eager.name, rendezvous.name, out.name) == ("eager", "rendezvous", "out of cache")
    assert (eager.stop_bytes, rendezvous.start_bytes, out.stop_bytes) == (4096, 6144, 2**24)
    assert [part.beta_s for part in (eager, rendezvous, out)] == pytest.approx([1e-10, 1e-10, 2e-10])
    assert eager.step_s == pytest.approx(0, abs=1e-12)
    assert rendezvous.step_s == pytest.approx(2e-6)


def test_the_lines_have_both_links_and_every_algorithm() -> None:
    text = "\n".join(describe_fit(make()))
    assert text.startswith("4 ranks on 2 nodes, Open MPI 5.0.11")
    assert "messages inside a node, one way: alpha 1 us" in text
    assert "messages between nodes, both ways at once: alpha 10 us" in text
    assert "beta 1.000 ns/B (1.0 GB/s)" in text
    table = list(predictions(make(), (1000, 2**20)))
    assert table[0].split() == ["predicted", "1000", "B", "1", "MB"]
    assert table[1].split() == ["native", "5", "us", "2.1", "ms"]
    assert {line.split()[0] for line in table[2:]} >= {"shared", "ring", "tree", "ps", "hierarchical"}
