"""What a command writes replaces nothing that the user may want to keep."""

import shutil

import pytest

from nnmpi.base.command import kinds, options_of
from nnmpi.base.errors import UsageError
from nnmpi.base.files import OutputFile
from nnmpi.commands.export import main as export
from nnmpi.commands.predict import main as predict
from nnmpi.lab import comm, memory, report, schedule, speedup
from nnmpi.teaching import grade
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks, over
from tests.harness.refusals import refuses, usage_error

pytestmark = pytest.mark.host_only("files, whatever computes")

FLOWERS = "sepal_length_cm,sepal_width_cm,petal_length_cm,petal_width_cm\n5.1,3.5,1.4,0.2\n"
MINE = "work of a week\n"
ASSIGNMENT = """
title = "one"
[[criteria]]
exercise = "ring-all-reduce"
name = "sums"
file = "ring_all_reduce.py"
points = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    words = "--dataset iris --model mlp --hidden 8 --max-steps 12 --save-every 4steps --quiet --out"
    on_ranks(train, [*words.split(), str(folder / "r")])
    return folder / "r"


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """A current folder with a run, and what commands read."""
    shutil.copytree(trained, tmp_path / "r")
    shutil.copytree(trained, tmp_path / "s")
    (tmp_path / "flowers.csv").write_text(FLOWERS)
    (tmp_path / "assignment.toml").write_text(ASSIGNMENT)
    (tmp_path / "ring_all_reduce.py").write_text(
        "def ring_all_reduce(rank, size):\n    return ()\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_ranks(main):
    return lambda words: on_ranks(main, words)


# each with a file at its end: the command, its words, and whether its files are marked
WRITERS = {
    "export": (of_ranks(export), "r --out net.safetensors", True),
    "predict": (of_ranks(predict), "r flowers.csv --out said.csv", False),
    "predict as json": (of_ranks(predict), "r flowers.csv --format json --out said.json", False),
    "report": (report.main, "r --out page.html", True),
    "report of two": (report.main, "r s --out page.html", True),
    "collective": (comm.main, "render ring --ranks 3 --html ring.html", True),
    "its picture": (comm.main, "render ring --ranks 3 --svg ring.svg", True),
    "schedule": (
        schedule.main,
        "--pipeline gpipe --stages 2 --microbatches 4 --html gpipe.html",
        True,
    ),
    "its png": (
        schedule.main,
        "--pipeline gpipe --stages 2 --microbatches 4 --svg gpipe.png",
        True,
    ),
    "memory": (memory.main, "plan --layers 4 --html swap.html", True),
    "its pdf": (memory.main, "plan --layers 4 --svg swap.pdf", True),
    "grade": (grade.main, "assignment.toml ring_all_reduce.py --json all.json", False),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_another_origin_stays_unless_replace_is_given(here, writer):
    main, words, is_marked = WRITERS[writer]
    words = words.split()
    file = here / words[-1]
    file.write_text(MINE)
    usage_error("not known as a file of nnmpi's; give another one, or --replace", main, words)
    assert file.read_text() == MINE
    main([*words, "--replace"])
    written = file.read_bytes()
    assert written != MINE.encode()
    if is_marked:
        main(words)
    else:
        usage_error("--replace", main, words)
    file.write_bytes(b"")  # as mktemp makes it
    main(words)
    assert file.stat().st_size


def test_a_page_here_that_is_not_named_stays(here):
    (here / "report.html").write_text(MINE)
    usage_error("report.html is there", report.main, ["r", "s"])
    assert (here / "report.html").read_text() == MINE
    (here / "report.html").unlink()
    report.main(["r", "s"])
    report.main(["s", "r"])  # its own


def test_nothing_of_a_run_is_replaced(here):
    before = {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}
    step = min((here / "r" / "checkpoints").glob("step-*"))
    targets = [
        step / "model.safetensors",
        here / "s" / "checkpoints" / step.name / "model.safetensors",
    ]
    for target in targets:
        for more in ([], ["--replace"]):
            words = ["r", "--out", str(target), *more]
            usage_error("in the folder of a run", of_ranks(export), words)
    usage_error("in the folder of a run", report.main, ["r", "--out", "s/config.json", "--replace"])
    words = ["r", "flowers.csv", "--out", "r/metrics.jsonl", "--replace"]
    usage_error("in the folder of a run", of_ranks(predict), words)
    (here / "link").symlink_to(here / "r" / "config.json")
    usage_error("in the folder of a run", of_ranks(predict), [*words[:3], "link", "--replace"])
    (here / "link").unlink()
    assert {file: file.read_bytes() for file in here.rglob("*") if file.is_file()} == before
    for _ in range(2):  # the run's own page and exports are made again
        report.main(["r"])
        on_ranks(export, ["r"])


def test_an_input_is_no_output(here):
    before = (here / "flowers.csv").read_text()
    words = ["r", "flowers.csv", "--out", "./flowers.csv", "--replace"]
    usage_error("is what the command reads", of_ranks(predict), words)
    assert (here / "flowers.csv").read_text() == before
    on_ranks(export, ["r", "--out", "net.safetensors"])
    words = ["r", "--weights", "net.safetensors", "--out", "net.safetensors"]
    usage_error("is what the command reads", of_ranks(export), words)


def test_two_ranks_refuse_together(here):
    (here / "said.csv").write_text(MINE)
    words = ["r", "flowers.csv", "--out", "said.csv"]
    refuses(UsageError, "--replace", on_ranks, predict, words, 2)


def test_devices_are_written_to(here, capfd):
    on_ranks(predict, ["r", "flowers.csv", "--out", "/dev/stdout"])
    assert "setosa" in capfd.readouterr().out


GPT = "--model gpt --dataset text.txt --max-steps 2 --batch-size 2 --eval-every 0 --quiet"


def test_a_run_does_not_write_over_what_it_reads(here):
    (here / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 100)
    small = "--layers 1 --features 8 --heads 2 --context 8"
    on_ranks(train, f"{GPT} {small} --out first")
    (here / "exp" / "checkpoints").mkdir(parents=True)
    shutil.copytree(here / "first" / "model", here / "exp" / "model")
    shutil.copy(here / "text.txt", here / "exp" / "checkpoints" / "text.txt")
    shutil.copy(here / "text.txt", here / "exp" / "text.txt")
    (here / "link").symlink_to("exp")
    before = {file: file.read_bytes() for file in here.rglob("*") if file.is_file()}
    for words in (
        f"{GPT} --pretrained exp/model --out exp",
        f"{GPT} --pretrained link/model --out exp",
        f"{GPT} --pretrained exp --out link",
        over(GPT, f"{small} --dataset exp/checkpoints/text.txt --out exp"),
    ):
        usage_error(
            "which a run would write there, too|already holds a run", of_ranks(train), words.split()
        )
    assert {file: file.read_bytes() for file in here.rglob("*") if file.is_file()} == before
    shutil.rmtree(here / "exp" / "checkpoints")
    shutil.rmtree(here / "exp" / "model")
    on_ranks(train, over(GPT, f"{small} --dataset exp/text.txt --out exp"))  # beside, not replaced
    assert (here / "exp" / "text.txt").read_bytes() == (here / "text.txt").read_bytes()


@pytest.mark.parametrize(
    "section",
    [
        comm.CommConfig,
        memory.MemoryPlanConfig,
        report.ReportConfig,
        schedule.ScheduleConfig,
        speedup.ScalingConfig,
        grade.GradeConfig,
    ],
)
def test_who_writes_files_takes_replace(section):
    options = {option.name: option for option in options_of(section)}
    assert "replace" in options
    for name in ("html", "svg", "plot", "out", "json"):
        assert name not in options or OutputFile in kinds(options[name].type)
