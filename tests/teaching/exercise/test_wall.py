"""Behind the wall Linux itself refuses what a solution has no need of, without the audit hook."""

import ctypes
import json
import os
import subprocess
import sys
from functools import cache

import pytest

# What a process behind the wall tries, and what it must be able to do.
TRIES = """
import ctypes, json, os, signal, socket, subprocess, sys, threading
import numpy
from nnmpi.teaching.exercise.wall import raise_wall

secret, library = sys.argv[1], os.path.dirname(os.__file__)
raise_wall(
    [item.path for item in os.scandir(library) if item.name != "site-packages"], [library], 50
)
folder = os.path.dirname(secret)
tries = {
    "kill": lambda: os.kill(os.getppid(), 0),
    "killpg": lambda: os.killpg(os.getpgid(os.getppid()), 0),
    "pidfd": lambda: os.pidfd_open(os.getppid()),
    "fork": os.fork,
    "spawn": lambda: subprocess.Popen(["true"]),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "thread": lambda: threading.Thread(target=print).start(),
    "write": lambda: open(secret, "w"),
    "append": lambda: os.open(secret, os.O_APPEND | os.O_WRONLY),
    "unlink": lambda: os.unlink(secret),
    "rename": lambda: os.rename(secret, secret + "2"),
    "truncate": lambda: os.truncate(secret, 0),
    "chmod": lambda: os.chmod(secret, 0),
    "utime": lambda: os.utime(secret),
    "mkdir": lambda: os.mkdir(folder + "/d"),
    "mkfifo": lambda: os.mkfifo(folder + "/f"),
    "link": lambda: os.link(secret, folder + "/l"),
    "symlink": lambda: os.symlink(secret, folder + "/s"),
    "readlink": lambda: os.readlink("/proc/self/exe"),
    "socket": lambda: socket.socket(),
    "socketpair": lambda: socket.socketpair(),
    "memory": lambda: os.memfd_create("m"),
    "handler": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "mask": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]),
    "timer": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    "priority": lambda: os.nice(1),
    "read": lambda: open(secret).read(),
    "list": lambda: os.listdir(folder),
    "processes": lambda: open(f"/proc/{os.getppid()}/environ").read(),
}
free = []
for name, act in tries.items():
    try:
        act()
        free.append(name)
    except (OSError, RuntimeError):
        pass
values = numpy.linalg.svd(numpy.eye(100))[1].sum(), len(open(os.__file__).read()) > 9
print(json.dumps([free, float(values[0]), values[1]]), flush=True)
os._exit(0)
"""
READS = {"read", "list", "processes"}  # for which Landlock is needed


@cache
def has_landlock():
    """Return whether this system has it."""
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the wall is Linux's")
def test_nothing_but_computing_is_left(tmp_path):
    """Root's process has no more than anybody's."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(secret)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        cwd="/",
    )
    free, total, reads = json.loads(done.stdout)
    assert not {*free} - (set() if has_landlock() else READS), done.stderr
    assert (total, reads) == (100.0, True)
    assert [*tmp_path.iterdir()] == [secret] and secret.read_text() == "mine"
