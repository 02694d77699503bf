"""Measuring this machine: that what comes out is a fit of these ranks, sane and reusable; times are another matter."""

from pathlib import Path

import pytest

from nnmpi.comm.fit import Fit, default_file, save_fit
from nnmpi.comm.fitting.measure import facts, find_fit, measure, time_calls
from nnmpi.comm.group import Group
from nnmpi.errors import UsageError


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
