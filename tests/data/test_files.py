import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from nnmpi.backend.jit.build import kernels_folder
from nnmpi.base.errors import UsageError
from nnmpi.base.files import cache_folder, locked
from nnmpi.train.cli import main as train
from tests.harness.commands import on_ranks
from tests.harness.refusals import usage_error


def test_variable_names_the_folder(monkeypatch):
    monkeypatch.setenv("NNMPI_DATA", "~/some/where")
    assert cache_folder() == Path.home() / "some" / "where"


@pytest.mark.parametrize(
    "platform, variables, folder",
    [
        ("linux", {}, "home/.cache/nnmpi"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/nnmpi"),
        ("darwin", {}, "home/Library/Caches/nnmpi"),
    ],
)
def test_platform_chooses_the_folder(monkeypatch, tmp_path, platform, variables, folder):
    monkeypatch.chdir(tmp_path)
    for name in ("NNMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert cache_folder() == Path(folder)
    assert Path(folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to give files away")
def test_a_folder_of_somebody_else_is_no_cache(monkeypatch, tmp_path):
    """Compiled kernels are code; several users may share what $NNMPI_DATA names, but not these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NNMPI_DATA", raising=False)
    (tmp_path / "nnmpi").mkdir()
    (tmp_path / "nnmpi").chmod(0o775)
    assert cache_folder().stat().st_mode & 0o777 == 0o755
    theirs = kernels_folder()
    for folder in (theirs, theirs.parent):
        os.chown(folder, 12345, -1)
        usage_error(rf"{folder} belongs to another user", kernels_folder)
        os.chown(folder, 0, -1)
    monkeypatch.setenv("NNMPI_DATA", str(tmp_path / "shared"))
    assert kernels_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "dataset", ["paradise-lost --model lstm --features 8", "digits --model mlp --jit"]
)
def test_bundled_data_need_no_home_that_can_be_written(monkeypatch, tmp_path, dataset):
    for name in ("NNMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").write_text("")  # nobody can write below it, root neither
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    kept = tmp_path / "tmp" / f"nnmpi-{os.getuid()}"
    assert cache_folder() == kept and kept.stat().st_mode & 0o777 == 0o700
    words = f"--dataset {dataset} --max-steps 2 --eval-every 0 --quiet --out"
    on_ranks(train, [*words.split(), str(tmp_path / "run")], 2)
    shutil.rmtree(kept)
    kept.symlink_to(tmp_path)
    usage_error(f"{kept} is a link", cache_folder)


def test_a_user_without_a_home_is_told_what_to_name(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NNMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    usage_error(r"NNMPI_DATA", cache_folder)
    monkeypatch.setenv("NNMPI_DATA", "~no-such-user/data")
    usage_error(r"^\$NNMPI_DATA ~no-such-user/data: the system has no home folder", cache_folder)


def test_lock_lets_one_in_at_a_time(tmp_path):
    inside, seen = [], []

    def visit():
        with locked(tmp_path / "new" / "folder"):
            inside.append(1)
            seen.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [1, 1, 1, 1]


def test_lock_that_is_held_too_long_is_an_error(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(UsageError, match="another process"),
        locked(tmp_path, patience_s=0.1),
    ):
        pass


def test_lock_is_free_after_an_exception(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path, patience_s=0.1):
        pass


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UsageError, match=r"file/folder cannot be written .*NNMPI_DATA"),
        locked(tmp_path / "file/folder"),
    ):
        pass
