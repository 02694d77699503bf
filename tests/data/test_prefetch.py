import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from nnmpi.data.loader import Prefetch
from tests.data.conftest import prefetch_threads

pytestmark = pytest.mark.usefixtures("no_threads_left")

numbers = partial(Prefetch, lambda i: i, range(100), workers=2)


def is_waiting(thread):
    """Return whether a thread waits for an item."""
    assert thread.ident is not None
    caller = sys._current_frames()[thread.ident].f_back
    return caller is not None and caller.f_code.co_name == "result"


@pytest.mark.parametrize("workers", [0, 1, 5])
@pytest.mark.parametrize("ahead", [1, 50])
def test_items_come_in_order(workers, ahead):
    def make(i):
        time.sleep(0.001 * (i % 3))  # later items are often ready before earlier ones
        return i * i

    assert list(Prefetch(make, range(3, 40), workers=workers, ahead=ahead)) == [
        i * i for i in range(3, 40)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_to_make(workers):
    assert list(Prefetch(lambda i: i, range(0), workers=workers)) == []


@pytest.mark.parametrize("workers, ahead", [(1, 1), (1, 4), (3, 2)])
def test_no_more_than_ahead_items_wait(workers, ahead):
    begun = []
    with Prefetch(lambda i: begun.append(i), range(100), workers=workers, ahead=ahead) as items:
        for taken in range(5):
            deadline = time.monotonic() + 10
            while len(begun) < taken + ahead and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)  # a thread that would go on too far does it now
            assert len(begun) == taken + ahead
            next(items)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_exception_comes_at_its_item_and_ends_the_threads(workers):
    def make(i):
        if i == 5:
            raise KeyError("five")
        return i

    items = Prefetch(make, range(100), workers=workers, ahead=4)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="five") as caught:
        next(items)
    assert "make" in [entry.name for entry in caught.traceback], "the traceback leads to the place"
    with pytest.raises(StopIteration):
        next(items)


def test_close_stops_threads_and_iteration():
    items = numbers()
    assert [item for item, _ in zip(items, range(3), strict=False)] == [0, 1, 2]
    assert len(prefetch_threads()) == 2
    items.close()
    items.close()
    assert list(items) == []
    with pytest.raises(ZeroDivisionError), numbers() as items:
        next(items)
        1 / 0  # noqa: B018
    for item in numbers(send=lambda i: lambda: i + 1):
        if item == 3:
            break


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_items_are_sent_in_order_and_an_error_waits_for_its_turn(workers):
    """A made item is sent before the one ahead of it is returned, if threads make it."""
    log = []

    def make(i):
        if i == 5:
            raise KeyError("five")
        return i

    def send(item):
        log.append(item)

        def arrive():
            log.append(f"{item} arrives")
            return 10 * item

        return arrive

    items = Prefetch(make, range(100), workers=workers, ahead=3, send=send)
    result = []
    for _ in range(5):
        for _ in range(200 if workers else 0):
            if items._pending and items._pending[0].done():
                break
            time.sleep(0.01)
        result.append(next(items))
    assert result == [0, 10, 20, 30, 40]
    with pytest.raises(KeyError, match="five"):
        next(items)
    assert [item for item in log if isinstance(item, int)] == [0, 1, 2, 3, 4]
    if workers:
        assert log.index(4) < log.index("3 arrives")


def test_close_does_not_wait_for_an_item_that_hangs():
    begun, go = threading.Event(), threading.Event()
    items = Prefetch(lambda i: begun.set() or go.wait(20), range(100))
    begun.wait(10)
    began = time.monotonic()
    items.close()
    assert time.monotonic() - began < 5
    go.set()


def test_forgotten_iterator_stops_its_threads():
    def forget():
        items = numbers()
        next(items)
        loop = [items]
        loop.append(loop)  # only the collector finds this

    forget()


def test_interrupt_while_waiting_stops_everything():
    begun, interrupted = threading.Event(), threading.Event()

    def make(i):
        begun.set()
        interrupted.wait(10)
        return i

    def interrupt():
        begun.wait(10)
        while not is_waiting(threading.main_thread()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.set()

    items = Prefetch(make, range(100))
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        list(items)
    thread.join(10)


def test_open_iterator_does_not_keep_the_interpreter_alive():
    program = (
        "from nnmpi.data.loader import Prefetch\n"
        "items = Prefetch(lambda i: bytes(1000), range(10**9), workers=3)\n"
        "next(items)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        timeout=30,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
