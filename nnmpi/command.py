"""What commands share: reading options, help, and which rank speaks.

The options of a large command are the fields of dataclasses, one dataclass for each group in the
help:

    @dataclass(frozen=True)
    class ModelConfig:
        \"\"\"The network.\"\"\"                                   the group's heading in --help

        hidden: tuple[int, ...] = (128, 64)                   --hidden 50 20
        \"\"\"Widths of the hidden dense layers.\"\"\"              the option's help
        normalize: bool = True                                --normalize, --no-normalize
        jit: Switch = "auto"                                  --jit, --no-jit, --jit auto
        clip: float | None = None                             --clip 0.5, --clip None

`options_of` lists them, `read_words` reads a command line, `convert` checks a value that comes from
a file. Smaller commands have a `Parser`: argparse, with the package's errors and the width of its
help.
"""

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, fields
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, wrap
from typing import (
    Any,
    Literal,
    NoReturn,
    TextIO,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from unicodedata import category

from nnmpi.custom import Custom
from nnmpi.errors import HelpAsked, NnmpiError, UsageError, shortened, told
from nnmpi.files import appending
from nnmpi.launcher import read_launch
from nnmpi.units import Bytes, Every, format_duration
from nnmpi.version import VERSION

# what the program decides unless it is switched on or off
Switch: TypeAlias = Literal["auto", "on", "off"]

HELP_WIDTH = 80  # of help texts, in characters: under MPI no rank knows the width of the terminal
# not a negative number, nor a text with a dash first
FLAG = re.compile(r"(--?[^\s=\d.][^\s=]*)(?:=(.*))?", re.DOTALL)
EXAMPLE = (" ", "python -m ", "mpirun ")  # how a line begins that is one
MOST_DIGITS = 12  # of a number of ranks, layers, microbatches
HELP_INDENT = 26  # where the explanations begin

# types of options: how the help has a value, and what it is in a sentence
PLAIN: Mapping[Any, tuple[str, str]] = {
    bool: ("", "true or false"),
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "text"),
    Path: ("PATH", "a path"),
    Custom: ("FILE.py:NAME", "FILE.py:NAME"),
    Bytes: ("BYTES", "a number of bytes such as 512MiB"),
    Every: ("EVERY", "a number of epochs, or of steps, such as 100steps"),
}

