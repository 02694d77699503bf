"""Cheats and defects to plant: an exercise, what is handed in for it, and what must be said.

A text without `def` at its top is the body of the function; PACKAGE is where nnmpi lies, OTHER
another's submission.
"""

from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from nnmpi.teaching.exercise.exercises import EXERCISES

RING, COST, ROW, ZERO, RULE = (
    "ring-all-reduce",
    "ring-cost",
    "row-linear",
    "zero-update",
    "ssp-rule",
)
NO_VALUE, NOT_THERE = (
    r"ended its process \(status -?\d+\) and returned no value",
    "No module named 'nnmpi.comm.algorithms.* for solutions, which have NumPy",
)
TOO_LONG, MAY_NOT = "is not over after 3 s", "PermissionError.*: a solution may not "
UNPROVED = "on 2 ranks: rank 0 ends without the part of rank 1 in chunk 0"
SUM = "y = (x @ w).ravel()\ngroup.all_reduce(y)\nreturn y.reshape(3, 5)"


@dataclass(frozen=True)
class Cheat:
    """What is handed in.

    Attributes:
        what: in a few words.
        exercise: for which.
        text: of the file, or the function's body.
        told: a regular expression that the sentence has.
        status: what the criterion gets.
        more: of the criterion.
    """

    what: str
    exercise: str
    text: str
    told: str
    status: str = "failed"
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self):
        """The file."""
        exercise = EXERCISES[self.exercise]
        if "def " in self.text:
            return self.text
        body = indent(self.text, "    ")
        return (
            f"import os\nimport sys\n\n\ndef {exercise.function}({exercise.arguments}):\n{body}\n"
        )


def _ending():
    """Yield ways to end, or never to."""
    yield Cheat("ends with status 0", RING, "os._exit(0)", NO_VALUE)
    yield Cheat("ends while it is imported", RING, "import os\nos._exit(0)\ndef f(): ...", NO_VALUE)
    atexit = (
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef ring_all_reduce(*_):\n   "
        " return ()"
    )
    yield Cheat("a hook at its end", RING, atexit, "No module named 'atexit'")
    yield Cheat("sys.exit", RING, "sys.exit(0)", "raised SystemExit")
    yield Cheat(
        "SystemExit while it is imported",
        RING,
        "raise SystemExit(0)\ndef f(): ...",
        "ends the program",
    )
    yield Cheat("KeyboardInterrupt", RING, "raise KeyboardInterrupt", "raised KeyboardInterrupt")
    yield Cheat("aborts", RING, "os.abort()", NO_VALUE)
    closed = "import time\nos.closerange(3, 99)\ntime.sleep(100)"
    yield Cheat("closes its streams and sleeps", RING, closed, NO_VALUE)
    yield Cheat(
        "rank 1 ends, the others wait", ROW, f"if group.rank:\n    os._exit(0)\n{SUM}", NO_VALUE
    )
    loop = (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n "
        "       pass"
    )
    for what, text in (
        ("a loop", "while True: pass"),
        ("a loop that catches all", loop),
        ("a loop at import", "while True: pass\ndef f(): ..."),
        ("sleep", "import time\ntime.sleep(100)"),
        ("a loop of a rank", f"while group.rank: pass\n{SUM}"),
    ):
        yield Cheat(what, ROW if "group" in text else RING, text, TOO_LONG, "timeout")
    pipe = "os.read(os.pipe()[0], 1)"  # behind the wall there are no new pipes
    yield Cheat("waits for what never comes", RING, pipe, f"not permitted|{TOO_LONG}", "*")
    yield Cheat(
        "much memory",
        RING,
        "return bytearray(8 << 30)",
        "MemoryError.*; 1,073,741,824 bytes are the limit",
    )
    yield Cheat("more and more memory", RING, "x = [0]\nwhile True:\n    x += x", "MemoryError")
    yield Cheat("a recursion", RING, "return ring_all_reduce(rank, size)", "RecursionError")


