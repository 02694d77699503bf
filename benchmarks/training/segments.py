"""A folder for each MPI job's shared memory.

Open MPI names its files in /dev/shm by 16 bits of a hash of the job. Of two jobs that get the same one, the later one
cuts off the file of the other, which then dies of a segmentation fault; and here two dozen jobs are alive at once.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")
VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")


class Segments:
    """A new folder in the shared memory of this machine; none where there is no such place.

    Attributes:
        environ: the variables that tell Open MPI to use it. Other MPIs ignore them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="nnmpi-", dir=SHARED) if SHARED.is_dir() else None
        self.environ = {} if self._folder is None else dict.fromkeys(VARIABLES, self._folder)

    def remove(self) -> None:
        """Remove the folder with what a job that was killed has left in it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
