"""Options by name: the configuration as flat names and values, and the checking of values that come from files.

flatten(Config())            {"model": "cnn", "hidden": [128, 64], ..., "keep": 3}       JSON values only
assemble({"epochs": 3})      Config with 3 epochs and defaults elsewhere
"""

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from nnmpi.command import Option, convert, options_of, suggest
from nnmpi.errors import UsageError
from nnmpi.train.config import Config


@cache
def all_options() -> Mapping[str, Option]:
    """Return the fields of all sections as options by name, in order."""
    found: dict[str, Option] = {}
    for section in get_type_hints(Config).values():
        for option in options_of(section):
            if option.name in found:
                raise TypeError(f"option {option.name} stands in {found[option.name].section} and in {section}")
            found[option.name] = option
    return types.MappingProxyType(found)


def flatten(config: Config) -> dict[str, Any]:
    """Return the options by name as JSON values (paths as text, tuples as lists), in the order of the sections."""
    flat: dict[str, Any] = {}
    for section in fields(config):
        part = getattr(config, section.name)
        for each in fields(part):
            value = getattr(part, each.name)
            flat[each.name] = (
                str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
            )
    return flat


def assemble(flat: Mapping[str, Any], origin: str = "options") -> Config:
    """Return the configuration with these values, and defaults for the rest.

    Raises:
        UsageError: for a name that is no option, a value of the wrong type or out of range.
    """
    values = check(flat, origin)
    sections = {
        name: section(**{each.name: values[each.name] for each in fields(section) if each.name in values})
        for name, section in get_type_hints(Config).items()
    }
    return Config(**sections)


def check(flat: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the values with the types that the options have; names may be written with dashes.

    Args:
        flat: values by name, as JSON and TOML know them.
        origin: where the values come from, for the message.

    Raises:
        UsageError: for a name that is no option (with the nearest ones) or a value of the wrong type.
    """
    values: dict[str, Any] = {}
    for written, value in flat.items():
        name = written.replace("-", "_")
        if name not in all_options():
            raise UsageError(f"{origin}: {written} is not an option{suggest(name, all_options())}")
        values[name] = convert(value, all_options()[name], f"{origin}: {written}")
    return values
