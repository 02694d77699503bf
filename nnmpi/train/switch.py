"""Options that are decided by themselves unless they are switched on or off: auto, on or off.

On the command line the short forms of a plain switch are good too, and in files true and false:

    --overlap on    --overlap       overlap = "on"     overlap = true
    --overlap off   --no-overlap    overlap = "off"    overlap = false
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

Switch: TypeAlias = Literal["auto", "on", "off"]
WORDS: tuple[str, ...] = get_args(Switch)


def is_switch(kind: Any) -> bool:
    """Whether an option's type is this one."""
    return get_args(kind) == WORDS


def decided(switch: Switch) -> bool | None:
    """Return True for on, False for off, None for auto."""
    return {"auto": None, "on": True, "off": False}[switch]


def spell_out(words: Sequence[str], switches: Iterable[str]) -> list[str]:
    """Return command-line words with `--name on` for a lone `--name`, and `--name off` for `--no-name`.

    Args:
        switches: the options of this kind as they are written, such as "--overlap".
    """
    negated = {f"--no-{name.removeprefix('--')}": name for name in switches}
    spelled: list[str] = []
    for word, follower in pairwise([*words, "--"]):
        alone = follower.startswith("-")  # what has a value too many is left for the diagnosis
        if word in negated and alone:
            spelled += [negated[word], "off"]
        elif word in negated.values() and alone:
            spelled += [word, "on"]
        else:
            spelled.append(word)
    return spelled
