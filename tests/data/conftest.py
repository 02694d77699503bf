"""Fixtures of the data tests: the real files, small made-up files, and a web server on loopback
that misbehaves.
"""

import gc
import gzip
import os
import struct
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def real_data():
    """The folder with real MNIST and CIFAR-10 files: $NNMPI_TEST_DATA, or ../shared/data beside the
    repository.
    """
    chosen = os.environ.get("NNMPI_TEST_DATA")
    folder = Path(chosen) if chosen else Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data files at {folder} (name their folder in NNMPI_TEST_DATA)")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test may see the user's downloads."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NNMPI_DATA", str(folder))
    return folder


def idx_bytes(values):
    return (
        bytes([0, 0, 8, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


@pytest.fixture
def idx_parts():
    """The four files of a made-up MNIST: 20 training and 10 test images of 6 x 5 pixels."""
    parts = {}
    for part, n in (("train", 20), ("t10k", 10)):
        images = np.random.default_rng(n).integers(0, 256, (n, 6, 5)).astype(np.uint8)
        parts[f"{part}-images-idx3-ubyte"] = idx_bytes(images)
        parts[f"{part}-labels-idx1-ubyte"] = idx_bytes((np.arange(n) % 10).astype(np.uint8))
    return parts


@pytest.fixture
def idx_folder(tmp_path, idx_parts):
    """A folder with the files of `idx_parts`, half of them packed."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for i, (name, content) in enumerate(idx_parts.items()):
        path = folder / (name if i % 2 else f"{name}.gz")
        path.write_bytes(content if i % 2 else gzip.compress(content))
    return folder


class Site:
    """A web server whose answers are chosen by path: files[path] is sent in the manner of
    manners[path].

    Manners: "plain", "cut" (half of it, then the connection closes), "silent" (no answer at all),
    "endless" (without a length, and without an end), "404" and other numbers.
    """

    def __init__(self):
        self.files = {}
        self.requests = []
        self.over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True

    def put(self, path, content, manner="plain"):
        """Serve a file; return the address of its folder."""
        self.files[path] = content, manner
        return f"http://127.0.0.1:{self.server.server_address[1]}{path.rpartition('/')[0]}"

    def _handler(site):  # noqa: N805  (self is the handler, below)
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.requests.append(self.path)
                content, manner = site.files.get(self.path, (b"", "404"))
                if manner == "silent":
                    site.over.wait(20)
                elif manner.isdecimal():
                    self.send_error(int(manner))
                else:
                    self.send_response(200)
                    if manner != "endless":
                        self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    with suppress(OSError):  # until the other side has gone
                        while manner == "endless" and not site.over.is_set():
                            self.wfile.write(bytes(2**16))
                        self.wfile.write(
                            content[: len(content) // 2] if manner == "cut" else content
                        )

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield site
    site.over.set()
    site.server.shutdown()
    thread.join(10)
    site.server.server_close()


def prefetch_threads():
    """The running threads of loaders."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("nnmpi-prefetch")]


@pytest.fixture
def no_threads_left():
    """The threads of a loader end with it."""
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert prefetch_threads() == []
