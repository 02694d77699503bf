"""Forward hooks: functions that get each result of a layer, and may replace it.

`Module.register_forward_hook` makes one. A replay of recorded calls would not call it, so a step is
done by Python while a model that it calls has one, and is recorded again without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from nnmpi.backend.recording import active

Hook: TypeAlias = Callable[[Any, tuple[Any, ...], Any], Any]


class ForwardHook:
    """A registered hook, as a block or until `remove` is called.

    Attributes:
        alive: how many there are in this process: without any, nobody looks for them.
    """

    alive = 0

    def __init__(self, module: Any, function: Hook) -> None:
        self._module, self.function = module, function
        ForwardHook.alive += 1

    def __del__(self) -> None:
        ForwardHook.alive -= 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of the hook that this one is a copy of."""
        vars(self).update(state)
        ForwardHook.alive += 1

    def remove(self) -> None:
        """Call the function no more."""
        self._module._forward_hooks = tuple(
            hook for hook in self._module._forward_hooks if hook is not self
        )

    def __enter__(self) -> ForwardHook:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def call_hooks(module: Any, inputs: tuple[Any, ...], result: Any) -> Any:
    """Return a module's result, after its hooks."""
    recorder = active()
    if recorder is not None:
        recorder.spoil(refusal_of(module))
    for hook in module._forward_hooks:
        other = hook.function(module, inputs, result)
        result = result if other is None else other
    return result


def refusal_of(module: Any) -> str:
    """Return why a step with a hook of this module is not replayed."""
    return f"a forward hook of {module.path or type(module).__name__} is called"


def hooked(modules: Iterable[Any]) -> Any:
    """Return the first module with a hook, or None; ask `ForwardHook.alive` before."""
    return next((item for item in modules if getattr(item, "_forward_hooks", ())), None)
