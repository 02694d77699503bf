"""`--layout auto`: the ranks agree on a layout, the run says which, and what cannot go with it is refused."""

import json
import shlex
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from nnmpi import plan
from nnmpi.backend.backend import numpy_backend
from nnmpi.backend.kernels import compiled_kernels
from nnmpi.comm import measure
from nnmpi.comm.group import Group
from nnmpi.comm.machine import Machine
from nnmpi.comm.simulated.simulated_world import simulate
from nnmpi.data.dataset import Dataset
from nnmpi.errors import UsageError
from nnmpi.plan import parse as parse_plan
from nnmpi.planner import profile
from nnmpi.planner.network import PlannedNetwork
from nnmpi.train import auto_layout, computing
from nnmpi.train.auto_layout import (
    ChosenLayout,
    TimedLayout,
    check_open,
    choose,
    workload_of,
)
from nnmpi.train.cli import main, parse
from nnmpi.train.config import Config, ParallelConfig, assemble

SMALL = ["--model", "mlp", "--hidden", "8", "--dataset", "iris", "--batch-size", "12", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure little, and keep nothing for others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "MEASURE_S", 0.0)
    monkeypatch.setattr(profile, "ROUNDS", 1)
    monkeypatch.setattr(auto_layout, "FIT_S", 0.05)
    monkeypatch.setattr(measure, "WHOLE_SIZES", measure.WHOLE_SIZES[:-3])  # up to a megabyte
    monkeypatch.setattr(auto_layout, "RACE_S", 0.0)


@pytest.mark.simulated(max_size=3)
def test_a_run_goes_with_the_layout_that_was_chosen(group: Group, tmp_path: Path) -> None:
    out = tmp_path.parent / f"run-{group.size}"
    main([*SMALL, "--layout", "auto", "--out", str(out)], group)
    group.barrier()  # the first rank prints last
    console = (out / "console.txt").read_text()
    assert ("race: " in console) == (group.size > 1)
    assert "planner: " in console
    assert "chosen: " in console
    assert "step predicted " in console
    kept = json.loads((out / "config.json").read_text())
    assert kept["layout"] == "given"
    assert kept["dp"] * kept["pp"] * kept["tp"] * kept["sp"] == group.size


def test_the_layouts_that_may_be_the_best_race_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest is taken, whatever was predicted; what it took is kept for the next run."""
    ran: list[Config] = []

    def time_layout(config: Config, group: Group, *_: Any) -> TimedLayout:
        if group.is_root:
            ran.append(config)
        return TimedLayout(1e-9 / group.share(len(ran)), {})  # less than any prediction: the first heat is the last

    monkeypatch.setattr(auto_layout, "time_layout", time_layout)
    network = PlannedNetwork("told", Machine.uniform(1e-5, 1e-9), 2)
    monkeypatch.setattr(auto_layout, "take_network", lambda *_: network)

    def chosen(*words: str) -> ChosenLayout:
        config = parse([*SMALL, "--layout", "auto", *words])
        return simulate(lambda group: choose(config, group, numpy_backend(), group.rank, lambda _: None), 2)[0]

    first, count = chosen(), len(ran)
    assert len({str(each) for each in ran}) == auto_layout.RACERS
    assert first.config == ran[-1]
    again = chosen()
    assert (again.config, len(ran)) == (first.config, count)
    assert sum("race (kept): " in line for line in again.lines) == auto_layout.RACERS


def test_a_race_goes_in_turns_without_those_that_are_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is disturbed once is not lost by it."""
    took = {"a": [2.0, 1.0, 1.2], "b": [9.0], "c": [1.9, 1.1, 1.3]}
    ran: list[str] = []

    def time_layout(config: str, *_: Any) -> TimedLayout:
        ran.append(config)
        return TimedLayout(took[config][ran.count(config) - 1], {})

    loaded: list[str] = []
    monkeypatch.setattr(auto_layout, "time_layout", time_layout)
    monkeypatch.setattr(auto_layout, "load_samples", lambda config, *_: loaded.append(config))
    nobody: Any = None
    assert auto_layout.race(list("abc"), nobody, nobody, 0) == [1.0, 9.0, 1.1]  # type: ignore[arg-type]
    assert ran == ["a", "b", "c", "c", "a", "a", "c"]
    assert loaded == ["a"], "the data are the same for all"


