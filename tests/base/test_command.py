"""What commands have in common: of a job's ranks one speaks, whatever there is to say."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nnmpi.base.command import (
    Switch,
    announce,
    folded,
    options_of,
    printable,
    read_command,
    read_words,
    say,
)
from nnmpi.base.errors import HelpAsked, UsageError

ROOT = Path(__file__).parents[2]
SCHEDULE = "nnmpi.schedule --pipeline gpipe --microbatches 2 --stages"


def ran(words: str, rank: int) -> tuple[int, str, str]:
    """Return status, output and errors of a command, started as one of two ranks."""
    place = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        env=os.environ | place,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words", [f"{SCHEDULE} 2", "nnmpi.schedule --help", "nnmpi.comm list --help", "nnmpi.comm"]
)
def test_the_first_rank_says_it(words: str) -> None:
    status, text, wrong = ran(words, 0)
    assert (status, wrong) == (0, "")
    assert "stages" in text or "usage: nnmpi" in text
    assert ran(words, 1) == (0, "", "")


@pytest.mark.parametrize("words", [f"{SCHEDULE} none", "nnmpi.comm list x"])
def test_it_says_what_is_wrong(words: str) -> None:
    status, text, wrong = ran(words, 0)
    assert (status, text) == (2, "")
    assert wrong.startswith("nnmpi: ") and words.split()[-1] in wrong and wrong.count("\n") == 1
    assert ran(words, 1) == (2, "", "")


def test_what_takes_long_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    announce("a little", 9)
    announce("a plan", 90)
    assert capsys.readouterr() == ("", "nnmpi: a plan takes about 1 min 30 s; Ctrl-C ends it\n")
    with pytest.raises(UsageError, match=r"a plan would take .* or so; ask for fewer"):
        announce("a plan", 1e30)


@dataclass(frozen=True)
class Section:
    """What is read here."""

    batch_size: int = 3
    """Rows."""
    limit: str | None = None
    """The most."""
    shuffle: bool = True
    """In another order."""
    overlap: Switch = "auto"
    """At the same time."""


def read(words: str) -> dict[str, Any]:
    return read_words(words.split(), options_of(Section), "few", "Few things.")


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    def interrupted(words: Any) -> str:
        raise KeyboardInterrupt

    assert say(interrupted) == 130


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyboardInterrupt()])
def test_what_ends_one_rank_alone_is_left_to_the_end_of_the_job(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status that one rank returns would leave the others waiting."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")

    def fails(words: Any) -> str:
        raise error

    with pytest.raises(type(error)):
        say(fails)


def test_fields_of_a_dataclass_are_options() -> None:
    assert read("") == {}
    assert read("--batch-size 4 --limit 5 --no-shuffle --overlap") == {
        "batch_size": 4,
        "limit": "5",
        "shuffle": False,
        "overlap": "on",
    }
    assert read("--batch_size=4 --limit None --no_overlap") == {
        "batch_size": 4,
        "limit": None,
        "overlap": "off",
    }
    assert read("--no-shuffle --shuffle --batch-size 4 --batch-size 5") == {
        "shuffle": True,
        "batch_size": 5,
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--batch-size 4 5", "--batch-size is 4 5; it must be a whole number"),
        ("--batch 4", "--batch is not an option; did you mean --batch-size?"),
        ("--shuffle=yes", "--shuffle takes no value, but yes follows it"),
        ("--no-batch-size", "--no-batch-size is not an option; did you mean --batch-size"),
        ("4 --batch-size 4", "4 is not an option; options begin with -- and are listed by --help"),
    ],
)
def test_a_wrong_word_is_named(words: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(words)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("words", "paths", "rows"),
    [
        ("run", ["run"], 3),
        ("run more --batch-size 4", ["run", "more"], 4),
        ("--batch-size 4 run --shuffle more", ["run", "more"], 4),
        ("--batch-size=4 run", ["run"], 4),
    ],
)
def test_paths_stand_before_and_behind_options(words: str, paths: list[str], rows: int) -> None:
    *read_paths, section = read_command("RUN [FILE]", "few", "", (Section,), words.split())
    assert [str(path) for path in read_paths if path is not None] == paths
    assert section == Section(batch_size=rows)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--shuffle", "give RUN [FILE] first and then the options; RUN is missing"),
        ("run more and", "and is not an option"),
        ("run --batch-size 4 more 5", "5 is not an option"),
    ],
)
def test_wrong_paths_are_named(words: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_command("RUN [FILE]", "few", "", (Section,), words.split())
    assert str(caught.value).startswith(text)


def test_help_has_forms_explanations_and_defaults() -> None:
    with pytest.raises(HelpAsked) as caught:
        read("--batch 4 --help")
    assert str(caught.value).splitlines()[4:] == [
        "  -h, --help              Print this help.",
        "  --version               Print the version.",
        "  --verbose               Print an error's whole traceback.",
        "",
        "What is read here:",
        "  --batch-size INT        Rows (default: 3).",
        "  --limit TEXT            The most (default: none).",
        "  --shuffle, --no-shuffle",
        "                          In another order (default: on).",
        "  --overlap [auto|on|off], --no-overlap",
        "                          At the same time (default: auto).",
    ]


def test_paragraphs_are_wrapped_and_examples_are_not() -> None:
    long, example = "word " * 40, "nnmpi train " + "--more " * 20 + "end"
    text = folded(f"{long}\n\n{example}\n{example}\n\nEnd.")
    assert text.endswith(f"\n\n{example}\n{example}\n\nEnd.") and len(text.splitlines()[0]) <= 80
    with pytest.raises(HelpAsked) as caught:
        read_words(["-h"], [], "one", f"`one`: {long}\n\n{example}")
    assert str(caught.value).count(example) == 1 and "\n\nWord word" in str(caught.value)


def test_nothing_that_steers_a_terminal_is_printed() -> None:
    """From the name of a file, or the reason in a server's answer."""
    assert printable("a\x1b[2Jb\rc\x07 \udcff") == "a\\x1b[2Jb\\rc\\x07 \\udcff"
    for fine in ("Größe: 3 × 4\n\t→ fine", "\u3000全角\xa0!", "👩\u200d👧 \u06cc\u200c\u06a9"):
        assert printable(fine) == fine


def test_what_cannot_be_written_is_said_in_a_sentence() -> None:
    command = [
        sys.executable,
        "-m",
        "nnmpi.schedule",
        "--pipeline",
        "gpipe",
        "--stages",
        "2",
        "--microbatches",
        "2",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "nnmpi: the output could not be written: No space left on device\n"
