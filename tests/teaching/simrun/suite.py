"""Runs a file of mpi4py's own tests on the ranks that run this program; rank 0 prints a line of
JSON, the outcome of each test on its worst rank.

    suite.py test_p2p_obj

Copied into mpi4py's folder of tests, because each simulated rank has its own copy of a program's
folder. It knows nothing of nnmpi: it is the same program under mpirun.
"""

import gc
import json
import sys
import unittest

gc.disable()  # its helpers compare counts of references before and after a call
# arrays of a device are for machines with one
sys.modules["cupy"] = sys.modules["numba"] = None
from mpi4py import MPI  # noqa: E402

ORDER = ["passed", "skipped", "failed", "missing"]


class Outcomes(unittest.TestResult):
    """The outcome of each test."""

    def __init__(self):
        super().__init__()
        self.outcomes = {}

    def startTest(self, test):
        super().startTest(test)
        self.outcomes[test.id()] = "passed"

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcomes[test.id()] = "skipped"

    def addError(self, test, err):
        self.outcomes[test.id()] = "failed"

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.outcomes[test.id()] = "failed"


result = Outcomes()
unittest.defaultTestLoader.loadTestsFromName(sys.argv[1]).run(result)
by_rank = MPI.COMM_WORLD.gather(result.outcomes)
if by_rank:
    worst = {
        name: max((outcomes.get(name, "missing") for outcomes in by_rank), key=ORDER.index)
        for name in by_rank[0]
    }
    print("OUTCOMES", json.dumps(worst))
