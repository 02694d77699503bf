"""The page of a run: what its files say, and nothing else."""

import json
from pathlib import Path

import pytest

from nnmpi.errors import UsageError
from nnmpi.report import gather, gather_trace, main
from nnmpi.timeline import TraceEvent, to_chrome, write_chrome
from nnmpi.train.config import Config, assemble, flatten
from tests.pages.browser import look

pytestmark = [pytest.mark.host_only("pages are text"), pytest.mark.timeout(200)]  # Chromium may be slow
WORKER = {"worker": 0, "steps": 3, "mean": 1.0, "max": 2, "histogram": [[0, 1], [1, 1], [2, 1]]}
COMMAND = ["python", "-m", "nnmpi.train", "--model", "mlp", "--hidden", "3", "4", "--config", "lr.toml"]
CONSOLE = """\
layout:      dp 2, 2 ranks on 1 node (here)
MPI:         simulated
all-reduce:  fused with the update, through shared memory
epoch 1/2: loss 1.5, accuracy 50 %
  step 6.64 ms = compute 2.79 ms
"""

FACTS = [["layout", "dp 2, 2 ranks on 1 node (here)"], ["data", "iris"], ["all-reduce", "ring"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with four steps, two evaluations, and a gradient that is two updates old."""
    folder = tmp_path / "my-run"
    folder.mkdir()
    options = flatten(assemble({"model": "mlp", "lr": 0.25, "hidden": [3, 4], "jit": "on", "dp": 2}))
    (folder / "config.json").write_text(json.dumps(options))
    memory = {"memory_parameters": 1024, "memory_optimizer": 3072, "memory_peak": 4096}
    records = [
        {"kind": "train", "global_step": step, "epoch": step / 2, "loss": 4 / step, "accuracy": None, "elapsed_s": step}
        | {"compute_s": 0.003, "sync_s": 0.001, "wait_s": 0.0, "input_s": 0.0, "learning_rate": 0.25, **memory}
        for step in (1, 2, 3, 4)
    ]
    records += [
        {"kind": kind, "global_step": 4, "epoch": 2.0, "loss": 0.5, "accuracy": 0.75, "elapsed_s": 4.0}
        for kind in ("eval", "test")
    ]
    records.append({"kind": "staleness", "global_step": 4, "mean": 1.0, "max": 2, "workers": [WORKER]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records) + '{"kind": "tr')
    (folder / "console.txt").write_text(CONSOLE)
    (folder / "starts.jsonl").write_text(
        json.dumps({"command": COMMAND, "ranks": 2, "folder": str(tmp_path), "facts": FACTS}) + "\n"
    )
    (tmp_path / "lr.toml").write_text("lr = 0.25\njit = 'auto'\n")
    return folder


def test_the_numbers_are_the_runs(run: Path) -> None:
    found = gather(run)
    assert found["head"][0] == ["layout", "dp 2, 2 ranks on 1 node (here)"] and len(found["head"]) == 3
    assert [each["kind"] for each in found["results"]] == ["eval", "test"]
    assert found["charts"][0]["title"] == "Loss"
    assert [line["name"] for line in found["charts"][0]["lines"]] == ["training", "test data"]
    assert found["charts"][0]["lines"][0]["points"] == [[1, 4.0], [2, 2.0], [3, 4 / 3], [4, 1.0]]
    assert found["times"] == pytest.approx({"compute": 0.003, "synchronization": 0.001})
    assert found["memory"] == {"parameters": 1024, "optimizer": 3072, "peak": 4096}
    assert found["staleness"] == {"width": 1, "heights": [[1, 1, 1]], "mean": 1.0, "max": 2}
    given = [["--lr", "0.25"], ["--jit", "auto"], ["--model", "mlp"], ["--hidden", "3 4"], ["--config", "lr.toml"]]
    assert sorted(found["options"]) == sorted(given)
    assert sorted(found["chosen"]) == [["--dp", "2"], ["--jit", "on"]]
    assert found["commands"] == ["python -m nnmpi.train --model mlp --hidden 3 4 --config lr.toml    # ranks: 2"]
    (run.parent / "lr.toml").unlink()
    found = gather(run)
    assert ["--dp", "2"] in found["options"] and not found["chosen"]


@pytest.mark.parametrize(
    ("name", "line"), [("metrics.jsonl", '{"a": 1}\n'), ("metrics.jsonl", "1\n"), ("starts.jsonl", "[1]\n")]
)
def test_files_that_are_not_a_runs_are_refused(run: Path, name: str, line: str) -> None:
    (run / name).write_text(line)
    with pytest.raises(UsageError, match="the metrics of the run cannot be read"):
        gather(run)


@pytest.mark.parametrize(("width", "dark"), [("desk", False), ("phone", True)])
def test_the_page_shows_them(run: Path, tmp_path: Path, width: str, dark: bool) -> None:
    assert main([str(run)]) == f"{run / 'report.html'} shows the run in a browser"
    script = """
        return { told: [texts("h1"), texts("h2"), texts("tr"), count("path[data-name]"), count(".fill")] };
    """
    title, headings, rows, lines, fills = look((run / "report.html").read_text(), script, tmp_path, width, dark)["told"]
    assert title == ["run my-run"]
    assert {"What it was", "Where a step's time went", "Memory of rank 0: at most 4 KB", "Loss"} <= set(headings)
    assert {"Staleness: 1 on average, at most 2", "Options that were given", "Options that the run has chosen"} <= {
        *headings
    }
    assert "layoutdp 2, 2 ranks on 1 node (here)" in rows and "at the endloss 0.5, accuracy 75.00 %, 4 s" in rows
    assert "compute3 ms, 75 %" in rows and "optimizer3 KB" in rows and "--lr0.25" in rows
    assert lines >= 8 and fills == 4


def test_a_run_without_steps_has_a_page_and_no_run_has_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run"):
        main([str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps(flatten(Config())))
    with pytest.raises(UsageError, match="the metrics of the run cannot be read"):
        main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    main([str(tmp_path), "--out", str(tmp_path / "page.html")])
    found = look((tmp_path / "page.html").read_text(), 'return { headings: texts("h2") };', tmp_path)
    assert found["headings"] == ["What it was", "Commands"]


def trace(folder: Path) -> Path:
    """Write the trace of two steps of two ranks: what is said below of the times."""
    first = [
        TraceEvent("step 0", "step", "steps", 10.0, 10.010),
        TraceEvent("F0", "forward", "compute", 10.0, 10.004),
        TraceEvent("sum", "collective", "reduce", 10.003, 10.006, {"bytes": 8}),
        TraceEvent("step 1", "step", "steps", 10.012, 10.020),
        TraceEvent("B1", "backward", "compute", 10.011, 10.013),  # 1 ms of it belongs to the part before
    ]
    second = [
        TraceEvent("step 0", "step", "steps", 10.001, 10.013),
        TraceEvent("other ranks", "waiting", "waiting", 10.001, 10.003),
        TraceEvent("step 1", "step", "steps", 10.014, 10.020),
        TraceEvent("F1", "forward", "compute", 10.016, 10.020),
    ]
    write_chrome(folder / "trace.json.gz", to_chrome({0: first, 1: second}, {0: "rank 0: d0"}))
    return folder / "trace.json.gz"


def test_a_traces_times_are_summed_up(tmp_path: Path) -> None:
    """Steps part the time where a first rank begins them; what overlaps counts once in what is left over."""
    found = gather_trace(trace(tmp_path))
    assert [rank["name"] for rank in found["ranks"]] == ["rank 0: d0", "rank 1"]
    assert [[each["kind"] for each in rank["tracks"]] for rank in found["ranks"]] == [
        ["computing", "exchange"],
        ["computing", "waiting"],
    ]
    assert [part[0] for part in found["parts"]] == ["step 0", "step 1"]
    assert [part[1:] for part in found["parts"]] == [pytest.approx((0.0, 0.012)), pytest.approx((0.012, 0.020))]
    (a, b), (c, d) = found["shares"]
    assert a == pytest.approx({"computing": 0.005, "exchange": 0.003, "waiting": 0.0, "idle": 0.005})
    assert b == pytest.approx({"computing": 0.0, "exchange": 0.0, "waiting": 0.002, "idle": 0.010})
    assert c == pytest.approx({"computing": 0.001, "exchange": 0.0, "waiting": 0.0, "idle": 0.007})
    assert d == pytest.approx({"computing": 0.004, "exchange": 0.0, "waiting": 0.0, "idle": 0.004})


@pytest.mark.parametrize(("width", "dark"), [("desk", True), ("phone", False)])
def test_the_page_of_a_trace_finds_steps_and_events(tmp_path: Path, width: str, dark: bool) -> None:
    file = trace(tmp_path)
    assert main([str(file)]) == f"{tmp_path / 'trace.html'} shows the trace in a browser"
    script = """
        const ask = (words) => {
          const field = document.querySelector('input[type="search"]');
          field.value = words;
          field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        };
        const told = [texts(".figures")[0], count("rect.span"), texts("tr")[1]];
        press("ArrowRight"); told.push(texts(".figures")[0]);
        ask("sum"); told.push(texts(".figures")[0], texts(".told")[0]);
        ask("1"); told.push(texts(".figures")[0]);
        ask("nobody"); told.push(texts(".told")[0]);
        move("shown at once", 1); told.push(texts(".figures")[0], count("rect.span"));
        return { told };
    """
    told = look((tmp_path / "trace.html").read_text(), script, tmp_path, width, dark)["told"]
    assert told[:4] == [
        "step 0 of 2: 12 ms",
        4,
        "rank 0: d05 ms, 42 %3 ms, 25 %0 s, 0 %5 ms, 42 %",
        "step 1 of 2: 8 ms",
    ]
    assert told[4:6] == ["step 0 of 2: 12 ms", "sum (collective) on rank 0: d0: 3 ms, from 3 ms, bytes 8"]
    assert told[6:8] == ["step 1 of 2: 8 ms", "nothing is called nobody"]
    assert told[8:] == ["step 0 to step 1 of 2: 20 ms", 5]


def test_no_trace_is_refused(tmp_path: Path) -> None:
    for name, text in (("a.json", b"{}"), ("b.json.gz", b"no gzip"), ("c.json", b"[1]"), ("d.json", b"\xff")):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(UsageError, match="is no trace that can be read"):
            gather_trace(tmp_path / name)
