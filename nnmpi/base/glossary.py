"""Names explained, for help texts.

A file of its own: tables of the core state what their names mean without loading the commands.
"""

from collections.abc import Mapping


class Glossary:
    """What each name of a table stands for, for the help of options that take these names."""

    def __init__(self, rows: Mapping[str, str]) -> None:
        self.text = " ".join(f"{name}: {words}." for name, words in rows.items() if words)

    def __repr__(self) -> str:
        return "..."  # in a signature