def test_options_that_say_a_layout_are_refused() -> None:
    with pytest.raises(UsageError, match="--layout auto chooses --zero itself; leave one of them out"):
        check_open(ParallelConfig(layout="auto", zero=1), asynchronous=False)
    with pytest.raises(UsageError, match="--layout auto is for ranks in step"):
        check_open(ParallelConfig(layout="auto"), asynchronous=True)
    with pytest.raises(UsageError, match="--layout auto is for a new run"):  # whose --dp was chosen, not given
        check_open(ParallelConfig(layout="auto", dp=2), asynchronous=False, resuming=True)


def test_a_model_has_an_output_for_each_number_that_is_predicted() -> None:
    config = assemble({"model": "mlp", "hidden": [4], "loss": "mse", "batch_size": 8})
    table = Dataset("table", np.ones((8, 3), np.float32), np.ones((8, 2), np.float32), 0)
    model = workload_of(config, table).build()
    assert [p.shape for p in model.parameters()][-1] == (2,)


def test_a_step_is_compared_with_its_prediction() -> None:
    records = [{"kind": "train", "samples_per_second": rate} for rate in (1.0, 100.0, 200.0, 300.0)]
    chosen: Any = ChosenLayout(assemble({}), None, (), 0.1)  # type: ignore[arg-type]
    assert chosen.compare(20, records) == "step predicted 100 ms, measured 100 ms (+0 %)"
    assert "too few steps" in chosen.compare(20, [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--shape", "8", "--dataset", "iris"], "--shape stands in the place of --dataset"),
        (["--memory", "much"], "much"),
        (["--dp", "2"], "--dp"),
        (["--shape", "8", "8", "--model", "gpt"], "--shape for --model gpt is one number"),
        (["--shape", "8", "--context", "4", "--model", "gpt"], "--shape says 8 tokens, and --context 4; leave"),
    ],
)
def test_wrong_words_of_the_plan_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse_plan(words)


def test_the_command_that_is_printed_is_one_for_a_shell() -> None:
    given = ["--data-dir", "my data; rm", "--dataset", "it's.csv", "--hidden", "3", "4", "--no-normalize"]
    words = shlex.split(plan.train_command(parse_plan(given), 2, {"dp": 2}))
    assert " ".join(words[:6]) == "mpirun -n 2 python -m nnmpi.train"
    assert parse(words[6:]) == parse([*given, "--dp", "2"])
    words = shlex.split(plan.train_command(parse_plan(["--shape", "8", "--model", "lstm"]), 2, {"dp": 2}))
    assert parse([*words[6:-2], "--dataset", "text"]).model.context == 8


@pytest.mark.host_only("kernels that numba compiles for NumPy's arrays")
@pytest.mark.parametrize(("word", "compiled"), [("on", True), ("off", False), ("auto", True)])
def test_parts_are_measured_with_the_kernels_that_train(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str, compiled: bool
) -> None:
    """By the plan command, and for a run whose layout is chosen."""
    pytest.importorskip("numba")
    monkeypatch.setattr(computing, "PAYS", 1.0)

    def measured(*_: Any) -> NoReturn:
        raise UsageError(f"compiled: {compiled_kernels() is not None}")

    monkeypatch.setattr(plan, "take_profile", measured)
    monkeypatch.setattr(auto_layout, "take_profile", measured)
    with pytest.raises(UsageError, match=f"compiled: {compiled}"):
        plan.main([*SMALL[:-3], "--jit", word], group)
    with pytest.raises(UsageError, match=f"compiled: {compiled}"):
        main([*SMALL, "--layout", "auto", "--jit", word, "--out", str(tmp_path / "run")], group)


@pytest.mark.simulated
def test_random_samples_have_classes_which_not_every_loss_takes(group: Group) -> None:
    with pytest.raises(UsageError, match="random samples has classes, and --loss mse predicts numbers"):
        plan.main(["--shape", "4", "--loss", "mse"], group)
    with pytest.raises(UsageError, match="32 samples of shape .* do not fit this memory"):
        plan.main(["--shape", str(10**6), str(10**8)], group)
    with pytest.raises(UsageError, match="network 'none' is unknown"):
        plan.main([*SMALL[:-3], "--network", "none", "--ranks", "1"], group)
    with pytest.raises(UsageError, match="cannot be as many on each of 7 nodes"):
        plan.main([*SMALL[:-3], "--nodes", "7", "--ranks", "1"], group)
