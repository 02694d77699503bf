"""What commands have in common: of a job's ranks one speaks, whatever there is to say."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np
import pytest

import nnmpi
from nnmpi import nn, optim
from nnmpi.base.command import (
    HELP_WIDTH,
    Switch,
    announce,
    check_idle,
    check_numbers,
    describe_uncaught,
    entry,
    folded,
    options_of,
    printable,
    read_command,
    read_words,
    say,
    settings,
)
from nnmpi.base.errors import HelpAsked, UsageError
from nnmpi.train.config import Config
from tests.harness.refusals import refuses, usage_error

ROOT = Path(__file__).parents[2]
SCHEDULE = "nnmpi schedule --pipeline gpipe --microbatches 2 --stages"


def ran(words, rank):
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
    "words", [f"{SCHEDULE} 2", "nnmpi schedule --help", "nnmpi comm list --help", "nnmpi comm"]
)
def test_the_first_rank_says_it(words):
    status, text, wrong = ran(words, 0)
    assert (status, wrong) == (0, "")
    assert "stages" in text or "usage: nnmpi" in text
    assert ran(words, 1) == (0, "", "")


@pytest.mark.parametrize("words", [f"{SCHEDULE} none", "nnmpi comm list x"])
def test_it_says_what_is_wrong(words):
    status, text, wrong = ran(words, 0)
    assert (status, text) == (2, "")
    assert wrong.startswith("nnmpi: ") and words.split()[-1] in wrong and wrong.count("\n") == 1
    assert ran(words, 1) == (2, "", "")


def test_what_takes_long_is_said_first(capsys):
    announce("a little", 9)
    announce("a plan", 90)
    assert capsys.readouterr() == ("", "nnmpi: a plan takes about 1 min 30 s; Ctrl-C ends it\n")
    usage_error(r"a plan would take .* or so; ask for fewer", announce, "a plan", 1e30)


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


def read(words):
    return read_words(words.split(), options_of(Section), "few", "Few things.")


def test_ctrl_c_ends_a_command_without_a_traceback():
    def interrupted(words):
        raise KeyboardInterrupt

    assert say(interrupted) == 130


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), KeyboardInterrupt()])
def test_what_ends_one_rank_alone_is_left_to_the_end_of_the_job(error, monkeypatch):
    """A status that one rank returns would leave the others waiting."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")

    def fails(words):
        raise error

    with pytest.raises(type(error)):
        say(fails)


def test_fields_of_a_dataclass_are_options():
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


@pytest.mark.parametrize(
    "words, text",
    [
        ("--batch-size 4 --limit a --batch-size 5", "--batch-size 4 and --batch-size 5 are given"),
        ("--batch-size 4 --batch_size=5", "--batch-size 4 and --batch_size 5 are given"),
        ("--limit a --limit a --limit None", "--limit a and --limit None are given"),
        ("--no-shuffle --shuffle", "--no-shuffle and --shuffle are given"),
        ("--overlap on --no-overlap", "--overlap on and --no-overlap are given"),
    ],
)
def test_an_option_with_two_values_is_refused(words, text):
    """The last one used to count, and the first was dropped without a word."""
    usage_error(re.escape(f"{text}; give the option once"), read, words)


def test_an_option_may_say_the_same_twice():
    assert read("--batch-size 4 --overlap --batch_size=04 --overlap=on") == {
        "batch_size": 4,
        "overlap": "on",
    }


