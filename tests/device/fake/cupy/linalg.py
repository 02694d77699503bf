"""CuPy's linear algebra."""

from typing import Any

import numpy as np

from cupy import _functions


def __getattr__(name: str) -> Any:
    return _functions.find("cupy.linalg", name, np.linalg)
