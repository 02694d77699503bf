"""A double of cuDNN's Python frontend: graphs of convolutions, computed by NumPy from the addresses they are given.

What may be called, and with which names, stands in `snapshot.json`, written by tests/device/cudnn/survey.py from the
real package. As with the real one, the package may be there without cuDNN itself: `settings().installed` says so, and
is False at first, as where the wheel of the frontend is installed alone.
"""

from cudnn._graph import Tensor, cudnnGraphNotSupportedError, pygraph
from cudnn._handle import (
    Handle,
    backend_version,
    backend_version_string,
    create_handle,
    destroy_handle,
    get_stream,
    set_stream,
)
from cudnn._names import data_type, heur_mode, numerical_note
from cudnn._settings import settings

__version__ = "1.32.0"
__all__ = [
    "Handle",
    "Tensor",
    "backend_version",
    "backend_version_string",
    "create_handle",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "get_stream",
    "heur_mode",
    "numerical_note",
    "pygraph",
    "set_stream",
    "settings",
]
