"""Arguments that have another name in PyTorch: taken by that name, too, where they are defined.

@also(dim="axis", keepdim="keepdims")
def total(x, axis=None, keepdims=False): ...

total(x, dim=1)      # total(x, axis=1)
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def also(**ours: str) -> Callable[[F], F]:
    """Let a function take arguments by other names, too.

    Args:
        ours: by their name elsewhere, what they are called here.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                for theirs in ours.keys() & kwargs.keys():
                    if ours[theirs] in kwargs:
                        raise TypeError(f"{function.__qualname__} got {theirs} and {ours[theirs]}, which are one thing")
                    kwargs[ours[theirs]] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        return cast(F, called)

    return decorate
