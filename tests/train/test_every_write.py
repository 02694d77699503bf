"""A kill, a full disk or an error in each single operation of the disk: what a folder says then is
there, and what is the user's is as it was.
"""

import re
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi import simulate
from nnmpi.base.errors import CheckpointError, NnmpiError
from nnmpi.base.files import read_json
from nnmpi.parallel.model_state import ArraySpec
from nnmpi.train import checkpoint
from nnmpi.train.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    CheckpointWriter,
    load_best,
    load_checkpoint,
    step_of,
    steps,
)
from nnmpi.train.cli import main
from nnmpi.train.metrics import read_metrics
from tests.harness.commands import over
from tests.harness.disk import FAULTS, at_each_operation, read_tree
from tests.harness.slow import MORE_FAULTS, cases, once_more
from tests.harness.survival import fast_folder, quick_trainings

pytestmark = [
    pytest.mark.host_only("it patches the system's files, not arrays"),
    # A rank that is killed while it opens a file leaves it open, as a process does that ends so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture
def place():
    """Where files are memory, if that is known: each test waits for the disk thousands of times."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as name:
        yield Path(name)


# ---- checkpoints, one after the other ----

# Step and best step of each: a step is saved twice, and a run goes on at an older one. The last one
# comes after each fault only.
SAVES = ((1, 1), (2, 1), (3, 3), (3, 3), (4, 3), (6, 3), (5, 3), (7, 7), (8, 7), (9, 7))


def save(folder, number, keep):
    """Write a checkpoint as a run does; its number is in its weights, too."""
    step, best_step = SAVES[number]
    writer = CheckpointWriter(folder, step)
    weights = np.full((2, 3), number, np.float32)
    with writer.explained():
        try:
            writer.begin()
            for file in (MODEL_FILE, OPTIMIZER_FILE):
                writer.open(file, {"w": ArraySpec.of(weights)})
                writer.write("w", weights)
            writer.finish({"step": step, "best_step": best_step, "number": number}, keep, best_step)
        finally:
            writer.discard()


def number_of(read):
    """Return which one a checkpoint is, by its state and its weights."""
    assert not read.notices
    number = read.values["number"]
    assert read.model["w"][0, 0] == read.optimizer["w"][0, 0] == number
    return number


def judge_words(folder, error, done):
    """An error says what is there."""
    left, text = {step_of(item) for item in steps(folder)}, str(error)
    step = int(re.search(r"checkpoint of step (\d+)", text)[1])
    assert step == SAVES[done][0]
    if text.startswith("no "):
        assert (step in left) == text.startswith("no new ")
        assert bool(left) == ("older ones are intact" in text) != ("there is none yet" in text)
    else:
        assert "is complete" in text and step in left


@pytest.mark.parametrize(
    "fault", [once_more(fault, fault == "full", MORE_FAULTS) for fault in FAULTS]
)
def test_newest_and_best_checkpoint_are_those_of_one_moment(fault, place):
    """With one checkpoint kept or three, in turns: all nine saves have the same operations."""
    done, keep = [0], 1  # how many are written, and are to be kept

    def prepare(folder):
        nonlocal keep
        keep = 1 if keep == 3 else 3

    def work(folder):
        done[0] = 0
        for number in range(len(SAVES) - 1):
            save(folder, number, keep)
            done[0] += 1

    def check(folder, error):
        newest, best = load_checkpoint(folder), load_best(folder)
        count = 0 if newest is None else number_of(newest) + 1
        assert done[0] <= count <= done[0] + 1
        if isinstance(error, NnmpiError):
            judge_words(folder, error, done[0])
            assert count == done[0] + ("is complete" in str(error))
        if best is not None:
            same = [n for n in range(count) if SAVES[n][0] == newest.values["best_step"]]
            assert number_of(best) == same[-1]
        for number in range(count, len(SAVES)):
            save(folder, number, keep)
        kept = [9, 7] if keep == 1 else [9, 8, 7]
        assert [step_of(item) for item in steps(folder)] == kept
        assert len(list(folder.iterdir())) == len(kept) + 1

    assert at_each_operation(place, fault, work, check, prepare) > 150


# ---- whole runs ----

RUN = (
    "--dataset iris --model mlp --hidden 8 --batch-size 32 --lr 0.2 --lr-schedule constant"
    " --epochs 8 --save-every 1 --keep-best --seed 3 --quiet --backend numpy"
)


def train(words, ranks=1):
    simulate(partial(main, words.split()), ranks, check=False)


class Undisturbed:
    """A run to which nothing happens; all of its checkpoints are kept."""

    def __init__(self, folder, words, ranks):
        self.ranks, self.words = ranks, over(RUN, words)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "_prune", lambda *_: None)
            train(f"{self.words} --out {folder}", ranks)
        self.weights = {step_of(item): weights_in(item) for item in steps(folder / "checkpoints")}
        records = read_metrics(folder / "metrics.jsonl")
        self.evaluations = [
            (item["global_step"], item["accuracy"]) for item in records if item["kind"] == "eval"
        ]
        self.last_words = last_words(folder)

    def best_step(self, step):
        """Return the step of the best evaluation up to a step."""
        best = (0, -1.0)
        for item in self.evaluations:
            if item[0] <= step and item[1] > best[1]:
                best = item
        return best[0]


def weights_in(folder):
    return (folder / MODEL_FILE).read_bytes(), (folder / OPTIMIZER_FILE).read_bytes()


def last_words(run):
    """Return what a run says of its best evaluation at its end."""
    return re.findall("best epoch .*", (run / "console.txt").read_text())[-1]


ONE_RANK, TWO_RANKS = (1, ""), (2, "--zero 1 --ema 0.9")


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory):
    ranks, words = request.param
    with quick_trainings():
        result = Undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", words, ranks)
        assert len({result.best_step(step) for step in result.weights}) > 2
        yield result


@pytest.mark.parametrize(
    "undisturbed, fault, stride",
    [
        *((ONE_RANK, fault, 43) for fault in FAULTS),
        (TWO_RANKS, "kill", 43),
        *(
            pytest.param(run, fault, 19, marks=pytest.mark.slow(MORE_FAULTS))
            for run in (ONE_RANK, TWO_RANKS)
            for fault in FAULTS
        ),
    ],
    indirect=["undisturbed"],
    ids=lambda value: f"{value[0]}-ranks" if isinstance(value, tuple) else value,
)
def test_the_best_weights_are_those_that_a_run_says(fault, stride, undisturbed, place):
    """After the fault, and after the run has continued to its end.

    Each fault is in other operations: checkpoints' are all tried above.
    """
    of, first = undisturbed, 1 + [*FAULTS].index(fault) * (stride // 3)

    def work(folder):
        train(f"{of.words} --out {folder / 'run'}", of.ranks)

    def check(folder, error):
        run = folder / "run"
        newest, best = (load(run / "checkpoints") for load in (load_checkpoint, load_best))
        if newest is not None:
            assert weights_in(newest.folder) == of.weights[newest.values["step"]]
            assert best.values["step"] == of.best_step(newest.values["step"])
            assert weights_in(best.folder) == of.weights[best.values["step"]]
        is_run = (run / "config.json").exists()
        train(f"--resume {run} --quiet" if is_run else f"{of.words} --out {run}", of.ranks)
        last = max(of.weights)
        assert nnmpi.load(run).step == last and last_words(run) == of.last_words
        assert nnmpi.load(run, best=True).step == of.best_step(last)
        for item in steps(run / "checkpoints"):
            assert weights_in(item) == of.weights[step_of(item)]

    numbers = range(first, 10_000, stride)
    assert at_each_operation(place, fault, work, check, numbers=numbers) > 5


# ---- the folder of a new run ----

SHORT = "--dataset iris --model mlp --hidden 3 --max-steps 1 --eval-every 0 --quiet --backend numpy"
MINE = ("README.md", "data/table.csv", "notes/a.txt", ".hidden", "report.html", "model.onnx")


def put_mine(folder):
    for name in MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}\n")


@pytest.mark.parametrize(
    "fault, exists",
    cases(
        [(fault, exists) for fault in FAULTS for exists in (True, False)],
        lambda fault, exists: exists == (fault == "kill") and fault != "full",
        MORE_FAULTS,
    ),
)
def test_a_start_that_fails_leaves_a_run_or_nothing_and_what_is_not_its_own(fault, exists, place):
    def prepare(folder):
        if exists:
            put_mine(folder / "out")

    def work(folder):
        train(f"{SHORT} --out {folder / 'out' / ('' if exists else 'run')}")

    def check(folder, error):
        out = folder / "out" / ("" if exists else "run")
        is_run = (out / "config.json").exists()
        if exists:
            mine = {name: (out / name).read_text() for name in MINE}
            assert mine == {name: f"mine: {name}\n" for name in MINE}
        elif error is not None and fault != "kill":
            assert is_run or not (folder / "out").exists()
        if error is not None and not is_run and out.exists():
            left = {item.name for item in out.iterdir()} - {Path(name).parts[0] for name in MINE}
            assert left <= {".lock", ".config.json.tmp"}
        train(f"--resume {out} --quiet" if is_run else f"{SHORT} --out {out}")
        assert read_json(out / "finished.json")["step"] == 1

    with quick_trainings():
        assert at_each_operation(place, fault, work, check, prepare) > 25


TAKEN = ("console.txt", "starts.jsonl", "finished.json", "evaluation.json", "trace.json.gz")
TAKEN += ("tokenizer/vocab.txt", "model/README.md", "flight/plan.txt", ".lock")
NET = "from nnmpi import nn\ndef build(shape, classes):\n    return nn.Linear(5, classes)\n"


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_file_of_the_user_is_refused_by_its_name(name, is_refused, tmp_path, monkeypatch):
    """Whether the run could have been trained or not."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)  # iris has 4 columns
    (Path("out") / name).parent.mkdir(parents=True)
    (Path("out") / name).write_text("mine")
    before = read_tree("out")
    words = SHORT.replace("mlp --hidden 3", "net.py:build") if is_refused else SHORT
    with pytest.raises(NnmpiError, match=f"--out out has {re.escape(Path(name).parts[0])}, which"):
        train(f"{words} --out out")
    assert read_tree("out") == before


@pytest.mark.parametrize("exists", [True, False])
def test_a_refused_first_step_leaves_all_as_it_was(exists, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    Path("runs").mkdir()
    Path("runs/latest").symlink_to("before")
    words = SHORT.replace("mlp --hidden 3", "net.py:build")
    if exists:
        put_mine(Path("runs/mine"))
    before = read_tree("runs")
    for out in ("", "--out runs/mine", "--out a/b/c"):
        with pytest.raises(NnmpiError, match="shape|columns|features"):
            train(f"{words} {out}")
        assert read_tree("runs") == before and not Path("a").exists()
        assert Path("runs/latest").readlink() == Path("before")
    Path("empty").mkdir()
    with pytest.raises(NnmpiError):
        train(f"{words} --out empty")
    assert Path("empty").is_dir() and not list(Path("empty").iterdir())


def test_a_file_where_the_link_to_the_newest_run_would_be_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/latest").write_text("mine")
    train(SHORT)
    assert Path("runs/latest").read_text() == "mine"


# ---- names ----


def test_folders_of_other_names_are_the_users(tmp_path):
    mine = ["step-good", "step-00000001.bak", "step-12", "step-000000012", ".step-good.tmp", "best"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("mine")
    before = {name: read_tree(tmp_path / name) for name in mine}
    for number in range(5):
        save(tmp_path, number, keep=1)
    assert {name: read_tree(tmp_path / name) for name in mine} == before
    assert [item.name for item in steps(tmp_path)] == ["step-00000004", "step-00000003"]
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "step-00000004").write_text("mine")
    with pytest.raises(CheckpointError, match="no new checkpoint of step 4 can be written"):
        save(tmp_path, 4, keep=1)
    assert (tmp_path / "step-00000004").read_text() == "mine"


def test_steps_are_numbers(tmp_path, monkeypatch):
    big = tuple((10**8 + step, 10**8 - 1) for step in (-2, -1, 0, 1, 2, 10**9))
    monkeypatch.setattr("tests.train.test_every_write.SAVES", big)
    for number in range(len(big)):
        save(tmp_path, number, keep=2)
    assert [step_of(item) for item in steps(tmp_path)] == [1_100_000_000, 100_000_002, 99_999_999]
    assert load_checkpoint(tmp_path).values["step"] == 1_100_000_000
    assert load_best(tmp_path).values["step"] == 99_999_999


# ---- what is gone is said ----


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose best evaluation was long before its end."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(over(RUN, f"--epochs 14 --out {run}"))
    return run


def best_of(run):
    """Return the step of a run's best evaluation, and those of its checkpoints, newest first."""
    state = read_json(steps(run / "checkpoints")[0] / "state.json")
    return state["best_step"], [step_of(item) for item in steps(run / "checkpoints")]


def test_the_best_of_a_damaged_newest_checkpoint_is_still_the_best(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    best, kept = best_of(run)
    assert best not in kept[:3]
    cut(run / f"checkpoints/step-{kept[0]:08d}/model.safetensors")
    assert nnmpi.load(run, best=True).step == best
    (run / f"checkpoints/step-{kept[0]:08d}/state.json").unlink()
    with pytest.warns(UserWarning, match=f"the best evaluation up to step {kept[1]} is used"):
        assert nnmpi.load(run, best=True).step == best
    shutil.rmtree(run / f"checkpoints/step-{kept[0]:08d}")
    with pytest.warns(UserWarning, match=f"not here; the best evaluation up to step {kept[1]} is"):
        assert nnmpi.load(run, best=True).step == best


def test_best_weights_that_are_gone_are_not_replaced_by_others(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    best, _ = best_of(run)
    folder = run / f"checkpoints/step-{best:08d}"
    cut(folder / "model.safetensors")
    words = f"the weights of the best evaluation, of step {best}, are gone"
    with pytest.raises(CheckpointError, match=f"{words}: .*leave --best out"):
        nnmpi.load(run, best=True)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=f"{words} from .*leave --best out"):
        nnmpi.load(run, best=True)
    train(f"--resume {run} --epochs 15 --lr 1e-9")
    notice = f"the weights of the best evaluation so far, of step {best}, are gone"
    assert notice in (run / "console.txt").read_text()
    with pytest.raises(CheckpointError, match=words):
        nnmpi.load(run, best=True)


def test_a_step_back_over_the_best_checkpoint_goes_back_to_the_best_before(tmp_path):
    """And the run that has continued says what it has."""
    run = tmp_path / "run"
    train(over(RUN, f"--epochs 14 --stop-after 20 --out {run}"))
    best, kept = best_of(run)
    assert best == kept[0]
    cut(run / f"checkpoints/step-{best:08d}/optimizer.safetensors")
    with pytest.raises(CheckpointError, match=f"of step {best}, are gone: .*optimizer"):
        nnmpi.load(run, best=True)
    train(f"--resume {run} --stop-after 24 --lr 1e-9")  # hardly another step
    before, kept = best_of(run)
    assert before < best and nnmpi.load(run, best=True).step == before
    assert f"best epoch {before // 4} with" in last_words(run)


def test_a_run_says_the_best_that_it_has_where_it_stops_on_its_way(tmp_path):
    """The last evaluation is none of the run's, as an uninterrupted one would not make it."""
    run = tmp_path / "run"
    train(over(RUN, f"--epochs 14 --eval-every 2 --stop-after 20 --out {run}"))
    assert nnmpi.load(run, best=True).step == 16
    assert last_words(run).startswith("best epoch 4 with")


def test_a_checkpoint_that_goes_while_it_is_read_is_not_said_to_be_gone(tmp_path, monkeypatch):
    """A training run has found better weights meanwhile."""
    save(tmp_path, 2, keep=1)
    real = checkpoint.read_checkpoint

    def read(folder):
        if folder.name == "step-00000003" and not (tmp_path / "step-00000007").exists():
            save(tmp_path, 7, keep=1)
        return real(folder)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read)
    assert load_best(tmp_path).values["step"] == 7


def test_what_is_called_latest_and_is_the_users_stays(tmp_path):
    def work(group):
        model = nnmpi.models.mlp((4,), 3).initialize(seed=0)
        nnmpi.save(tmp_path, (model, nnmpi.optim.Adam(model.storage), group))

    (tmp_path / "latest").symlink_to("run-7")
    with pytest.raises(NnmpiError, match="latest is not of nnmpi"):
        simulate(work, 2)
    assert (tmp_path / "latest").is_symlink() and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "latest").unlink()
    simulate(work, 2)
    assert (tmp_path / "latest").read_text() == "step-00000000\n"


def test_a_refused_resume_leaves_the_run_as_it_was(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(finished, tmp_path / "run")
    Path("calls.py").write_text('def typo(record):\n    return "Stop"\n')
    logs = ("console.txt", "starts.jsonl")
    before = {name: content for name, content in read_tree(run).items() if name not in logs}
    end = (run / "finished.json").stat()
    with pytest.raises(NnmpiError, match="Stop"):
        train(f"--resume {run} --epochs 12 --lr 0.7 --log-every 1 --callback calls.py:typo")
    after = {name: content for name, content in read_tree(run).items() if name not in logs}
    assert after == before
    now = (run / "finished.json").stat()
    assert (now.st_ino, now.st_mtime_ns) == (end.st_ino, end.st_mtime_ns)
