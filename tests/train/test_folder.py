"""A run's folder is never shared with another run, and what cannot be written is a usage error."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from errno import EDQUOT, ENOSPC, EROFS
from fcntl import LOCK_EX, flock
from functools import partial
from os import EX_CANTCREAT
from pathlib import Path
from time import sleep

import pytest

import nnmpi.train.session as training
from nnmpi.base import files
from nnmpi.base.errors import LayoutError, UsageError
from nnmpi.base.files import LOCK_FILE, is_locked, locked, write_atomically
from nnmpi.lab.run import count_lines
from nnmpi.train.cli import main
from nnmpi.train.config import Config, assemble, flatten
from nnmpi.train.folder import RunFolder, default_folder
from tests.data.locked import lock
from tests.harness.commands import on_ranks
from tests.harness.refusals import refuses, usage_error


def test_the_resolved_configuration_lies_in_the_folder(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.check_free()
    folder.make()
    folder.create(flatten(Config()))
    assert assemble(json.loads(folder.config.read_text())) == Config()
    assert [item.name for item in folder.path.iterdir()] == ["config.json"]


def test_a_folder_with_a_run_is_refused(tmp_path):
    RunFolder(tmp_path).create(flatten(Config()))
    usage_error(
        f"already holds a run .* with --resume {tmp_path}", lambda: RunFolder(tmp_path).check_free()
    )


def test_what_is_no_folder_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    usage_error("is a file", lambda: RunFolder(file).check_free())
    usage_error(
        r"cannot be written \(Not a directory\)",
        lambda: RunFolder(file / "below").make(),
    )


def test_a_place_that_the_system_refuses_is_named_with_its_reason(tmp_path, monkeypatch):
    usage_error(
        r"--out .*aaa cannot be written \(File name too long\); give a writable folder",
        lambda: RunFolder(tmp_path / ("a" * 300)).check_free(),
    )
    lock(tmp_path, monkeypatch)
    usage_error(
        r"--out .*/y cannot be written \(Permission denied\); give a writable folder",
        lambda: RunFolder(tmp_path / "y").check_free(),
    )
    usage_error(
        rf"the folder {tmp_path} cannot be written \(Permission denied\); give another",
        lambda: default_folder(Config(), tmp_path),
    )


def test_default_names_are_not_taken_twice(tmp_path):
    """By jobs that begin in the same second, of which none has written anything yet."""
    result = {default_folder(Config(), tmp_path) for _ in range(3)}
    assert len(result) == 3
    assert all(
        item.name.startswith("digits-cnn-20") and not list(item.iterdir()) for item in result
    )


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LayoutError):
        on_ranks(main, "--dataset iris --model mlp --pp 7", 7)
    assert not list(Path("runs").iterdir())


def test_what_a_kill_leaves_beside_a_file_is_gone_after_the_next_write(tmp_path):
    def killed(file, content, root=None):
        file.write_bytes(content[:3])
        os._exit(9)

    child = os.fork()
    if child == 0:
        files.write_synced = killed
        write_atomically(tmp_path / "latest", b"step-1")
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    write_atomically(tmp_path / "latest", b"step-2")
    assert [item.name for item in tmp_path.iterdir()] == ["latest"]
    os.mkfifo(tmp_path / "pipe")  # as root would /dev/null
    refuses(OSError, "not an ordinary file", write_atomically, tmp_path / "pipe", b"step-3")
    assert (tmp_path / "pipe").is_fifo()


def test_commands_write_a_file_one_after_the_other(tmp_path, monkeypatch):
    def slow(*args):
        real(*args)
        sleep(0.1)

    real = files.write_synced
    monkeypatch.setattr(files, "write_synced", slow)
    monkeypatch.setattr(files, "PATIENCE", 20)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write_atomically, [tmp_path / "report.html"] * 3, [b"a", b"b", b"c"]))
    assert len(list(tmp_path.iterdir())) == 1
    with (tmp_path / ".report.html.tmp").open("wb") as stopped:
        flock(stopped, LOCK_EX)
        write_atomically(tmp_path / "report.html", b"d")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("left", ["file", "link", "pipe"])
def test_what_a_killed_writer_left_is_no_obstacle(tmp_path, monkeypatch, left):
    monkeypatch.setattr(files, "sleep", lambda seconds: pytest.fail("it waits"))
    temporary, mine = tmp_path / ".config.json.tmp", tmp_path / "mine"
    mine.write_bytes(b"mine")
    if left == "file":
        temporary.write_bytes(b"half")
    elif left == "link":
        temporary.symlink_to(mine)
    else:
        os.mkfifo(temporary)
    write_atomically(tmp_path / "config.json", b"whole")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {
        "config.json": b"whole",
        "mine": b"mine",
    }


def test_who_locks_the_folder_delays_no_write(tmp_path, monkeypatch):
    """As `flock RUN nnmpi train --resume RUN` does, whose command inherits the lock."""
    monkeypatch.setattr(files, "sleep", lambda seconds: pytest.fail("it waits"))
    users = os.open(tmp_path, os.O_RDONLY)
    flock(users, LOCK_EX)
    write_atomically(tmp_path / "config.json", b"whole")
    with locked(tmp_path):
        write_atomically(tmp_path / "config.json", b"again")
    os.close(users)


def test_many_writers_of_one_file(tmp_path):
    """Each writes it whole, and nobody removes what another one is about to rename."""
    with ThreadPoolExecutor(16) as pool:
        texts = [bytes([65 + n]) * 1000 for n in range(16)] * 8
        list(pool.map(write_atomically, [tmp_path / "evaluation.json"] * len(texts), texts))
    assert [file.name for file in tmp_path.iterdir()] == ["evaluation.json"]
    assert (tmp_path / "evaluation.json").read_bytes() in texts


def test_a_text_is_whole_and_a_link_is_kept(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write_text(tmp_path / "link", "first")
    assert (tmp_path / "link").is_symlink()

    def full(file, content, root=None):
        file.write_bytes(content[:3])
        raise OSError("No space left on device")

    monkeypatch.setattr(files, "write_synced", full)
    refuses(OSError, "No space", files.write_text, tmp_path / "file", "second")
    assert (tmp_path / "file").read_text() == "first"


# One job at a time writes a run.


def test_a_lock_follows_no_link(tmp_path):
    """Of whichever version filelock is: before 3.20.3 it emptied the file."""
    mine = tmp_path / "mine.txt"
    mine.write_text("precious")
    (tmp_path / "shared").mkdir()
    for to in (mine, tmp_path / "missing"):
        (tmp_path / "shared" / ".lock").symlink_to(to)
        for call in (
            lambda: locked(tmp_path / "shared").__enter__(),
            partial(is_locked, tmp_path / "shared"),
        ):
            usage_error(r"shared/\.lock is a link", call)
        (tmp_path / "shared" / ".lock").unlink()
    assert mine.read_text() == "precious" and not (tmp_path / "missing").exists()


@pytest.mark.parametrize("number", [ENOSPC, EDQUOT, EROFS])
def test_a_full_disk_at_the_lock_has_a_full_disks_status(tmp_path, monkeypatch, number):
    real = os.open

    def full(path, *args, **more):
        if str(path).endswith(LOCK_FILE):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(UsageError, match="cannot be written") as told, locked(tmp_path):
        pass
    assert told.value.exit_status == EX_CANTCREAT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_may_only_read_sees_that_a_run_goes_on(tmp_path):
    tmp_path.chmod(0o755)
    here = os.open(tmp_path, os.O_RDONLY)  # others may not enter pytest's folder
    with locked(tmp_path):
        before = {file.name for file in tmp_path.iterdir()}
        if not (child := os.fork()):
            os.fchdir(here)
            os.setuid(65534)
            os._exit(7 if is_locked(Path()) else 8)
        os.close(here)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not is_locked(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == before
    (tmp_path / "new").mkdir()
    assert not is_locked(tmp_path / "new") and not [*(tmp_path / "new").iterdir()]


def test_a_folder_has_one_holder_at_a_time(tmp_path):
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(UsageError, match="in use"), locked(tmp_path, 0.0):
            pass
    assert not is_locked(tmp_path)


def test_a_run_in_use_is_neither_resumed_nor_written_over(group, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PATIENCE_S", 0.0)
    run, words = tmp_path / "run", "--model mlp --dataset iris --max-steps 2"
    main(f"{words} --out {run}".split(), group)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with locked(run), locked(tmp_path / "new"):
        for more in (f"--resume {run} --max-steps 3", f"{words} --out {tmp_path / 'new'}"):
            with pytest.raises(UsageError, match="is in use"):
                main(more.split(), group)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert [item.name for item in (tmp_path / "new").iterdir()] == [LOCK_FILE]
    main(f"--resume {run} --max-steps 3".split(), group)


def test_a_current_folder_that_is_gone_does_not_end_a_run(tmp_path, monkeypatch):
    """A job's scratch folder was removed; the run is elsewhere."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    words = ["--dataset", "iris", "--model", "mlp", "--max-steps", "1", "--quiet"]
    on_ranks(main, [*words, "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "finished.json").is_file()


def test_a_pipe_in_a_run_is_not_opened(tmp_path):
    """Nobody writes into it, so that its reader would wait for ever."""
    folder = RunFolder(tmp_path)
    folder.create(flatten(Config()))
    folder.starts.write_text("")
    os.mkfifo(folder.console)
    folder.note_error(UsageError("another"))
    assert count_lines(folder.starts) == count_lines(folder.console) == 0
