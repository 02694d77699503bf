"""A store on a disk of a given bandwidth: an unthrottled file would measure the page cache."""

import time

from nnmpi.memory.store import Store


class ThrottledStore(Store):
    """A file on a disk of `bandwidth` bytes per second, reads and writes together."""

    def __init__(self, folder, bandwidth):
        super().__init__(folder)
        self.bandwidth, self._done_s = bandwidth, 0.0

    def copy(self, pairs):
        """Start a copy on the thread; it takes the disk's time, after the copies before it."""
        nbytes = sum(len(to) for to, _ in pairs)
        self._done_s = max(time.perf_counter(), self._done_s) + nbytes / self.bandwidth
        return self._thread.submit(self._slowly, pairs, self._done_s).result

    def _slowly(self, pairs, done_s):
        self.move(pairs)
        time.sleep(max(0.0, done_s - time.perf_counter()))