def _saying():
    """Yield what only says that it is right."""
    right = "ring-all-reduce: right on 1, 2, 3, 4, 5, 8 ranks"
    yield Cheat("prints that it is right", RING, f"print({right!r})\nreturn ()", UNPROVED)
    yield Cheat(
        "writes it to the streams",
        RING,
        f"[os.write(n, b{right!r}) for n in (1, 2)]\nreturn []",
        UNPROVED,
    )
    every = "for n in range(3, 20):\n    try:\n        os.write(n, b'{\"result\": null}\\n')\n"
    every += "    except OSError:\n        pass\nreturn ()"
    yield Cheat(
        "writes to all it has",
        RING,
        every,
        "returns no readable value: its output is not a message",
    )
    found = (
        "frame = sys._getframe()\nwhile 'wire' not in frame.f_locals:\n    frame = frame.f_back\n"
    )
    frame = f"{found}frame.f_locals['wire'].send('result', 'right', [])\nreturn ()"
    yield Cheat(
        "answers with the check's own word", RING, frame, "gives a str; give a list of Step"
    )
    raised = "import gc\nfor each in gc.get_objects():\n    if type(each).__name__ == 'Frames':\n"
    raised += "        each.send('result', 'right', [])\nreturn ()"
    yield Cheat("looks for the streams", RING, raised, "No module named 'gc'")
    yield Cheat("says right", RING, "return 'right'", "gives a str; give a list of Step")
    yield Cheat("returns True", RING, "return True", "gives a bool; give a list of Step")
    patched = "import nnmpi.teaching.exercise.wire as wire\n"
    patched += "wire.Frames._pack = lambda *_: ['result', 'right', []]\nreturn ()"
    yield Cheat("patches nnmpi where it runs", RING, patched, "gives a str; give a list of Step")
    equal = (
        "class Yes:\n    def __eq__(self, other):\n        return True\n\ndef ssp_rule(*_):\n   "
        " return Yes()"
    )
    yield Cheat("is equal to everything", RULE, equal, "it gives .*Yes.*, but must give")
    number = "class Near(float):\n    def __eq__(self, other):\n        return True\n\n"
    yield Cheat(
        "a number that is every number",
        COST,
        f"{number}def ring_cost(*_):\n    return Near(1)",
        "must give a nu",
    )


def _hostile():
    """Yield values that are to harm who reads them."""
    step = "from nnmpi.comm.collective import Step\n"
    many = f"{step}return [Step(to=1 - rank, send=range(10**12))] if size == 2 else ()"
    yield Cheat("a million million chunks", RING, many, "more than 1048576 numbers")
    yield Cheat(
        "steps without end",
        RING,
        f"{step}while True:\n    yield Step()",
        "not over after 3 s|Memory|limit",
        "*",
    )
    yield Cheat("a hundred million bytes", RING, "return 'x' * 10**8", "returned no value|limit")
    yield Cheat("a large file", RING, f"return {'0' * 2**18}", "has more than 131,072 bytes")
    yield Cheat("text that no parser can take", RING, f"return {'(' * 10**5}", "line 6")
    yield Cheat(
        "lists in lists",
        RING,
        "x = []\nfor _ in range(10**5):\n    x = [x]\nreturn x",
        "RecursionError",
    )
    yield Cheat("a list in itself", RING, "x = []\nx.append(x)\nreturn x", "RecursionError")
    yield Cheat("a number of ten thousand digits", RULE, "return 10**10000", "ValueError")
    chunk = (
        f"{step}return [Step(to=1 - rank, send=[7], from_=1 - rank, recv=[7])] if size == 2 else ()"
    )
    yield Cheat("chunks that there are not", RING, chunk, "chunk 7|cannot judge", "*")
    stage = (
        "from nnmpi.schedule.schedule import Instruction, Kind\nreturn [Instruction(Kind.F, 10**9,"
        " 'x')]"
    )
    yield Cheat(
        "stages that there are not",
        "one-f-one-b",
        stage,
        "1000000000Fx does not belong in 2 stages",
    )
    kind = "from nnmpi.schedule.schedule import Instruction\nreturn [Instruction('F', 0, 0)]"
    yield Cheat("text for a kind", "one-f-one-b", kind, "0F0 does not belong in")
    yield Cheat("text for numbers", ROW, "return 'abc'", "must be numbers of shape")
    yield Cheat(
        "an array of objects",
        ROW,
        "import numpy\nreturn numpy.array([None])",
        "must be numbers of shape",
    )
    yield Cheat("no numbers", ROW, "return x @ w * float('nan')", "is nan, but must be")
    yield Cheat("a function", ROW, "return lambda: 1", "must be numbers of shape")