@pytest.mark.parametrize(
    "words, text",
    [
        ("--batch-size 4 5", "--batch-size is 4 5; it must be a whole number"),
        ("--batch 4", "--batch is not an option; did you mean --batch-size?"),
        ("--shuffle=yes", "--shuffle takes no value, but yes follows it"),
        ("--no-batch-size", "--no-batch-size is not an option; did you mean --batch-size"),
        (
            "4 --batch-size 4",
            "4 is not an option, and few takes no path; options begin with -- and",
        ),
    ],
)
def test_a_wrong_word_is_named(words, text):
    with pytest.raises(UsageError) as caught:
        read(words)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "words, paths, rows",
    [
        ("run", ["run"], 3),
        ("run more --batch-size 4", ["run", "more"], 4),
        ("--batch-size 4 run --shuffle more", ["run", "more"], 4),
        ("--batch-size=4 run", ["run"], 4),
    ],
)
def test_paths_stand_before_and_behind_options(words, paths, rows):
    *read_paths, section = read_command("RUN [FILE]", "few", "", (Section,), words.split())
    assert [str(path) for path in read_paths if path is not None] == paths
    assert section == Section(batch_size=rows)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--shuffle", "give RUN [FILE] first and then the options; RUN is missing"),
        ("run ", "[FILE] is empty; give one"),
        ("run more and", "and is not an option"),
        ("run --batch-size 4 more 5", "5 is not an option"),
    ],
)
def test_wrong_paths_are_named(words, text):
    with pytest.raises(UsageError) as caught:
        read_command("RUN [FILE]", "few", "", (Section,), words.split(" "))
    assert str(caught.value).startswith(text)


def test_a_form_with_many_names_is_broken_between_them():
    """Each new row of a table would make its line longer."""
    names = "|".join(f"name-{number}" for number in range(30))
    lines = entry(f"--kind {names}", "What it is.")
    assert max(map(len, lines)) <= HELP_WIDTH and len(lines) > 3
    assert "".join(map(str.strip, lines[:-1])) == f"--kind {names}"


def test_help_has_forms_explanations_and_defaults():
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


def test_paragraphs_are_wrapped_and_examples_are_not():
    long, example = "word " * 40, "nnmpi train " + "--more " * 8 + "end"
    text = folded(f"{long}\n\n{example}\n{example}\n\nEnd.")
    assert text.endswith(f"\n\n{example}\n{example}\n\nEnd.") and len(text.splitlines()[0]) <= 80
    with pytest.raises(HelpAsked) as caught:
        read_words(["-h"], [], "one", f"`one`: {long}\n\n{example}")
    assert str(caught.value).count(example) == 1 and "\n\nWord word" in str(caught.value)


def test_nothing_that_steers_a_terminal_is_printed():
    """From the name of a file, or the reason in a server's answer."""
    assert printable("a\x1b[2Jb\rc\x07 \udcff") == "a\\x1b[2Jb\\rc\\x07 \\udcff"
    for fine in ("Größe: 3 × 4\n\t→ fine", "\u3000全角\xa0!", "👩\u200d👧 \u06cc\u200c\u06a9"):
        assert printable(fine) == fine


