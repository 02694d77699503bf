"""The page of a run: what its files say, and nothing else."""

import json
import math
import shutil
import struct
from itertools import pairwise

import pytest

from nnmpi.lab.pages.page import make_page
from nnmpi.lab.report import compare, gather, main
from nnmpi.train.config import Config, assemble, flatten
from tests.harness.refusals import usage_error
from tests.lab.pages.browser import look

# Chromium may be slow
pytestmark = [pytest.mark.host_only("pages are text"), pytest.mark.timeout(200)]
WORKER = {"worker": 0, "steps": 3, "mean": 1.0, "max": 2, "histogram": [[0, 1], [1, 1], [2, 1]]}
COMMAND = ["nnmpi", "train", "--model", "mlp", "--hidden", "3", "4", "--config", "lr.toml"]
FACTS = [["layout", "dp 2, 2 ranks on 1 node (here)"], ["data", "iris"], ["all-reduce", "ring"]]


@pytest.fixture
def run(tmp_path):
    """A run's folder with four steps, two evaluations, and a gradient that is two updates old."""
    folder = tmp_path / "my-run"
    folder.mkdir()
    options = flatten(
        assemble({"model": "mlp", "lr": 0.25, "hidden": [3, 4], "jit": "on", "dp": 2})
    )
    (folder / "config.json").write_text(json.dumps(options))
    memory = {"memory_parameters": 1024, "memory_optimizer": 3072, "memory_peak": 4096}
    records = [
        {
            "kind": "train",
            "global_step": step,
            "epoch": step / 2,
            "loss": 4 / step,
            "accuracy": None,
            "elapsed_s": step,
        }
        | {
            "step_s": 0.005,
            "compute_s": 0.003,
            "sync_s": 0.001,
            "wait_s": 0.0,
            "input_s": 0.0,
            "learning_rate": 0.25,
            **memory,
        }
        for step in (1, 2, 3, 4)
    ]
    records += [
        {
            "kind": kind,
            "global_step": 4,
            "epoch": 2.0,
            "loss": 0.5,
            "accuracy": 0.75,
            "elapsed_s": 4.0,
        }
        for kind in ("eval", "test")
    ]
    records.append(
        {"kind": "staleness", "global_step": 4, "mean": 1.0, "max": 2, "workers": [WORKER]}
    )
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"kind": "tr'
    )
    (folder / "starts.jsonl").write_text(
        json.dumps({"command": COMMAND, "ranks": 2, "folder": str(tmp_path), "facts": FACTS}) + "\n"
    )
    return folder


def test_the_numbers_are_the_runs(run):
    result = gather(run)
    assert (
        result["head"][0] == ["layout", "dp 2, 2 ranks on 1 node (here)"]
        and len(result["head"]) == 3
    )
    assert [item["kind"] for item in result["results"]] == ["eval", "test"]
    titles = [item["title"] for item in result["charts"]]
    assert titles == ["Loss"]  # a rate that stays, a straight line, is none
    assert [line["name"] for line in result["charts"][0]["lines"]] == ["training", "test data"]
    assert result["charts"][0]["lines"][0]["points"] == [[n, n, 4 / n] for n in (1, 2, 3, 4)]
    assert result["times"] == pytest.approx(
        {"compute": 0.003, "synchronization": 0.001, "other": 0.001}
    )
    assert result["parts"] == [[step, 0.003, 0.0, 0.001, 0.0] for step in (1, 2, 3, 4)]
    assert result["memory"] == {"parameters": 1024, "optimizer": 3072, "peak": 4096}
    assert result["staleness"] == {"heights": [[1, 1, 1]], "mean": 1.0, "max": 2}
    given = [
        ["--lr", "0.25"],
        ["--jit", "on"],
        ["--model", "mlp"],
        ["--hidden", "3 4"],
        ["--dp", "2"],
    ]
    assert sorted(result["options"]) == sorted(given)
    assert result["commands"] == [
        "nnmpi train --model mlp --hidden 3 4 --config lr.toml    # ranks: 2"
    ]


