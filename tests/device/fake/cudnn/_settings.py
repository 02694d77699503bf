"""What a test may set, and what the double counts."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Settings:
    """The double's state.

    Attributes:
        installed: whether cuDNN itself can be loaded.
        refuses: says for a graph's operations and dtypes, such as ("conv_fprop", "bias", "relu", "HALF"), whether no
            engine supports it.
        fails: the same, for graphs that are built and cannot be run.
        plans: per plan of a graph, how many seconds a run takes; None for one that cannot be built.
        scratch: per plan, the bytes of memory that a run wants, where that is not the usual.
        built, executed: how many graphs, by their operations.
        ran: how many runs, by the plan's number.
    """

    installed: bool = False
    refuses: Callable[[tuple[str, ...]], bool] = lambda words: False
    fails: Callable[[tuple[str, ...]], bool] = lambda words: False
    plans: tuple[float | None, ...] = (0.0,)
    scratch: dict[int, int] = field(default_factory=dict)
    built: Counter[str] = field(default_factory=Counter)
    executed: Counter[str] = field(default_factory=Counter)
    ran: Counter[int] = field(default_factory=Counter)


@functools.cache
def settings() -> Settings:
    """Return the double's settings."""
    return Settings()
