"""The models that the command knows by name, and those that users bring: FILE.py:NAME or package.module:NAME."""

from collections.abc import Sequence

from nnmpi.errors import UsageError
from nnmpi.nn.module import Module
from nnmpi.own import call_own

MODELS = ("mlp", "cnn", "resnet", "lstm", "gpt")


def build_custom_model(name: str, sample_shape: Sequence[int], classes: int) -> Module:
    """Return what the user's function makes of the samples' shape and the number of classes.

    Args:
        name: FILE.py:NAME or package.module:NAME.
        sample_shape: of one sample, such as (28, 28, 1).
        classes: how many outputs there are: one for each class, or quantity that is predicted.

    Raises:
        UsageError: when there is no such file, module or function, the file cannot be read, or it gives no `Module`.
    """
    model = call_own(name, "--model", "(sample_shape, classes)", tuple(sample_shape), classes)
    if not isinstance(model, Module):
        raise UsageError(f"--model {name} gave a {type(model).__name__}; return a nnmpi.nn.Module")
    return model
