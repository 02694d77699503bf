"""The pytest plugin on every rank: records outcomes, ends all ranks when one fails, and watches the
time.

Under several ranks a failing test prints its report with the rank and aborts the job: the others
may be waiting in a collective, and would wait for ever. The runner (`python -m tests.harness`) then
starts again with the next test.
"""

import faulthandler
import gc
import importlib
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from itertools import chain, groupby, pairwise
from pathlib import Path

import pytest

from nnmpi.base.errors import LaunchError
from nnmpi.base.launcher import read_launch
from nnmpi.comm.mpi.start import start
from tests.harness import left_out, records
from tests.harness.records import CLAIMS, DEFAULT_LIMIT_S, LIMIT, RUN_FOLDER
from tests.harness.slow import MORE_CASES

CALLS = 8  # lines of a traceback that a failure's summary has
PYTEST = re.compile(r"[/\\](_pytest|pytest|pluggy)[/\\]|<frozen runpy>")


@pytest.fixture(scope="session")
def group():
    """The group of all ranks: one rank in the serial tests."""
    return start_quietly()


def start_quietly():
    """Start MPI, and leave an exception in a thread to pytest, which makes it a failure of the
    test.
    """
    hook = threading.excepthook
    world = start()
    threading.excepthook = hook
    return world