def test_what_cannot_be_written_is_said_in_a_sentence():
    command = [
        sys.executable,
        "-m",
        "nnmpi",
        "schedule",
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


@settings
@dataclass(frozen=True)
class Pace:
    """How fast it goes."""

    gear: Literal["low", "high"] | Callable[[int], int] = "low"
    """One of the gears; `limit` says how far."""
    stops: Literal["none"] | Sequence[int] = "none"
    """Where it stops."""
    marks: tuple[int, ...] = ()
    """Which it passes."""
    _: KW_ONLY
    state: int = 2
    """Of a program alone."""

    def __post_init__(self):
        check_numbers(self, "stops state", 1)
        check_idle(self, "gear", {"stops": ("low",)})


@dataclass(frozen=True)
class PaceConfig(Pace):
    """Pace."""

    limit: int = 3
    """The most."""


def read_pace(words):
    (section,) = read_command("", "go", "Go.", (PaceConfig,), words.split())
    assert isinstance(section, PaceConfig)
    return section


def test_a_field_of_the_library_is_an_option_with_the_same_docstring():
    assert str(getdoc(Pace)).startswith("How fast it goes.\n\nAttributes:\n    gear: One of")
    assert all(f"\n    {item.name}: " in str(getdoc(Pace)) for item in fields(Pace))
    assert getdoc(PaceConfig) == "Pace."
    assert [item.name for item in options_of(PaceConfig)] == ["gear", "stops", "marks", "limit"]
    with pytest.raises(HelpAsked) as asked:
        read_pace("--help")
    text = " ".join(str(asked.value).split())
    assert "--gear low|high|FILE.py:NAME One of the gears; --limit says how far" in text
    assert "--stops none|[INT ...] Where it stops (default: none)." in text
    assert "Which it passes (default: none)." in text
    assert read_pace("--gear a.py:b --limit 4") == PaceConfig("a.py:b", limit=4)
    assert read_pace("--stops 2,3") == PaceConfig(stops=(2, 3))


def test_lists_in_several_places_are_joined():
    assert read_pace("--marks 1 2 --limit 4 --marks=3,4").marks == (1, 2, 3, 4)
    usage_error("--stops is 2 none; it must be ", read_pace, "--stops 2 --stops none")
    # an empty list beside another one: nobody knows which is meant
    usage_error("--marks 1 and --marks are given", read_pace, "--marks 1 --marks")


@pytest.mark.parametrize(
    "options, text, words, told",
    [
        ({"stops": (1, 0)}, "stops is 1,0; give whole numbers", "--stops 1 0", "--stops is 1,0; "),
        (
            {"gear": "high", "stops": (1,)},
            "stops is for gear low, not for high; leave it out",
            "--gear high --stops 1",
            "--stops is for --gear low, not for high; leave it out",
        ),
        (
            {"gear": "top"},
            "gear is 'top'; it must be one of low, high or a callable",
            "--gear top",
            "--gear is top; it must be one of low, high or FILE.py:NAME",
        ),
        ({"state": 0}, "state is 0; give a whole number, 1", "--state 0", "--state is not an opt"),
        ({"state": None}, "state is None; it must be a whole number", "", ""),
        ({"state": 1.5}, "state is 1.5; it must be a whole number", "", ""),
        ({"stops": [1.5]}, "stops is [1.5]; it must be ", "--stops x", "--stops is x; it must"),
        ({"stops": 3}, "stops is 3; it must be ", "", ""),
    ],
)
def test_an_error_spells_an_option_as_its_user_does(options, text, words, told):
    usage_error(re.escape(text), Pace, **options)
    if words:
        usage_error(re.escape(told), read_pace, words)


def test_an_unknown_option_of_the_library_is_refused_with_a_suggestion():
    for make in (Pace, partial(replace, Pace())):
        refuses(TypeError, r"Pace has no option 'stop'; did you mean stops\?", make, stop=(1,))


def test_a_former_name_of_an_option_is_read_and_said():
    with pytest.warns(DeprecationWarning, match=r"Layout\(schedule=\) is pipeline= now"):
        assert nnmpi.Layout(pp=2, schedule="gpipe").pipeline == "gpipe"
    with pytest.warns(DeprecationWarning, match=r"Sync\(mode=\) is sync= now"):
        assert nnmpi.Sync(mode="asp").sync == "asp"
    with (
        pytest.raises(TypeError, match="both schedule and pipeline"),
        pytest.warns(DeprecationWarning),
    ):
        nnmpi.Layout(schedule="gpipe", pipeline="1f1b")
    with pytest.raises(UsageError, match="pipeline is 3"), pytest.warns(DeprecationWarning):
        nnmpi.Layout(schedule=3)


@pytest.mark.parametrize("section", get_type_hints(Config).values())
def test_the_train_command_repeats_no_option_of_the_library(section):
    """But for a default of its own, whose docstring is the library's."""
    library = {
        item.name
        for kind in (nnmpi.Layout, nnmpi.GradientExchange, nnmpi.Numerics, nnmpi.Sync)
        for item in fields(kind)
    }
    own = {*vars(section).get("__annotations__", {})}
    assert own & library <= {"precision"}


def test_numbers_that_numpy_is_told_to_refuse_are_said_in_a_sentence():
    """In nnmpi's own code; what a user's own line raises keeps its traceback."""
    model = nn.Sequential(nn.Linear(2, 2)).initialize(seed=0)
    optimizer = optim.Adam(model.storage, lr=1e-3)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError) as raised:
        for value in (1e-20, 1e-30):
            for grad in model.storage.grads:
                grad[...] = value
            optimizer.step()
    status, text = describe_uncaught(raised.value)
    assert status == UsageError("").exit_status and "Traceback" not in text
    assert "has told NumPy to raise this (np.seterr, np.errstate)" in text
    with np.errstate(all="raise"), pytest.raises(FloatingPointError) as raised:
        np.float32(1e-30) * np.float32(1e-30)
    assert "Traceback" in describe_uncaught(raised.value)[1]
