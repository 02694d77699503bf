"""Freed memory stays in the process: counted in page faults, which do not depend on the machine's
load.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from nnmpi.backend.cuda.graph import AHEAD, Segment

PROGRAM = """
import resource, sys
import numpy as np
if sys.argv[1] == "keep":
    from nnmpi.backend.memory import keep_freed_memory
    if not keep_freed_memory():
        sys.exit(7)
if sys.argv[1] == "compute":
    from nnmpi import Tensor
    Tensor([0.0])
for step in range(30):
    if step == 10:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [np.ones(1_000_000, np.float32) for _ in range(8)]
    del activations
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


def faults(how):
    """Return the page faults of 20 steps that make eight arrays of 4 MB and drop them.

    The variable is what glibc begins with. Left out, glibc changes it as it goes, and where some
    other block happens to lie above the arrays it then gives nothing back either: that depends on
    the interpreter and the environment.
    """
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM, how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    if ran.returncode == 7:
        pytest.skip("this C library has no mallopt")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


def test_arrays_are_not_mapped_afresh():
    """With glibc's own settings each array costs faults for its pages; kept memory, as every
    program with tensors keeps it, costs none.
    """
    assert faults("keep") < 100
    assert faults("compute") < 100
    assert faults("leave") > 1000


RECORDED = """
import numpy as np
import nnmpi
from nnmpi.backend.memory import host_memory
arrays = [np.ones(2**18, np.float32) for _ in range(48)]
kept = arrays[::2]
del arrays
x, before = np.ones((2**9, 2**9), np.float32), host_memory().used_bytes
step = nnmpi.compile(lambda x: (x + x) * x)
for _ in range(3):
    step(x)
print(host_memory().used_bytes - before - step.pool.size_bytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="malloc is glibc's on Linux alone")
def test_a_replay_gives_back_what_malloc_has_kept():
    """Holes of 24 MiB between arrays that stay go, and replays have memory apart from them."""
    ran = subprocess.run(
        [sys.executable, "-c", RECORDED], capture_output=True, text=True, timeout=60
    )
    assert not ran.returncode, ran.stderr
    assert int(ran.stdout) < -12 * 2**20


def test_a_launch_has_its_own_numbers():
    """Where the card reads pageable memory late, the numbers of later launches are not read."""
    work, seen, values = [], [], np.zeros(1, np.uint32)

    def finish(count):
        seen.extend(int(x[0]) for x in work[len(seen) : count])

    def record():
        return SimpleNamespace(synchronize=partial(finish, len(work)))

    stream = SimpleNamespace(record=record)
    xp = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    target = SimpleNamespace(set=lambda values, stream: work.append(values))
    graph = SimpleNamespace(launch=lambda stream: None)
    segment = Segment(xp, graph, stream, [(target, values)])
    for step in range(3 * AHEAD):
        values[0] = step
        segment()
    assert len(seen) == 2 * AHEAD  # what is dropped has been read
    finish(len(work))
    assert seen == [*range(3 * AHEAD)]
