"""What a user writes stands wherever a name does, in the library and on the command line; faults
are sentences.
"""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import nnmpi
from nnmpi import NnmpiError
from nnmpi.base.custom import as_custom, is_custom, is_foreign, short_name
from nnmpi.base.errors import CheckpointError, ScheduleError, UsageError
from nnmpi.base.files import read_json, write_json
from nnmpi.commands import evaluate, export, predict
from nnmpi.lab.comm import main as comm
from nnmpi.lab.schedule import main as schedule
from nnmpi.train.build import build_model
from nnmpi.train.cli import main as train
from nnmpi.train.config import ModelConfig, assemble
from nnmpi.train.folder import default_folder
from nnmpi.train.metrics import read_metrics
from tests.data.locked import lock
from tests.harness.commands import on_ranks, over
from tests.harness.refusals import refuses, usage_error

OWN = '''
"""All that a student writes."""
import numpy as np
from nnmpi import ops, optim
from nnmpi.asynchronous.averaging import LocalSGD
from nnmpi.comm.collective import Step
from nnmpi.data import Dataset
from nnmpi.schedule.schedule import Kind


def relay(rank, size):
    """Add up along the line of ranks; the sum comes back."""
    steps, everything = [], range(size)
    if rank > 0:
        steps.append(Step(from_=rank - 1, recv=everything, reduce=True))
    if rank < size - 1:
        steps.append(Step(to=rank + 1, send=everything))
        steps.append(Step(from_=rank + 1, recv=everything))
    if rank > 0:
        steps.append(Step(to=rank - 1, send=everything))
    return tuple(steps)


def no_sum(rank, size):
    return relay(rank, size)[:-1]


def one_by_one(rank, ranks, microbatches):
    return [kind.at(rank, number) for number in range(microbatches) for kind in (Kind.F, Kind.B)]


def backward_first(rank, ranks, microbatches):
    return [kind.at(rank, number) for number in range(microbatches) for kind in (Kind.B, Kind.F)]


def failing(logits, labels):
    return len(None)


def loss(logits, labels):
    return ops.cross_entropy(logits, labels, reduction="none")


def of_each(logits, labels):
    return logits * logits


def number(logits, labels):
    return 0.0


class Plain(optim.SGD):
    pass


class Slow(LocalSGD):
    def outer_step(self, weights, anchor, momentum):
        momentum *= self.outer_momentum
        momentum += (anchor - weights) / self.optimizer.lr
        weights[...] = anchor - self.outer_lr * self.optimizer.lr * momentum


def falling(step, steps, lr):
    return lr * (1 - step / steps)


def note(record):
    with open("noted.txt", "a") as file:
        print(record["kind"], record["global_step"], record["loss"], file=file)


def data():
    x = np.arange(120, dtype=np.float32).reshape(60, 2) % 7
    parts = [Dataset("sevens", x[i::2], (x[i::2, 0] > 3).astype(np.int64), 2) for i in (0, 1)]
    return tuple(parts)
'''


