"""pytest --backend fake: the suite on the double of CuPy.

The engine is the same to the letter. Around it, what a test writes for the host means the device:

    the backend where none is given     the device's, in the engine's code and in the tests' own
                                        numpy_backend()
    Tensor(array), in a test            the array is uploaded first
    f(tensor, array), in a test         so is an array that a test hands to an operation
    tensor.data == array, in a test     compares a copy on the host; so do NumPy's functions,
                                        np.testing among them

What is a test's is told by the calling frame; the engine's code gets none of it and raises where it
mixes the two. A test that is about the host alone says so by `@pytest.mark.host_only("why")`, and
runs there.
"""

import os
import sys
from functools import wraps
from pathlib import Path

import numpy as np
import pytest

from nnmpi.backend import backend as backends
from nnmpi.backend.recording import active
from nnmpi.base import lines
from nnmpi.nn.compiled import Compiled
from nnmpi.nn.module import Module
from nnmpi.tensor.function import Function
from nnmpi.tensor.tensor import Tensor
from tests.device import library
from tests.harness import left_out

TESTS_FOLDER = Path(__file__).parents[1]
BETWEEN = ("numpy", "_pytest", "pytest", "hypothesis", "contextlib")
TESTS = ("tests.", "nnmpi.tensor.check")  # the latter is a test itself, of derivatives
HOST = "nnmpi.backend.device"  # says numpy_backend() because somebody asked for it by name


# Tests of the double itself, of messages (which know buffers, and no backend) and of scripts, and
# those without arrays: the same with and without --backend fake.
SAME = ("base", "comm", "corpus", "device", "gpu", "harness", "layering", "schedule", "scripts")
SAME += ("teaching", "test_array_names.py", "test_assignments.py", "test_docs.py")
SAME += ("test_packaging.py", "backend/cuda", "backend/test_kernels.py", "data/test_files.py")
SAME += ("lab/test_doctor.py", "lab/test_run.py", "equivalence/test_breaks.py")
SAME += tuple(f"asynchronous/test_{name}.py" for name in ("ends", "jobs", "speed"))
SAME += ("compose/test_seeds.py", "compose/test_simulated_times.py", "tensor/test_memory.py")
SAME += tuple(f"train/test_{name}.py" for name in ("simulated", "stall"))

MOST_CASES = 2  # of one test, with --quick: all of them run on the host


def pytest_addoption(parser):
    """Add --backend."""
    parser.addoption(
        "--backend",
        choices=("numpy", "fake"),
        default="numpy",
        help="where the suite's arrays live",
    )


def pytest_configure(config):
    """Put the double in place before any test module is read."""
    words = "host_only(reason): runs on the host, whatever --backend says"
    config.addinivalue_line("markers", words)
    if config.getoption("--backend") == "fake":
        config.pluginmanager.register(Everywhere(), "nnmpi-everywhere")


def pytest_ignore_collect(collection_path, config):
    """Do not run once more what is the same on the double, unless it is named in the command."""
    same = config.getoption("--backend") == "fake" and collection_path in [
        TESTS_FOLDER / item for item in SAME
    ]
    return True if same else None


