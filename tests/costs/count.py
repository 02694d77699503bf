"""Counting what one call of a function costs: nothing here looks at a clock.

    python      calls of Python functions, also by function
    c           calls of functions of C
    messages    to other ranks: sends, and collectives that MPI does
    bytes       of arrays that NumPy allocates, but those under `LEAST_BYTES`
    recordings  among the calls before, each of which costs several times as much

The numbers are the same on every machine, for one version of Python and of NumPy. So kernels and
products that the processor decides on are left out, and so are the simulated world's own calls.
"""

import gc
import sys
import threading
import tracemalloc
from collections import Counter
from contextlib import ExitStack, chdir
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import nnmpi
from nnmpi.backend import gemm, onednn
from nnmpi.backend.blas import loaded_pools
from nnmpi.backend.recording import Recorder

ROOT = Path(__file__).parents[2]
REPEATS = 4  # of a step; what is rare in it, such as a table that grows, is in one of them alone
LEAST_BYTES = 6 * 1024
KINDS = "python", "c", "messages", "bytes", "recordings"
OF_THE_WORLD = f"{ROOT}/nnmpi/comm/simulated/", threading.__file__
MESSAGES = "SimulatedComm.isend", "SimulatedComm._join"


@cache
def is_counted(code):
    """Whether a function belongs to the step, and not to the simulated world.

    How often a dataclass is compared depends on what caches hold from earlier steps of others.
    """
    is_made = code.co_filename == "<string>" and code.co_name == "__eq__"
    return not (is_made or code.co_filename.startswith(OF_THE_WORLD))


def name_of(code):
    """Return a function's name with its file, from the project's root on; of others, its name."""
    file = Path(code.co_filename)
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT / "nnmpi") else file.name
    return f"{place}: {code.co_qualname}"


class Calls:
    """The calls of a step.

    Attributes:
        python: of Python functions, by name.
        c: of functions of C.
        messages: of this rank.
    """

    def __init__(self, step):
        seen, self.c = Counter(), 0

        def note(frame, event, _):
            if event == "call":
                seen[frame.f_code] += 1
            elif event == "c_call":
                self.c += is_counted(frame.f_code)

        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        self.python = Counter()
        for code, number in seen.items():
            self.python[name_of(code)] += number * is_counted(code)
        self.messages = sum(seen[code] for code in seen if code.co_qualname in MESSAGES)


class Allocated:
    """The bytes of the arrays that rank 0 allocates in a step: `found`.

    Between two calls a step makes one array at most, and Python's own objects are small. All ranks
    take part, of which one runs at a time, so that none counts another's arrays.
    """

    def __init__(self):
        self.found = self._last = 0

    def during(self, step, is_root):
        """Do a step."""

        def note(*_):
            most = tracemalloc.get_traced_memory()[1] - self._last
            self.found += most if is_root and most >= LEAST_BYTES else 0
            self._begin()

        tracemalloc.start()
        self._begin()
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)

    def _begin(self):
        tracemalloc.reset_peak()
        self._last = tracemalloc.get_traced_memory()[0]


def cost_of(way):
    """Return what a step costs on rank 0, by kind, and its calls by function."""
    allocated, recordings, running = Allocated(), Counter(), Recorder.running

    def counted(recorder):
        recordings[recorder.thread] += 1
        return running(recorder)

    def program(group):
        step = way.make(group)
        for _ in range(way.calls):
            step()
        before = recordings[threading.get_ident()]
        repeats = range(1 if way.is_run else REPEATS)
        calls = [Calls(step) if group.is_root else step() for _ in repeats]
        if not way.is_run:
            group.barrier()
            allocated.during(step, group.is_root)
            group.barrier()
        return (min(calls, key=lambda one: one.python.total()), before) if group.is_root else None

    with ExitStack() as stack:
        stack.enter_context(nnmpi.jit(False))
        stack.enter_context(loaded_pools().limit(limits=1, user_api="blas"))
        stack.enter_context(patch.object(gemm, "has_small_products", lambda: False))
        stack.enter_context(patch.object(onednn, "for_float32", lambda: None))
        stack.enter_context(patch.object(Recorder, "running", counted))
        stack.enter_context(chdir(stack.enter_context(TemporaryDirectory())))
        stack.callback(tracemalloc.stop)
        gc.collect()
        gc.disable()
        stack.callback(gc.enable)
        calls, recorded = nnmpi.simulate(program, way.ranks, cpu_factor=0)[0]
    cost = calls.python.total(), calls.c, calls.messages, allocated.found, recorded
    return dict(zip(KINDS, cost, strict=True)), calls.python
