"""mpi4py's statuses, requests and matched messages.

Operation     one or more started messages or a collective, and what is left to do in the end
Request       a handle of an operation, which is null when the operation is over
Prequest      a handle of a call that can be started again and again
"""

from typing import Any

import numpy as np

from nnmpi.teaching.mpi_front.datatypes import BYTE, DATATYPES
from nnmpi.teaching.mpi_front.handles import (
    ANY,
    PROC_NULL,
    UNDEFINED,
    Exception,
    FrontHandle,
    local,
)
from nnmpi.teaching.mpi_front.messages import PICKLED, read, unpack

EMPTY = ANY, ANY, 0, 0, 0  # the status of no message
ROOM_BYTES = 1 << 15  # mpi4py's buffer for the pickle of irecv


class Status:
    """The envelope of a received message."""

    __module__ = "mpi4py.MPI"
    _words: Any
    cancelled: bool

    def __init__(self, other=None):
        if not isinstance(other, Status | None):
            raise TypeError(f"Status of {other!r}")
        self._words = np.array(EMPTY if other is None else other._words, "i8")

    def __reduce__(self):
        return Status._made, (self._words.tolist(),)

    @staticmethod
    def _made(words):
        result = Status()
        result._set(*words)
        return result

    def _set(self, *words):
        self._words[: len(words)] = words

    def tomemory(self):
        """Return its numbers as memory."""
        return memoryview(self._words)

    def Get_count(self, datatype=DATATYPES["BYTE"]):
        """Return its number of elements; UNDEFINED for a part of one."""
        number, rest = divmod(self.count, datatype.size or 1)
        return UNDEFINED if rest else number

    def Get_elements(self, datatype=DATATYPES["BYTE"]):
        """Return its number of plain elements."""
        return self.count // (datatype._layout().dtype.itemsize if datatype.size else 1)

    def Set_elements(self, datatype, count):
        """Set its number of elements."""
        self.count = count * datatype.size

    def Is_cancelled(self):
        """Return whether it was cancelled."""
        return self.cancelled


def _word(at, kind, *names):
    def put(self, value):
        self._words[at] = value

    def get(self):
        return kind(self._words[at])

    setattr(Status, names[0], property(get, put))
    for name in names[1:]:
        setattr(Status, name, get if name[0] == "G" else put)


_word(0, int, "source", "Get_source", "Set_source")
_word(1, int, "tag", "Get_tag", "Set_tag")
_word(2, int, "error", "Get_error", "Set_error")
_word(3, int, "count")
_word(4, bool, "cancelled", "Set_cancelled")


class Operation:
    """Started messages, or a collective; nothing, to or from PROC_NULL.

    Args:
        wire: the communicator.
        started: the requests.
        finish: called in the end; returns the received object.
        status: (source, tag) without requests.
        start: starts it again, if it is persistent; returns an operation.
    """

    def __init__(self, wire, started=(), finish=None, status=(ANY, ANY), start=None):
        self.wire, self.started, self.finish, self.start = wire, [*started], finish, start
        self.status, self.active, self.cancelled = status, start is None, False

    def is_complete(self):
        """Return whether it is over, without a look at messages."""
        return all(item.complete for item in self.started)

    def envelope(self):
        """Return the numbers of its status."""
        for item in self.started:
            if item.what.startswith("receive") and item.complete:
                source, tag, got = item.envelope
                return source, tag, 0, len(got), self.cancelled
        return *self.status, 0, 0, self.cancelled

    def wait(self):
        """Wait for it, finish it, and return the received object."""
        if not self.active:
            return None
        if self.started:
            self.wire.wait_all(self.started)
        result = self.finish() if self.finish and not self.cancelled else None
        self.active = False
        return result

    def begin(self):
        """Start a persistent one."""
        new = self.start()
        self.started, self.finish, self.status = new.started, new.finish, new.status
        self.active, self.cancelled = True, False


