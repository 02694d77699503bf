"""What the numbers of a data set stand for: its classes, columns and tokens by name.

    train    a b c    0 1 2          another table, whose categories were made apart
    test     b c      0 1            0 is b here: an accuracy would compare numbers alone

A model learns numbers. So whoever trained it keeps these names, and refuses data of others.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from nnmpi.base.errors import DataError, shortened

Names: TypeAlias = Mapping[str, Sequence[str]]
"""By kind, of CLASSES, COLUMNS and TOKENIZER: the name of each number. A kind may be missing."""

CLASSES, COLUMNS, TOKENIZER = "classes", "columns", "tokenizer"
_REMEDY = {
    CLASSES: "give both the same class_names, such as the categories of one table before its split",
    COLUMNS: "give both the same columns in the same order",
    TOKENIZER: "encode both by the same tokenizer",
}


def of_table(values: object) -> Names:
    """Return the names of a table's columns, as of pandas; nothing for other values."""
    columns = getattr(values, "columns", None)
    return {} if columns is None else {COLUMNS: [*map(str, columns)]}


def agree(known: Names, given: Names, what: str) -> dict[str, list[str]]:
    """Return the names of both together, after checking that no number stands for two things.

    Data without names are taken as numbers. Of classes one may have fewer, if these come first.

    Args:
        known: those that the model was trained on.
        given: of other data.
        what: the other data, for the message.

    Raises:
        DataError: with the first difference.
    """
    result = {kind: list(names) for kind, names in known.items() if names}
    for kind, names in given.items():
        before = result.setdefault(kind, list(names)) if names else []
        if not names:
            continue
        pairs = zip(before, names, strict=False)
        differ = next((number for number, (a, b) in enumerate(pairs) if a != b), None)
        if differ is None and kind != CLASSES and len(before) != len(names):
            differ = min(len(before), len(names))
        if differ is not None:
            texts = (shortened(", ".join(items)) for items in (names, before))
            has, had = (f"the {kind} {text}" for text in texts)
            raise DataError(
                f"{what} has {has}, but the model was trained on {had}, so number {differ} would"
                f" stand for another one; {_REMEDY.get(kind, 'give both the same')}"
            )
        result[kind] = max(before, list(names), key=len)
    return result