def _looking():
    """Yield what looks, or goes, where it may not."""
    ring = "from nnmpi.comm.algorithms.ring import ring as ring_all_reduce\ndef f(): ..."
    yield Cheat("imports nnmpi's own", RING, ring, NOT_THERE)
    yield Cheat(
        "imports the table",
        RING,
        "from nnmpi.comm.algorithms import registry\ndef f(): ...",
        NOT_THERE,
    )
    own = "from nnmpi.schedule.schedules import one_f_one_b\ndef f(): ..."
    yield Cheat(
        "imports nnmpi's schedule", "one-f-one-b", own, "No module named 'nnmpi.schedule.schedules'"
    )
    path = (
        "sys.path.insert(0, 'PACKAGE')\nfor name in [*sys.modules]:\n    if"
        " name.startswith('nnmpi'):\n"
    )
    path += (
        "        del sys.modules[name]\nfrom nnmpi.comm.algorithms.ring import ring\nreturn"
        " ring(rank, size)"
    )
    yield Cheat("adds nnmpi to the path", RING, path, "No module named")
    file = "PACKAGE/nnmpi/comm/algorithms/ring.py"
    yield Cheat(
        "reads nnmpi's file", RING, f"exec(open('{file}').read())", f"{MAY_NOT}read .*ring.py"
    )
    loaded = (
        "from importlib.machinery import SourceFileLoader\nreturn SourceFileLoader('r',"
        f" '{file}').load_module()"
    )
    yield Cheat("loads nnmpi's file", RING, loaded, MAY_NOT)
    yield Cheat("lists nnmpi's files", RING, "os.listdir('PACKAGE/nnmpi')", f"{MAY_NOT}read")
    yield Cheat(
        "asks for the checker", RING, "import nnmpi\nnnmpi.simulate(1)", "no attribute 'simulate'"
    )
    yield Cheat("reads another's solution", RING, "return open('OTHER').read()", f"{MAY_NOT}read")
    for what, text, name in (
        ("starts a program", "os.posix_spawn('/bin/true', ['true'], {})", "use os.posix_spawn"),
        ("starts a shell", "os.system('true')", "use os.system"),
        ("forks", "os.fork()", "use os.fork"),
        ("becomes another program", "os.execv('/bin/true', ['true'])", "use os.exec"),
        ("ends the checker", "os.kill(os.getppid(), 9)", "use os.kill"),
        (
            "has the hook's constants changed",
            "import nnmpi.teaching.exercise.child as c\nc.REFUSED, c.LOOKS = '~', ()\nos.fork()",
            "use os.fork",
        ),
        ("writes a file", "open('/tmp/x', 'w')", "write"),
        ("writes another's solution", "open('OTHER', 'a')", "write"),
        ("removes itself", "os.remove(__file__)", "use os.remove"),
        ("removes another's", "os.unlink('OTHER')", "use os.remove"),
        ("reads memory", "import ctypes\nctypes.string_at(0)", "use ctypes"),
    ):
        yield Cheat(what, RING, text, MAY_NOT + name)
    for what, text, name in (
        ("modules that compute nothing", "import gc", "gc"),
        (
            "interpreters",
            "import _xxsubinterpreters as s\ns.run_string(s.create(), 'import os; os.fork()')",
            "_xxsub",
        ),
        ("history of lines", "import readline\nreadline.read_history_file('OTHER')", "readline"),
        (
            "signals by another way",
            "import signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
            "signal",
        ),
        ("her grader's limits", "import resource\nresource.prlimit(os.getppid(), 7, (3, 3))", ""),
        ("shared memory", "import _posixshmem\n_posixshmem.shm_open('x', 66)", "_posixshmem"),
        ("a database", "import sqlite3\nsqlite3.connect('/tmp/x')", "sqlite3"),
        ("sockets", "import socket\nsocket.create_connection(('127.0.0.1', 9))", "socket"),
        (
            "processes",
            "from multiprocessing import Process\nProcess(target=print).start()",
            "multiprocessing",
        ),
    ):
        yield Cheat(
            f"imports {what}", RING, text, f"No module named '{name}" if name else f"{MAY_NOT}use "
        )
    text = "class S(str):\n    def __getitem__(self, at):\n        return 'x'\n"
    text += (
        "    def split(self, *_):\n        return []\n    def startswith(self, *_):\n        return"
        " True\n"
    )
    text += "def ring_all_reduce(*_):\n    open(S('OTHER'))"
    yield Cheat("a path that says what it is", RING, text, f"{MAY_NOT}read")
    patched = "import posixpath\nposixpath._joinrealpath = lambda *_: (os.__file__, True)\n"
    patched += "posixpath.realpath = posixpath.abspath = lambda *_: os.__file__\nopen('OTHER')"
    yield Cheat("patches realpath", RING, patched, f"{MAY_NOT}read")
    frame = (
        "try:\n    open('OTHER')\nexcept OSError as error:\n    cells ="
        " error.__traceback__.tb_next.tb_frame.f_locals\n"
    )
    frame += "    cells['may'].add('gc')"
    yield Cheat(
        "adds to what the hook lets pass", RING, frame, "'frozenset' object has no attribute 'add'"
    )
    switched = frame.replace("['may'].add('gc')", ".update(looks=(), refused=())")
    switched += "\nopen('OTHER')"
    yield Cheat("switches the hook off by its frame", RING, switched, f"{MAY_NOT}read")
    anew = (
        "import _imp\n_imp.create_builtin(type('S', (), {'name': 'posix'})).kill(os.getppid(), 9)"
    )
    yield Cheat("makes a built-in anew", RING, anew, "has no attribute 'create_builtin'")
    up = "open(os.path.dirname(os.__file__) + '/..' * 9 + 'OTHER')"
    yield Cheat("goes up", RING, up, f"{MAY_NOT}read")
    for name in ("mkfifo", "mknod"):
        yield Cheat(name, RING, f"os.{name}('OTHER.{name}')", f"has no attribute '{name}'")
    code = "def f(): return 1\nimport os\nf.__code__ = os.fsdecode.__code__"
    yield Cheat("another's code", RING, code, f"{MAY_NOT}use object.__setattr__")
    yield Cheat(
        "compiled code", RING, "import marshal\nmarshal.loads(b'N')", f"{MAY_NOT}use marshal.loads"
    )
    yield Cheat("asks the group for more", ROW, "return group.comm", "no attribute 'comm'")
    yield Cheat(
        "hands the group a file",
        ROW,
        "group.all_reduce(x[0], '/tmp/evil.py:f')",
        "not lent to the solution",
    )
    inside = (
        "frame = sys._getframe()\nwhile 'wire' not in frame.f_locals:\n    frame = frame.f_back\n"
    )
    inside += "frame.f_locals['wire'].send('ask', 1, '__class__', [], {}, 1)\nreturn 1"
    yield Cheat("asks for what is not lent", ROW, inside, "__class__ is not lent to the solution")


