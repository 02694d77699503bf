import gzip
import hashlib
import os
import signal
import subprocess
import sys
import time
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


def test_cut_transfer_is_resumed(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut", "cut", "plain"))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=256000-", "bytes=384000-"]


def test_part_of_an_earlier_run_is_resumed(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut"))
    with pytest.raises(DataError, match="broke off after 256000 of 512000 bytes"):
        download(wanted, tmp_path, tries=1)
    assert not (tmp_path / "file.bin").exists()
    site.put("/a", CONTENT)
    assert download(wanted, tmp_path, tries=1).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=256000-"]


def test_server_without_range_sends_everything_again(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut", "no range"))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=256000-"]


def test_tries_are_counted(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut"))
    with pytest.raises(DataError, match="broke off"):
        download(wanted, tmp_path, tries=3)
    assert len(site.requests) == 3


def test_mirror_that_makes_no_progress_is_left(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut", "status 503"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert len(site.ranges("/a")) == 2
    assert leftovers(tmp_path) == ["file.bin"], "the part file of the first mirror must go"


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


def test_stale_part_that_does_not_fit_is_thrown_away(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", OTHER, "cut"))
    with pytest.raises(DataError):
        download(wanted, tmp_path, tries=1)
    site.put("/a", CONTENT)  # the file on the mirror changed in between
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=256000-", None]


def test_part_that_is_whole_already_is_used(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut"))
    with pytest.raises(DataError):
        download(wanted, tmp_path, tries=1)
    (part,) = tmp_path.iterdir()
    part.write_bytes(CONTENT)  # killed between the last byte and the renaming
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=512000-"]


def test_wrong_range_is_not_appended(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut", "wrong range"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert len(site.ranges("/b")) == 1


def test_stalled_connection_times_out(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "stall"), site.put("/b", CONTENT))
    began = time.monotonic()
    assert download(wanted, tmp_path, stall_s=0.5, tries=2).read_bytes() == CONTENT
    assert time.monotonic() - began < 5
    assert site.ranges("/a") == [None, "bytes=256000-"]


def test_silent_mirror_is_asked_once(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "silent"), site.put("/b", CONTENT))
    assert download(wanted, tmp_path, stall_s=0.5).read_bytes() == CONTENT
    assert site.ranges("/a") == [None]


def test_file_is_on_disk_before_it_has_its_name(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "file.bin"
    synced: list[tuple[int, bool]] = []

    def fsync(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, final.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    download(source(site.put("/a", CONTENT)), tmp_path)
    assert synced == [(final.stat().st_ino, False), (tmp_path.stat().st_ino, True)], "renamed, not copied"


def test_error_lists_what_each_mirror_said(site: Any, tmp_path: Path) -> None:
    wanted = source(
        site.put("/gone", CONTENT, "status 404"),
        site.put("/stalled", CONTENT, "stall"),
        site.put("/wrong", OTHER),
        "http://127.0.0.1:9/closed",
    )
    with pytest.raises(DataError) as caught:
        download(wanted, tmp_path, stall_s=0.5, tries=1)
    text = str(caught.value)
    assert f"{wanted.urls[0]}: HTTP status 404 Not Found" in text
    assert f"{wanted.urls[1]}: sent nothing for 0.5 s" in text
    assert f"{wanted.urls[2]}: the file has SHA-256 {hashlib.sha256(OTHER).hexdigest()} and should have" in text
    assert f"{wanted.urls[3]}: [Errno 111] Connection refused" in text
    assert "data_dir" in text
    assert "\n" not in text
    assert not (tmp_path / "file.bin").exists()


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


def test_endless_answer_is_given_up(site: Any, tmp_path: Path) -> None:
    small = source(site.put("/a", CONTENT), content=b"small")
    with pytest.raises(DataError, match="sent more than the 5 bytes"):
        download(small, tmp_path)
    assert leftovers(tmp_path) == []


def test_folder_that_cannot_be_written_is_not_the_mirrors_fault(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT), site.put("/b", CONTENT))
    with pytest.raises(DataError, match="cannot be written"):
        download(wanted, tmp_path / "missing")
    assert site.ranges("/b") == []


def test_killed_process_leaves_no_file_and_the_next_resumes(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "stall", "plain"))
    program = (
        "import sys; from pathlib import Path; from nnmpi.data.download import download; "
        f"from nnmpi.data.sources import Source; download({wanted!r}, Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        assert site.half_sent.wait(20)
        deadline = time.monotonic() + 20
        while sum(path.stat().st_size for path in tmp_path.iterdir()) < 256000 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    (part,) = tmp_path.iterdir()
    assert part.name.endswith(".part")
    assert download(wanted, tmp_path).read_bytes() == CONTENT
    assert site.ranges("/a") == [None, "bytes=256000-"]


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


@pytest.mark.parametrize("manner", ["drip", "dripping head"])
def test_a_mirror_that_drips_is_left(manner: str, site: Any, tmp_path: Path) -> None:
    """Each byte came within the limit, and the file would have come in a year."""
    wanted = source(site.put("/a", CONTENT, manner), site.put("/b", CONTENT))
    began = time.monotonic()
    assert download(wanted, tmp_path, stall_s=0.3, tries=2).read_bytes() == CONTENT
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("ftp://127.0.0.1/file.bin", "unknown url type: ftp"),
        ("http://[bad", "sent to an address that cannot be read"),
        ("http://..x/", "sent to an address that cannot be read"),
    ],
)
def test_redirects_that_cannot_be_followed(place: str, said: str, site: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        download(source(site.put("/a", CONTENT, place)), tmp_path)


def test_a_length_of_any_number_of_digits_is_no_traceback(site: Any, tmp_path: Path) -> None:
    assert download(source(site.put("/a", CONTENT, "endless length")), tmp_path).read_bytes() == CONTENT


def test_a_link_in_the_place_of_the_part_file_is_not_followed(site: Any, tmp_path: Path) -> None:
    wanted = source(site.put("/a", CONTENT, "cut"))
    with pytest.raises(DataError):
        download(wanted, tmp_path, tries=1)
    (part,) = tmp_path.iterdir()
    part.unlink()
    mine = tmp_path / "mine"
    mine.write_bytes(b"precious")
    part.symlink_to(mine)
    with pytest.raises(DataError, match=r"\.part: cannot be written \(Too many levels of symbolic links\)"):
        download(wanted, tmp_path, tries=1)
    assert mine.read_bytes() == b"precious"
