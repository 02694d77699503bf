import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest

from nnmpi.data.download import check, download
from nnmpi.data.sources import Source, sources
from nnmpi.errors import DataError

CONTENT = bytes(range(256)) * 2000
OTHER = CONTENT[::-1]


def source(*urls: str, content: bytes = CONTENT, unpacked: bool = False) -> Source:
    return Source("file.bin", urls, len(content), hashlib.sha256(content).hexdigest(), unpacked)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_put_in_place_and_asked_for_once(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT))
    said: list[str] = []
    for _ in range(2):
        path = download(wanted, tmp_path, report=said.append)
    assert path.read_bytes() == CONTENT
    assert leftovers(tmp_path) == ["file.bin"]
    assert site.ranges("/a") == [None]
    assert len(said) == 1
    assert said[0].startswith("downloading file.bin from 127.0.0.1:")


@pytest.mark.parametrize("code", [404, 403, 500])
def test_refusal_sends_to_the_next_mirror(site: Any, tmp_path: Path, code: int) -> None:
    wanted = source(site.put("/a", CONTENT, f"status {code}"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert (len(site.ranges("/a")), len(site.ranges("/b"))) == (1, 1)


@pytest.mark.parametrize("wrong", [OTHER, CONTENT[:-1], CONTENT + b"x" * 5, b""])
def test_wrong_content_sends_to_the_next_mirror(site: Any, tmp_path: Path, wrong: bytes) -> None:
    wanted = source(site.put("/a", wrong), site.put("/b", CONTENT))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert len(site.ranges("/a")) == 1
    assert leftovers(tmp_path) == ["file.bin"]


def test_wrong_range_is_not_appended(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut", "wrong range"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert len(site.ranges("/b")) == 1


def test_silent_mirror_is_asked_once(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "silent"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path, stall_s=0.5).read_bytes() == CONTENT
    assert site.ranges("/a") == [None]


def test_gz_is_checked_by_its_content(site: Any, tmp_path: Path) -> None:
    """Mirrors pack the same content differently: each packing passes, and another content does not."""
    for number, level in enumerate((1, 9)):
        folder = tmp_path / str(level)
        folder.mkdir()
        packed = gzip.compress(CONTENT, level, mtime=level)
        wanted = source(site.put(f"/{number}", packed), unpacked=True)
        assert download(wanted, folder).read_bytes() == packed
    wanted = source(site.put("/other", gzip.compress(OTHER)), site.put("/html", b"<html>"), unpacked=True)
    with pytest.raises(DataError, match=r"the unpacked content has SHA-256 .*; .*not a whole gz file"):
        download(wanted, tmp_path)


def test_cut_gz_without_announced_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(CONTENT)[:-6])
    assert "not a whole gz file" in str(check(path, source(unpacked=True)))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_known_sources_are_well_formed(name: str) -> None:
    for known in sources(name):
        assert len(known.urls) >= 2
        assert all(url.endswith(known.filename) for url in known.urls)
        assert len(bytes.fromhex(known.sha256)) == 32
        assert not known.unpacked or known.filename.endswith(".gz")


def test_real_mnist_files_pass_the_known_checksums(real_data: Path) -> None:
    for known in sources("mnist"):
        assert check(real_data / "mnist" / known.filename, known) is None
