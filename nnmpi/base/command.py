"""The commands' common parts: options, help, and output of one rank only.

The options of a command are the fields of dataclasses, one dataclass per group in the help:

    @dataclass(frozen=True)
    class ModelConfig:
        \"\"\"The network.\"\"\"                                   the group's heading in --help

        hidden: tuple[int, ...] = (128, 64)                   --hidden 50 20
        \"\"\"Widths of the hidden dense layers.\"\"\"              the option's help
        normalize: bool = True                                --normalize, --no-normalize
        jit: Switch = "auto"                                  --jit, --no-jit, --jit auto
        clip: float | None = None                             --clip 0.5, --clip None

`options_of` lists them, `read_words` parses a command line, `convert` checks a value from a file.
`read_command` also reads the paths of a command, and makes its dataclasses.

Options of the library, such as `nnmpi.Layout`, are `settings`: a command's section is a subclass,
which adds what the command alone has. `name` in a docstring is --name in the help, and in errors an
option is spelled as its user writes it.
"""

import ast
import inspect
import os
import re
import shutil
import sys
import traceback
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache, wraps
from itertools import pairwise
from math import inf
from numbers import Integral, Real
from pathlib import Path
from shlex import join
from textwrap import dedent, fill, wrap
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TextIO,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from unicodedata import category

from nnmpi.base.custom import Custom, is_custom, name_of
from nnmpi.base.errors import (
    HelpAsked,
    NnmpiError,
    UsageError,
    raised_as,
    shortened,
    translated,
)
from nnmpi.base.files import OF_A_RUN, OutputFile, is_own, opened_to_write
from nnmpi.base.launcher import read_launch
from nnmpi.base.lines import lines_of
from nnmpi.base.units import Bytes, Every, Seconds, format_duration
from nnmpi.base.version import VERSION
from nnmpi.base.words import instead, nearest, rows

T = TypeVar("T")
Switch: TypeAlias = Literal["auto", "on", "off"]  # auto: the program decides

MANY = "..."  # ends the name of paths of which there may be several
HELP_WIDTH = 80  # characters; under MPI, the terminal's width is unknown to every rank
_COMMAND_AT_END = re.compile(r"(?<=: )(mpirun|srun|nnmpi|python) .*$")
# Not a flag: a negative number, and text with spaces that begins with a dash.
FLAG = re.compile(r"(--?[^\s=\d.][^\s=]*)(?:=(.*))?", re.DOTALL)
EXAMPLE = (" ", "nnmpi ", "mpirun ")  # prefixes of example lines, which `folded` leaves alone
MOST = 1e12  # of ranks, layers, microbatches
INTERRUPTED = 130
HELP_INDENT = 26  # the column of the explanations

# types of options: their values in the help, and their name in a sentence
PLAIN: Mapping[Any, tuple[str, str]] = {
    bool: ("", "true or false"),
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "text"),
    Path: ("PATH", "a path"),
    OutputFile: ("FILE", "a path"),
    Custom: ("FILE.py:NAME", "FILE.py:NAME"),
    Bytes: ("BYTES", "a number of bytes such as 512MiB"),
    Every: ("EVERY", "a number of epochs, or of steps, such as 100steps"),
    Seconds: ("TIME", "a time such as 3h, 90m or 1h30m"),
}


