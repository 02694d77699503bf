"""The wall around a solution's process: what Linux itself lets it do.

    seccomp    no system call but those that compute, read, and write to what is open already: no
               signals, processes, files, names, sockets or timers; by libseccomp, which apt needs
    Landlock   no file but those of Python, NumPy and the submission; of Linux 5.13 and later

Neither needs rights: both hold for root and for anybody, also in a container, where namespaces and
other users often are not to be had. Neither can be taken down, whatever is done to the interpreter.
Where a system has none of them, the audit hook of `exercise.child` stands alone.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

CALLS = """
read readv pread64 write writev lseek close fstat newfstatat stat lstat statx getdents64 getcwd
access faccessat faccessat2 mmap munmap mremap mprotect brk madvise futex membarrier rseq
sigaltstack rt_sigreturn restart_syscall clock_gettime clock_getres gettimeofday time nanosleep
clock_nanosleep sched_yield select pselect6 poll ppoll getrandom getpid gettid getuid geteuid getgid
getegid getrusage sched_getaffinity uname sysinfo exit exit_group
"""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM  # libseccomp's SCMP_ACT_ALLOW, _ERRNO
MASKED_EQUAL = 7  # libseccomp's SCMP_CMP_MASKED_EQ
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NO_NEW_PRIVS = 38  # of prctl
# Landlock's calls have these numbers on all processors
RULESET, RULE, RESTRICT = 444, 445, 446
FILE_RIGHTS = 13, 14, 15, 15, 16  # the number of rights of each of its versions from 1 on
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
NETWORK_FROM, SCOPES_FROM = 4, 6  # the versions that also refuse sockets, and signals


class _Comparison(ctypes.Structure):
    """A condition on the argument of a system call: libseccomp's scmp_arg_cmp."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def raise_wall(readable: Iterable[str], listed: Iterable[str], seconds: int) -> None:
    """Put up as much of the wall as this system has, for good.

    Args:
        readable: files, and folders with all in them, that may be read.
        listed: folders of which only the names may be read.
        seconds: by the clock, after which the process ends, should nobody be left to end it.
    """
    library = None
    with suppress(OSError, AttributeError, TypeError):  # the last on Windows
        ctypes.CDLL(None).alarm(seconds)
    with suppress(OSError):
        library = ctypes.CDLL("libseccomp.so.2")  # a file that Landlock would refuse
    with suppress(OSError, AttributeError, TypeError):
        _limit_files(readable, listed)
    if library is not None:
        _limit_calls(library)


def _limit_files(readable: Iterable[str], listed: Iterable[str]) -> None:
    """Refuse all files but these, by Landlock.

    Raises:
        OSError, AttributeError: on a system without it.
    """
    system = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *values: object) -> int:
        result = int(system.syscall(ctypes.c_long(number), *values))
        if result < 0:
            raise OSError(ctypes.get_errno(), "Landlock refuses")
        return result

    version = call(RULESET, None, ctypes.c_size_t(0), ctypes.c_int(1))
    rights = (1 << FILE_RIGHTS[min(version, len(FILE_RIGHTS)) - 1]) - 1
    words = [rights, *[3] * (version >= NETWORK_FROM), *[3] * (version >= SCOPES_FROM)]
    ruleset = call(
        RULESET, struct.pack(f"{len(words)}Q", *words), ctypes.c_size_t(8 * len(words)), 0
    )
    for path, right in [
        *((path, READ_FILE | READ_FOLDER) for path in readable),
        *((path, READ_FOLDER) for path in listed),
    ]:
        with suppress(FileNotFoundError):
            number = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = right if os.path.isdir(path) else right & READ_FILE
            call(RULE, ruleset, 1, struct.pack("=Qi", allowed, number), 0)
            os.close(number)
    system.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    call(RESTRICT, ruleset, 0)
    os.close(ruleset)


def _limit_calls(library: ctypes.CDLL) -> None:
    """Refuse all system calls but CALLS and opening to read, by libseccomp, if the system can."""
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(REFUSE)))
    reading = {"open": 1, "openat": 2}  # the argument with the flags
    for name in (*CALLS.split(), *reading):
        number = library.seccomp_syscall_resolve_name(name.encode())
        condition = _Comparison(reading.get(name, 0), MASKED_EQUAL, WRITES, 0)
        count = int(name in reading)
        # a processor may lack a call, such as open: its rule is refused
        library.seccomp_rule_add_array(
            rules, ctypes.c_uint32(ALLOW), number, ctypes.c_uint(count), ctypes.byref(condition)
        )
    library.seccomp_load(rules)
