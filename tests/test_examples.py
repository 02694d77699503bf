"""The programs of the examples, but for their notebooks."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import nnmpi
from nnmpi.commands.export import main as export
from nnmpi.commands.generate import main as generate
from nnmpi.data.tokenizer import ByteTokenizer
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks

FOLDER = Path(__file__).parents[1] / "examples"
LESSONS = sorted((FOLDER / "lessons").glob("*.py"), key=lambda file: int(file.stem.split("_")[0]))
NAMES = [file.stem for file in LESSONS]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
SOURCE = '''
class Shape:
    def area(self, unit):
        """Return the area.

        In square metres."""
        side = self.side / unit
        return side * side

    def name(self):
        return "shape"

    def todo(self):
        """Do it."""
'''


def test_problems_are_functions_that_say_what_they_are_for():
    """Nothing is lost between problem and solution, and methods begin at the margin."""
    pytest.importorskip("tokenizers")
    find = runpy.run_path(str(FOLDER / "finetuning" / "make_texts.py"))["find_problems"]
    ((problem, solution),) = find(SOURCE)
    assert problem == 'def area(self, unit):\n    """Return the area.\n\n    In square metres."""'
    assert solution == "    side = self.side / unit\n    return side * side"
    assert not list(find("def f(:"))


def test_a_llama_is_tuned_as_the_page_says(tmp_path, monkeypatch, capsys):
    """Each command of docs/fine-tuning.md, with a smaller model, a step and a tokenizer of bytes;
    two nodes are two ranks.
    """
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(FOLDER / "finetuning" / "make_texts.py"))
    texts = Path("runs/texts")
    texts.mkdir(parents=True)
    ByteTokenizer().save(texts)
    made["write_talks"](texts, [*made["find_problems"](SOURCE)] * 9)
    rows = (json.dumps({"text": SOURCE * 4}) for _ in range(40))
    (texts / "library.jsonl").write_text("\n".join(rows))
    page = (FOLDER.parent / "docs" / "fine-tuning.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^    (?:mpirun .*)?nnmpi (train|export|generate) (.*)$", page, re.M)
    assert [name for name, _ in commands] == ["train", "train", "export", "generate"]
    smaller = {"layers": 1, "features": 12, "max-steps": 2, "eval-every": "1steps"}
    mains = {"train": train, "export": export, "generate": generate}
    for number, (name, words) in enumerate(commands):
        for option, value in smaller.items():
            words = re.sub(rf"--{option} \S+", f"--{option} {value}", words)
        words = re.sub(r"--prompt .*", "--prompt a --tokens 2", words)
        on_ranks(mains[name], words, 1 + (number == 1))
    printed = capsys.readouterr().out
    assert "in adapters to" in printed and "of bfloat16" in printed
    assert Path("runs/tuned/merged/tokenizer_config.json").is_file()


def test_there_are_eleven_lessons_that_are_read_in_one_sitting():
    """Each with a picture, and no longer than 185 lines, of which a dozen draw what it is about."""
    assert [int(name.split("_")[0]) for name in NAMES] == list(range(1, 12))
    for file in LESSONS:
        text = file.read_text()
        assert len(text.splitlines()) <= 185, file
        assert "\n\n    " in text.split('"""')[1], file
        assert "given = program_words(__doc__" in text and "sys" not in text, file


