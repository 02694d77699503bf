"""A store on a disk that is as slow as is wanted, so that it is not the page cache that is
measured.
"""

import time

from nnmpi.memory.store import Store


class ThrottledStore(Store):
    """A file on a disk of so many bytes per second, whichever way."""

    def __init__(self, folder, bandwidth):
        super().__init__(folder)
        self.bandwidth, self._done_s = bandwidth, 0.0

    def copy(self, pairs):
        """Let the thread take the time that the disk would take, from now on or from the end of
        what it does.
        """
        nbytes = sum(len(to) for to, _ in pairs)
        self._done_s = max(time.perf_counter(), self._done_s) + nbytes / self.bandwidth
        return self._thread.submit(self._slowly, pairs, self._done_s).result

    def _slowly(self, pairs, done_s):
        self.move(pairs)
        time.sleep(max(0.0, done_s - time.perf_counter()))