# what other programs call what is called otherwise here: who comes from there looks for these
HABITS = {
    **dict.fromkeys(("num_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("out_dir", "output_dir"), "out"),
    "learning_rate": "lr",
    "batch": "batch_size",
    "data": "dataset",
    "data_path": "data_dir",
    **dict.fromkeys(("lr_scheduler", "scheduler"), "lr_schedule"),
    "schedule": "lr_schedule pipeline",
    **dict.fromkeys(
        ("alpha", "beta", "gamma", "per_node", "across_alpha", "across_beta", "fit"), "network"
    ),
    "message_ms": "network",
    "optim": "optimizer",
    "workers": "dp",
    "device": "backend",
}


class _Help(argparse.HelpFormatter):
    """argparse's help, as wide as that of the large commands; examples in a description stay lines
    of their own.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # of a module's docstring: the usage names the command
        text = re.sub(r"^`[^`]*`: ", "", text.strip())
        return folded(text[:1].upper() + text[1:])


class Parser(argparse.ArgumentParser):
    """Raises the package's error where argparse would end the program."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help, **options})

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return action.type(arg_string) if callable(action.type) else arg_string
        except ValueError as error:  # of int and float without a sentence
            wrong = (
                f"{arg_string!r} is not {PLAIN[action.type][1]}"
                if action.type in PLAIN
                else str(error)
            )
            raise argparse.ArgumentError(action, wrong) from None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse renamed options first; otherwise argparse's own."""
        known, others = (
            self._option_string_actions,
            any(action.nargs == argparse.REMAINDER for action in self._actions),
        )
        for written in [] if others else [word.partition("=")[0] for word in args or ()]:
            habit = (
                written.startswith("--")
                and written not in known
                and written[2:].replace("-", "_") in HABITS
            )
            if habit and (near := suggest(written, known)):
                self.error(f"{written} is not an option{near}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the message as a sentence."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def folded(text: str) -> str:
    """Return a text with paragraphs wrapped to the help's width; example lines stay."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        examples = all(line.startswith(EXAMPLE) for line in lines)
        paragraphs.append(
            paragraph
            if examples
            else "\n".join(wrap(paragraph, HELP_WIDTH, break_on_hyphens=False))
        )
    return "\n\n".join(paragraphs)


def positive_count(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a whole number of at least 1")
    if len(text) > MOST_DIGITS:
        raise UsageError(f"{shortened(text)} is too large a number")
    return int(text)


LONG_S, MOST_S = 10.0, 3600.0


def foretell(what: str, seconds: float) -> None:
    """Say on standard error that something takes long, before it begins.

    Args:
        what: is to be done.
        seconds: that it takes about.

    Raises:
        UsageError: where nobody would wait for it, and it would not fit into memory either.
    """
    if seconds > MOST_S:
        raise UsageError(
            f"{what} would take {format_duration(min(seconds, 1e9))} or so; ask for fewer"
        )
    if seconds > LONG_S:
        print(
            f"nnmpi: {what} takes about {format_duration(seconds)}; Ctrl-C ends it",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: as the field is written: `batch_size`.
        type: of its values: one of PLAIN, a Literal, tuple[int, ...], or a union of them and None.
        default: the value without the option.
        section: the dataclass that has the field; the help lists the options of a section together.
        help: the explanation; None for the docstring below the field.
    """

    name: str
    type: Any
    default: Any
    section: type
    help: str | None = None

    @property
    def flag(self) -> str:
        """The option as it is written on the command line: `--batch-size`."""
        return flag_of(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that switches the option off, such as `--no-normalize`; None if it takes values."""
        return f"--no-{self.flag[2:]}" if self.type is bool or is_switch(self.type) else None


def flag_of(name: str) -> str:
    """Return an option as it is written on the command line: "batch_size" -> "--batch-size"."""
    return f"--{name.replace('_', '-')}"


def options_of(section: type) -> list[Option]:
    """Return the fields of a dataclass as options, in order."""
    hints = get_type_hints(section)
    return [Option(item.name, hints[item.name], item.default, section) for item in fields(section)]


def read_words(
    words: Sequence[str],
    options: Sequence[Option],
    program: str,
    description: str,
    first: Collection[str] = (),
) -> dict[str, Any]:
    """Return the values of the options on a command line, by name; the last one counts.

    Args:
        words: of the command line, without the program.
        options: all that the command knows. Names may be written with dashes or underscores.
        program: how the command is called, for its help.
        description: what the command does, for its help.
        first: options by name that --help prints, where it does not print all: then `--help all`
            does that, and `--help NAME` prints the group of an option.

    Raises:
        HelpAsked: for -h or --help, whatever is wrong with the other words but the name behind it.
        UsageError: for a word that is no option, or a value that the option cannot have.
    """
    if {"-h", "--help"} & {*words}:
        place = min(words.index(item) for item in ("-h", "--help") if item in words)
        raise HelpAsked(_help_on((*words, "")[place + 1], options, program, description, first))
    if "--version" in words:
        raise HelpAsked(f"nnmpi {VERSION}")
    known = {
        flag: option
        for option in options
        for flag in (option.flag, option.negation)
        if flag is not None
    }
    taken: dict[str, tuple[str, list[str]]] = {}
    # how many words an option takes is found later, with a sentence on its type
    behind: list[str] | None = None
    for word in words:
        parts = FLAG.fullmatch(word)
        written, value = parts.groups() if parts else (word, None)
        if option := known.get(written.replace("_", "-")):
            behind = [] if value is None else [value]
            taken[option.name] = written, behind
        elif parts or behind is None:
            near = suggest(written, known) or "; options begin with -- and are listed by --help"
            raise UsageError(f"{shortened(written)} is not an option{near}")
        else:
            behind.append(word)
    return {
        option.name: _read(option, *taken[option.name])
        for option in options
        if option.name in taken
    }


def convert(value: Any, option: Option, where: str) -> Any:
    """Return what a value from a file means: what it would mean on the command line.

    Args:
        value: as JSON and TOML know it; a list stands for several words, and true and false for the
            option and its negation.
        option: whose value it is.
        where: the file and the name in it, for the message.

    Raises:
        UsageError: for a value that the option cannot have.
    """
    words = [str(item) for item in (value if isinstance(value, list | tuple) else [value])]
    if isinstance(value, bool):
        words = []
    with suppress(UsageError):
        return _read(option, option.flag if value is not False else option.negation or "", words)
    raise UsageError(f"{where} is {shortened(repr(value))}; it must be {describe(option.type)}")


@cache
def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the plain types of a type, which may be a union of some."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@cache
def is_switch(kind: Any) -> bool:
    """Return whether an option's type is `Switch`: auto, on or off."""
    return get_args(kind) == get_args(Switch)


def describe(hint: Any) -> str:
    """Return a type as text, such as "a whole number or "full"", for error sentences."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(kind) for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return (
            "one of " + ", ".join(get_args(hint))
            if len(get_args(hint)) > 1
            else f'"{get_args(hint)[0]}"'
        )
    return "a list of whole numbers" if get_origin(hint) is tuple else PLAIN[hint][1]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest known names, or "" if none is near.

    Dashes and underscores are alike.
    """
    plain = {item.lstrip("-").replace("-", "_"): item for item in known}
    name = name.lstrip("-").replace("-", "_")
    meant = [item for item in HABITS.get(name, "").split() if item in plain]
    near = meant or difflib.get_close_matches(name, plain, n=3, cutoff=0.65)
    return (
        f"; did you mean {' or '.join(plain[item].replace('_', '-') for item in near)}?"
        if near
        else ""
    )


def printable(text: str) -> str:
    """Return a text without terminal control characters, which file names may hold.

    Spaces of other widths and what joins letters steer nothing: texts in many languages have them.
    """
    if text.isprintable():
        return text
    saved = "\n\t\u200c\u200d"
    return "".join(
        item if item in saved or item.isprintable() or category(item) == "Zs" else ascii(item)[1:-1]
        for item in text
    )


def say(main: Callable[[Sequence[str]], str]) -> int:
    """Print a command's result, or one sentence that says what is wrong.

    Of the ranks of a job the first one speaks, of help too.

    Returns:
        The exit status.
    """
    launch = read_launch(os.environ)
    speaks = launch is None or launch.rank == 0
    console = Console(quiet=not speaks)
    try:
        with nullcontext() if speaks else redirect_stdout(StringIO()):
            # argparse prints its help by itself
            try:
                text = main(sys.argv[1:])
            except HelpAsked as asked:
                text = str(asked)
            console.say(*filter(None, [text]))
        console.check()
    except (NnmpiError, OSError) as caught:
        if not isinstance(error := told(caught), NnmpiError):
            raise
        if speaks:
            print(f"nnmpi: {printable(str(error))}", file=sys.stderr)
        return error.exit_status
    return 0


def program_words(description: str, *more: tuple[str, Mapping[str, Any]]) -> argparse.Namespace:
    """Return a small program's arguments: `simulate`, a number of ranks or None, and its own.

    Help and a sentence on a wrong word end the program.

    Args:
        description: what the program is for.
        more: its own words, each with what argparse has to know of it.
    """
    parser, given = Parser(description=description), argparse.Namespace()
    parser.add_argument(
        "--simulate", type=positive_count, metavar="RANKS", help="on so many ranks of this process"
    )
    for word, how in more:
        parser.add_argument(word, **how)
    if status := say(lambda words: "" * bool(parser.parse_args(words, given))):
        sys.exit(status)
    return given


class Console:
    """Prints lines on one rank and nothing on the others.

    A reader that goes away (`| head`, a closed session), or a full disk, ends the printing, not the
    training.
    """

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        """Print to `stream` (standard output when None) unless `quiet`."""
        self._stream = sys.stdout if stream is None else stream
        # Python has no standard output when it was closed before the start
        self._quiet = quiet or self._stream is None
        self._copy: TextIO | None = None
        self._lost: OSError | None = None

    def silence(self) -> None:
        """Print nothing from now on; what is said goes into the copy alone."""
        self._quiet = True

    @contextmanager
    def copied(self, file: Path) -> Iterator[None]:
        """Append what is said in the body to a file, too, as long as the disk takes it."""
        with suppress(OSError):
            self._copy = appending(file)
        try:
            yield
        finally:
            if self._copy is not None:
                with suppress(OSError):
                    self._copy.close()
            self._copy = None

    def say(self, *lines: str) -> None:
        """Print the lines at once."""
        if self._copy is not None:
            with suppress(OSError):
                self._copy.write("".join(f"{printable(line)}\n" for line in lines))
                self._copy.flush()
        if self._quiet:
            return
        # the system's, which may not have all letters
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            for line in lines:
                print(
                    printable(line).encode(encoding, "backslashreplace").decode(encoding),
                    file=self._stream,
                )
            self._stream.flush()
        except (OSError, ValueError) as error:
            # no reader, a full disk; ValueError: the stream is closed
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self._lost = error
            self._quiet = True
            with suppress(OSError, ValueError):
                # else Python would try once more at the end, and fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def check(self) -> None:
        """Make sure that all was printed that somebody wants to read.

        Raises:
            NnmpiError: when something could not be written; a reader that went away is no error.
        """
        if self._lost is not None:
            raise NnmpiError(f"what was to be printed could not be written: {self._lost.strerror}")


def _read(option: Option, written: str, words: Sequence[str]) -> Any:
    """Return the value that an option has by the words behind it.

    Args:
        option: which it is.
        written: how it was written, for the message.
        words: up to the next option.

    Raises:
        UsageError: when the words are no value of its type.
    """
    off = option.negation is not None and written.replace("_", "-") == option.negation
    if off or option.type is bool:
        if words:
            raise UsageError(
                f"{written} takes no value, but {shortened(' '.join(words))} follows it"
            )
        return not off if option.type is bool else "off"
    if is_switch(option.type) and not words:
        return "on"
    if Path in kinds(option.type) and list(words) == [""]:
        # an unset variable of a script; Path("") is this folder
        raise UsageError(f"{written} is empty; give a path, or leave {written} out")
    # None first: where text is a value too, the word None still means none.
    for kind in sorted(kinds(option.type), key=lambda kind: kind is not type(None)):
        try:
            return _read_as(kind, words)
        except ValueError:
            continue
    given = f"is {shortened(' '.join(words)) or 'empty'}" if words else "stands without a value"
    raise UsageError(f"{written} {given}; it must be {describe(option.type)}")


def _read_as(kind: Any, words: Sequence[str]) -> Any:
    """Return the words as a value of a plain type; a ValueError says that they are none."""
    if get_origin(kind) is tuple:
        return tuple(_read_as(int, [item]) for word in words for item in word.split(","))
    (word,) = words  # a ValueError unless there is exactly one
    if kind is type(None) or get_origin(kind) is Literal:
        allowed = {"None": None} if kind is type(None) else {item: item for item in get_args(kind)}
        if word not in allowed:
            raise ValueError(word)
        return allowed[word]
    if kind in (int, float) and (not word.isascii() or "_" in word):
        raise ValueError(word)  # digits of other scripts and 1_0, which Python reads
    return kind(word)


def _help_on(
    topic: str, options: Sequence[Option], program: str, description: str, first: Collection[str]
) -> str:
    """Return the help on the topic after --help, or the overview."""
    by_name = {option.name: option for option in options}
    name = topic.replace("-", "_")
    if name in by_name:
        return _format_help(
            [item for item in options if item.section is by_name[name].section],
            program,
            description,
        )
    if topic == "all" or not first:
        return _format_help(options, program, description)
    if topic and not topic.startswith("-"):
        raise UsageError(
            f"--help {shortened(topic)}: there is no such option{suggest(topic, by_name)}"
        )
    shown = [option for option in options if option.name in first]
    more = (
        f"All {len(options)} options: --help all. An option and those of its group: --help NAME,\n"
        "such as --help pp."
    )
    return f"{_format_help(shown, program, description)}\n\n{more}"


def _format_help(options: Sequence[Option], program: str, description: str) -> str:
    """Return the help: every option with its form, explanation and default, in the groups of its
    dataclasses.
    """
    lines = [
        f"usage: {program} [-h] [OPTIONS]",
        "",
        folded(description),
        "",
        *entry("-h, --help", "Print this help."),
        *entry("--version", "Print the version."),
    ]
    for section in dict.fromkeys(option.section for option in options):
        lines += ["", inspect.cleandoc(section.__doc__ or "").partition("\n")[0].rstrip(".") + ":"]
        texts = _field_docstrings(section)
        for option in options:
            if option.section is section:
                text = " ".join((option.help or texts[option.name]).split())
                default = _show_default(option, text)
                lines += entry(_form(option), f"{text.rstrip('.')}{default}." if default else text)
    return "\n".join(lines)


def entry(form: str, text: str) -> list[str]:
    """Return an option's help: its form, and the explanation beside or below it."""
    texts = wrap(text, HELP_WIDTH - HELP_INDENT, break_on_hyphens=False)
    first = f"  {form}"
    beside = [f"{first:<{HELP_INDENT}}{texts.pop(0)}"] if len(first) < HELP_INDENT - 1 else [first]
    return [*beside, *(" " * HELP_INDENT + item for item in texts)]


def _form(option: Option) -> str:
    """Return how the option is written: `--lr NUMBER`, `--jit, --no-jit`, `--quick [auto|on|off],
    --no-quick`.
    """
    if option.type is bool:
        return f"{option.flag}, {option.negation}"
    shapes = []
    for kind in kinds(option.type):
        if get_origin(kind) is Literal:
            shapes.append("|".join(get_args(kind)))
        elif kind is not type(None):
            shapes.append("[INT ...]" if get_origin(kind) is tuple else PLAIN[kind][0])
    if is_switch(option.type):
        return f"{option.flag} [{shapes[0]}], {option.negation}"
    return f"{option.flag} {'|'.join(shapes)}"


def _show_default(option: Option, text: str) -> str:
    """Return the default in brackets, or "" if the explanation states it."""
    value = option.default
    if value is None or value == "":
        return "" if "default" in text or "without" in text.lower() else " (default: none)"
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def _field_docstrings(section: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, from the source: Python drops them."""
    (body,) = ast.parse(dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        ast.unparse(field.target): text.value.value
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