def pytest_addoption(parser):
    """Add --quick, --cover, --deal and --but-plain."""
    parser.addoption(
        "--quick", action="store_true", help="leave out the tests that are marked slow"
    )
    parser.addoption(
        "--cover",
        action="store_true",
        help="of tests that cross parameters, the cases in which all pairs of values meet",
    )
    words = (
        "numbers of ranks over which MPI tests are dealt out, all but those of messages themselves"
    )
    parser.addoption("--deal", type=left_out.read_ranks, default=[], help=words)
    parser.addoption(
        "--but-plain", action="store_true", help="leave out what a plain scripts/test runs"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path, config):
    """Do not read a file without MPI tests where nothing else is asked for: every rank would, at
    every size.
    """
    if config.option.markexpr != "mpi" or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    text = collection_path.read_text()
    return None if "mark.mpi" in text or "mark.both_worlds" in text else True


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow the cases that a plain run leaves out, before others choose; leave out those
    that --all does without.
    """
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    for item in left_out.beyond(quick):
        item.add_marker(pytest.mark.slow(MORE_CASES))
    if config.option.cover:
        others = {*left_out.beyond_cover(items)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Give each rank a place of its own for temporary files: pytest's shared one is tidied by all
    ranks at once.
    """
    launch = read_launch(os.environ)
    if launch is not None and launch.size > 1 and not config.option.basetemp:
        scratch = tempfile.TemporaryDirectory(
            prefix=f"rank-{launch.rank}-",
            dir=os.environ.get(RUN_FOLDER),
            ignore_cleanup_errors=True,
        )
        config.add_cleanup(scratch.cleanup)
        config.option.basetemp = os.path.join(scratch.name, "tmp")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Find this rank's place, and register what it needs there."""
    # else runs measure how many are fastest, and bits differ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = os.environ.pop(RUN_FOLDER, None)  # it is not for what the tests start
    claims = os.environ.pop(CLAIMS, None)
    rank = 0
    if config.getoption("--with-mpi", default=False):
        try:
            start_quietly()
        except LaunchError as error:
            pytest.exit(str(error), returncode=error.exit_status)
        world = importlib.import_module("mpi4py.MPI").COMM_WORLD.Dup()
        rank = world.Get_rank()
        config.pluginmanager.register(
            Guard(world, _stderr(config, folder, rank), folder is None), "nnmpi-guard"
        )
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                # pytest-mpi's: at the end it prints a page about MPI
                plugin._is_testing_mpi = False
    if rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")  # rank 0 speaks for all
    if folder is not None:
        config.pluginmanager.register(
            Recorder(records.Writer(Path(folder), rank), Path(folder)), "nnmpi-recorder"
        )
    if claims is not None:
        config.pluginmanager.register(Sharer(claims), "nnmpi-sharer")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let Python's search for cycles pass over what is collected: half a million objects, at each
    full search.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _stderr(config, folder, rank):
    """Return a descriptor for a rank's last words: its file in the run's folder, or else the real
    stderr.
    """
    if folder is not None:
        return os.open(
            records.Writer(Path(folder), rank).errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.suspend_global_capture()
    descriptor = os.dup(2)
    capture.resume_global_capture()
    return descriptor


def _cpu_s():
    """Return the processor seconds of this process, and of those that it started and awaited."""
    return sum(os.times()[:4])


class Recorder:
    """Writes what happens to each test, and leaves out what is done, or not asked for in a run of a
    few again.
    """

    def __init__(self, writer, folder):
        self._writer = writer
        self._is_wanted = records.read_plan(folder)
        self._outcome = records.PASSED
        self._reason = ""
        self._begin_s = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Leave out what is done, and what is not for this run where that is asked for."""
        launch = read_launch(os.environ)
        ranks = 1 if launch is None else launch.size
        saved, others = [], []
        for item in items:
            reason = left_out.reason(item, ranks, config.option.quick, config.option.deal)
            if config.option.but_plain and left_out.is_plain(item, 0 if launch is None else ranks):
                reason = "a plain scripts/test runs it"
            if reason:
                self._writer.write(item.nodeid, records.LEFT_OUT, reason)
            (saved if not reason and self._is_wanted(item.nodeid) else others).append(item)
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = saved

    def pytest_runtest_logstart(self, nodeid):
        """Note that the test has begun."""
        self._outcome, self._reason, self._begin_s = records.PASSED, "", _cpu_s()
        self._writer.write(nodeid, records.STARTED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        """Note a failure at once, because the guard may end the process right after."""
        if report.failed:
            self._outcome = records.FAILED
            self._writer.write(report.nodeid, records.FAILED, _what(report))
        elif report.skipped and self._outcome == records.PASSED:
            self._outcome = records.SKIPPED
            self._reason = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            )

    def pytest_collectreport(self, report):
        """Note a file that is left out as a whole."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self._writer.write(report.nodeid, records.SKIPPED, report.longrepr[2])

    def pytest_runtest_logfinish(self, nodeid):
        """Note the outcome."""
        if self._outcome != records.FAILED:
            self._writer.write(nodeid, self._outcome, self._reason, _cpu_s() - self._begin_s)

    def pytest_sessionfinish(self, session, exitstatus):
        """Leave the proof of a proper end: tests passed, or failed, or there were none, which is as
        good.
        """
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
        if exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.TESTS_FAILED,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            self._writer.finish()


class Sharer:
    """Shares the test files with other runs of the same suite: whoever comes first to a file runs
    it.
    """

    def __init__(self, claims):
        self._claims = claims

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Run this run's tests, as pytest's own loop does; a file is claimed when its turn
        comes.
        """
        if session.config.option.collectonly or session.testsfailed:
            return None
        for item, following in pairwise(chain(self._taken(session.items), [None])):
            assert item is not None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return True

    def _taken(self, items):
        """Yield the tests of files that no other run has claimed.

        The last files come first: those of whole jobs take longest, and would be waited for.
        """
        files = groupby(items, key=lambda item: item.nodeid.partition("::")[0])
        for file, tests in reversed([(file, [*tests]) for file, tests in files]):
            if records.claim(self._claims, file):
                yield from tests


class Guard:
    """Sees to it that no rank waits for ever: for a failed one, or in a hanging test.

    Args:
        world: an MPI communicator of all ranks, used by nobody else.
        descriptor: where this rank's last words go.
        is_shared: whether other ranks' words go there too.
    """

    def __init__(self, world, descriptor, is_shared):
        self._world = world
        self._is_shared = is_shared
        self._descriptor = descriptor
        self._has_met = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        """Run the test within its time; go on when all ranks have ended it."""
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0]) if marker else float(os.environ.get(LIMIT, DEFAULT_LIMIT_S))
        watchdog = threading.Timer(limit_s, self._hung, (item.nodeid, limit_s))
        watchdog.daemon = True
        self._has_met = False
        watchdog.start()
        # for code that never frees the GIL
        faulthandler.dump_traceback_later(limit_s + 2, file=self._descriptor)
        result = yield
        self._has_met = True
        self._meet()
        faulthandler.cancel_dump_traceback_later()
        watchdog.cancel()
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        """End all ranks when the test failed here."""
        if report.failed:
            self._failed(f"{report.nodeid} failed in its {report.when}", _words(report))

    def pytest_collectreport(self, report):
        """End all ranks when a file cannot be read here."""
        if report.failed:
            self._failed(f"{report.nodeid} cannot be collected", report.longreprtext)

    def pytest_internalerror(self, excrepr):
        """End all ranks when pytest itself failed here."""
        self._failed("pytest failed", str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo):
        """End all ranks when the session was broken off here."""
        self._failed("the session was broken off", str(excinfo.value))

    def _meet(self):
        """Wait for the other ranks, so that every rank is always in the same test; sleep, as cores
        are few.
        """
        request = self._world.Ibarrier()
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _failed(self, headline, text):
        """Say what failed; end the job if there are other ranks."""
        self._say(f"{headline}\n{text}\n")
        if self._world.size > 1:
            self._abort()

    def _hung(self, test, limit_s):
        """Say where this rank is, give the others time to do the same, and end the job."""
        if self._has_met:
            self._say(f"{test} ended here; this rank waits for the others\n")
        else:
            self._say(f"{test} has not ended after {limit_s:g} s\n{_stacks()}")
        time.sleep(1)
        self._abort()

    def _say(self, text):
        """Write the text in one piece, so that those of several ranks do not mix."""
        if self._is_shared:
            text = f"\nrank {self._world.rank} of {self._world.size}: {text}"
        os.write(self._descriptor, text.encode(errors="replace"))

    def _abort(self):
        self._world.Abort(1)
        sys.exit(1)


def _stacks():
    """Return what every other thread is doing, without pytest's own frames."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            frames = [
                line for line in traceback.extract_stack(frame) if not PYTEST.search(line.filename)
            ]
            parts += [f"in {threads.get(number, number)}:\n", *traceback.format_list(frames)]
    return "".join(parts)


def _what(report):
    """Return the first line of what the test failed with, and the innermost lines of code that led
    there.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext.partition("\n")[0]
    entries = getattr(report.longrepr.reprtraceback, "reprentries", [])  # type: ignore[union-attr]
    result = [getattr(entry, "reprfileloc", None) for entry in entries]
    places = [at for at in result if at is not None and not PYTEST.search(at.path)]
    calls = " < ".join(f"{at.path}:{at.lineno}" for at in reversed(places[-CALLS:]))
    return crash.message.partition("\n")[0] + (f"\n    at {calls}" if calls else "")


def _words(report):
    """Return the traceback and what the test printed."""
    captured = [f"---- {name} ----\n{text}" for name, text in report.sections]
    return "\n".join([report.longreprtext, *captured])
