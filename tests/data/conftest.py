"""Fixtures of the data tests: the real files, small made-up files, and a web server on loopback that misbehaves."""

import gzip
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real MNIST and CIFAR-10 files: $NNMPI_TEST_DATA, or ../shared/data beside the repository."""
    chosen = os.environ.get("NNMPI_TEST_DATA")
    folder = Path(chosen) if chosen else Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data files at {folder} (name their folder in NNMPI_TEST_DATA)")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test may see the user's downloads."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NNMPI_DATA", str(folder))
    return folder


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@pytest.fixture
def idx_parts() -> dict[str, bytes]:
    """The four files of a made-up MNIST: 20 training and 10 test images of 6 x 5 pixels."""
    random = np.random.default_rng(1)
    parts = {}
    for part, n in (("train", 20), ("t10k", 10)):
        images = random.integers(0, 256, (n, 6, 5)).astype(np.uint8)
        parts[f"{part}-images-idx3-ubyte"] = idx_bytes(images)
        parts[f"{part}-labels-idx1-ubyte"] = idx_bytes((np.arange(n) % 10).astype(np.uint8))
    return parts


@pytest.fixture
def idx_folder(tmp_path: Path, idx_parts: dict[str, bytes]) -> Path:
    """A folder with the files of `idx_parts`, half of them packed."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for i, (name, content) in enumerate(idx_parts.items()):
        if i % 2:
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


class Site:
    """A web server whose answers are chosen by path: files[path] is sent in the manner of manners[path], in turn.

    Manners: "plain" (knows Range), "no range", "cut" (half of what was asked for, then the connection closes),
    "stall" (half of it, then nothing), "drip" (a byte now and then), "silent" (no answer at all), "wrong range",
    "endless length" (of 4,400 digits), "dripping head", an address (sent there), "status 404" and other numbers.
    The last manner is kept.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.manners: dict[str, list[str]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.half_sent = threading.Event()
        self.over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}{path}"

    def put(self, path: str, content: bytes, *manners: str) -> str:
        self.files[path] = content
        self.manners[path] = list(manners) or ["plain"]
        return self.url(path)

    def ranges(self, path: str) -> list[str | None]:
        """Return the Range header of each request for this path."""
        return [asked for requested, asked in self.requests if requested == path]

    def _handler(site) -> type[BaseHTTPRequestHandler]:  # noqa: N805  (self is the handler, below)
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.requests.append((self.path, self.headers["Range"]))
                manners = site.manners.get(self.path, ["status 404"])
                manner = manners.pop(0) if len(manners) > 1 else manners[0]
                if manner == "silent":
                    site.over.wait(20)
                    return
                if manner == "dripping head":
                    with suppress(OSError):  # until the other side has gone
                        while not site.over.wait(0.05):
                            self.wfile.write(b"H")
                    return
                if "://" in manner:
                    self.send_response(302)
                    self.send_header("Location", manner)
                    self.end_headers()
                    return
                if manner.startswith("status"):
                    self.send_error(int(manner.split()[1]))
                    return
                self.answer(site.files[self.path], manner)

            def answer(self, content: bytes, manner: str) -> None:
                asked = self.headers["Range"]
                start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and manner != "no range" else 0
                if start and start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    said = 0 if manner == "wrong range" else start
                    self.send_header("Content-Range", f"bytes {said}-{len(content) - 1}/{len(content)}")
                rest = content[start:]
                self.send_header("Content-Length", "9" * 4400 if manner == "endless length" else str(len(rest)))
                self.end_headers()
                while manner == "drip" and not site.over.wait(0.05):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                half = manner in ("cut", "stall")
                self.wfile.write(rest[: len(rest) // 2] if half else rest)
                self.wfile.flush()
                site.half_sent.set()
                if manner == "stall":
                    site.over.wait(20)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield site
    site.over.set()
    site.server.shutdown()
    thread.join(10)
    site.server.server_close()


@pytest.fixture
def prefetch_threads() -> Callable[[], list[threading.Thread]]:
    """A function that lists the running threads of loaders."""
    return lambda: [thread for thread in threading.enumerate() if thread.name.startswith("nnmpi-prefetch")]
