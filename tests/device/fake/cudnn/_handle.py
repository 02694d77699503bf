"""Handles and their streams."""

from cudnn._settings import settings


class Handle:
    """A handle.

    Attributes:
        backend_handle: its number, None once it is destroyed.
        stream: the address of the stream on which it works.
    """

    def __init__(self, backend_handle: int | None, ordinal: int | None = None, stream: int | None = None) -> None:
        self.backend_handle, self.stream = backend_handle, stream


def create_handle() -> Handle:
    """Return a new handle on the null stream."""
    _load("cudnnCreate")
    return Handle(0xC0DE, 0, 0)


def destroy_handle(handle: Handle) -> None:
    """Give a handle back."""
    handle.backend_handle = handle.stream = None


def set_stream(handle: Handle, stream: int) -> None:
    """Let the handle work on a stream, given by its address."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"cudnn.set_stream expects a cudnn.Handle (from cudnn.create_handle()), got {type(handle).__name__}"
        )
    if type(stream) is not int:
        raise TypeError("a stream is given by its address")
    handle.stream = stream


def get_stream(handle: Handle) -> int | None:
    """Return the address of the handle's stream."""
    return handle.stream


def backend_version() -> int:
    """Return cuDNN's version as a number."""
    _load("cudnnGetVersion")
    return 92700


def backend_version_string() -> str:
    """Return cuDNN's version."""
    _load("cudnnGetVersion")
    return "9.27.0"


def _load(symbol: str) -> None:
    if not settings().installed:
        raise RuntimeError(f"Unable to find symbol {symbol}")