@pytest.fixture(autouse=True)
def student(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def run(words, ranks):
    """Return the losses of a short run."""
    folder = Path(f"run{len(list(Path().iterdir()))}")
    plain = "--dataset own.py:data --model mlp --hidden 6 4 --dtype float64"
    words = over(f"{plain} --epochs 2 --log-every 1", words)
    on_ranks(train, [*words.split(), "--out", str(folder)], ranks)
    return [
        item["loss"] for item in read_metrics(folder / "metrics.jsonl") if item["kind"] == "train"
    ]


def test_all_that_is_ones_own_trains_as_what_is_built_in():
    """The same losses, with everything of one's own at once, on ranks and on stages."""
    plain = run(
        "--optimizer sgd --lr 0.1 --lr-schedule constant --reduction fixed --microbatches 4", 1
    )
    names = "--optimizer own.py:Plain --loss own.py:loss --lr 0.1 --lr-schedule constant"
    assert np.allclose(run(f"{names} --allreduce own.py:relay", 3), plain, rtol=1e-11)
    assert np.allclose(run(f"{names} --pipeline own.py:one_by_one --pp 2", 2), plain, rtol=1e-11)
    rates = run("--lr-schedule own.py:falling --warmup-epochs 0 --optimizer sgd --lr 0.1", 1)
    assert rates[0] == pytest.approx(plain[0])
    slow = "--batch-size 6 --local-steps 2 --outer-momentum 0.5 --outer-lr 0.7 --lr 0.1 --sync"
    assert run(f"{slow} own.py:Slow", 3) == run(f"{slow} slowmo", 3) != run(f"{slow} local", 3)
    assert comm(["render", "own.py:relay", "--ranks", "3"]).startswith(
        "all-reduce by relay, 3 ranks"
    )
    assert "one_by_one: 3 ranks, 4 microbatches" in schedule(
        ["--pipeline", "own.py:one_by_one", "--stages", "3", "--microbatches", "4"]
    )


def test_a_callback_is_told_each_record_once():
    """On rank 0 of two, what the file holds."""
    losses = run("--callback own.py:note", 2)
    noted = [line.split() for line in Path("noted.txt").read_text().splitlines()]
    assert [float(loss) for kind, _, loss in noted if kind == "train"] == losses
    assert [kind for kind, *_ in noted].count("test") == 1


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            "--callback own.py:nobody",
            "--callback own.py:nobody: own.py has no function 'nobody'; define nobody.record.",
        ),
        (
            "--allreduce own.py:no_sum",
            "no_sum with 3 ranks is not a correct all-reduce: unmatched message: rank 1",
        ),
        ("--pp 3 --pipeline own.py:backward_first", "backward_first: .* comes before"),
        (
            "--allreduce own.py:gone",
            "--allreduce own.py:gone: own.py has no function 'gone'; define gone(rank, size)",
        ),
        ("--optimizer own.py:data", "--optimizer own.py:data: .*; define data(storage, lr)"),
        ("--lr-schedule own.py:loss", "define loss(step, steps, lr)"),
        ("--dataset own.py:falling", "define falling()"),
        *(
            (f"--dataset own.py:data {words}", "makes the samples itself; leave --.* out")
            for words in ("--target k", "--drop k", "--sample-weight w", "--stratify")
        ),
        ("--loss huber.py:loss", "--loss huber.py:loss: there is no file huber.py"),
        (
            "--loss own.py:number --pp 3",
            "the loss returned an instance of float for labels of shape .*; return one value for"
            " each label.*A number of the batch as a whole, such as a Dice .*, is no sum",
        ),
        ("--loss own.py:failing", "failing(logits, labels) raised TypeError in line"),
        ("--loss own.py:of_each", "the loss returned values of shape .* for labels of shape"),
        ("--sync own.py:relay", "--sync own.py:relay: .*; define relay(group, storage, optimizer"),
        ("--sync own.py:Slow --staleness 2", "--staleness is for --sync ssp, not for own.py:Slow"),
        ("--loss hube", "--loss is hube; it must be .* or FILE.py:NAME"),
    ],
)
def test_what_is_wrong_is_said_before_it_runs(words, sentence):
    """With the fault; nobody hangs."""
    sentence = sentence.replace("(", r"\(").replace(")", r"\)")
    refuses((UsageError, ScheduleError), sentence, run, words, 3)


@pytest.fixture
def trained(file, tmp_path):
    """Return the folder of a run of a model of one's own."""
    words = f"--dataset iris --model {file}:build --epochs 1 --out {tmp_path}/run"
    on_ranks(train, words)
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["load", "evaluate", "predict", "export", "resume"])
def test_code_that_a_run_names_is_executed_only_on_the_users_word(command, trained):
    """The folder may be somebody else's."""
    names = "sepal_length_cm,sepal_width_cm,petal_length_cm,petal_width_cm"
    (trained.parent / "rows.csv").write_text(f"{names}\n5,3,1,0\n")

    def use(*trust):
        words = [
            str(trained),
            *([str(trained.parent / "rows.csv")] if command == "predict" else []),
            *trust,
        ]
        if command == "load":
            nnmpi.load(trained, trust=bool(trust))
        elif command == "resume":
            on_ranks(train, ["--resume", str(trained), "--epochs", "2", *trust])
        else:
            main = {"evaluate": evaluate.main, "predict": predict.main, "export": export.main}[
                command
            ]
            on_ranks(main, words)

    net = trained.parent / "net.py"
    net.write_text(f"{NET}\nopen({str(trained.parent / 'executed')!r}, 'w').close()\n")
    usage_error(r"names code outside of nnmpi, --model .*net.py:build, .* give --trust", use)
    assert not (trained.parent / "executed").exists()
    use("--trust")