def _wrong():
    """Yield what gets round the exercise, and defects."""
    for exercise, text in (
        ("gathered-linear", "x[:] = 0\nreturn numpy.zeros((3, 5))"),
        ("gathered-gradient", "grad[:] = 0\nreturn numpy.zeros(x.shape), numpy.zeros(w.shape)"),
        ("zero3-partition", "w[:] = 0\nreturn numpy.zeros(-(-w.size // group.size))"),
    ):
        yield Cheat(
            f"makes the inputs 0, {exercise}",
            exercise,
            f"import numpy\n{text}",
            "is 0, but must be",
        )
    known = "s = backward.size * (backward.size + 1) / 2 / (backward.rank + 1)\n"
    known += "return [backward.gradient(i) * s for i in reversed(range(backward.layers))][::-1]"
    yield Cheat(
        "sums that need no others",
        "overlap",
        known,
        "on 2 ranks, the result of rank 0, array 0.* must be",
    )
    yield Cheat(
        "control characters",
        RING,
        r"raise ValueError('\x1b[2J\x9b\ud800 eve: 10 of 10')",
        r"\\x1b\[2J\\x9b\\ud800 eve",
    )
    much = "from nnmpi.schedule.schedule import Kind\n"
    much += "return [Kind.F.at(rank, m) for m in range(microbatches)] * 12000"
    yield Cheat(
        "instructions without end",
        "gpipe",
        much,
        "24,000 of them, more than any right answer needs",
    )
    yield Cheat(
        "cycles without end",
        "gpipe-clock",
        "return [[]] * 200000",
        "200,000 of them, more than any right",
    )
    yield Cheat(
        "cycles of floats", "gpipe-clock", "return [[(0.0, 0.0)]]", "is not a .microbatch, stage."
    )
    yield Cheat(
        "a number that no float is",
        COST,
        "return 10**4000",
        "must give a number of seconds or bytes",
    )
    yield Cheat(
        "the file to begin with", RING, EXERCISES[RING].starter(), "raised NotImplementedError"
    )
    yield Cheat(
        "the file to begin with, on ranks",
        ROW,
        EXERCISES[ROW].starter(),
        "raised NotImplementedError",
    )
    yield Cheat(
        "another function", RING, "def ring(rank, size): ...", "has no function 'ring_all_reduce'"
    )
    yield Cheat("no Python", RING, "def ring_all_reduce(rank, size:", "line 1")
    yield Cheat(
        "a module that is not there", RING, "import torch\ndef f(): ...", "No module named 'torch'"
    )
    yield Cheat("no sum", ROW, "return x @ w", "on 2 ranks, the result of rank 0.* must be")
    yield Cheat(
        "ranks that do not all sum",
        ROW,
        f"if group.rank:\n    return x @ w\n{SUM}",
        "deadlock: no rank can continue",
    )
    drawn = (
        "import numpy\ndraw = numpy.random.default_rng(0)\nreturn draw.normal(size=(3, 7)) @"
        " draw.normal(size=(7, 5))"
    )
    yield Cheat("draws the inputs itself", ROW, drawn, "on 1 rank, the result of rank 0")
    seen = (
        "SEEN = []\ndef row_linear(group, x, w):\n    SEEN.append(x @ w)\n    if group.size > 1:\n"
    )
    seen += (
        "        import numpy\n        group.all_reduce(numpy.zeros(1))\n    return"
        " sum(SEEN[-group.size:])"
    )
    yield Cheat("ranks that share a variable", ROW, seen, "on 2 ranks, the result of rank 0")
    known = "return {n: 2 * (n - 1) * (alpha + M / n * beta) for n in (1, 2, 3, 4, 5, 8, 16)}[N]"
    yield Cheat(
        "a formula for known numbers alone", COST, known, r"ring_cost\(\d\d, .* raised KeyError"
    )
    whole = "group.all_reduce(gradient)\nweights -= rate * gradient"
    yield Cheat("a whole sum and a whole update", ZERO, whole, "is nan, but must be")
    both = (
        "group.all_reduce(gradient)\nweights[mine] -= rate *"
        " gradient[mine]\ngroup.all_gather(weights)"
    )
    yield Cheat(
        "a whole sum and an own update",
        ZERO,
        both,
        r"rank \d sends or receives \d+ bytes; the limit is \d+",
    )
    gaps = "import numpy\ny = numpy.zeros((4, 2))\ngroup.all_reduce(y[:, 0])\nreturn x @ w"
    yield Cheat("an array with gaps", ROW, gaps, r"\) raised .* line \d of .* is not contiguous")


CHEATS = [cheat for make in (_ending, _saying, _hostile, _looking, _wrong) for cheat in make()]
