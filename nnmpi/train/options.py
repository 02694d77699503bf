"""Options by name: the configuration as flat names and values, and the checking of values that come from files.

flatten(Config())            {"model": "cnn", "hidden": [128, 64], ..., "keep": 3}       JSON values only
assemble({"epochs": 3})      Config with 3 epochs and defaults elsewhere
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nnmpi.errors import UsageError
from nnmpi.train.config import Config
from nnmpi.train.switch import is_switch


@cache
def hints() -> Mapping[str, tuple[str, Any]]:
    """Return option name -> (section, type) for every field of every section, in order."""
    found: dict[str, tuple[str, Any]] = {}
    for section, kind in get_type_hints(Config).items():
        for name, hint in get_type_hints(kind).items():
            if name in found:
                raise TypeError(f"option {name} stands in the sections {found[name][0]} and {section}")
            found[name] = (section, hint)
    return types.MappingProxyType(found)


def option(name: str) -> str:
    """Return the name as it is written on the command line: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def flatten(config: Config) -> dict[str, Any]:
    """Return the options by name as JSON values (paths as text, tuples as lists), in the order of the sections."""
    flat: dict[str, Any] = {}
    for section in fields(config):
        part = getattr(config, section.name)
        for each in fields(part):
            flat[each.name] = _plain(getattr(part, each.name))
    return flat


def assemble(flat: Mapping[str, Any], origin: str = "options") -> Config:
    """Return the configuration with these values, and defaults for the rest.

    Raises:
        UsageError: for a name that is no option, a value of the wrong type or out of range.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, value in check(flat, origin).items():
        parts.setdefault(hints()[name][0], {})[name] = value
    sections = get_type_hints(Config)
    return Config(**{section: sections[section](**values) for section, values in parts.items()})


def check(flat: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the values with the types that the options have; names may be written with dashes.

    Args:
        origin: where the values come from, for the message.

    Raises:
        UsageError: for a name that is no option (with the nearest ones) or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for written, value in flat.items():
        name = written.replace("-", "_")
        if name not in hints():
            raise UsageError(f"{origin}: {written} is not an option{perhaps(name, hints())}")
        values[name] = _convert(value, hints()[name][1], f"{origin}: {written}")
    return values


def arguments(flat: Mapping[str, Any]) -> list[str]:
    """Return the values as command-line arguments, so that later arguments override them; None is left out."""
    words: list[str] = []
    for name, value in flat.items():
        if isinstance(value, bool):
            words.append(option(name) if value else option("no_" + name))
        elif isinstance(value, list | tuple):
            words += [option(name), *map(str, value)]
        elif value is not None:
            words += [option(name), str(value)]
    return words


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the plain types that an option may have."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def switches() -> list[str]:
    """Return the options that are auto, on or off, as they are written."""
    return [option(name) for name, (_, hint) in hints().items() if is_switch(hint)]


def perhaps(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Return "; did you mean ...?" with the known names nearest to this one, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(dashes + each.replace('_', '-') for each in near)}?" if near else ""


def _plain(value: Any) -> Any:
    """Return the value as JSON knows it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Return the value in the option's type; nothing is guessed: text is never read as a number."""
    for kind in kinds(hint):
        fits, converted = _match(value, kind)
        if fits:
            return converted
    raise UsageError(f"{where} is {value!r}; it must be {describe(hint)}")


def _match(value: Any, kind: Any) -> tuple[bool, Any]:
    """Return whether the value fits one plain type, and the value in that type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_switch(kind) and isinstance(value, bool):
        return True, "on" if value else "off"
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind), value
    if get_origin(kind) is tuple:
        whole = isinstance(value, list | tuple) and all(_match(each, int)[0] for each in value)
        return whole, tuple(value) if whole else value
    if kind is float:
        return number, float(value) if number else value
    if kind is int:
        return number and isinstance(value, int), value
    if kind is Path:
        fits = isinstance(value, str | Path) and value != ""  # Path("") would be this folder
        return fits, Path(value) if fits else value
    return isinstance(value, kind), value


def describe(hint: Any) -> str:
    """Return the type in words for a message."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(kind) for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint)) if len(get_args(hint)) > 1 else f'"{get_args(hint)[0]}"'
    return "a list of whole numbers" if get_origin(hint) is tuple else words[hint]
