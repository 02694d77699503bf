"""The models that the command knows by name, and custom ones that users bring: FILE.py:NAME or package.module:NAME."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nnmpi.errors import UsageError
from nnmpi.nn.module import Module

MODELS = ("mlp", "cnn", "resnet", "lstm", "gpt")


def is_custom(name: str) -> bool:
    """Return whether the name is of a user's own function."""
    source, colon, function = name.rpartition(":")
    return bool(colon and source) and function.isidentifier()


def short_name(name: str) -> str:
    """Return a name that can be part of a folder's: "nets/mine.py:build" -> "mine-build"."""
    if not is_custom(name):
        return name
    source, _, function = name.rpartition(":")
    stem = Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]
    return f"{stem}-{function}"


def custom_file(name: str) -> Path | None:
    """Return the file of a user's model; None for a model of another kind, and for one in an installed module."""
    source = Path(name.rpartition(":")[0])
    return source if is_custom(name) and source.suffix == ".py" and source.is_file() else None


def build_custom_model(name: str, sample_shape: Sequence[int], classes: int) -> Module:
    """Return what the user's function makes of the samples' shape and the number of classes.

    Args:
        name: FILE.py:NAME or package.module:NAME.
        sample_shape: of one sample, such as (28, 28, 1).
        classes: how many the data set has.

    Raises:
        UsageError: when there is no such file, module or function, the file cannot be read, or it gives no `Module`.
    """
    source, _, function = name.rpartition(":")
    module = _load_file(Path(source), name) if source.endswith(".py") else _load_module(source, name)
    build: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(build):
        raise UsageError(
            f"--model {name}: {source} has no function {function!r}; define {function}(sample_shape, classes)"
        )
    try:
        model = build(tuple(sample_shape), classes)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within the function
        raise UsageError(f"--model {name}: {error}; define {function}(sample_shape, classes)") from None
    if not isinstance(model, Module):
        raise UsageError(f"--model {name} gave a {type(model).__name__}; return a nnmpi.nn.Module")
    return model


def _load_file(file: Path, name: str) -> Any:
    try:
        if not file.is_file():
            raise UsageError(f"--model {name}: there is no file {file}")
        file.open("rb").close()
    except OSError as error:
        raise UsageError(f"--model {name}: {file} cannot be read ({error.strerror or error})") from None
    title = f"nnmpi_model_{file.stem}"
    spec = importlib.util.spec_from_file_location(title, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module  # where classes that the file defines look for themselves
    spec.loader.exec_module(module)
    return module


def _load_module(source: str, name: str) -> Any:
    try:
        found = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"--model {name}: there is no module {source}; give FILE.py:NAME, or set PYTHONPATH")
    return importlib.import_module(source)