@pytest.mark.parametrize(
    "source",
    [
        "nnmpi.run:1/evil.py",
        "nnmpi.a:b.c",
        "nnmpi./tmp/evil",
        "nnmpi.x/evil",
        "nnmpix.y",
        "nnmpi.py",
    ],
)
def test_a_source_that_only_looks_like_nnmpis_is_foreign(source):
    """A folder may have any name; what decides is the part that would be loaded."""
    assert is_foreign(f"{source}:build")
    assert not is_foreign("nnmpi.optim.muon:Muon")
    custom = as_custom(f"{source}:build")
    assert custom is not None and (custom.source, custom.function) == (source, "build")


def test_a_folder_with_a_colon_runs_no_code(tmp_path, monkeypatch):
    """The folder's name passes for a module of nnmpi up to the first colon."""
    monkeypatch.chdir(tmp_path)
    run = Path("nnmpi.run:1")
    words = f"--dataset iris --model mlp --hidden 4 --epochs 1 --quiet --out {run}"
    on_ranks(train, words)
    values = read_json(run / "config.json") | {"model": f"{run}/evil.py:build"}
    write_json(run / "config.json", values)
    (run / "evil.py").write_text("raise AssertionError('executed')")
    for act in (
        lambda: nnmpi.load(run),
        lambda: on_ranks(train, ["--resume", str(run)]),
        lambda: on_ranks(evaluate.main, [str(run)]),
    ):
        usage_error(r"names code outside of nnmpi", act)


def test_code_that_is_named_again_or_replaced_needs_no_word(trained):
    values = read_json(trained / "config.json") | {"callback": "evil.py:never"}
    write_json(trained / "config.json", values)
    (own := trained.parent / "own.py").write_text("def see(record):\n    pass\n")
    words = f"--resume {trained} --model {trained.parent / 'net.py'}:build --epochs 2"
    on_ranks(train, f"{words} --callback {own}:see")


@pytest.mark.parametrize("name", ["console.txt", "metrics.jsonl", "starts.jsonl"])
def test_nothing_is_written_through_a_link_in_a_run(name, tmp_path):
    """It may lead to a file of the user's own, far from the run."""
    folder, precious = tmp_path / "run", tmp_path / "precious"
    on_ranks(train, f"--dataset iris --model mlp --epochs 1 --out {folder}")
    precious.write_bytes((folder / name).read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to(precious)
    before = precious.read_bytes()
    with suppress(UsageError, CheckpointError):
        on_ranks(train, f"--resume {folder} --epochs 2")
    assert precious.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["raise SystemExit(0)", "def steps(rank, size):\n    raise SystemExit(0)\n"]
)
def test_a_file_that_ends_the_program_proves_nothing(text, tmp_path):
    """Its status would be that of a proof."""
    file = tmp_path / "own.py"
    file.write_text(text)
    refuses(
        (UsageError, ScheduleError), "SystemExit", comm, ["prove", f"{file}:steps", "--ranks", "3"]
    )


NET = """
from nnmpi import nn


class Wide(nn.Module):
    def __init__(self, inputs, classes):
        self.flat, self.out = nn.Flatten(), nn.Linear(inputs, classes)

    def forward(self, x):
        return self.out(self.flat(x))


def build(sample_shape, classes):
    size = 1
    for length in sample_shape:
        size *= length
    return nn.Sequential(Wide(size, 7), nn.ReLU(), nn.Linear(7, classes))


def broken(sample_shape, classes):
    return 1 + ""


def number(sample_shape, classes):
    return 3


def alone():
    return nn.Sequential()


def empty(sample_shape, classes):
    return nn.Sequential(nn.Flatten())
"""