class Everywhere:
    """The tests, on the device."""

    def __init__(self):
        moved = [name for name in SAME if not (TESTS_FOLDER / name).exists()]
        assert not moved, f"tests/device/plugin.py leaves out what is not there: {moved}"
        cupy = library.load()
        lines._OTHERS += (os.path.dirname(__file__) + os.sep,)  # an error's lines are not these
        self._settings = cupy.cuda.runtime.settings()
        self._settings.hidden = False
        paths = [str(library.FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        # for what the tests start
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self._array = cupy.ndarray
        self._backend = library.device_backend()
        self._on = False
        self._host_only = []
        sys.modules["cupy._array"].VIEWERS.append(self._is_test)  # type: ignore[attr-defined]
        self._put_backend()
        self._put_uploads()

    def pytest_collection_modifyitems(self, config, items):
        """Note which tests stay on the host; --quick leaves them out, as any other run has them,
        and many cases.
        """
        on_host = [item for item in items if item.get_closest_marker("host_only")]
        self._host_only = [reason(item) for item in on_host]
        if config.option.quick:
            dealt = filter(left_out.is_dealt, items)
            others = {*on_host, *left_out.beyond(dealt, most_cases)}
            config.hook.pytest_deselected(items=list(others))
            items[:] = [item for item in items if item not in others]

    def pytest_terminal_summary(self, terminalreporter):
        """Say how many tests stay on the host, and why."""
        for words in sorted(set(self._host_only)):
            terminalreporter.write_line(f"host only {self._host_only.count(words)}: {words}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Let the test be on the device, or on a machine that has none."""
        self._on = item.get_closest_marker("host_only") is None
        self._settings.hidden = not self._on
        try:
            return (yield)
        finally:
            self._on = False

    def _is_test(self, frame):
        """Return whether a frame, but for what stands between, is a test's."""
        if not self._on:
            return False
        while frame is not None and module(frame).startswith(BETWEEN):
            frame = frame.f_back
        return frame is not None and is_tests(frame)

    def _put_backend(self):
        """Let the engine's default be the device."""
        plain = backends.numpy_backend

        def numpy_backend():
            return self._backend if self._on and module(sys._getframe(1)) != HOST else plain()

        for item in list(sys.modules.values()):
            if getattr(item, "numpy_backend", None) is plain:
                item.numpy_backend = numpy_backend  # type: ignore[attr-defined]

    def _put_uploads(self):
        """Upload what a test gives to a tensor or an operation."""
        make, apply = Tensor.__init__, Function.__call__

        def make_tensor(tensor, data, *args, **kwargs):
            if self._on and is_tests(sys._getframe(1)):
                if isinstance(data, np.ndarray):
                    data = self._upload(data)
                elif not isinstance(data, Tensor | self._array):
                    make(tensor, data, *args, **kwargs)
                    tensor.data = self._upload(tensor.data)
                    return
            make(tensor, data, *args, **kwargs)

        def call(function, *inputs):
            recorder = active()
            # one that no graph contains is called between two graphs, and reads host arrays there
            is_between = recorder is not None and recorder.captures and function.is_whole(recorder)
            is_mixed = any(is_host(x) for x in inputs) and any(map(self._is_here, inputs))
            if self._on and is_mixed and not is_between:
                given = from_test(sys._getframe(1))
                inputs = tuple(self._upload(x) if _is_among(x, given) else x for x in inputs)
            return apply(function, *inputs)

        for kind in (Module, Compiled):
            kind.__call__ = self._uploading(kind.__call__)  # type: ignore[method-assign]
        Tensor.__init__ = make_tensor  # type: ignore[method-assign]
        Function.__call__ = call  # type: ignore[method-assign]

    def _uploading(self, function):
        """Return a method that uploads the arrays that a test gives to it."""

        @wraps(function)
        def call(thing, *args, **kwargs):
            if self._on and is_tests(sys._getframe(1)):
                args = tuple(self._upload(x) if is_host(x) else x for x in args)
            return function(thing, *args, **kwargs)

        return call

    def _is_here(self, x):
        """Return whether x is a tensor on the device."""
        return isinstance(x, Tensor) and isinstance(x.data, self._array)

    def _upload(self, array):
        """Return the array on the device, lying as it lay on the host."""
        if array.flags.c_contiguous:
            return self._backend.asarray(array)
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        back = [order.index(axis) for axis in range(array.ndim)]
        return self._backend.asarray(np.ascontiguousarray(array.transpose(order))).transpose(back)


def most_cases(test, _):
    """Return how many cases of a test run here with --quick: one of whole trainings."""
    return 1 if left_out.is_training(test) else MOST_CASES


def reason(item):
    """Return why a test stays on the host."""
    marker = item.get_closest_marker("host_only")
    return str(marker.args[0])


def module(frame):
    """Return the name of a frame's module."""
    return str(frame.f_globals.get("__name__", ""))


def is_tests(frame):
    """Return whether the frame is the tests' own code."""
    return module(frame).startswith(TESTS)


def from_test(frame):
    """Return the arrays among the arguments with which a test called the engine."""
    outer = None
    while frame is not None and not is_tests(frame):
        if module(frame).startswith("nnmpi."):
            outer = frame
        frame = frame.f_back
    if frame is None:
        return []
    values = list(frame.f_locals.values()) if outer is None else list(outer.f_locals.values())
    return [
        x
        for value in values
        for x in (value if isinstance(value, list | tuple) else [value])
        if is_host(x)
    ]


def is_host(x):
    """Return whether x is an array of the host's."""
    return type(x) is np.ndarray


def _is_among(x, given):
    return is_host(x) and any(x is item or np.may_share_memory(x, item) for item in given)