class Request(FrontHandle):
    """A started operation; false and equal to REQUEST_NULL when it is over."""

    @property
    def _is_active(self):
        return self._value is not None and self._value.active

    def _finish(self, status):
        """Wait, and return the received object."""
        operation = self._value if self._is_active else None
        result = operation.wait() if operation else None
        if status is not None:
            status._set(*(operation.envelope() if operation else EMPTY))
        if operation and operation.start is None:
            self._value = None
        return result

    @staticmethod
    def _complete(requests):
        """Return the numbers of those that are complete, without a look at messages."""
        return [
            number
            for number, item in enumerate(requests)
            if item._is_active and item._value.is_complete()
        ]

    @staticmethod
    def _poll(requests):
        """Return the numbers of those that are complete; it lets other ranks go on."""
        active = [item for item in map(Request._checked, requests) if item._is_active]
        for item in active:
            started = item._value.started
            if started and not item._value.is_complete():
                item._value.wire.test_all([one for one in started if not one.complete])
                break
        else:
            if active:
                active[0]._value.wire.progress()
        return Request._complete(requests)

    @staticmethod
    def _fill(requests, numbers, statuses):
        """Finish some requests; return their objects."""
        if statuses is None:
            return [requests[number]._finish(None) for number in numbers]
        if isinstance(statuses, list):
            statuses += [Status() for _ in range(len(numbers) - len(statuses))]
        padded = [*statuses, *[None] * len(numbers)]
        return [
            requests[number]._finish(status)
            for number, status in zip(numbers, padded, strict=False)
        ]

    # ---- one ----

    def wait(self, status=None):
        """Return the received object when it is complete."""
        return self._finish(status)

    def Wait(self, status=None):
        """Return when it is complete."""
        self._finish(status)
        return True

    def test(self, status=None):
        """Return whether it is complete, and the received object."""
        if self._is_active and not self._poll([self]):
            return False, None
        return True, self._finish(status)

    def Test(self, status=None):
        """Return whether it is complete."""
        return self.test(status)[0]

    def Get_status(self, status=None):
        """Return whether it is complete; it stays a request."""
        done = not self._is_active or bool(self._poll([self]))
        if status is not None and done:
            status._set(*(self._value.envelope() if self._is_active else EMPTY))
        return done

    get_status = Get_status

    def Cancel(self):
        """Cancel a receive, or a send that nobody receives yet; it is to be awaited still."""
        operation = self._given()
        for item in operation.started if self._is_active else ():
            operation.cancelled |= operation.wire.cancel(item)

    cancel = Cancel

    def Free(self):
        """Forget it: a send goes on, and nobody waits for it."""
        operation = self._given()
        for item in operation.started if self._is_active else ():
            operation.wire.forget(item)
        self._value = None

    def free(self):
        """Forget it, unless it is null."""
        if self:
            self.Free()

    # ---- several ----

    @classmethod
    def waitall(cls, requests, statuses=None):
        """Return the received objects when all are complete."""
        active = [item._value for item in map(cls._checked, requests) if item._is_active]
        started = [one for operation in active for one in operation.started]
        if started:
            active[0].wire.wait_all(started)
        return cls._fill(requests, range(len(requests)), statuses)

    @classmethod
    def Waitall(cls, requests, statuses=None):
        """Return when all are complete."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def testall(cls, requests, statuses=None):
        """Return whether all are complete, and the received objects."""
        if len(cls._poll(requests)) < sum(item._is_active for item in requests):
            return False, None
        return True, cls._fill(requests, range(len(requests)), statuses)

    @classmethod
    def Testall(cls, requests, statuses=None):
        """Return whether all are complete."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def _block(cls, requests):
        """Return the numbers of complete requests when there is one; [] if none is awaited."""
        active = [item._value for item in requests if item._is_active]
        if active:
            active[0].wire.world.wait_until(
                lambda: any(operation.is_complete() for operation in active)
            )
        return Request._complete(requests)

    @classmethod
    def _take_any(cls, requests, numbers, status):
        if numbers:
            return numbers[0], requests[numbers[0]]._finish(status)
        if status is not None:
            status._set(*EMPTY)
        return UNDEFINED, None

    @classmethod
    def waitany(cls, requests, status=None):
        """Return the number of one that is complete, or UNDEFINED, and the received object."""
        return cls._take_any(requests, cls._block(requests), status)

    @classmethod
    def Waitany(cls, requests, status=None):
        """Return the number of one that is complete, or UNDEFINED if none is awaited."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def testany(cls, requests, status=None):
        """Return a number as `waitany`, whether it is complete, and the received object."""
        numbers = cls._poll(requests)
        if not numbers and any(item._is_active for item in requests):
            return UNDEFINED, False, None
        number, result = cls._take_any(requests, numbers, status)
        return number, True, result

    @classmethod
    def Testany(cls, requests, status=None):
        """Return the number of one that is complete, or UNDEFINED, and whether none is awaited."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def _take_some(cls, requests, numbers, statuses):
        if not any(item._is_active for item in requests):
            return None, None
        if isinstance(statuses, list):
            del statuses[len(numbers) :]
        return numbers, cls._fill(requests, numbers, statuses)

    @classmethod
    def waitsome(cls, requests, statuses=None):
        """Return the numbers of all that are complete, at least one, and their objects."""
        return cls._take_some(requests, cls._block(requests), statuses)

    @classmethod
    def Waitsome(cls, requests, statuses=None):
        """Return the numbers of all that are complete, at least one; None if none is awaited."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def testsome(cls, requests, statuses=None):
        """Return the numbers of all that are complete, and their objects."""
        return cls._take_some(requests, cls._poll(requests), statuses)

    @classmethod
    def Testsome(cls, requests, statuses=None):
        """Return the numbers of all that are complete; None if none is awaited."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def Get_status_any(cls, requests, status=None):
        """Return as `Testany`; all stay requests."""
        numbers = cls._poll(requests)
        if numbers:
            requests[numbers[0]].Get_status(status)
        elif status is not None:
            status._set(*EMPTY)
        none = not any(item._is_active for item in requests)
        return (numbers[0], True) if numbers else (UNDEFINED, none)

    @classmethod
    def Get_status_all(cls, requests, statuses=None):
        """Return as `Testall`; all stay requests."""
        done = len(cls._poll(requests)) == sum(item._is_active for item in requests)
        for item, status in zip(requests, (statuses if done else None) or (), strict=False):
            item.Get_status(status)
        return done

    @classmethod
    def Get_status_some(cls, requests, statuses=None):
        """Return as `Testsome`; all stay requests."""
        numbers = cls._poll(requests)
        if not any(item._is_active for item in requests):
            return None
        for number, status in zip(numbers, statuses or (), strict=False):
            requests[number].Get_status(status)
        return numbers

    get_status_any, get_status_all = Get_status_any, Get_status_all
    get_status_some = Get_status_some


