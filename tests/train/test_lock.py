"""One job at a time writes a run."""

from pathlib import Path

import pytest

from nnmpi.comm.group import Group
from nnmpi.errors import UsageError
from nnmpi.train import session
from nnmpi.train.cli import main
from nnmpi.train.folder import FolderLock


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as first:
        first.take()
        with pytest.raises(UsageError, match="is in use by another job"), FolderLock(tmp_path, 0.0) as second:
            second.take()
    with FolderLock(tmp_path, 0.0) as third:
        third.take()
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_use_is_neither_resumed_nor_written_over(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FolderLock", lambda folder: FolderLock(folder, 0.0))
    run, words = tmp_path / "run", "--model mlp --dataset iris --max-steps 2"
    main(f"{words} --out {run}".split(), group)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    (tmp_path / "new").mkdir()
    with FolderLock(run) as one, FolderLock(tmp_path / "new") as other:
        one.take()
        other.take()
        for more in (f"--resume {run} --max-steps 3", f"{words} --out {tmp_path / 'new'}"):
            with pytest.raises(UsageError, match="is in use by another job"):
                main(more.split(), group)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert list((tmp_path / "new").iterdir()) == []
    main(f"--resume {run} --max-steps 3".split(), group)