def test_windows_count_by_their_steps_and_the_title_says_whose_times_they_are(run):
    """20 steps of 30 ms in windows of 10, 8 and 2 steps."""
    file = run / "metrics.jsonl"
    lines = [
        {"kind": "train", "global_step": step, "epoch": 1.0, "loss": 1.0, "step_s": step_s}
        | {"compute_s": compute_s, "sync_s": step_s - compute_s, "input_s": 0.0, "wait_s": 0.0}
        for step, step_s, compute_s in ((10, 0.02, 0.01), (18, 0.03, 0.02), (20, 0.08, 0.04))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = gather(run)
    assert result["times"] == pytest.approx({"compute": 0.017, "synchronization": 0.013})
    assert sum(result["times"].values()) == pytest.approx(0.6 / 20)
    assert result["whose"] == "on rank 0"
    file.write_text("".join(json.dumps(line | {"workers": 4}) + "\n" for line in lines))
    assert gather(run)["whose"] == "as a mean over 4 workers"
    file.write_text(
        "".join(json.dumps(line | {"workers": 4, "sync_s": 0}) + "\n" for line in lines)
    )
    assert gather(run)["times"] == pytest.approx(result["times"])  # what is left is waiting
    (run / "starts.jsonl").write_text("")
    assert "--jit" not in dict(gather(run)["options"])  # which nobody has given


def test_what_is_drawn_is_what_a_person_reads(run, tmp_path):
    """Parts of a step that were there; accuracies by the errors that are left; which class was
    taken for which.
    """
    points = [[1, 10, 0.5], [2, 20, 0.97], [3, 30, 0.99], [4, 40, 1.0]]
    accuracy = {
        "title": "Accuracy",
        "accuracy": True,
        "lines": [{"name": "test", "points": points}],
    }
    confusion = {"classes": ["cat", "dog"], "confusion": [[3, 1], [0, 2]]}
    page = make_page("run", "drawn", gather(run) | {"charts": [accuracy], "evaluation": confusion})
    script = """
        const paths = [...document.querySelectorAll(".chart path")];
        return { told: [texts("h2"), texts(".chart title"), texts(".chart svg text.soft"),
                        texts(".entry"), paths.map((each) => each.getAttribute("stroke")),
                        paths[2].getAttribute("d"), texts("td[title]"),
                        (take(0, "seconds"), texts(".chart title")), texts("text.axis")] };
    """
    told = look(page, script, tmp_path)["told"]
    heads, said, marks, parts, colours, path, cells, over_time, axes = told
    assert "test: 100 %, 40 seconds" in over_time and "compute: 3 ms, 2 steps" in over_time
    assert axes == ["time of a step", "steps", "accuracy", "seconds"]
    assert {"1", "2", "3", "4"} <= {*marks} and not [mark for mark in marks if mark == "1.5"]
    assert "Where a step's time went, over the steps" in heads and "Accuracy" in heads
    assert parts == ["compute", "synchronization"] and cells == ["3", "1", "", "2"]
    assert colours[:3] == ["#4c78a8", "#8aa83c", "#4c78a8"]  # as the bars beside it
    assert "compute: 3 ms, 2 steps" in said and "test: 100 %, 4 steps" in said
    assert {"50 %", "90 %", "99 %"} <= {*marks}
    up = [float(place.split()[1]) for place in path[1:].split("L")]
    # 0.5, 0.03, 0.01 and half of the least error are drawn, on a logarithmic axis
    lengths = [a - b for a, b in pairwise(up)]
    errors = [0.5, 0.03, 0.01, 0.005]
    expected = [math.log(a / b) for a, b in pairwise(errors)]
    assert [n / lengths[0] for n in lengths] == pytest.approx(
        [n / expected[0] for n in expected], abs=0.01
    )


def test_several_runs_are_on_one_page(run, tmp_path):
    """Their curves in one picture, their results, and the options that differ."""
    other, young = tmp_path / "other", tmp_path / "young"
    shutil.copytree(run, other)
    shutil.copytree(run, young)
    options = json.loads((run / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(options | {"lr": 0.5, "clip": 1.0}))
    (young / "metrics.jsonl").unlink()
    (young / "metrics.jsonl").touch()
    data = compare({path.name: path for path in (run, other, young)})
    assert data["options"] == [
        ["", "my-run", "other", "young"],
        ["lr", "0.25", "0.5", "0.25"],
        ["clip", "None", "1.0", "None"],
    ]
    ended = "accuracy 75.00 %, loss 0.5 after epoch 2"
    assert data["head"] == [["my-run", ended], ["other", ended], ["young", "not evaluated yet"]]
    (chart,) = data["charts"]
    names = [
        f"{name}, {kind}" for name in ("my-run", "other") for kind in ("training", "test data")
    ]
    assert [line["name"] for line in chart["lines"]] == names
    file = tmp_path / "page.html"
    main([str(run), str(other), str(young), "--out", str(file)])
    script = 'return { told: [texts("h2"), texts("tr"), texts("title")] };'
    heads, rows, _ = look(file.read_text(), script, tmp_path)["told"]
    assert heads == ["Loss", "The runs", "Options that differ"] and "lr0.250.50.25" in rows


def test_its_metrics_are_written_for_tensorboard(run, tmp_path):
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    main([str(run), "--tensorboard", str(tmp_path / "events")])
    (file,) = (tmp_path / "events").iterdir()
    content, result = file.read_bytes(), []
    while content:
        (length,) = struct.unpack_from("<Q", content)
        result.append(events.Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    scalars = [
        (item.step, value.tag, value.simple_value)
        for item in result
        for value in item.summary.value
    ]
    assert (3, "train/loss", pytest.approx(4 / 3)) in scalars and (
        4,
        "eval/accuracy",
        0.75,
    ) in scalars


@pytest.mark.parametrize(
    "name, line",
    [
        ("metrics.jsonl", '{"a": 1}\n'),
        ("metrics.jsonl", "1\n"),
        ("metrics.jsonl", '{"kind": "train", "compute_s": {}}\n'),
        ("metrics.jsonl", '{"kind": "eval", "global_step": 1, "epoch": 1.0, "loss": "0.5"}\n'),
        (
            "metrics.jsonl",
            '{"kind": "staleness", "global_step": 1,'
            ' "workers": [{"histogram": [[1000000000, 1]]}]}\n',
        ),
        ("starts.jsonl", "[1]\n"),
        ("starts.jsonl", '{"command": "nnmpi train", "ranks": 1}\n'),
        ("starts.jsonl", '{"command": ["nnmpi", "train"], "ranks": "1"}\n'),
        ("starts.jsonl", '{"command": ["nnmpi"], "ranks": 1, "facts": [["a"]]}\n'),
    ],
)
def test_files_that_are_not_a_runs_are_refused(run, name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(run, tmp_path / "other")
    (run / name).write_text(line)
    for words in ([str(run)], [str(run), str(other)]):
        usage_error(
            rf"{name}: (the metrics of the run cannot be|not as runs write it)", main, words
        )


@pytest.mark.parametrize("width, dark", [("desk", False), ("phone", True)])
def test_the_page_shows_them(run, tmp_path, width, dark):
    assert main([str(run)]) == f"open {run / 'report.html'} in a browser"
    script = """
        const drawn = count(".chart > svg");
        return { told: [texts("h1"), texts("h2"), texts("tr"), drawn, count(".fill"),
                        texts(".chart > svg > text:not(.soft)"), texts(".counted"), texts("p")] };
    """
    title, headings, rows, charts, fills, alone, counted, said = look(
        (run / "report.html").read_text(), script, tmp_path, width, dark
    )["told"]
    # the result comes first, and once; what was measured once has its number; ages are counted
    assert title == ["run my-run"] and headings[0] == "test accuracy 75.00 %"
    assert said[0] == "loss 0.5, at the end, 4 s" and alone == ["0.5"]
    assert counted == [f"worker 0: 1 update of age {age}" for age in (0, 1, 2)]
    assert {
        "The run",
        "Where a step's time went on rank 0",
        "Memory of rank 0: at most 4 KiB",
        "Loss",
    } <= set(headings)
    assert {"Staleness: 1 on average, at most 2", "Options that differ from their defaults"} <= {
        *headings
    }
    assert "layoutdp 2, 2 ranks on 1 node (here)" in rows
    assert "compute3 ms, 60 %" in rows and "optimizer3 KiB" in rows and "--lr0.25" in rows
    assert charts == 3 and fills == 5


@pytest.mark.parametrize(
    "text",
    [
        '{"confusion": 5}',
        '{"loss": Infinity}',
        '{"loss": 1e999}',
        "[]",
        '{"part": "test", "data": 3, "step": 1, "samples": 2}',
        '{"part": "test", "data": "d", "step": 1, "samples": 2, "confusion": [[1, 2], [3]],'
        ' "classes": ["a", "b"]}',
        '{"part": "test", "data": "d", "step": 1, "samples": 2, "confusion": [[1]]}',
    ],
)
def test_an_evaluation_that_is_none_is_refused(run, text):
    (run / "evaluation.json").write_text(text)
    usage_error("not what nnmpi evaluate writes; call it again", main, [str(run)])


def test_a_run_without_steps_has_a_page_and_no_run_has_none(tmp_path):
    usage_error("there is no run", main, [str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps(flatten(Config())))
    usage_error("the metrics of the run cannot be read", main, [str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    main([str(tmp_path), "--out", str(tmp_path / "page.html")])
    result = look(
        (tmp_path / "page.html").read_text(), 'return { headings: texts("h2") };', tmp_path
    )
    assert result["headings"] == ["Commands"]
