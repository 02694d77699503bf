"""A disk that fails on purpose: full at some point, cut off in the middle of a write, without what
was not synced.

    with FaultyDisk(folder, dies_at=17, draws=Random(3)) as disk:
        simulate(train, 3)                  # the rank that does the 17th operation is killed in it
    disk.lose()                             # the power went, too: what was not brought to the disk
                                            may be gone

    at_each_operation(place, "kill", work, check)       # what is there when work ended in its first
                                                        # operation, in its second, ...

What the disk promises is what POSIX does, and no more. A file's content is safe once it was synced;
before, any part of its end may be missing. That a name exists, has gone, or belongs to another file
is safe once its folder was synced; before, of what was done in a folder, the last of it may be
undone. (CrashMonkey and ALICE test file systems and databases in this way: Mohan et al., OSDI 2018;
Pillai et al., OSDI 2014.)

The program is not changed: the functions of `os`, `io` and `shutil` that it calls are replaced
while the block runs, for paths below the folder. A rank that is only cleared away, because another
one was killed, changes nothing any more.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from nnmpi.base import clock
from nnmpi.base.errors import NnmpiError
from nnmpi.comm.simulated.simulated_world import SimulatedWorld

Tree = dict[str, bytes | None]
"""Files by path below a place, with their content; folders with None. "" is the place itself."""


@dataclass
class _Act:
    """Something that was done to a name and is not safe yet."""

    kind: str
    path: str
    source: str = ""
    before: Tree | None = None


class Killed(BaseException):
    """The process was killed in the operation."""


class FaultyDisk(AbstractContextManager["FaultyDisk"]):
    """The disk below a folder.

    Args:
        root: the folder.
        draws: decides how much of a write comes through, and what is lost.
        dies_at: in which operation the rank is killed that does it, from 1; 0 for none. Outside of
            a simulated world, `Killed` is raised, and nothing changes any more.
        full_at: from which operation on nothing more can be written; 0 for never.
        fails_at: which operation fails, and only that one, as of a damaged disk; 0 for none.

    Attributes:
        operations: how many there were so far.
    """

    def __init__(self, root, draws, dies_at=0, full_at=0, fails_at=0):
        self.root, self.operations = os.path.abspath(root), 0
        self._draws, self._dies_at, self._full_at = draws, dies_at, full_at
        self._fails_at, self._is_dead = fails_at, False
        self._acts = []
        self._safe_bytes = {}  # of files that were written to and not synced since
        self._before = []

    def __enter__(self):
        """Take the place of the system's functions."""
        for module, name, work in (
            (io, "open", self._open),
            (builtins, "open", self._open),
            (os, "fsync", self._fsync),
            (os, "rename", self._rename),
            (os, "replace", self._rename),
            (os, "mkdir", self._mkdir),
            (os, "unlink", self._remove),
            (os, "rmdir", self._rmdir),
            (shutil, "rmtree", self._rmtree),
        ):
            self._before.append((module, name, getattr(module, name)))
            setattr(module, name, self._guarded(work, getattr(module, name)))
        return self

    def __exit__(self, *failure):
        """Give them back."""
        while self._before:
            setattr(*self._before.pop())

    def lose(self):
        """Lose some of what was not brought to the disk, after the end of all."""
        done = {}
        for act in self._acts:
            done.setdefault(os.path.dirname(act.path), []).append(act)
        undone = [
            act for acts in done.values() for act in acts[self._draws.randrange(len(acts) + 1) :]
        ]
        for act in reversed(list(self._acts)):
            self._acts.remove(act)
            if act in undone:
                self._undo(act)
        for path, safe in self._safe_bytes.items():
            if os.path.isfile(path) and self._draws.random() < 0.5:
                os.truncate(path, self._draws.randint(safe, max(safe, os.path.getsize(path))))

    # ---- operations ----

    def _guarded(self, work, real):
        """Return a function that does the work below the folder, and the system's elsewhere."""

        def guarded(path, *args, **kwargs):
            if work == self._fsync:
                place = os.readlink(f"/proc/self/fd/{path}")
            elif isinstance(path, str | os.PathLike):
                number = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
                below = "" if number is None else os.readlink(f"/proc/self/fd/{number}")
                place = os.path.abspath(os.path.join(below, path))
            else:
                place = ""
            inside = (place + os.sep).startswith(self.root + os.sep)
            if inside or place == os.path.dirname(self.root) and work == self._fsync:
                return work(real, place, path, *args, **kwargs)
            return real(path, *args, **kwargs)

        return guarded

    def _begin(self, writes=True):
        """Begin an operation; return whether it is still seen by anybody.

        Raises:
            OSError: when the disk is full.
        """
        world = clock._clock.get()
        if isinstance(world, SimulatedWorld) and world._scheduler.failure is not None:
            return False
        if self._is_dead:
            return False
        self.operations += 1
        if self.operations == self._dies_at:
            self._die()
        if self.operations == self._fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if writes and self._full_at and self.operations >= self._full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def _die(self):
        world = clock._clock.get()
        if not isinstance(world, SimulatedWorld):
            self._is_dead = True
            raise Killed
        world._scheduler.begin_call(world._local)
        world._scheduler.halt(
            world._local, f"was killed in operation {self.operations} of the disk"
        )

    def _open(self, real, place, path, mode="r", *args, **kwargs):
        if mode in ("w", "a"):  # of a text that nobody relies on: opening it is the operation
            is_seen = self._begin(writes=not os.path.exists(place))
            return real(path, mode, *args, **kwargs) if is_seen else real(os.devnull, mode)
        if mode not in ("wb", "ab"):
            return real(path, mode, *args, **kwargs)
        if not self._begin(writes=not os.path.exists(place)):
            return real(os.devnull, mode)
        if not os.path.exists(place):
            self._acts.append(_Act("create", place))
        stream = real(path, mode, buffering=0)
        self._safe_bytes.setdefault(place, stream.seek(0, os.SEEK_END))
        return _Stream(stream, self)

    def _write(self, stream, content):
        data = memoryview(content).cast("B")
        ends = (self._dies_at, self._full_at, self._fails_at)
        if self.operations + 1 in ends and not self._is_dead:  # a part of it comes through
            world = clock._clock.get()
            if not (isinstance(world, SimulatedWorld) and world._scheduler.failure):
                stream.write(data[: self._draws.randrange(len(data) + 1)])
        if self._begin():
            stream.write(data)
        return len(data)

    def _fsync(self, real, place, number):
        if not self._begin(writes=False):
            return
        if os.path.isdir(place):
            self._settle(place)
        else:
            self._safe_bytes.pop(place, None)

    def _rename(self, real, place, path, target, **at):
        if not self._begin(writes=False):
            return
        aim = os.path.join(os.path.dirname(place), target) if at else os.path.abspath(target)
        before = read_tree(aim)
        real(place, aim)
        self._move(place, aim)
        self._acts.append(_Act("rename", aim, place, before))

    def _mkdir(self, real, place, path, *args, **kwargs):
        if self._begin():
            real(path, *args, **kwargs)
            self._acts.append(_Act("create", place))

    def _remove(self, real, place, path, **at):
        if self._begin(writes=False):
            before = read_tree(place)
            real(path, **at)
            self._acts.append(_Act("remove", place, before=before))

    def _rmdir(self, real, place, path, **at):
        if self._begin(writes=False):
            real(path, **at)
            self._acts.append(_Act("remove", place, before={"": None}))

    def _rmtree(self, real, place, path, **how):
        """Remove file by file, and be killed or hindered between two of them."""
        with suppress(OSError) if how.get("ignore_errors") else nullcontext():
            for folder, _, names in os.walk(place, topdown=False):
                for name in names:
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)

    # ---- what is not safe ----

    def _settle(self, place):
        """Let be safe what was done in a folder. What was in a folder that is gone from there comes
        back no more.
        """
        safe = {
            number for number, act in enumerate(self._acts) if os.path.dirname(act.path) == place
        }
        gone = {
            self._acts[number].path: number
            for number in safe
            if self._acts[number].before == {"": None}
        }
        saved = []
        for number, act in enumerate(self._acts):
            if number not in safe and number > gone.get(os.path.dirname(act.path), -1):
                saved.append(act)
        self._acts = saved

    def _move(self, source, target):
        """Let what is known of a place go with it to another one."""

        def moved(path):
            return (
                target + path[len(source) :]
                if (path + os.sep).startswith(source + os.sep)
                else path
            )

        for act in self._acts:
            act.path, act.source = moved(act.path), moved(act.source) if act.source else ""
        self._safe_bytes = {moved(path): safe for path, safe in self._safe_bytes.items()}

    def _undo(self, act):
        with suppress(OSError):
            if act.kind == "rename":
                os.rename(act.path, act.source)
                self._move(act.path, act.source)
            elif act.kind == "create":
                shutil.rmtree(act.path) if os.path.isdir(act.path) else os.unlink(act.path)
            if act.before:
                write_tree(act.path, act.before)


