"""What is wrong with command-line words, in one sentence, from the options' own names and types.

tyro decides whether words are wrong; its framed text of many lines is not what a log or a batch job's mail should
hold, so the sentence is found here. A sentence that could be wrong is not given: then tyro's text is flattened.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from nnmpi.train.options import describe, hints, kinds, perhaps
from nnmpi.train.switch import is_switch


def diagnose(words: Sequence[str]) -> str | None:
    """Return the first fault in the words as a sentence, or None when none is found."""
    for name, values in _options(words):
        if not name.startswith("--"):
            return f"{name} is not an option; options begin with -- and are listed by --help"
        known = name[2:].replace("-", "_")
        switch = known.removeprefix("no_")
        kind = hints()[switch][1] if switch in hints() else None
        if kind is bool or (is_switch(kind) and known != switch):
            if values:
                return f"{name} takes no value, but {' '.join(values)} follows it"
        elif known not in hints():
            return f"{name} is not an option{perhaps(known, _names(), dashes='--')}"
        elif not any(_reads(values, kind) for kind in kinds(hints()[known][1])):
            given = f"is {' '.join(values) or 'empty'}" if values else "stands without a value"
            return f"{name} {given}; it must be {describe(hints()[known][1])}"
    return None


def flatten_box(text: str) -> str:
    """Return the message inside tyro's frame as one line, without title, rules and help texts."""
    kept: list[str] = []
    for line in text.splitlines():
        inner = line.strip(" │|")
        if inner.startswith(("Argument helptext", "For full helptext")):
            break
        if inner and inner[0] not in "╭╰" and set(inner) not in ({"─"}, {"-"}):
            kept.append(inner)
    return " ".join(kept) or "the options cannot be read; --help lists them"


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the words up to the next one; a word before the first option comes alone."""
    name, values = "", list[str]()
    for word in words:
        if not word.startswith("--"):
            if not name:
                yield word, []
                return
            values.append(word)
            continue
        if name:
            yield name, values
        name, equals, value = word.partition("=")
        values = [value] if equals else []
    if name:
        yield name, values


def _names() -> list[str]:
    """Return every name that the command line knows, as fields are written."""
    return [
        each
        for name, (_, hint) in hints().items()
        for each in ([name, "no_" + name] if hint is bool or is_switch(hint) else [name])
    ]


def _reads(values: Sequence[str], kind: Any) -> bool:
    """Return whether the words after an option can be read as one plain type."""
    if get_origin(kind) is tuple:
        return all(_reads([value], int) for value in values)
    if len(values) != 1:
        return False
    if kind in (int, float):
        try:
            kind(values[0])
        except ValueError:
            return False
        return True
    if get_origin(kind) is Literal:
        return values[0] in get_args(kind)
    return values[0] == "None" if kind is type(None) else True
