"""A file for activations on a disk that is as slow as is wanted, so that it is not the page cache that is measured."""

import time

from nnmpi.memory.store import FileStore


class ThrottledStore(FileStore):
    """A file on a disk of so many bytes per second, which begins with what it is asked for as soon as it can.

    Attributes:
        moved: bytes, both ways.
    """

    def __init__(self, folder, bandwidth):
        super().__init__(folder)
        self.bandwidth, self.moved, self._done_s = bandwidth, 0, 0.0

    def submit(self, work, *args):
        """Let the thread write or read, and take the time that the disk would take."""
        return super().submit(self._slowly, time.perf_counter(), work, *args)

    def _slowly(self, asked_s, work, place, memory):
        nbytes = sum(map(len, memory))
        self.moved += nbytes
        self._done_s = max(asked_s, self._done_s) + nbytes / self.bandwidth
        work(place, memory)
        time.sleep(max(0.0, self._done_s - time.perf_counter()))