@pytest.fixture
def file(tmp_path):
    """Return a file with models."""
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


def test_a_model_from_a_module():
    model = build_model(ModelConfig("nnmpi.models:cnn"), (8, 8, 1), 3).initialize()
    assert model.storage.size > 0


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("{file}:nothing", "has no function 'nothing'"),
        ("{file}:number", "returned an instance of int; return an nnmpi.nn.Module"),
        ("{file}:empty", "returned a model without parameters; give it a layer that has some"),
        (
            "{file}:alone",
            r"takes 0 positional arguments but 2 were given; define alone\(sample_shape, classes\)",
        ),
        ("{folder}/none.py:build", "there is no file .*none.py"),
        ("no.such.module:build", "there is no module no.such.module"),
    ],
)
def test_what_is_wrong_is_said(file, name, sentence):
    usage_error(
        sentence,
        lambda: build_model(ModelConfig(name.format(file=file, folder=file.parent)), (4,), 3),
    )


def test_a_file_that_cannot_be_read_is_one_sentence(file, monkeypatch):
    lock(file.parent, monkeypatch)
    usage_error(
        rf"--model {file}:build: {file} cannot be read \(Permission denied\)$",
        lambda: build_model(ModelConfig(f"{file}:build"), (4,), 3),
    )


def test_a_fault_inside_the_function_is_not_hidden(file):
    refuses(
        TypeError,
        "unsupported operand",
        lambda: build_model(ModelConfig(f"{file}:broken"), (4,), 3),
    )


def test_names(tmp_path):
    assert is_custom("a/b.py:net")
    assert not is_custom("cnn")
    assert not is_custom(":net")
    assert not is_custom("a.py:")
    assert short_name("a/mine.py:build") == "mine-build"
    assert short_name("nets.mine:build") == "mine-build"
    assert "/" not in default_folder(assemble({"model": "a/b.py:net"}), tmp_path).name


@pytest.mark.parametrize(
    "body, sentence",
    [
        (
            "(record):\n    raise KeyError('x')",
            r"f\(record\) raised KeyError in line 2 of cb.py: 'x'",
        ),
        ("(record):\n    raise SystemExit(0)", "f.record. raised SystemExit in line 2 of cb.py: 0"),
        ("(record):\n    raise GeneratorExit", "f.record. raised GeneratorExit in line 2"),
        ("(a, b): ...", r"missing a required argument: 'b'; define f\(record\)"),
        ("(): ...", r"too many positional arguments; define f\(record\)"),
    ],
)
def test_a_callback_of_the_wrong_form_is_a_sentence(tmp_path, body, sentence):
    """Also one that leaves by status 0: the run has not come to its end."""
    (tmp_path / "cb.py").write_text(f"def f{body}\n")
    words = "--dataset iris --model mlp --hidden 4 --epochs 2 --quiet"
    words += f" --callback {tmp_path}/cb.py:f --out {tmp_path}/run"
    with pytest.raises(NnmpiError, match=sentence) as raised:
        on_ranks(train, words, 2)
    assert raised.value.exit_status != 0
    assert not (tmp_path / "run" / "finished.json").exists()


@pytest.mark.parametrize("spelling", [["nnmpi"], [sys.executable, "-m", "nnmpi"]])
@pytest.mark.parametrize("name", ["mine.py:relay", "inner/mine.py:relay", "package.mine:relay"])
def test_a_file_may_import_what_lies_beside_it(tmp_path, spelling, name):
    """In both spellings of a command, whose first folder of modules differs."""
    for folder in (tmp_path, tmp_path / "inner", tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        (folder / "own.py").write_text(OWN)
        (folder / "mine.py").write_text(
            f"from {'package.' * (folder.name == 'package')}own import relay\n"
        )
    command = [str(Path(sys.executable).parent / spelling[0]), *spelling[1:]]
    result = subprocess.run(
        [*command, "comm", "prove", name, "--ranks", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
