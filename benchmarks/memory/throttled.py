"""A file for activations on a disk that is as slow as is wanted, so that it is not the page cache that is measured."""

import time

from nnmpi.memory.store import FileStore


class ThrottledStore(FileStore):
    """A file on a disk of so many bytes per second."""

    def __init__(self, folder, bandwidth):
        super().__init__(folder)
        self.bandwidth = bandwidth

    def write(self, place, memory):
        """Write, and take the time that it would take."""
        self._slowly(super().write, place, memory)

    def read(self, place, memory):
        """Read, and take the time that it would take."""
        self._slowly(super().read, place, memory)

    def _slowly(self, move, place, memory):
        end = time.perf_counter() + sum(map(len, memory)) / self.bandwidth
        move(place, memory)
        time.sleep(max(0.0, end - time.perf_counter()))