class _Stream:
    """A file open for writing, without a buffer: a killed program's is lost anyway."""

    def __init__(self, stream, disk):
        self._stream, self._disk = stream, disk
        self.fileno, self.close, self.tell, self.truncate = (
            stream.fileno,
            stream.close,
            stream.tell,
            stream.truncate,
        )
        self.name, self.seek = stream.name, stream.seek

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.close()

    def flush(self):
        """Do nothing."""

    def write(self, content):
        """Write it, or a part of it and be killed."""
        return self._disk._write(self._stream, content)


FAULTS = {"kill": "dies_at", "full": "full_at", "error": "fails_at"}


def at_each_operation(place, fault, work, check, prepare=lambda folder: None, numbers=None):
    """Do some work again and again, each time with a fault in another operation of the disk.

    Args:
        place: for the folders, a new one each time.
        fault: of `FAULTS`: the work is killed, the disk is full from then on, or fails once.
        work: called with the folder.
        check: called with the folder, and the error in which the work ended, or None.
        prepare: called with the folder before the disk is faulty.
        numbers: of the operations; all by default.

    Returns:
        How often it was done.
    """
    done = 0
    for number in count(1) if numbers is None else numbers:
        folder, ended = place / f"{fault}-{number}", None
        folder.mkdir()
        prepare(folder)
        disk = FaultyDisk(folder, Random(number), **{FAULTS[fault]: number})
        try:
            with disk:
                work(folder)
        except (Killed, NnmpiError, OSError) as error:
            ended = error
        if disk.operations < number:
            assert ended is None, ended
            shutil.rmtree(folder)
            break
        try:
            check(folder, ended)
        except BaseException as error:
            error.add_note(f"with the fault {fault} in operation {number}, which gave {ended!r}")
            raise
        shutil.rmtree(folder)
        done += 1
    return done


def read_tree(place):
    """Return what lies in a place; None where there is nothing."""
    if os.path.isfile(place):
        return {"": Path(place).read_bytes()}
    if not os.path.isdir(place):
        return None
    result = {"": None}
    for path in Path(place).rglob("*"):
        result[str(path.relative_to(place))] = path.read_bytes() if path.is_file() else None
    return result


def write_tree(place, tree):
    """Put a tree back where it was."""
    for name, content in tree.items():
        path = Path(place, name)
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
