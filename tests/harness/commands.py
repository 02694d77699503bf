"""Commands in this process."""

from collections.abc import Callable, Sequence
from typing import Any

from nnmpi import simulate


def on_ranks(
    main: Callable[..., Any], words: str | Sequence[str], ranks: int = 1, *more, **options
) -> list[Any]:
    """Run a command on simulated ranks; return what its main function does on each."""
    given = words.split() if isinstance(words, str) else list(words)
    return simulate(lambda group: main(given, group), ranks, *more, **options)
