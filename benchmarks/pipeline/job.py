"""One measurement's ranks: `mpirun -n P python benchmarks/pipeline/job.py MODULE SETTINGS RESULT`.

The command beside this file starts it (see `launch.py`). MODULE has a function `measure(group, settings)`, called on
every rank; what it returns on rank 0 is written to the file RESULT, with what ran it.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # the checkout, so that the modules here have their full names

from nnmpi.comm.start import start  # noqa: E402

if __name__ == "__main__":
    group = start()
    from nnmpi.comm.describe import describe  # it imports mpi4py.MPI, which `start` must have loaded by then

    found = describe(group)
    rows = import_module(sys.argv[1]).measure(group, json.loads(sys.argv[2]))
    if group.is_root:
        content = {
            "ranks": group.size,
            "mpi": found.mpi,
            "blas": f"{found.blas}, {found.threads} thread{'s' * (found.threads != 1)}",
            "rows": rows,
        }
        Path(sys.argv[3]).write_text(json.dumps(content))
