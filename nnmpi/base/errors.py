"""nnmpi's errors: each message is one sentence, with the values and a remedy.

`exit_status` is the command line's: 2 for wrong use (the user changes the command), 1 for a
failure, 65 (EX_DATAERR) for a failure that recurs when the same command runs again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR
from functools import partial, wraps
from math import inf, nan
from operator import index

# 65; `nnmpi run` restarts a job that ends with it once, and then gives up
from os import EX_DATAERR
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def counted(n: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, for sentences: "1 rank", "2 ranks".

    Args:
        n: the number.
        singular: the noun for 1.
        plural: the noun for others; empty for the singular with an s.
    """
    return f"{n} {singular if n == 1 else plural or singular + 's'}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as text, consecutive ones as a range: "rank 3", "ranks 0-2, 5"."""
    ordered = sorted(set(ranks))
    spans: list[tuple[int, int]] = []
    for rank in ordered:
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    listed = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {listed}" if len(ordered) == 1 else f"ranks {listed}"


def group_ranks(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks of each value, from (rank, value) pairs."""
    ranks: dict[T, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def shortened(text: str, most: int = 200) -> str:
    """Return a text without its middle if it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class NnmpiError(Exception):
    """Any error with a text for the user of the program.

    Example:
        >>> try:
        ...     models.mlp([4], 0)
        ... except nnmpi.NnmpiError as error:
        ...     print(error)
        mlp's classes is 0; give a whole number of at least 1
    """

    exit_status = 1


class HelpAsked(NnmpiError):
    """The user asked for help or the version; the text is printed and the status is 0."""

    exit_status = 0


class UsageError(NnmpiError, ValueError):
    """A wrong option, value or combination of them, detected before any work."""

    exit_status = 2


def check_int(name: str, value: object, least: float = 1) -> int:
    """Return the value if it is an integer of at least `least`; an error calls it `name`.

    Args:
        least: the inclusive lower bound; -inf for none.

    Raises:
        UsageError: for a smaller number, a fraction, or another type.
    """
    number: Any = nan
    with suppress(TypeError):
        number = index(value)  # type: ignore[arg-type]
    if not number >= least:
        bound = f" of at least {least}" if least > -inf else ""
        raise UsageError(f"{name} is {shortened(repr(value))}; give a whole number{bound}")
    return number


def number(name: str, value: Any, below: float = inf, most: float | None = None) -> float:
    """Return the value as a float of at least 0; an error calls it `name`.

    Args:
        below: the exclusive upper bound, such as 1 for the decay rate of an average.
        most: an inclusive upper bound instead.

    Raises:
        UsageError: for a value out of range, NaN, or an object that is no number, such as text.
    """
    result = nan
    with suppress(AttributeError, TypeError, OverflowError):
        result = value.__float__()  # which text has not: float("1e-3") is a number
    if not (0 <= result < below if most is None else 0 <= result <= most):
        end = (
            f"at most {most}"
            if most is not None
            else "finite"
            if below == inf
            else f"below {below}"
        )
        raise UsageError(
            f"{name} is {shortened(repr(value))}; give a number of at least 0 that is {end}"
        )
    return result


def check_ints(name: str, values: object, least: int = 1) -> tuple[int, ...]:
    """Return the values if they are a sequence of integers of at least `least`.

    Raises:
        UsageError: for another one, or something else than a sequence.
    """
    if not isinstance(values, Iterable):
        raise UsageError(f"{name} is {values!r}; give whole numbers, such as (128, 64)")
    return tuple(check_int(f"{name}[{i}]", value, least) for i, value in enumerate(values))


def expect(call: str, *pairs: tuple[object, type]) -> None:
    """Refuse an argument that is not of its type.

    Args:
        call: the right one, for the error.
        pairs: of an argument and its type.

    Raises:
        UsageError: "NoneType is no Module; call CALL".
    """
    for value, kind in pairs:
        if not isinstance(value, kind):
            raise UsageError(f"{type(value).__name__} is no {kind.__name__}; call {call}")


# owners: PyTorch's names: what to write instead
_ROWS = """\
Module: eval train training: models evaluate; the block "with nnmpi.nn.training(step=...):" trains
Module Tensor: to cuda cpu device: leave it out; x.astype("float32") converts a tensor
Module: float double: model.initialize(dtype="float64")
Module: half: with nnmpi.use_precision("fp16")
Module: modules named_children apply: named_modules()
Module: add_module register_parameter: an attribute, self.name = value
Module: register_buffer: an attribute, self.name = nnmpi.nn.Buffer(shape, value)
Module: append extend insert: nnmpi.nn.Sequential(*model, layer)
Module Optimizer: state_dict load_state_dict: nnmpi.save and nnmpi.resume (model, optimizer, group)
Module Tensor: requires_grad_: parameter.requires_grad = False, or True
Optimizer: param_groups: optimizer.lr, which schedules set, or rates by group, lr={"head": 0.1}
Tensor: contiguous clone: leave it out
Tensor: float double half long: x.astype("float32")
Tensor: register_hook: parameter.hook = function
Tensor: is_leaf grad_fn: x.node, the operation that made x, or None
Tensor nnmpi: unsqueeze: x[None] or x[:, None]
Tensor nnmpi: squeeze: x.reshape(...)
Tensor: dim: x.ndim
Tensor nnmpi: numel: x.size
Tensor: tolist: x.numpy().tolist()
Tensor nnmpi: clamp: x.clip(low, high)
Tensor: masked_fill: nnmpi.tensor.where(mask, value, x)
Tensor nnmpi: gather split chunk expand repeat: indices, slices and broadcasting
Tensor nnmpi: std: x.var(correction=1).sqrt()
Tensor nnmpi: norm: (x * x).sum().sqrt()
Tensor nnmpi: abs: abs(x)
Tensor nnmpi: pow: x ** 2
Tensor nnmpi: t: x.T
Tensor nnmpi: mm matmul bmm: x @ y
Tensor nnmpi: relu gelu sigmoid softmax log_softmax: the functions of nnmpi.ops
nnmpi: manual_seed: model.initialize(seed=0)
nnmpi: zeros ones rand randn arange from_numpy as_tensor: nnmpi.Tensor(array) of an array of NumPy
nnmpi: cat concat: nnmpi.tensor.concatenate(tensors, axis)
nnmpi: stack where: the function of nnmpi.tensor
"""
_INSTEAD = {
    (owner, name): more
    for owners, names, more in (row.split(": ", 2) for row in _ROWS.splitlines())
    for owner in owners.split()
    for name in names.split()
}


def instead(name: str, *owners: str) -> str:
    """Return the end of a sentence: what to write instead of a name of PyTorch's, if known.

    Args:
        name: any text.
        owners: classes that lack it.
    """
    for owner in owners:
        if (owner, name) in _INSTEAD:
            return f"; in nnmpi: {_INSTEAD[owner, name]} (docs/pytorch.md)"
    return ""


def raise_missing(owner: object, name: str) -> Any:
    """Raise the error of a missing attribute: a class's `__getattr__`, or its end."""
    kind = type(owner)
    more = instead(name, *(base.__name__ for base in kind.__mro__))
    if not more and hasattr(kind, name):  # a property, which raises its own error again
        return object.__getattribute__(owner, name)
    raise AttributeError(
        f"{kind.__name__!r} object has no attribute {name!r}{more}", name=name, obj=owner
    )


class Settled:
    """An object to which nothing is written that it would ignore.

    A subclass names what it reads when it is made: `class SGD(Optimizer, fixed="momentum")`. Such
    an attribute cannot be assigned later. nnmpi's own classes also refuse public names that they
    lack, as they do when these are read; a user's class has names of its own.
    """

    _read_once: ClassVar[frozenset[str]] = frozenset()
    _is_made = False

    def __init_subclass__(cls, fixed: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._read_once = cls._read_once.union(fixed.split())
        if not is_own(cls) or hasattr(cls, "__post_init__"):  # a dataclass's `__init__` is to come
            return
        make = cls.__init__

        @wraps(make)
        def __init__(self: Any, *args: Any, **named: Any) -> None:
            make(self, *args, **named)
            if type(self) is cls:  # not a base of it, whose subclass is not made yet
                object.__setattr__(self, "_is_made", True)

        cls.__init__ = __init__  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] != "_":
            _check_written(self, name)
        object.__setattr__(self, name, value)


def _check_written(owner: Settled, name: str) -> None:
    """Refuse to write a public attribute that its owner would ignore; see `Settled`.

    Raises:
        UsageError: for one that was read when the owner was made.
        AttributeError: for one that the owner lacks.
    """
    kind = type(owner)
    is_fixed, is_made = name in kind._read_once, owner._is_made
    # nobody says when an object of a user's class is made: there the first value is the last
    if is_fixed and (is_made or (not is_own(kind) and name in vars(owner))):
        again = "call its release() and make" if hasattr(kind, "release") else "make"
        raise UsageError(
            f"{name} is read when {kind.__name__} is made, and a later value would change nothing;"
            f" {again} another one"
        )
    if is_made and not _has(owner, name) and is_own(kind) and not hasattr(kind, name):
        raise_missing(owner, name)


def _has(owner: object, name: str) -> bool:
    """Return whether an object has an attribute of its own; a look at `vars` would slow it down."""
    try:
        object.__getattribute__(owner, name)
    except AttributeError:
        return False
    return True


def is_own(thing: Any) -> bool:
    """Return whether a class or a function is nnmpi's own."""
    return (thing.__module__ or "").partition(".")[0] == "nnmpi"


def add_missing(kind: type) -> None:
    """Let a class say what to write instead of PyTorch's names; `__getattr__` would slow down all."""
    for owner, name in _INSTEAD:
        if owner == kind.__name__:
            setattr(kind, name, property(partial(raise_missing, name=name)))


@contextmanager
def raised_as(kind: type[NnmpiError], what: str, advice: str = "") -> Iterator[None]:
    """Turn an OSError of the body into another error: "WHAT (the system's reason); ADVICE"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({error.strerror or error}){advice and f'; {advice}'}") from None


def translated(error: BaseException) -> BaseException:
    """Return the error; for the system's errors about paths, a UsageError with a sentence.

    Any access raises them on any rank, for a folder without permission or in place of a file, or a
    name that is too long. Their cause is the user's path, whichever code raises them.
    """
    if (
        isinstance(error, OSError)
        and error.errno in (EACCES, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR)
        and error.filename
    ):
        return UsageError(
            f"{shortened(str(error.filename))} cannot be used ({error.strerror}); give another"
        )
    return error


class LayoutError(UsageError):
    """A parallel layout that does not fit the number of ranks or the model."""


class LaunchError(UsageError):
    """A start of MPI that cannot work (wrong mpirun, no MPI library)."""


class ShapeError(NnmpiError, ValueError):
    """Arrays whose shapes do not fit the operation."""


class DtypeError(NnmpiError, TypeError):
    """Arrays whose dtypes do not fit the operation; nnmpi never converts silently."""


class GraphError(NnmpiError, RuntimeError):
    """An impossible backward pass: its graph was not recorded, or is used up."""


class UninitializedError(GraphError, AttributeError):
    """Access to an uninitialized model's values; an AttributeError for `hasattr` and `deepcopy`."""


class DataError(NnmpiError):
    """A missing or damaged data file, or one of the wrong kind; the message names it."""

    exit_status = EX_DATAERR


class CheckpointError(NnmpiError):
    """A checkpoint that is missing, damaged, or of another model."""


class DivergenceError(NnmpiError):
    """A loss or gradient with NaN or infinity; the message names rank, step and layer."""

    exit_status = EX_DATAERR


class CommError(NnmpiError):
    """Ranks that disagree, or messages that do not fit one another."""


class ScheduleError(NnmpiError):
    """A collective or schedule with wrong steps, found by proof before any message is sent."""


class DeviceError(NnmpiError):
    """A missing device, or device or shared memory that is used up."""