class Prequest(Request):
    """A call that can be started again and again."""

    def Start(self):
        """Start it."""
        if self._given().active:
            raise Exception("ERR_REQUEST", "the request was started before and not awaited since")
        self._value.begin()

    @classmethod
    def Startall(cls, requests):
        """Start all."""
        for item in requests:
            item.Start()


class Grequest(Request):
    """A request of the program's own, which is refused."""

    def __new__(cls, other=None):
        """Refuse it."""
        raise TypeError("the simulated MPI has no generalized requests")


# ---- messages between two ranks ----


def start_send(wire, data, dest, tag, eager=None):
    """Start sending.

    Args:
        wire: the communicator.
        data: a part of a buffer, or bytes.
        eager: the length of the longest message that leaves at once.
    """
    if dest == PROC_NULL:
        return Operation(wire, status=(PROC_NULL, ANY))
    values = data if isinstance(data, np.ndarray) else data.read().view(data.kind)
    return Operation(wire, [wire.isend(values, dest, tag, eager)])


def start_receive(wire, into, source, tag, message=None):
    """Start receiving.

    Args:
        wire: the communicator.
        into: a part of a buffer; None for an object, a number for one of at most so many bytes.
        message: the one to receive, if it was taken before.
    """
    if source == PROC_NULL:
        return Operation(wire, status=(PROC_NULL, ANY))
    if into is None or isinstance(into, int):
        memory = None if into is None else np.empty(into, BYTE)
        request = wire.receive(memory, PICKLED, source, tag, message)
        return Operation(wire, [request], lambda: unpack(request.envelope[2]))
    memory = np.empty(into.nbytes, BYTE) if into.bytes is None else into.bytes
    request = wire.receive(memory, into.kind, source, tag, message)
    finish = None if into.bytes is not None else lambda: into.write(request.envelope[2])
    return Operation(wire, [request], finish)


class Message(FrontHandle):
    """A message that a probe has taken: nobody else can receive it."""

    def _take(self, into):
        if self._value is None:
            raise Exception("ERR_REQUEST", "the message is MESSAGE_NULL: it was received before")
        wire, message = self._value
        if self is not local().MESSAGE_NO_PROC:  # which is never used up
            self._value = None
        if message is None:
            return Operation(wire, status=(PROC_NULL, ANY))
        source, tag, _ = message.request.envelope
        return start_receive(wire, into, source, tag, message)

    def Recv(self, buf, status=None):
        """Receive it into a buffer."""
        return self.Irecv(buf).Wait(status) and None

    def Irecv(self, buf):
        """Start receiving it."""
        from_nobody = self._value is not None and self._value[1] is None
        return Request._of(self._take(None if from_nobody else read(buf)))

    def recv(self, status=None):
        """Return its object."""
        return Request._of(self._take(None)).wait(status)

    def irecv(self):
        """Start receiving its object."""
        return Request._of(self._take(None))

    @classmethod
    def Probe(cls, comm, source=ANY, tag=ANY, status=None):
        """Return a message, when it has come."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(cls, comm, source=ANY, tag=ANY, status=None):
        """Return a message, or None."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe
