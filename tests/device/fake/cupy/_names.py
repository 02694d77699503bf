"""The names and parameters of the real CuPy, from the snapshot."""

import json
from pathlib import Path

_SNAPSHOT = json.loads((Path(__file__).parent / "snapshot.json").read_text())

VERSION = _SNAPSHOT["version"]
MODULES = _SNAPSHOT["modules"]
CLASSES = _SNAPSHOT["classes"]


class Parameters:
    """The parameters of a function: which calls it takes, and where they differ from NumPy's.

    Attributes:
        positional: names in their order.
        keywords: names that may be given by name.
        open_ended: takes any number of positional arguments.
        any_keyword: takes any keyword, as far as the snapshot knows.
    """

    def __init__(self, text):
        words = [word.strip() for word in text.split(",") if word.strip()]
        self.unknown = text == "?"
        self.open_ended = self.unknown or any(
            word.startswith("*") and word[1:2] not in ("", "*") for word in words
        )
        self.any_keyword = self.unknown or any(word.startswith("**") for word in words)
        star = next((place for place, word in enumerate(words) if word.startswith("*")), len(words))
        slash = words.index("/") if "/" in words else -1
        names = [word.rstrip("=") for word in words]
        self.positional = [name for name in names[:star] if name != "/"]
        self.keywords = {
            name for name in names[slash + 1 :] if not name.startswith("*") and name != "/"
        }

    def check(self, name, args, kwargs):
        """Raise TypeError for a call that CuPy would not take."""
        if len(args) > len(self.positional) and not self.open_ended:
            raise TypeError(
                f"{name}() takes {len(self.positional)} positional arguments but {len(args)} were"
                " given"
            )
        if kwargs and not self.any_keyword:
            for key in kwargs:
                if key not in self.keywords:
                    raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")


def parameters(entry):
    """Return the parameters of a snapshot's entry."""
    return Parameters(entry.partition(" ")[2])
