"""The benchmark's predictions: which fit they come from, and what they are."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives import prediction
from benchmarks.collectives.command import main
from benchmarks.collectives.tables import read
from nnmpi.comm.fitting.fit import Fit, default_file, load_fit, save_fit
from nnmpi.comm.fitting.measure import facts
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Curve, Machine
from nnmpi.errors import UsageError

pytestmark = pytest.mark.mpi

ALPHA_S, BETA_S = 2e-6, 1e-9
SHORT = "--min 4k --max 4k --iterations 2"


def textbook(group: Group, **changed: Any) -> Fit:
    """Return a fit of a textbook machine."""
    line = Curve.line(1e-6, 1e-9)
    return Fit(Machine.uniform(ALPHA_S, BETA_S), line, line, Curve.line(5e-7, 1e-10), facts(group) | changed)


def keep_fit(group: Group, folder: Path, **changed: Any) -> Path:
    """Write such a fit where all ranks find it."""
    fit, file = textbook(group, **changed), Path(group.share(str(folder))) / "fit.json"
    if group.is_root:
        save_fit(fit, file)
    group.barrier()
    return file


@pytest.fixture
def cache(group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of all ranks that holds nothing."""
    folder = Path(group.share(str(tmp_path))) / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_rows_are_predicted_by_the_fit_that_is_named(group: Group, tmp_path: Path, cache: Path) -> None:
    file = keep_fit(group, tmp_path)
    json = file.with_name("rows.json")
    main([*SHORT.split(), "--fit", str(file), "--json", str(json)], group)
    group.barrier()
    content = read(json)
    rows = {row["algorithm"]: row for row in content["rows"]}
    assert content["header"]["fit"].startswith(f"of {facts(group)['date']}, {group.size} ranks under ")
    assert rows["native"]["predicted_us"] == pytest.approx(1 + 4.096, abs=0.01)
    assert rows["shared"]["predicted_us"] == pytest.approx(0.5 + 0.41, abs=0.01)
    n = group.size
    ring_us = 2 * (n - 1) * 1e6 * ALPHA_S + 2 * (n - 1) / n * 4096 * 1e6 * BETA_S
    assert rows["ring"]["predicted_us"] == pytest.approx(ring_us, rel=0.01, abs=1e-9)
    assert rows["auto"]["predicted_us"] == rows[rows["auto"]["chosen"]]["predicted_us"]
    assert rows["fused"]["predicted_us"] is None
    for row in rows.values():
        if row["predicted_us"]:
            assert row["measured_over_predicted"] == pytest.approx(row["p50_us"] / row["predicted_us"], rel=0.01)


def test_other_operations_are_predicted_from_their_steps(group: Group, tmp_path: Path, cache: Path) -> None:
    file = keep_fit(group, tmp_path)
    json = file.with_name("rows.json")
    main([*SHORT.split(), "--operation", "all-gather", "--fit", str(file), "--json", str(json)], group)
    group.barrier()
    rows = {row["algorithm"]: row["predicted_us"] for row in read(json)["rows"]}
    n = group.size
    assert rows["native"] is None
    assert rows["ring"] == pytest.approx((n - 1) * 2 + (n - 1) / n * 4.096, rel=0.01)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"ranks": 77, "nodes": [0] * 77}, "was made with 77 ranks on "),
        ({"mpi": "Other MPI 1.0"}, " under Other MPI 1.0, but this run has "),
    ],
)
def test_a_stale_fit_is_an_error_on_all_ranks(
    group: Group, tmp_path: Path, cache: Path, changed: dict[str, Any], text: str
) -> None:
    file = keep_fit(group, tmp_path, **changed)
    with pytest.raises(UsageError) as caught:
        main([*SHORT.split(), "--fit", str(file)], group)
    assert text in str(caught.value)
    assert len(set(group.gather(str(caught.value)))) == 1


def test_a_missing_fit_is_an_error_on_all_ranks(group: Group, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json cannot be read \(No such file"):
        main([*SHORT.split(), "--fit", "absent.json"], group)


def test_a_kept_fit_is_used_and_a_damaged_one_is_not(
    group: Group, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SHORT.split(), "--algorithms", "native"], group)
    assert ("no fit" in capsys.readouterr().out) == group.is_root
    kept = default_file(group.share(facts(group)))
    assert kept is not None
    assert kept.is_relative_to(cache)
    if group.is_root:
        kept.parent.mkdir(parents=True)
    file = keep_fit(group, tmp_path)
    if group.is_root:
        kept.write_text(file.read_text())
    group.barrier()
    main([*SHORT.split(), "--algorithms", "native"], group)
    assert (str(kept) in capsys.readouterr().out) == group.is_root
    group.barrier()
    if group.is_root:
        kept.write_text("{")
    group.barrier()
    main([*SHORT.split(), "--algorithms", "native"], group)
    printed = capsys.readouterr().out
    assert (f"the kept fit is not used: {kept} is no fit" in printed) == group.is_root
    assert ("no fit\n" in printed) == group.is_root


def test_refit_measures_and_keeps(
    group: Group, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(group.share(str(tmp_path))) / "deep" / "fit.json"
    monkeypatch.setattr(prediction, "measure", lambda group, progress: textbook(group, cores=123))
    words = [*SHORT.split(), "--algorithms", "native,ring", "--refit", "--fit", str(file)]
    main(words, group)
    group.barrier()
    assert load_fit(file).facts["cores"] == 123
    printed = capsys.readouterr().out
    assert ("fitting the model" in printed) == group.is_root
    assert (f"under {load_fit(file).facts['mpi']} ({file})" in printed) == group.is_root