def broken(line: str, indent: int = 4) -> str:
    """Return a line of words in lines of at most HELP_WIDTH columns; what has no space stays whole.

    A command at its end stays in one line, to be copied from there.

    Args:
        indent: of the lines below the first one.
    """
    if len(line) <= HELP_WIDTH:
        return line
    found = _COMMAND_AT_END.search(line)
    words, command = (line[: found.start()], found[0]) if found else (line, "")
    lines = wrap(
        words,
        HELP_WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if command and len(lines[-1]) + 1 + len(command) > HELP_WIDTH:
        lines.append(" " * indent + command)
    elif command:
        lines[-1] += f" {command}"
    return "\n".join(lines)


def _continued(example: str) -> str:
    """Return an example's line; a command that is too long in several, which a shell joins."""
    if len(example) <= HELP_WIDTH or example.startswith(" "):
        return example
    room = HELP_WIDTH - len(" \\")
    parts = wrap(
        example, room, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(parts)


def folded(text: str) -> str:
    """Return a text with paragraphs wrapped to HELP_WIDTH; lines of EXAMPLE stay.

    A command that is longer goes on in the next line, as a shell reads it.
    """
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.split("\n")
        examples = all(line.startswith(EXAMPLE) for line in lines)
        paragraphs.append(
            "\n".join(map(_continued, lines))
            if examples
            else "\n".join(wrap(paragraph, HELP_WIDTH, break_on_hyphens=False))
        )
    return "\n\n".join(paragraphs)


LONG_S, MOST_S = 10.0, 3600.0


def announce(what: str, seconds: float) -> None:
    """Print to standard error that a computation takes long, before it begins.

    Args:
        what: the computation, in words.
        seconds: its estimated time. Nothing is printed up to LONG_S.

    Raises:
        UsageError: above MOST_S, where memory would not suffice either.
    """
    if seconds > MOST_S:
        raise UsageError(
            f"{what} would take {format_duration(min(seconds, 1e9))} or so; ask for fewer"
        )
    if seconds > LONG_S:
        complain(f"{what} takes about {format_duration(seconds)}; Ctrl-C ends it")


@dataclass(frozen=True)
class Option:
    """One option of a command.

    Attributes:
        name: of the field: `batch_size`.
        type: of its values: one of PLAIN, a Literal, tuple[int, ...], or a union of them and None.
        default: the value if the option is not given.
        section: the dataclass of the field; the help lists the options of a section together.
        help: the explanation; None for the docstring below the field.
    """

    name: str
    type: Any
    default: Any
    section: type[Any]
    help: str | None = None

    @property
    def flag(self) -> str:
        """The option's spelling on the command line: `--batch-size`."""
        return flag_of(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that switches the option off: `--no-normalize`; None for other types."""
        return f"--no-{self.flag[2:]}" if self.type in (bool, Switch) else None


def flag_of(name: str) -> str:
    """Return an option's spelling on the command line: "batch_size" -> "--batch-size".

    A field whose name would be a keyword of Python ends in an underscore.
    """
    return f"--{name.rstrip('_').replace('_', '-')}"


def as_words(name: str, value: Any) -> str:
    """Return an option and its value as words of a shell: --hidden 50 20, --jit or --no-jit."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return join([flag_of(name), *map(str, value if isinstance(value, list | tuple) else [value])])


def require(holds: bool, sentence: str) -> None:
    """Raise a UsageError with this sentence unless the condition holds."""
    if not holds:
        raise UsageError(sentence)


def check_numbers(
    section: Any, names: str, least: float, below: float = inf, above: bool = False
) -> None:
    """Refuse options below `least`, or not below `below`; text and None pass, NaN does not.

    Of a list each number counts.

    Args:
        section: of the options.
        names: of the options, separated by spaces.
        least, below: the bounds.
        above: whether `least` itself is refused.

    Raises:
        UsageError: with the option, its value and the bounds.
    """
    for name in names.split():
        value = getattr(section, name)
        many = isinstance(value, list | tuple)
        for item in value if many else [value]:
            is_number = isinstance(item, Real)
            if is_number:
                kind = f"{'whole' if isinstance(item, Integral) else 'finite'} number"
                kind = f"{kind}s" if many else f"a {kind}"
                bound = f"{kind} above {least:g}" if above else f"{kind}, {least:g} or more"
                limit = "" if below == inf else f", and below {below:g}"
                require(
                    (least < item if above else least <= item) and item < below,
                    f"{spelled(section, name)} is {','.join(map(str, value)) if many else value};"
                    f" give {bound}{limit}",
                )


def options_of(section: type[Any]) -> tuple[Option, ...]:
    """Return the fields of a dataclass as options, in order.

    Fields behind KW_ONLY are for Python alone.
    """
    key: Any = section  # mypy takes a class of any kind for unhashable
    return _options_of(key)


@cache
def _options_of(section: type[Any]) -> tuple[Option, ...]:
    hints = get_type_hints(section, include_extras=True)
    return tuple(
        Option(item.name, _in_words(hints[item.name]), item.default, section)
        for item in fields(section)
        if not item.kw_only
    )


def _in_words(hint: Any) -> Any:
    """Return a type for words: functions are named, FILE.py:NAME, and lists are of numbers."""
    return Union[  # noqa: UP007
        tuple(
            Custom if get_origin(kind) is Callable else kind
            for kind in kinds(hint)
            if get_origin(kind) is not Sequence or is_list(kind)
        )
    ]


def non_defaults(section: Any) -> dict[str, Any]:
    """Return {name: value} of a section's options that differ from their defaults."""
    return {
        item.name: value
        for item in fields(section)
        if (value := getattr(section, item.name)) != item.default
    }


def check_idle(section: Any, option: str, needs: Mapping[str, Sequence[str]]) -> None:
    """Refuse sub-options that have no meaning with this option's value.

    Args:
        section: of the options.
        option: the option.
        needs: {sub-option: the values of the option with which it has a meaning}; FILE.py:NAME for
            any of the user's.
    """
    has, given = getattr(section, option), non_defaults(section)
    for name, values in needs.items():
        require(
            not given.get(name)
            or has in values
            or ((is_custom(has) or callable(has)) and PLAIN[Custom][0] in values),
            f"{spelled(section, name)} is for {spelled(section, option)} {' or '.join(values)}, not"
            f" for {name_of(has)}; leave it out",
        )


def as_given(section: Any, name: str, at: object = None) -> str:
    """Return an option with its value as its user writes them: zero 1, or --zero 1.

    Args:
        section: of the option.
        name: of the option.
        at: has the value, if not the section.
    """
    value = getattr(at, name, getattr(section, name))
    text = name_of(value) if callable(value) else value
    return spelled(section, name) + (f" {text}" if value is not True else "")


# ---- options of the library ----


class _Documented:
    """A class's docstring, ending in those of its fields, which are read when asked for."""

    def __init__(self, text: str) -> None:
        self.text = inspect.cleandoc(text)

    def __get__(self, instance: object, owner: type) -> str:
        entries = (
            fill(
                f"{name}: {' '.join(text.split())}",
                96,
                initial_indent=" " * 4,
                subsequent_indent=" " * 8,
                break_on_hyphens=False,  # names
            )
            for name, text in _explained(owner).items()
        )
        return "\n".join([self.text, "", "Attributes:", *entries])


def settings(section: type[T]) -> type[T]:
    """Make a dataclass one of the library's options: `help` shows its fields.

    Its constructor refuses unknown names with a suggestion, and values of other types. A class
    attribute `_former` maps former names of options, which programs may still use, to today's.
    """
    make = section.__init__
    former: Mapping[str, str] = getattr(section, "_former", {})

    @cache
    def options() -> dict[str, Any]:
        hints = get_type_hints(section, include_extras=True)
        return {item.name: hints[item.name] for item in fields(section)}  # type: ignore[arg-type]

    @wraps(make)
    def __init__(self: T, *values: Any, **named: Any) -> None:
        known = options()
        for old in former.keys() & named.keys():
            text = f"{section.__name__}({old}=) is {former[old]}= now"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            if former[old] in named:
                raise TypeError(f"{section.__name__} was given both {old} and {former[old]}")
            named[former[old]] = named.pop(old)
        for name, value in (*zip(known, values, strict=False), *named.items()):
            if name not in known:
                near = suggest(name, known)  # which may be a sentence about a command's options
                near = near.replace("-", "_") * near.endswith("?")
                raise TypeError(f"{section.__name__} has no option {name!r}{near}")
            require(
                any(_fits(value, kind) for kind in kinds(known[name])),
                f"{name} is {shortened(repr(value))}; it must be {describe(known[name])}",
            )
        make(self, *values, **named)

    section.__init__ = __init__  # type: ignore[method-assign,assignment]
    section.__doc__ = _Documented(section.__doc__ or "")  # type: ignore[assignment]
    return section


def spelled(section: Any, name: str) -> str:
    """Return an option as its user writes it: `local_steps` in Python, --local-steps to a command.

    The library's `settings` are made in Python; their subclasses and other sections, by commands.
    """
    in_python = isinstance(vars(type(section))["__doc__"], _Documented)
    return name if in_python else flag_of(name)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, one of those of options."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is Sequence and isinstance(value, str):
        return False  # of letters
    if not isinstance(value, {int: Integral, Bytes: Integral, float: Real}.get(origin, origin)):
        return False
    return origin is not Sequence or all(
        any(_fits(item, one) for one in kinds(get_args(kind)[0])) for item in value
    )


def read_words(
    words: Sequence[str],
    options: Sequence[Option],
    program: str,
    description: str,
    first: Collection[str] = (),
    names: str = "",
) -> dict[str, Any]:
    """Return {name: value} of a command line's options and paths.

    An option that takes a list may be given several times: the lists are joined. Any other that is
    given again must say the same, see `_read_all`.

    Args:
        words: of the command line, without the program.
        options: of the command. Their flags may be written with dashes or underscores.
        program: the command's call, for its help.
        description: the command's purpose, for its help.
        first: names of the options that --help prints; empty for all. Otherwise `--help all` prints
            all, and `--help NAME` the group of an option.
        names: of the paths, such as "RUN [FILE]"; those in brackets may be missing, and of one with
            dots, "FILE...", there may be several, a list. With paths each option takes at most one
            word.

    Raises:
        HelpAsked: for -h or --help, even beside wrong words.
        UsageError: for an unknown option, an invalid value, two values of one option, a missing
            path, and an unknown NAME after --help.
    """
    if {"-h", "--help"} & {*words}:
        at = min(words.index(item) for item in ("-h", "--help") if item in words)
        usage = f"{program} {names}".rstrip()
        raise HelpAsked(_help_on((*words, "")[at + 1], options, usage, description, first))
    if "--verbose" not in (option.flag for option in options):
        words = [word for word in words if word != "--verbose"]  # `describe_uncaught` reads it
    if "--version" in words:
        raise HelpAsked(f"nnmpi {VERSION}")
    known = {
        flag: option
        for option in options
        for flag in (option.flag, option.negation, "-n" if option.name == "ranks" else None)
        if flag is not None
    }
    places, paths = names.split(), list[str]()
    taken: dict[str, list[tuple[str, list[str]]]] = {}
    # Every word up to the next flag belongs to the option. `_read` checks their number, so that
    # the error can name the expected type.
    behind: list[str] | None = None
    for word in words:
        parts = FLAG.fullmatch(word)
        written, value = parts.groups() if parts else (word, None)
        if option := known.get(written.replace("_", "-")):
            behind = [] if value is None else [value]
            taken.setdefault(option.name, []).append((written, behind))
            room = int(option.type is not bool)
        elif (
            not parts
            and (len(paths) < len(places) or names.endswith(MANY))
            and (behind is None or len(behind) == room)
        ):
            paths.append(word)
            behind = None
        elif parts or behind is None:
            near = suggest(written, known) if parts else ""
            near = near or "; options begin with -- and are listed by --help"
            what = "an option" if parts else f"an option, and {program} takes {names or 'no path'}"
            raise UsageError(f"{shortened(written)} is not {what}{near}")
        else:
            behind.append(word)
    if len(paths) < len([place for place in places if not place.startswith("[")]):
        raise UsageError(
            f"give {names} first and then the options; {places[len(paths)]} is missing"
        )
    if "" in paths:  # probably an unset variable of a script; Path("") would be the current folder
        raise UsageError(f"{places[min(paths.index(''), len(places) - 1)]} is empty; give one")
    read: list[Any] = [*paths]
    if names.endswith(MANY):
        read[len(places) - 1 :] = [paths[len(places) - 1 :]]
    given = {
        option.name: _read_all(option, taken[option.name])
        for option in options
        if option.name in taken
    }
    _check_outputs(given, [Path(path) for path in paths])
    return dict(zip(places, read, strict=False)) | given


def _check_outputs(given: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Refuse files to write that must stay, before anything is computed: see `check_output`."""
    outputs = {name: value for name, value in given.items() if isinstance(value, OutputFile)}
    options = [value for name, value in given.items() if isinstance(value, Path)]
    inputs = [*paths, *(value for value in options if not isinstance(value, OutputFile))]
    for name, file in outputs.items():
        check_output(file, f"{flag_of(name)} {file}", given.get("replace", False), inputs)


def check_output(file: Path, named: str, replace: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse to write a command's result over what the user may want to keep.

    Args:
        file: to write.
        named: its option with the file, for messages.
        replace: whether the user has given --replace.
        inputs: what the command reads.

    Raises:
        UsageError: for an input and a file in a run's folder, always; else see `check_known`.
    """
    with raised_as(UsageError, f"{named} cannot be written"):
        if any(given.exists() and given.samefile(file) for given in inputs if file.is_file()):
            raise UsageError(f"{named} is what the command reads; give another file")
        for folder in file.resolve().parents if file.is_file() else ():
            if all((folder / name).is_file() for name in OF_A_RUN):
                raise UsageError(f"{named} is there, in the folder of a run; give another file")
    check_known(file, named, replace)


def check_known(file: Path, named: str, replace: bool) -> None:
    """Refuse to replace a file that nnmpi did not write, as far as its marks say.

    What is no ordinary file, such as /dev/stdout, is written to; an empty file holds nothing.

    Raises:
        UsageError: unless `replace`.
    """
    with raised_as(UsageError, f"{named} cannot be written"):
        if not replace and file.is_file() and file.stat().st_size and not is_own(file):
            raise UsageError(
                f"{named} is there, and it is not known as a file of nnmpi's; give another one, or"
                " --replace"
            )


def make_section(section: type[T], values: Mapping[str, Any]) -> T:
    """Return a section with its options among the values, and defaults otherwise.

    Raises:
        UsageError: for missing options, of fields without a default.
    """
    options = options_of(section)
    absent = [item.flag for item in options if item.default is MISSING and item.name not in values]
    require(not absent, f"required: {', '.join(absent)}")
    return section(**{item.name: values[item.name] for item in options if item.name in values})


def read_command(
    names: str, program: str, description: str, sections: Sequence[type[Any]], words: Sequence[str]
) -> tuple[Any, ...]:
    """Return a command's paths, None for a missing one, followed by its sections of options.

    Args:
        names: of the paths, see `read_words`.
        program, description: for --help.
        sections: dataclasses of options, with distinct names.
        words: of the command line.

    Raises:
        HelpAsked: for -h or --help.
        UsageError: for wrong names or values, and a missing path.
    """
    known = [item for section in sections for item in options_of(section)]
    given = read_words(words, known, program, description, names=names)
    paths = (
        [Path(item) for item in given[name]]
        if name.endswith(MANY)
        else Path(given[name])
        if name in given
        else None
        for name in names.split()
    )
    return *paths, *(make_section(section, given) for section in sections)


def split_command(
    words: Sequence[str], program: str, description: str, commands: Mapping[str, str]
) -> tuple[str, Sequence[str]]:
    """Return the command that the first word names, and the words behind it.

    Args:
        words: of the command line.
        program, description: for --help.
        commands: {name: explanation}.

    Raises:
        HelpAsked: for -h or --help, and without words.
        UsageError: for an unknown command.
    """
    name, *rest = words or ["--help"]
    if name in ("-h", "--help"):
        lines = [line for item in commands.items() for line in entry(*item)]
        usage = f"usage: {program} COMMAND [-h] [OPTIONS]"
        raise HelpAsked("\n".join([usage, "", _opening(description), "", *lines]))
    if name not in commands:
        near = suggest(name, commands) or f"; give {', '.join(commands)}"
        raise UsageError(f"{shortened(name)} is not a command{near}")
    return name, rest


def convert(value: Any, option: Option, where: str) -> Any:
    """Convert a value from a file as the same words on a command line would be.

    Args:
        value: of JSON or TOML. A list stands for several words; true and false for the option and
            its negation.
        option: the value's option.
        where: the file and the key in it, for the message.

    Raises:
        UsageError: for an invalid value.
    """
    words = [*map(str, value if isinstance(value, list | tuple) else [value])]
    if isinstance(value, bool):
        words = []
    with suppress(UsageError):
        return _read(option, option.flag if value is not False else option.negation or "", words)
    raise UsageError(f"{where} is {shortened(repr(value))}; it must be {describe(option.type)}")


@cache
def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one type.

    `Annotated[str, names]` is the type of a table's names: text to type checkers, which cannot read
    the table, and here a Literal. A `Glossary` behind the names explains them in the help.
    """
    return tuple(
        Literal[item.__metadata__[0]] if get_origin(item) is Annotated else item
        for item in _members(hint)
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def describe(hint: Any) -> str:
    """Return a type as text, such as "a whole number or "full"", for error sentences."""
    first, *more = kinds(hint)
    if more:
        return " or ".join(describe(kind) for kind in (first, *more) if kind is not type(None))
    if get_origin(first) is Literal:
        names = get_args(first)
        return "one of " + ", ".join(names) if len(names) > 1 else f'"{names[0]}"'
    if is_list(hint):
        items = {int: "whole numbers", float: "numbers"}
        return f"a list of {items.get(get_args(hint)[0], 'names')}"
    return PLAIN[hint][1] if hint in PLAIN else f"a {get_origin(hint).__name__.lower()}"


def is_list(kind: Any) -> bool:
    """Return whether the values of a type are lists: of numbers, or of names in a table."""
    items = get_args(kind)[:1]
    return items in ((int,), (float,)) or any(get_origin(item) is Annotated for item in items)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the nearest known names, or "" if none is near.

    Of other programs' options, what stands beside them in the table of names. Dashes and
    underscores are equal.
    """
    plain = {item.lstrip("-").replace("-", "_"): item for item in known}
    name = name.lstrip("-").replace("-", "_")
    text = rows().get(flag_of(name), "") if name not in plain else ""
    # a text that begins otherwise, such as with another command, is true in any case
    flags = re.findall(r"--\w[\w-]*", text) if text.startswith("--") else []
    flags = [flag[2:].replace("-", "_") for flag in flags]
    near = [flag for flag in flags if flag in plain]
    if text and not flags or near and not re.fullmatch(r"(--[\w-]+(, )?)+", text):
        return instead(flag_of(name))
    if not text:
        near = nearest(name, plain, 3)
    return (
        f"; did you mean {' or '.join(plain[item].replace('_', '-') for item in near)}?"
        if near
        else ""
    )


def printable(text: str) -> str:
    """Escape control characters of terminals, which file names and submissions may contain.

    Wide spaces and joiners of letters (U+200C, U+200D) pass: they are harmless and common in many
    languages.
    """
    if text.isprintable():
        return text
    harmless = "\n\t\u200c\u200d"
    return "".join(
        char
        if char in harmless or char.isprintable() or category(char) == "Zs"
        else ascii(char)[1:-1]
        for char in text
    )


def complain(text: str) -> None:
    """Print to stderr, after pending output of stdout; a sentence begins with "nnmpi: ".

    In a terminal it is broken at 80 columns; in a file a sentence is a line.
    """
    shown = printable(text)
    if "Traceback" not in text:
        shown = f"nnmpi: {shown}"
        if getattr(sys.stderr, "isatty", bool)():
            shown = "\n".join(broken(line) for line in shown.split("\n"))
    for stream, line in (sys.stdout, ""), (sys.stderr, f"{shown}\n"):
        # None if closed before the start; closed since; or without a reader
        with suppress(AttributeError, OSError, ValueError):
            stream.write(line)
            stream.flush()


def describe_uncaught(error: BaseException) -> tuple[int, str]:
    """Return an uncaught exception's exit status and text.

    The text of nnmpi's errors is their sentence, followed by the lines of the user's code; with
    --verbose it is the whole traceback, as that of any other exception. It is empty for Ctrl-C.
    """
    if isinstance(error := translated(error), NnmpiError):
        text = str(error)
        if "Traceback" in text:  # of another rank's error, at the end of the sentence
            return error.exit_status, text
        if "--verbose" not in sys.argv:
            return error.exit_status, "\n  ".join([text, *lines_of(error)])
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, ""
    status = error.exit_status if isinstance(error, NnmpiError) else 1
    return status, "".join(traceback.format_exception(error)).rstrip()


def watch_alone() -> None:
    """Let an uncaught exception end a lone process as `Shutdown.on_exception` ends a rank."""
    sys.excepthook = lambda _kind, error, _trace: sys.exit(_complain_of(error))


def _complain_of(error: BaseException, speaks: bool = True) -> int:
    """Print an uncaught exception's text; return its exit status.

    Args:
        speaks: whether this rank prints sentences; a traceback may be this rank's alone.
    """
    status, text = describe_uncaught(error)
    if text and (speaks or "Traceback" in text):
        complain(text)
    return status


def say(main: Callable[[Sequence[str]], str]) -> int:
    """Run a command and print its result, or its error in one sentence; rank 0 alone prints.

    Returns:
        The exit status.
    """
    launch = read_launch(os.environ)
    speaks = launch is None or launch.rank == 0
    console = Console(quiet=not speaks)
    try:
        try:
            text = main(sys.argv[1:])
        except HelpAsked as request:
            text = str(request)
        console.finish(*filter(None, [text]))
    except (Exception, KeyboardInterrupt) as error:
        if launch is not None and not isinstance(translated(error), NnmpiError):
            raise  # `Shutdown` ends the other ranks, too
        return _complain_of(error, speaks)
    return 0


@dataclass(frozen=True)
class SimulatedConfig:
    """The ranks of a program."""

    simulate: int | None = None
    """Run this many ranks in one process, without MPI."""

    def __post_init__(self) -> None:
        check_numbers(self, "simulate", 1)


def program_words(description: str, section: type[Any] = SimulatedConfig) -> Any:
    """Return the options of an example program. Help and wrong words end the program.

    Args:
        description: of the program, for its help.
        section: of its options.
    """
    watch_alone()
    given: list[Any] = []

    def read(words: Sequence[str]) -> str:
        given.extend(read_command("", Path(sys.argv[0]).name, description, (section,), words))
        return ""

    status = say(read)
    return given[0] if given else sys.exit(status)


def silence(stream: TextIO) -> None:
    """Point a stream that failed at /dev/null: Python flushes it at exit and would fail again."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _is_terminal(stream: TextIO) -> bool:
    """Return whether people watch a stream: under Open MPI, which gives each rank a terminal, the
    launcher's own.
    """
    try:
        watched = stream.isatty() and (
            read_launch(os.environ) is None or os.readlink(f"/proc/{os.getppid()}/fd/1")
        )
    except (OSError, ValueError):  # no /proc, or another user's launcher; a closed stream
        return False
    return watched is True or str(watched).startswith("/dev/")


class Console:
    """Print lines on one rank and nothing on the others.

    A closed pipe (`| head`, a closed session) or a full disk ends the printing, not the training.

    Args:
        quiet: print nothing; lines still go to the copy.
        stream: to print to; None for standard output.
    """

    def __init__(self, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        # sys.stdout is None if it was closed before Python started
        self._quiet = quiet or self._stream is None
        self.is_terminal = not self._quiet and _is_terminal(self._stream)
        self._shown = 0  # characters in a terminal's line that will be replaced
        self._copy: TextIO | None = None
        self._error: OSError | None = None

    @contextmanager
    def copied(self, file: Path) -> Iterator[None]:
        """Append the body's lines to a file, too; a full disk ends the copy without an error."""
        with suppress(OSError):
            self._copy = opened_to_write(file, "a")
        try:
            yield
        finally:
            self.say()  # erase what is shown
            if self._copy is not None:
                with suppress(OSError):
                    self._copy.close()
            self._copy = None

    def say(self, *lines: str) -> None:
        """Print the lines and flush."""
        text = "".join(f"{printable(line)}\n" for line in lines)
        self._write_copy(text)
        self._print(text)

    def show(self, line: str, keep: bool) -> None:
        """Show how far the work is: in a terminal's last line, which the next output replaces.

        Args:
            line: to show.
            keep: whether it is for logs, too: the copy, and a stream that is no terminal.
        """
        if keep:
            self._write_copy(f"{line}\n")
        if self.is_terminal:
            room = shutil.get_terminal_size().columns - 1
            self._print(line[:room], shown=min(room, len(line)))
        elif keep:
            self._print(f"{line}\n")

    def _write_copy(self, text: str) -> None:
        if self._copy is not None:
            with suppress(OSError):
                self._copy.write(text)
                self._copy.flush()

    def _print(self, text: str, shown: int = 0) -> None:
        if self._quiet:
            return
        # the terminal's encoding may lack some characters
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        blank, self._shown = "\r".join(["", " " * self._shown, ""]) * (self._shown > 0), shown
        try:
            self._stream.write(blank + text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError) as error:
            # OSError: broken pipe or full disk; ValueError: the stream is closed
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                self._error = error
            self._quiet = True
            silence(self._stream)

    def finish(self, *lines: str) -> None:
        """Print a command's last lines; raise NnmpiError if any line could not be written.

        A closed pipe is no error.
        """
        self.say(*lines)
        if self._error is not None:
            raise NnmpiError(f"the output could not be written: {self._error.strerror}")


def _read_all(option: Option, given: Sequence[tuple[str, Sequence[str]]]) -> Any:
    """Return the value of an option from all places in which a command line has it.

    Args:
        option: to read.
        given: of each place, the option's spelling and the words after it.

    Raises:
        UsageError: for a wrong value, and for two values of an option that takes one: dropping one
            of them would be as silent as it is likely a mistake.
    """
    written = given[0][0]
    if any(map(is_list, kinds(option.type))) and all(words for _, words in given):
        return _read(option, written, [word for _, words in given for word in words])
    values = [_read(option, *place) for place in given]
    for value, (again, words) in zip(values[1:], given[1:], strict=True):
        if value != values[0]:
            first = " ".join([written, *given[0][1]])
            second = " ".join([again, *words])
            raise UsageError(
                f"{shortened(first)} and {shortened(second)} are given; give the option once"
            )
    return values[0]


def _read(option: Option, written: str, words: Sequence[str]) -> Any:
    """Return an option's value from one place.

    Args:
        option: to read.
        written: its spelling on the command line, for messages.
        words: the words after it, up to the next flag.

    Raises:
        UsageError: when the words are no value of its type.
    """
    off = written.replace("_", "-") == option.negation
    if off or option.type is bool:
        if words:
            raise UsageError(
                f"{written} takes no value, but {shortened(' '.join(words))} follows it"
            )
        return not off if option.type is bool else "off"
    if option.type == Switch and not words:
        return "on"
    if {Path, OutputFile} & {*kinds(option.type)} and list(words) == [""]:
        # probably an unset variable of a script; Path("") would be the current folder
        raise UsageError(f"{written} is empty; give a path, or leave {written} out")
    # None first: the word None means none even if the option takes text.
    for kind in sorted(kinds(option.type), key=lambda kind: kind is not type(None)):
        try:
            return _read_as(kind, words)
        except ValueError:
            continue
    given = f"is {shortened(' '.join(words)) or 'empty'}" if words else "has no value"
    raise UsageError(f"{written} {given}; it must be {describe(option.type)}")


def _read_as(kind: Any, words: Sequence[str]) -> Any:
    """Return the words as a value of a type in PLAIN, a Literal or a tuple; else ValueError."""
    if is_list(kind):
        item_kind = get_args(kind)[0]
        items = [item for word in words for item in word.split(",")]
        if item_kind in (int, float):
            return tuple(_read_as(item_kind, [item]) for item in items)
        if not all(items):
            raise ValueError(items)  # an empty name
        return tuple(items)
    (word,) = words  # a ValueError unless there is exactly one
    choices = ("None",) if kind is type(None) else get_args(kind)
    if choices:
        if word not in choices:
            raise ValueError(word)
        return None if kind is type(None) else word
    if kind in (int, float) and (not word.isascii() or "_" in word):
        raise ValueError(word)  # Python would accept 1_0 and digits of other scripts
    return kind(word)


def _help_on(
    topic: str, options: Sequence[Option], program: str, description: str, first: Collection[str]
) -> str:
    """Return the help on the word after --help, or the overview.

    Options stand by section, each with its form, explanation and default.
    """
    by_name = {option.name: option for option in options}
    name, shown, more = topic.replace("-", "_"), options, []
    if name in by_name:
        shown = [item for item in options if item.section is by_name[name].section]
    elif first and topic != "all":
        if topic and not topic.startswith("-"):
            raise UsageError(
                f"--help {shortened(topic)}: there is no such option{suggest(topic, by_name)}"
            )
        shown = [option for option in options if option.name in first]
        more = [
            "",
            f"All {len(options)} options: --help all. An option and the others of its group:"
            " --help NAME,",
            "such as --help pp.",
        ]
    lines = [
        f"usage: {program} [-h] [OPTIONS]",
        "",
        _opening(description),
        "",
        *entry("-h, --help", "Print this help."),
        *entry("--version", "Print the version."),
    ]
    if "verbose" not in by_name:
        lines += entry("--verbose", "Print an error's whole traceback.")
    for section in dict.fromkeys(option.section for option in shown):
        lines += ["", inspect.cleandoc(section.__doc__ or "").partition("\n")[0].rstrip(".") + ":"]
        texts = _explained(section)
        for option in shown:
            if option.section is section:
                text = " ".join((option.help or texts[option.name]).split())
                text = re.sub(
                    r"`([^`]+)`",
                    lambda part: flag_of(part[1]) if part[1] in by_name else part[1],
                    text,
                )
                default = _show_default(option, text)
                lines += entry(_form(option), f"{text.rstrip('.')}{default}." if default else text)
    return "\n".join([*lines, *more])


def _opening(description: str) -> str:
    """Return a description for the help.

    A module's docstring begins with `command`, which the usage line names already.
    """
    text = re.sub(r"^`[^`]*`: ", "", inspect.cleandoc(description))
    return folded(text[:1].upper() + text[1:])


def entry(form: str, text: str) -> list[str]:
    """Return the lines of an option's help: its form, with the explanation beside or below."""
    texts = wrap(text, HELP_WIDTH - HELP_INDENT, break_on_hyphens=False)
    first = f"  {form}"
    beside = (
        [f"{first:<{HELP_INDENT}}{texts.pop(0)}"]
        if len(first) < HELP_INDENT - 1
        else _broken(first)
    )
    return [*beside, *(" " * HELP_INDENT + item for item in texts)]


def _broken(form: str) -> list[str]:
    """Return a form in lines of HELP_WIDTH, broken between the names of a table."""
    names = form.split("|")
    indent = " " * (form.rfind(" ", 0, len(names[0])) + 1)
    lines = [""]
    for number, name in enumerate(names):
        part = name + "|" * (number + 1 < len(names))
        if number and len(lines[-1] + part) > HELP_WIDTH:
            lines.append(indent)
        lines[-1] += part
    return lines


def _form(option: Option) -> str:
    """Return `--lr NUMBER`, `--jit, --no-jit` or `--overlap [auto|on|off], --no-overlap`."""
    if option.type is bool:
        return f"{option.flag}, {option.negation}"
    shapes = []
    for kind in kinds(option.type):
        if get_origin(kind) is Literal:
            shapes.append("|".join(get_args(kind)))
        elif kind is not type(None):
            shapes.append(f"[{_items(kind)} ...]" if is_list(kind) else PLAIN[kind][0])
    if option.type == Switch:
        return f"{option.flag} [{shapes[0]}], {option.negation}"
    return f"{option.flag} {'|'.join(shapes)}"


def _items(kind: Any) -> str:
    """Return what a list holds, for its form: "INT", or the names of a table."""
    (item, *_) = get_args(kind)
    return PLAIN[item][0] if item in PLAIN else "|".join(item.__metadata__[0])


def _show_default(option: Option, text: str) -> str:
    """Return the default in brackets, or "" if the explanation states it."""
    value = option.default
    if value is MISSING:
        return " (required)"
    if value in (None, "", ()):
        return "" if "default" in text or "without" in text.lower() else " (default: none)"
    if isinstance(value, bool):
        return f" (default: {'on' if value else 'off'})"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def _explained(section: type) -> dict[str, str]:
    """Return {field: docstring}, followed by the glossaries of tables with its values.

    A class attribute `_needs` has the values of another option with which a field has a meaning,
    and `_lists` the lists of names that a docstring has in braces, made from where they are known.
    """
    hints, texts = get_type_hints(section, include_extras=True), _field_docstrings(section)
    lists = [vars(kind).get("_lists", {}) for kind in section.__mro__]
    for placeholder, names in ChainMap(*lists).items():
        for name in texts:
            texts[name] = texts[name].replace(f"{{{placeholder}}}", names)
    for name, values in getattr(section, "_needs", {}).items():
        texts[name] = f"With {' or '.join(values)}: {texts[name][:1].lower()}{texts[name][1:]}"
    for name in texts:
        for item in _members(hints[name]):
            for words in getattr(item, "__metadata__", ())[1:]:
                texts[name] += f" {words.text}"
    return texts


def _field_docstrings(section: type) -> dict[str, str]:
    """Return {field: docstring} of a dataclass, from its source: Python does not store them.

    A field's docstring may stand in a class from which the dataclass inherits.
    """
    bodies = [
        ast.parse(dedent(inspect.getsource(kind))).body[0]
        for kind in reversed(section.__mro__)
        if "__dataclass_fields__" in vars(kind)
    ]
    return {
        ast.unparse(item.target): str(ast.literal_eval(text.value))
        for body in bodies
        if isinstance(body, ast.ClassDef)
        for item, text in pairwise(body.body)
        if isinstance(item, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def leave_fork(status: int) -> NoReturn:
    """End a fork of a rank; the interpreter's end would finalize the parent's MPI, and hang."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