EACH_LESSON = pytest.mark.parametrize("lesson", LESSONS, ids=NAMES)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@EACH_LESSON
def test_a_lesson_is_equal_to_the_serial_run(lesson, ranks):
    drawn = nnmpi.simulate(runpy.run_path(str(lesson))["main"], ranks=ranks)[0]
    # a death is drawn where both starts are seen
    assert lesson.stem[:2] in ("1_", "10") or str(drawn)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_lesson_on_death_goes_on_behind_the_checkpoint(ranks, tmp_path, capsys):
    """A rank is killed, the others are ended; the second start begins where the file says, and not
    anew.
    """
    runpy.run_path(str(FOLDER / "lessons" / "10_a_rank_dies.py"))["start_twice"](
        ranks, f"{tmp_path}/saved.npz"
    )
    first, *told = capsys.readouterr().out.splitlines()
    assert first == f"rank {ranks - 1} was killed in its call {36 * (ranks - 1)}"
    assert f"begun with step 4, equal to the serial run after 12 steps, ranks: {ranks}" in told
    assert [line[17:].strip()[:2] for line in told if line.startswith("start")] == [
        *["0#"] * ranks,
        *["4#"] * ranks,
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["saved.npz"]


def test_titles_and_signs_are_right_on_any_machine():
    """Buckets on a busy one hide less than nothing; keys of rank 1 have one sign on any number of
    ranks.
    """
    buckets, attention = (runpy.run_path(str(LESSONS[at]))["draw"] for at in (2, 8))
    assert buckets([(0, 0.002, "", "")], [(0, 0.003, "", "")]).title.endswith(
        "which hide nothing on this machine now"
    )
    assert attention(4).kinds == [f"keys of {rank}" for rank in range(4)]


@pytest.mark.mpi
@EACH_LESSON
def test_a_lesson_runs_on_mpi(lesson, group):
    runpy.run_path(str(lesson))["main"](group)


@EACH_LESSON
def test_a_lesson_fails_where_weights_differ(lesson):
    """In one number of one layer, by a millionth: the rank that sees it raises."""
    main = runpy.run_path(str(lesson))["main"]
    serial = main.__globals__["serial"]

    def other(*staleness):
        weights = serial(*staleness)
        weights[2][-1, -1] *= 1 + 1e-6
        return weights

    main.__globals__["serial"] = other
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        nnmpi.simulate(main, ranks=2)


ONE_FILE = FOLDER / "one_file.py"


@pytest.mark.parametrize("dp, pp, tp", [(2, 2, 2), (3, 1, 2), (1, 5, 1)])
def test_the_one_file_is_equal_in_every_layout(dp, pp, tp):
    main = runpy.run_path(str(ONE_FILE))["main"]
    nnmpi.simulate(lambda group: main(group, dp, pp, tp), ranks=dp * pp * tp)


@pytest.mark.mpi
def test_the_one_file_runs_on_mpi(group):
    for layout in ((group.size, 1, 1), (1, group.size, 1), (1, 1, group.size)):
        runpy.run_path(str(ONE_FILE))["main"](group, *layout)


@pytest.mark.parametrize("broken", ["reduce_scatter", "all_gather"])
def test_the_one_file_fails_where_weights_differ(broken):
    main = runpy.run_path(str(ONE_FILE))["main"]
    main.__globals__[broken] = lambda chunks, axis: None
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        nnmpi.simulate(lambda group: main(group, 2, 1, 1), ranks=2)


def test_the_one_file_is_read_in_an_hour_and_ends_as_the_readme_shows():
    """It takes from nnmpi what carries messages, and nothing else."""
    text = ONE_FILE.read_text()
    readme = (FOLDER.parent / "README.md").read_text()
    lines = len(text.splitlines())
    assert lines <= 385
    assert f"is a program of {lines} lines" in readme
    assert set(re.findall(r"nnmpi\.(\w+)\(", text)) == {"start", "simulate"}
    ran = subprocess.run(
        [sys.executable, str(ONE_FILE)], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert all(f"    {line}" in readme for line in ran.stdout.splitlines()[-2:])


@pytest.mark.parametrize(
    "words, status, told",
    [
        (
            "2_ring.py --simulate 2",
            0,
            "equal to the serial run after 12 steps, ranks: 2\n\nA server's link carries",
        ),
        ("2_ring.py --help", 0, "usage: 2_ring.py [-h] [OPTIONS]"),
        ("2_ring.py --simulate", 2, "nnmpi: --simulate has no value; it must be a whole number\n"),
        ("2_ring.py --simulate 0", 2, "nnmpi: --simulate is 0; give a whole number, 1 or more"),
        (
            "2_ring.py --similate 3",
            2,
            "nnmpi: --similate is not an option; did you mean --simulate?\n",
        ),
        ("9_ring_attention.py --simulate 99", 2, "nnmpi: 99 ranks share"),
    ],
)
def test_a_lesson_is_a_program_without_mpi(words, status, told):
    """Its status says whether it is equal; nothing is trained by words that it does not know."""
    command = [sys.executable, *words.split()]
    ran = subprocess.run(
        command, cwd=LESSONS[1].parent, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ran.returncode == status and (ran.stderr if status else ran.stdout).startswith(told), ran
