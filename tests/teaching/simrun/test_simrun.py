"""Programs written for mpi4py: each mistake is named with its ranks and lines; right ones print
what mpirun prints.
"""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from nnmpi.base.errors import CommError
from nnmpi.comm.simulated import scheduler
from nnmpi.teaching import simrun
from nnmpi.teaching.rank_modules import RankModules
from nnmpi.teaching.simrun import main
from tests.harness.job import mpirun, run
from tests.harness.refusals import refuses, usage_error

HEAD = """\
import sys
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
"""

# A program (its first line is line 6), the exception, and what its sentence says (a regular
# expression).
DEFECTS = {
    "a thread of a rank that polls": (
        """\
        import threading

        def poll():
            while not comm.Iprobe():
                pass

        thread = threading.Thread(target=poll)
        thread.start()
        thread.join()""",
        CommError,
        r"deadlock.*rank 0 waits for a message from any rank.*polling.*p\.py:9",
    ),
    "a ring of long sends": (
        "comm.Send(np.zeros(9999), (rank + 1) % size)\ncomm.Recv(np.zeros(9999))",
        CommError,
        r"deadlock.*(rank \d -> ){3}.*rank 1 waits for send to rank 2 with tag 0.*p\.py:6",
    ),
    "nobody sends": (
        "if rank == 1:\n    comm.recv(source=MPI.ANY_SOURCE, tag=4)",
        CommError,
        r"deadlock.*rank 1 waits for receive from any rank with tag 4.*p\.py:7.*ended: ranks 0, 2",
    ),
    "a rank leaves a collective out": (
        "if rank:\n    comm.Barrier()",
        CommError,
        r"deadlock.*rank 1 waits for Barrier.*p\.py:7.*ended: rank 0",
    ),
    "different collectives": (
        "if rank == 1:\n    comm.gather(1)\nelse:\n    comm.bcast(1)",
        CommError,
        r"different collectives.*(rank 1 in gather\(root 0\) \(p\.py:7\)|bcast).*p\.py:[79]",
    ),
    "a number for a reduction": (
        "comm.allreduce(rank, op=5)",
        SystemExit,
        r"p\.py.*TypeError: 5 is no reduction of MPI; give one of SUM, PROD.*\(on rank",
    ),
    "a list for a reduction": (
        "comm.Reduce(np.zeros(1), np.zeros(1), op=[])",
        SystemExit,
        r"TypeError: \[\] is no reduction of MPI; give",
    ),
    "nobody completes a request": (
        "MPI.Request.Waitany([comm.irecv(source=0)])",
        CommError,
        r"deadlock.*rank \d waits for something to become complete.*p\.py:6",
    ),
    "different roots": (
        "comm.bcast(1, root=rank % 2)",
        CommError,
        r"bcast\(root [01]\).*p\.py:6.*bcast\(root",
    ),
    "different lengths": (
        "n = 3 + (rank == 1)\ncomm.Allreduce(np.zeros(n), np.zeros(n))",
        CommError,
        r"different collectives.*Allreduce\(SUM, [34], float64\) \(p\.py:7\)",
    ),
    "different operations": (
        "comm.reduce(1, [MPI.MAX, MPI.MIN][rank % 2])",
        CommError,
        r"reduce\(root 0, M",
    ),
    "a part that does not fit": (
        "comm.Gather(np.zeros(2 + (rank == 2)), np.zeros(6))",
        SystemExit,
        r"Gather: 3 float64 are sent \(p\.py:6\) to rank 0 .* room for 2 float64 \(p\.py:6\)",
    ),
    "a sum that does not fit": (
        "comm.Allreduce(np.zeros(3), np.zeros(3, 'f4'))",
        SystemExit,
        r"line 6.*Allreduce sends float64 and receives float32; give both one datatype",
    ),
    "a buffer that is read-only": (
        "if rank == 0:\n    comm.Send(np.zeros(2), 1)\nif rank == 1:\n    comm.Recv(bytes(16), 0)",
        SystemExit,
        r'"p\.py", line 9.*received into an array that is read-only.*on rank 1 of 3',
    ),
    "a grid of too many ranks": (
        "comm.Create_cart([2, 2])",
        SystemExit,
        r"a grid of \[2, 2\] does not fit a communicator of 3 ranks",
    ),
    "a datatype that is not committed": (
        "kind = MPI.DOUBLE.Create_vector(3, 1, 4).Commit().Create_resized(0, 8)\n"
        "comm.Bcast([np.zeros(12), 1, kind])",
        SystemExit,
        r"line 7.*a datatype of the program's own needs Commit\(\) first",
    ),
    "a negative color": (
        "comm.Split(-1 if rank else 0)",
        SystemExit,
        r"line 6.*the color is -1; give 0 or more, or MPI\.UNDEFINED",
    ),
    "no program": ("if rank == 1\n", SystemExit, r'^1\n  File "p\.py", line 6\n.*SyntaxError'),
    "no tag": (
        "rank or comm.send(0, 1, tag=-5)",
        SystemExit,
        r"send's tag is -5; give 0 or more.*on rank 0",
    ),
    "no root": (
        "comm.bcast(0, root='0')",
        SystemExit,
        r"no rank '0' in this communicator, whose ranks are 0 to 2",
    ),
    "a message that is cut": (
        "if rank == 0:\n    comm.Send(np.zeros(9), 1)\nif rank == 1:\n    comm.Recv(np.zeros(5))",
        CommError,
        r"rank 0 sends 72 bytes \(p\.py:7\), which rank 1 receives into a buffer of 40 \(p\.py:9\)",
    ),
    "an object for an array": (
        "if rank == 0:\n    comm.send([1], 1)\nif rank == 1:\n    comm.Recv(np.zeros(99))",
        CommError,
        r"rank 0 sends .*pickle.* \(p\.py:7\), which rank 1 receives as float64 \(p\.py:9\)",
    ),
    "an array of another dtype": (
        (
            "if rank == 0:\n    comm.Send(np.zeros(3, 'f8'), 1)\n"
            "if rank == 1:\n    comm.Recv(np.zeros(9, 'f4'))"
        ),
        CommError,
        r"rank 0 sends float64 \(p\.py:7\), which rank 1 receives as float32 .*give both one dtype",
    ),
    "changed in flight": (
        (
            "x = np.zeros(9)\nif rank == 0:\n    r = comm.Isend(x, 1)\n    x += 1\n    r.Wait()\n"
            "if rank == 1:\n    comm.Recv(x)"
        ),
        CommError,
        r"rank 0 changed an array while its send to rank 1 .* read it \(p\.py:8\)",
    ),
    "received twice into one array": (
        "x = np.zeros(9)\nr = [comm.Irecv(x, 0), comm.Irecv(x, 0)]",
        CommError,
        r"memory \(p\.py:7\) that its receive from rank 0 .* still writes",
    ),
    "a sum of an array into itself": (
        "x = np.zeros(3)\ncomm.Allreduce(x, x)",
        CommError,
        r"Allreduce .* memory to read and to write \(p\.py:7\); .*MPI\.IN_PLACE",
    ),
    "a part gathered into its own array": (
        "x = np.zeros(size)\ncomm.Iallgather(x[rank:][:1], x).Wait()",
        CommError,
        r"Iallgather .* memory to read and to write \(p\.py:7\)",
    ),
    "an exchange of an array with itself": (
        "x = np.zeros(3)\ncomm.Sendrecv(x, (rank + 1) % size, 0, x, (rank - 1) % size, 0)",
        CommError,
        r"its send to rank \d .* that its receive .* still writes .*or give another array",
    ),
    "changed during a sum": (
        "x = np.zeros(3)\nr = comm.Iallreduce(x, np.zeros(3))\nx += 1\nr.Wait()",
        CommError,
        r"changed an array while its Iallreduce .* read it \(p\.py:7\)",
    ),
    "ranks that poll for one another": (
        "q = comm.irecv(source=(rank + 1) % size)\nwhile not q.test()[0]: pass",
        CommError,
        r"deadlock: .*(rank \d -> ){3}.* rank 1 waits for receive from rank 2 .*polling.*p\.py:7",
    ),
    "ranks that look for messages": (
        "while not comm.Iprobe(tag=3): MPI.Wtime()",
        CommError,
        r"deadlock: .*rank 0 waits for a message from any rank with tag 3, polling.*p\.py:6",
    ),
    "a message that nobody sends": (
        "comm.Probe(source=(rank + 1) % size)",
        CommError,
        r"deadlock: .*(rank \d -> ){3}.*waits for a message from rank 1 with any tag",
    ),
    "a rank that catches everything": (
        "if rank == 1:\n    1 / 0\nwhile True:\n    try: comm.recv(source=1)\n    except: pass",
        SystemExit,
        r"line 7.*ZeroDivisionError",
    ),
    "the program's lines alone": (
        "try:\n    comm.send(lambda: 0, 0)\nexcept Exception as e:\n    raise ValueError from e",
        SystemExit,
        (
            r'^1\nTraceback[^\n]*\n  File "p\.py", line 7[^/]*PicklingError[^/]*direct cause[^/]*'
            r"line 9[^/]*ValueError"
        ),
    ),
    "a wait for a signal": (
        "import signal\nsignal.alarm(1)",
        SystemExit,
        r"line 7.*no signal reaches a simulated rank",
    ),
    "a reduction of several objects": (
        "comm.Allreduce(np.zeros(2), np.zeros(2), lambda x, y: x)",
        SystemExit,
        r"<lambda> reduces objects; make one for arrays by MPI\.Op\.Create",
    ),
    "a group's rank": (
        "comm.Get_group().Incl([7])",
        SystemExit,
        r"there is no rank 7 in a group of 3",
    ),
    "counts as a pair": (
        "comm.Allgatherv(np.zeros(1), [np.zeros(3), (1, 1, 1)])",
        SystemExit,
        r"\(1, 1, 1\) is no pair of counts and offsets; give a count for each rank as a list",
    ),
    "elements of a buffer that has fewer": (
        "comm.Send([np.zeros(3), 4, MPI.DOUBLE], 0)",
        SystemExit,
        r"a buffer of 24 bytes is too short for bytes 0 to 32",
    ),
    "nobody receives": (
        "if rank == 2:\n    comm.send('hello', 0)",
        CommError,
        r"nobody received rank 2's send to rank 0 with tag 0 of \d+ bytes \(p\.py:7\)",
    ),
    "nobody waits": (
        "if rank == 2:\n    comm.isend('hello', 0)\nif rank == 0:\n    comm.recv()",
        CommError,
        r"rank 2 never waited for its send to rank 0 .*\(p\.py:7\)",
    ),
    "an object in place of a buffer": (
        "comm.Send([1.0, 2.0], 0)",
        SystemExit,
        r"1\.0 is no array; give one, or send objects by the call in small letters",
    ),
    "no such rank": ("comm.send(1, rank + 1)", SystemExit, r"line 6.*there is no rank 3.* 0 to 2"),
    "windows": (
        "MPI.Win.Create(None)",
        SystemExit,
        r"line 6.*has no Win.Create; docs/reference/mpi4py.md lists its calls",
    ),
    "two threads of a rank in calls": (
        """\
        import threading, time
        def meet():
            for _ in range(50):
                time.sleep(0.01)
                comm.Barrier()
        threads = [threading.Thread(target=meet) for _ in range(1 + (rank == 0))]
        for thread in threads: thread.start()
        for thread in threads: thread.join()""",
        CommError,
        r"rank 0 calls MPI on Thread.* while another of its threads waits in a call",
    ),
    "two groups": (
        "comm.Create_intercom(0, comm, 1)",
        SystemExit,
        r"has no Intracomm.Create_intercom; ",
    ),
}

# Programs that are right. Their lines are compared with those of mpirun, in any order.
# Each prints what became of it: the exception's class, MPI.Exception for all of MPI's own.
ATTEMPT = """\
def attempt(number, call):
    try:
        call()
        came = "nothing"
    except Exception as error:
        came = "MPI.Exception" if isinstance(error, MPI.Exception) else type(error).__name__
    print(rank, number, came)
"""


def refused(text):
    """Return a program that attempts each line of a text, an expression of its own."""
    lines = [line.strip() for line in text.strip().splitlines()]
    calls = [f"attempt({number}, lambda: {line})" for number, line in enumerate(lines)]
    return "\n".join([ATTEMPT, "one, two = np.ones(1), np.ones(2)", *calls])


RIGHT = {
    "MPI.IN_PLACE where nothing stays in place": refused(
        """
        MPI.COMM_SELF.Reduce(MPI.IN_PLACE, MPI.IN_PLACE)
        MPI.COMM_SELF.Allreduce(one, MPI.IN_PLACE)
        MPI.COMM_SELF.Ireduce(one, MPI.IN_PLACE)
        MPI.COMM_SELF.Scan(MPI.IN_PLACE, MPI.IN_PLACE)
        MPI.COMM_SELF.Gather(one, MPI.IN_PLACE)
        MPI.COMM_SELF.Iallgather(MPI.IN_PLACE, MPI.IN_PLACE)
        MPI.COMM_SELF.Scatter(MPI.IN_PLACE, one)
        MPI.COMM_SELF.Scatter(one, MPI.IN_PLACE)
        MPI.COMM_SELF.Alltoallv(one, MPI.IN_PLACE)
        MPI.COMM_SELF.Bcast(MPI.IN_PLACE)
        MPI.COMM_SELF.Reduce_scatter(MPI.IN_PLACE, two)
        MPI.COMM_SELF.Reduce_scatter_block(one, MPI.IN_PLACE)
        """
    ),
    "None where a message is needed": refused(
        """
        MPI.COMM_SELF.Bcast(None)
        MPI.COMM_SELF.Scatter(None, one)
        MPI.COMM_SELF.Gather(None, None)
        MPI.COMM_SELF.Allreduce(one, None)
        MPI.COMM_SELF.Gather(None, one)
        MPI.COMM_SELF.Send(3, MPI.PROC_NULL)
        MPI.COMM_SELF.send(lambda: 1, MPI.PROC_NULL)
        MPI.COMM_SELF.Sendrecv(one, 0)
        """
    ),
    "elements that MPI has no datatype for": refused(
        """
        MPI.COMM_SELF.Bcast(np.array(["ab"]))
        MPI.COMM_SELF.Bcast(np.array([b"ab"]))
        MPI.COMM_SELF.Allgather(np.zeros(2, "V4"), two)
        MPI.COMM_SELF.Bcast(np.array(["2020-01-01"], "M8[D]"))
        MPI.COMM_SELF.Bcast(np.array([1], "m8[s]"))
        MPI.COMM_SELF.Bcast(np.zeros(2, [("index", "i4"), ("value", "f8")]))
        MPI.COMM_SELF.Bcast(np.array([None]))
        MPI.COMM_SELF.Bcast(np.array([1.0], ">f8"))
        MPI.COMM_SELF.Bcast(np.array([1, 2], "f2"))
        MPI.COMM_SELF.Bcast(np.array([b"a"], "c"))
        MPI.COMM_SELF.Bcast([np.array(["ab"]), MPI.BYTE])
        MPI.COMM_SELF.Bcast([two, "zz"])
        MPI.Datatype.fromcode("zz")
        MPI.Datatype.fromcode("bool")
        """
    ),
    "ranks and axes that a topology lacks": refused(
        """
        comm.Create_cart([3], periods=[False]).Get_cart_rank([5])
        comm.Create_cart([3], periods=[False]).Get_cart_rank([-1])
        comm.Create_cart([3], periods=[True]).Get_cart_rank([-1])
        comm.Create_cart([3], periods=[True]).Get_cart_rank([0, 0])
        comm.Create_cart([3]).Get_cart_rank([0.5])
        comm.Create_cart([3]).Get_coords(99)
        comm.Create_cart([3]).Shift(-1, 1)
        comm.Create_cart([1.5])
        comm.Create_cart([4])
        comm.Create_dist_graph([rank], [2], [0])
        comm.Create_dist_graph([rank], 1, [0])
        MPI.Compute_dims(0, 1)
        MPI.Compute_dims(6, -1)
        """
    ),
    "memory for buffered sends": refused(
        """
        MPI.Detach_buffer()
        MPI.COMM_SELF.Bsend(one, MPI.PROC_NULL)
        MPI.Attach_buffer(bytearray(0))
        MPI.Attach_buffer(bytearray(1000))
        MPI.Attach_buffer(bytearray(1000))
        MPI.COMM_SELF.Bsend(np.zeros(500), 0)
        MPI.Detach_buffer()
        MPI.Detach_buffer()
        """
    ),
    "arguments of another kind": refused(
        """
        MPI.COMM_SELF.Send(one, None)
        MPI.COMM_SELF.Send(one, "0")
        MPI.COMM_SELF.Send(one, 7)
        MPI.COMM_SELF.Send(one, MPI.PROC_NULL, 2**31)
        MPI.COMM_SELF.Send_init(one, 7)
        MPI.COMM_SELF.Iprobe(0, -5)
        MPI.COMM_SELF.Allreduce(one, two)
        MPI.COMM_SELF.Exscan(one, two)
        MPI.COMM_SELF.Allreduce(one, np.ones(1, "i4"))
        MPI.COMM_SELF.Allreduce(one, np.ones(1), max)
        MPI.COMM_SELF.Allreduce(one, np.ones(1), None)
        MPI.COMM_SELF.Scatterv([two, [1, 1]], one)
        MPI.COMM_SELF.Scatterv([two, [-1]], one)
        MPI.COMM_SELF.Gather(two, one)
        MPI.OP_NULL.Is_commutative()
        comm.Get_group().Union(comm.Get_group())
        MPI.Group.Union(comm.Get_group(), None)
        comm.Get_group().Range_incl([(0, 1, 0)])
        comm.Get_group().Range_incl([(0, 1)])
        comm.Compare(None)
        comm.Create(None)
        comm.Split_type(77)
        comm.Set_name(3)
        comm.Get_attr(12345)
        MPI.Info.Create()["nothing"]
        MPI.Info.Create().Set("key", 3)
        MPI.Request.Waitall([None])
        MPI.REQUEST_NULL.Cancel()
        MPI.Get_error_class(-1)
        MPI.Alloc_mem(-1)
        {MPI.Exception(5): 1}[5]
        """
    ),
    "libraries elsewhere, which keep a rank and talk while they are imported": (
        """\
        import os
        sys.path.insert(0, os.path.abspath("../elsewhere"))
        import plain; plain.SEEN.append(rank); comm.Barrier(); print(plain.SEEN)
        import talks, outer.inner
        outer.inner.count(10)
        print(
            talks.rank, talks.total, outer.inner.RANK, outer.inner.counted, outer.talks is talks
        )"""
    ),
    "functions for the end": (
        """\
        import atexit
        atexit.register(lambda: print("bye", comm.allreduce(rank)))
        atexit.register(print, "last")
        atexit.unregister(print)
        sys.exit(0)"""
    ),
    "memory of a node": (
        """\
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        win = MPI.Win.Allocate_shared(8 * (rank + 1), 8, comm=node)
        parts = [np.frombuffer(win.Shared_query(at)[0], "d") for at in range(size)]
        parts[rank][:] = rank
        win.Fence()
        whole, unit = win.Shared_query(MPI.PROC_NULL)
        print(np.concatenate(parts), len(whole), unit, win.group.size, len(win.tomemory()))
        win.Fence()
        parts[0][0] += 1
        win.Free()
        print(bool(win))"""
    ),
    "objects beside their buffers, types by their letters": (
        """\
        from mpi4py.util import pkl5
        other = pkl5.Intracomm(comm)
        request = other.isend(np.arange(9.0) * rank, (rank + 1) % size)
        print(other.recv().sum(), other.bcast([rank, np.ones(3)]), MPI._typedict["d"].Get_size())
        request.wait()"""
    ),
    "what MPI refuses": (
        """\
        a, self = np.arange(12.0), MPI.COMM_SELF
        strided = MPI.DOUBLE.Create_vector(3, 1, 4)
        freed = self.Dup()
        freed.Free()
        null = MPI.Datatype(MPI.DATATYPE_NULL)
        for call in (
            lambda: self.Sendrecv([a, 1, strided], 0, 0, [a.copy(), 1, strided], 0),
            lambda: self.Split(-1),
            freed.Free,
            freed.Get_rank,
            MPI.REQUEST_NULL.Free,
            MPI.Prequest().Start,
            MPI.DOUBLE.Free,
            null.Get_size,
            lambda: self.Send([a, 1, null], 0),
            lambda: self.Send(a, 0, tag=-3),
            lambda: self.Send(a.reshape(3, 4)[:, 1], 0),
            lambda: self.Recv(memoryview(b"12345678"), 0),
            lambda: self.Allreduce(a, a.copy(), MPI.OP_NULL),
            lambda: self.Allreduce(a, a.copy(), MPI.BAND),
            lambda: self.Allreduce(a, a.copy(), MPI.MAXLOC),
            lambda: self.Create_cart([2, 2]),
            lambda: MPI.Compute_dims(6, [4, 0]),
            lambda: self.Get_group().Incl([0, 0]),
            lambda: MPI.DOUBLE.Create_vector(-1, 1, 1),
            lambda: MPI.DOUBLE.Create_subarray([4], [2], [3]),
            lambda: MPI.INFO_NULL.Get("a"),
            lambda: MPI.Info.Create().Delete("a"),
            MPI.COMM_NULL.free,
        ):
            try:
                print(call())
            except Exception as error:
                number = error.Get_error_class() if isinstance(error, MPI.Exception) else -1
                names = [name for name in dir(MPI) if getattr(MPI, name) is number]
                print(type(error).__name__, *[name for name in names if name[:4] == "ERR_"])"""
    ),
    "a function of its own, and requests that are over": (
        """\
        print(comm.allreduce(rank + 1, op=lambda x, y: x * y))
        data = np.full(1, rank)
        requests = [
            comm.Irecv(data, (rank - 1) % size), comm.Isend(np.full(1, rank), (rank + 1) % size)
        ]
        while any(each != MPI.REQUEST_NULL for each in requests):
            for each in requests:
                each.Test()
        print(rank, data, bool(requests[0]), bool(MPI.REQUEST_NULL))
        """
    ),
    "messages": (
        """\
        x, y, status = np.arange(4.0) + rank, np.empty(6), MPI.Status()
        right, left = (rank + 1) % size, (rank - 1) % size
        requests = [comm.Irecv([y, 4, MPI.DOUBLE], left, 7), comm.Isend([x, MPI.DOUBLE], right, 7)]
        MPI.Request.Waitall(requests)
        print(rank, y[:4], comm.sendrecv({"from": rank}, right, 1, None, left, 1))
        comm.Sendrecv(
            x, dest=left, sendtag=2, recvbuf=y, source=right, recvtag=MPI.ANY_TAG, status=status
        )
        print(
            rank, y[:4], status.Get_source() == right, status.Get_tag(),
            status.Get_count(MPI.DOUBLE),
        )
        request = comm.isend("x" * rank, left)
        received = comm.irecv(source=right)
        comm.Send([None, MPI.BYTE], left, 5); comm.Recv([None, MPI.BYTE], right, 5)
        print(MPI.COMM_SELF.allreduce(rank), MPI.COMM_SELF.Get_size())
        print(rank, received.wait(), request.test()[1], comm.recv(None, MPI.PROC_NULL, 0, status))
        again = comm.Recv_init(y, right, 9); again.Start(); comm.Send(x, left, 9)
        print(status.source == MPI.PROC_NULL); again.Wait(status); print(status.source == right)
        request, done = comm.irecv(source=right), False
        comm.send([rank], left)
        while not done:
            done, got = request.test(status)
        print(rank, got, status.source == right)
        request = comm.issend(rank, left)
        print(rank, MPI.Request.waitall([comm.irecv(source=right), request]))
        requests = [comm.irecv(source=right, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            comm.Barrier(); comm.send(tag * 10, left, tag); done = False
            while not done:
                number, done, got = MPI.Request.testany(requests)
            print(rank, number, got)
        print(rank, MPI.Request.Testany(requests) == (MPI.UNDEFINED, True))
        requests = [comm.irecv(source=right, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            comm.Barrier(); comm.send(tag * 10, left, tag)
            print(rank, MPI.Request.waitany(requests, status), status.Get_tag())
        print(rank, MPI.Request.Waitany(requests) == MPI.UNDEFINED)
        """
    ),
    "arguments by their names": (
        """\
        right, left = (rank + 1) % size, (rank - 1) % size
        status, request = MPI.Status(), MPI.Request()
        request.Wait(); print(request.Test(), request == MPI.REQUEST_NULL)
        x = np.zeros(1)
        comm.Sendrecv(np.ones(1), right, 4, x, left, 4, status)
        print(rank, x, status.tag)
        comm.Sendrecv_replace(x, right, 5, left, 5, status)
        print(rank, status.Get_tag(), status.Get_count(MPI.DOUBLE))
        request = comm.isend(obj=None, dest=right, tag=3)
        print(rank, comm.recv(source=left, tag=3, status=status), MPI.SUCCESS)
        request.wait()
        request = comm.irecv(source=left); comm.Barrier(); comm.send(dest=right, obj=rank)
        print(rank, request.wait())
        data = np.zeros(1, int); request = comm.Irecv(data, left); comm.Barrier()
        comm.Rsend(np.full(1, rank), dest=right); request.Wait(); print(rank, data)
        print(
            rank, comm.sendrecv(sendobj=rank, dest=right, source=left), comm.bcast(obj=rank, root=1)
        )
        print(
            rank, comm.scatter(sendobj=[*range(size)]), comm.gather(sendobj=rank, root=1),
            comm.allgather(sendobj=1),
        )
        print(
            rank, comm.alltoall(sendobj=[rank] * size), comm.reduce(sendobj=1, op=MPI.SUM),
            comm.allreduce(sendobj=2),
        )
        """
    ),
    "collectives": (
        """\
        x, whole, mine = np.arange(2) + 10 * rank, np.zeros((size, 2), int), np.zeros(2, int)
        comm.Allgather(x, whole); print(rank, whole.tolist())
        comm.Alltoall(np.arange(size) + 10 * rank, whole[:, 0].copy())
        comm.Bcast([whole, MPI.LONG], root=1)
        comm.Scatter(whole if rank == 1 else None, mine, root=1); print(rank, mine)
        comm.Gather(mine, whole if rank == 0 else None); print(rank, whole.tolist())
        for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN, MPI.LAND, MPI.LOR, MPI.BAND, MPI.BOR):
            comm.Allreduce(x, mine, op)
            print(rank, mine, comm.allreduce(rank, op), comm.reduce(rank, op, root=1))
        comm.Allreduce(MPI.IN_PLACE, x); comm.Scan(x, mine); print(rank, x, mine, comm.scan(rank))
        comm.Reduce(x, mine, root=2); print(rank, mine if rank == 2 else "")
        own = np.zeros(rank + 1, "i"); counts = [1, 2, 3][:size]; total = sum(counts)
        comm.Reduce_scatter(np.arange(total, dtype="i") * rank, own, counts); print(rank, own)
        comm.Reduce_scatter_block(np.arange(2 * size), mine); print(rank, mine)
        parts = np.zeros(total + 1, "i")
        comm.Allgatherv(own, [parts, counts, [0, 2, 4], MPI.INT]); print(rank, parts)
        comm.Gatherv(own, (parts, counts) if rank == 0 else None)
        comm.Scatterv([parts, counts, None, MPI.INT] if rank == 0 else None, own); print(rank, own)
        comm.Alltoallv(
            [np.arange(size) + rank, [1] * size], [whole, ([1] * size, range(0, 2 * size, 2))]
        )
        print(
            rank, whole.tolist(), comm.bcast(rank, 1), comm.scatter([[i] for i in range(size)]),
            comm.gather(rank),
        )
        print(rank, comm.allgather("a" * rank), comm.alltoall([(rank, i) for i in range(size)]))
        """
    ),
    "operations that are started": (
        """\
        x, y = np.arange(4.0) + rank, np.zeros(4)
        comm.Iallreduce(x, y).Wait(); print(rank, y)
        request = comm.Ireduce(x, y, MPI.MAX, root=1); request.Wait()
        print(rank, y if rank == 1 else "", not request)
        request = comm.Ibcast(x, 2); comm.Ibarrier().Wait(); request.Wait(); print(rank, x)
        parts = np.zeros((size, 4)); comm.Igather(y, parts if rank == 0 else None).Wait()
        comm.Iallgather(x, parts).Wait()
        print(rank, parts.tolist())
        comm.Iscatter(parts if rank == 0 else None, y).Wait(); comm.Iexscan(x, y).Wait()
        print(rank, y if rank else "")
        send = comm.Send_init(x, (rank + 1) % size, 3)
        receive = comm.Recv_init(y, (rank - 1) % size, 3)
        for i in range(3):
            x[:] = rank * 10 + i
            MPI.Prequest.Startall([receive, send]); MPI.Request.Waitall([send, receive])
            print(rank, y, bool(send))
        send.Free(); receive.Free()
        total = comm.Allreduce_init(x, y)
        for i in range(2): total.Start(); total.Wait(); x += 1; print(rank, y)
        total.Free()
        requests = [comm.Irecv(np.zeros(1), (rank - 1) % size, tag) for tag in range(4)]
        for tag in range(4): comm.Send(np.ones(1), (rank + 1) % size, tag)
        done = []
        while len(done) < 4: done += MPI.Request.Waitsome(requests)
        print(rank, sorted(done), MPI.Request.Waitsome(requests), MPI.Request.Testall(requests))
        a, b = np.zeros(2), np.ones(2)
        comm.Isendrecv(b, (rank + 1) % size, 0, a, (rank - 1) % size, 0).Wait()
        comm.Sendrecv_replace(x, (rank + 1) % size, 0, (rank - 1) % size, 0); print(rank, a, x)
        """
    ),
    "messages that are looked at": (
        """\
        right, left, status = (rank + 1) % size, (rank - 1) % size, MPI.Status()
        request = comm.Isend(np.arange(rank + 1.0), right, 5)
        comm.Probe(left, MPI.ANY_TAG, status); x = np.zeros(status.Get_count(MPI.DOUBLE))
        comm.Recv(x, left, 5); request.Wait()
        print(rank, x, status.Get_source() == left, status.tag)
        request = comm.issend({"rank": rank}, right, 6)
        while not comm.iprobe(left, 6): pass
        message = comm.mprobe(left, 6)
        print(rank, bool(message), message.recv(), bool(message), comm.improbe(left))
        request.wait()
        comm.send("a", rank, 1); comm.send("b", rank, 2)
        first = comm.mprobe(rank)
        print(rank, comm.recv(source=rank, tag=MPI.ANY_TAG), first.recv())
        """
    ),
    "parts of arrays": (
        """\
        x, y = np.arange(24.0).reshape(4, 6) + 100 * rank, np.zeros((4, 6))
        column = MPI.DOUBLE.Create_vector(4, 1, 6).Commit()
        right, left = (rank + 1) % size, (rank - 1) % size
        requests = [
            comm.Irecv([y.reshape(-1)[1:], 1, column], left), comm.Isend([x, 1, column], right)
        ]
        requests += [comm.Irecv([y.reshape(-1)[3:], 1, column], left)]
        requests += [comm.Isend([x.reshape(-1)[2:], 1, column], right)]
        MPI.Request.Waitall(requests)
        print(rank, y.tolist(), column.Get_size(), column.Get_extent())
        two, z = comm.Split(min(rank, 1)), np.zeros(3)
        if two.size == 2: two.Allgatherv(np.full(two.rank + 1, float(rank)), [z, [1, 2]])
        if two.size == 2: two.Allgatherv([np.full(3, float(rank)), 1], [z, ([1, 1], [2, 0]), "d"])
        print(rank, z)
        block = MPI.DOUBLE.Create_subarray([4, 6], [2, 3], [1, 2]).Commit(); y[:] = 0
        comm.Sendrecv([x, 1, block], right, 0, [y, 1, block], left, 0); print(rank, y.tolist())
        comm.Bcast([x, 1, block], 1); print(rank, x[1:3, 2:5].tolist())
        kind = MPI.Datatype.Create_struct([1, 2], [0, 4], [MPI.INT, MPI.SHORT]).Commit()
        print(kind.size, kind.extent)
        z = np.zeros(5, "f8")
        ones, kinds = [1] * size, [MPI.DOUBLE] * size
        comm.Alltoallw(
            [x, (ones, [0] * size), kinds], [z, (ones, [8 * i for i in range(size)]), kinds]
        )
        print(rank, z.tolist())
        """
    ),
    "reductions": (
        """\
        pair = np.zeros(1, np.dtype("f8,i4", align=True))
        pair["f0"], pair["f1"] = -abs(rank - 1), rank
        best = np.zeros_like(pair)
        comm.Allreduce([pair, MPI.DOUBLE_INT], [best, MPI.DOUBLE_INT], MPI.MAXLOC)
        print(rank, best)
        print(comm.allreduce((rank % 2, rank), MPI.MINLOC))
        print(comm.allreduce((rank % 2, rank), op=MPI.MAXLOC), comm.exscan(rank + 1))
        print(comm.allreduce([rank], MPI.SUM), comm.allreduce(rank % 2, MPI.LXOR))
        print(comm.allreduce(rank, MPI.BXOR), comm.scan("abc"[rank]))
        def longest(a, b, kind):
            b_, a_ = np.frombuffer(b, "i"), np.frombuffer(a, "i"); b_[...] = np.maximum(a_, b_)
        op = MPI.Op.Create(longest, commute=True); y = np.zeros(2, "i")
        comm.Allreduce(np.array([rank, -rank], "i"), y, op); print(rank, y); op.Free()
        x = np.array([1, 2], "i"); MPI.SUM.Reduce_local(x, y); print(rank, y, MPI.PROD(3, 4))
        comm.Allreduce(MPI.IN_PLACE, x)
        comm.Reduce(MPI.IN_PLACE if rank == 1 else x, x if rank == 1 else None, root=1)
        print(rank, x)
        comm.Exscan(x.copy(), y); print(rank, y if rank else "")
        """
    ),
    "groups and neighbours": (
        """\
        group = comm.Get_group(); some = group.Incl([2, 0])
        print(
            rank, some.rank == MPI.UNDEFINED, some.Translate_ranks([0, 1], group),
            group.Excl([1]).size,
        )
        new = comm.Create(some)
        print(
            rank, new.rank if new != MPI.COMM_NULL else "none",
            MPI.Group.Compare(some, group) == MPI.UNEQUAL,
        )
        if rank != 1: print(rank, comm.Create_group(some).allgather(rank))
        print(
            MPI.Comm.Compare(comm, comm.Dup()) == MPI.CONGRUENT, MPI.Compute_dims(12, 3),
            MPI.Compute_dims(6, [0, 3]),
        )
        print(comm.Split_type(MPI.COMM_TYPE_SHARED).size)
        ring = comm.Create_cart([size], periods=True); y = np.zeros(2, int)
        ring.Neighbor_allgather(np.array([rank]), y)
        print(rank, y, ring.neighbor_alltoall(["l", "r"]))
        line = comm.Create_cart([size]); y[:] = -1
        line.Ineighbor_allgather(np.array([rank]), y).Wait()
        print(rank, y, line.neighbor_allgather(rank), line.inedges)
        grid = comm.Create_cart([size, 1], [True, False]); sub = grid.Sub([True, False])
        print(rank, sub.dims, sub.coords, sub.periods, grid.topo, grid.Get_topology() == MPI.CART)
        print(comm.Create_cart([size, 1], [True, True]).neighbor_alltoall("abcd"))
        graph = comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size])
        print(rank, graph.neighbor_allgather(rank), graph.Get_dist_neighbors_count())
        web = comm.Create_graph([1, 3, 4], [1, 0, 2, 1])
        print(rank, web.neighbors, web.neighbor_alltoall([rank] * web.nneighbors))
        print(MPI.Is_initialized(), MPI.Is_finalized(), MPI.Query_thread() >= 0)
        print(len(MPI.Get_library_version()) > 3, comm.Get_name(), MPI.Get_version()[0] >= 3)
        """
    ),
    "a communicator of its own class": (
        """\
        class Ours(MPI.Intracomm):
            def __new__(cls, comm=None): return super().__new__(cls, comm)
            def everything(self): return self.allgather(rank)
        print(Ours(comm).everything(), type(Ours(comm)).__module__, Ours() == MPI.COMM_NULL)
        """
    ),
    "output": (
        """\
        sys.stdout.reconfigure(line_buffering=True)
        sys.stdout.buffer.write(f"rank {rank} é\\n".encode())
        sys.stdout.buffer.flush()
        print("x" * rank, end=""); sys.stdout.write(""); print()
        """
    ),
    "what a process has once": (
        """\
        import os, logging, warnings, tempfile
        os.chdir(sys.path[0] if rank else os.sep); comm.Barrier()
        print(rank, os.getcwd() == os.sep)
        logging.basicConfig(force=True, stream=sys.stdout, format=f"{rank} %(message)s")
        logging.root.setLevel([10, 40, 20][rank]); comm.Barrier()
        logging.info("info"); logging.error("error"); comm.Barrier()
        warnings.simplefilter(["error", "ignore", "ignore"][rank]); comm.Barrier()
        try: warnings.warn("x"); print(rank, "ignored")
        except UserWarning: print(rank, "raised")
        np.set_printoptions(precision=rank + 1); comm.Barrier(); print(np.array([1 / 3]))
        """
    ),
    "communicators": (
        """\
        row = comm.Split(rank % 2, -rank); print(rank, row.Get_rank(), row.allgather(rank))
        print(
            rank, comm.Split(MPI.UNDEFINED if rank else 0) == MPI.COMM_NULL, comm.Dup().allreduce(1)
        )
        grid = comm.Create_cart([size, 1], periods=[True, False])
        print(
            rank, grid.Get_coords(rank), grid.Shift(0, 1), grid.Shift(1, 1)[0] == MPI.PROC_NULL,
            grid.coords,
        )
        """
    ),
    "modules and numbers": (
        """\
        import random, pickle, helper
        class Own:
            def __init__(self): self.rank = rank
        np.random.seed(rank); random.seed(rank)
        found = comm.allgather(Own())
        print(
            helper.RANK == rank, [each.rank for each in found], isinstance(found[0], Own), __name__
        )
        print(rank, np.random.rand(), random.random(), sys.argv[1:], end="")
        comm.Barrier(); print(" whole")
        """
    ),
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Write a program and its modules into the current folder; returns its name."""
    (tmp_path / "program").mkdir()
    monkeypatch.chdir(tmp_path / "program")
    Path("helper.py").write_text("from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n")
    Path("../elsewhere/outer").mkdir(parents=True)
    Path("../elsewhere/plain.py").write_text("SEEN = []\n")
    Path("../elsewhere/talks.py").write_text(
        "from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"
        "total = MPI.COMM_WORLD.allreduce(rank)\n"
    )
    Path("../elsewhere/outer/__init__.py").write_text("import talks\n")
    Path("../elsewhere/outer/inner.py").write_text(
        "from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\nMPI.COMM_WORLD.barrier()\n"
        "counted = 0\ndef count(n):\n    global counted\n    counted += n * RANK\n"
    )

    def write(text):
        Path("p.py").write_text(HEAD + dedent(text))
        return "p.py"

    return write


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_mistake_is_named(defect, programs, monkeypatch, capsys):
    monkeypatch.setattr(simrun, "PATIENCE_S", 0.1)
    monkeypatch.setattr(scheduler, "FRUITLESS_POLLS", 2000)
    text, kind, sentence = DEFECTS[defect]
    for seed in "01":
        with pytest.raises(kind) as error:
            main(["-n", "3", "--seed", seed, programs(text)])
        assert re.search(sentence, f"{error.value}\n{capsys.readouterr().err}", re.DOTALL)


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_prints_what_mpirun_prints(name, programs, tmp_path, capsys):
    program = programs(RIGHT[name])
    text = main(["-n", "3", "--seeds", "4", program, "a", "--b"])
    assert text == "4 seeds: none fails, and all print the same"
    ending = run([*mpirun(3), sys.executable, program, "a", "--b"], tmp_path / "output", 60.0)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(ending.output.splitlines())


def test_mpi_begins_and_ends_once(programs, capsys):
    """As the import of mpi4py.MPI, or `rc.initialize`, says; Open MPI adds lines of its own."""
    attempts = """
        attempt(0, lambda: MPI.Init())
        attempt(1, lambda: MPI.Init_thread())
        attempt(2, lambda: MPI.Finalize())
        attempt(3, lambda: MPI.Finalize())
        print(rank, MPI.Is_initialized(), MPI.Is_finalized())"""
    never = "import mpi4py; mpi4py.rc(initialize=False)\n"
    for text, begins in ((ATTEMPT, "MPI.Exception"), (f"{never}{ATTEMPT}", "nothing")):
        main(["-n", "2", programs(text + dedent(attempts))])
        lines = sorted(capsys.readouterr().out.splitlines())
        came = [f"0 {begins}", "1 MPI.Exception", "2 nothing", "3 MPI.Exception", "True True"]
        assert lines == [f"{rank} {what}" for rank in (0, 1) for what in came]


def test_communicators_in_one_line_are_told_apart(programs):
    """By their ranks; and counted where these are the same."""
    text = "half = comm.Split(rank % 2)\n(half if rank != 3 else comm).Barrier()"
    with pytest.raises(CommError) as error:
        main(["-n", "4", programs(text)])
    assert "rank 1 waits for Barrier (collective 1 of the communicator of ranks 1, 3)" in str(
        error.value
    )
    assert "rank 3 waits for Barrier (collective 2 of the communicator of all ranks)" in str(
        error.value
    )
    text = "a, b = comm.Dup(), comm.Dup()\n(b if rank else a).Recv(np.ones(1), 1 - rank)"
    with pytest.raises(CommError) as error:
        main(["-n", "2", programs(text)])
    names = re.findall(r" on (\w+ \d of all ranks)", str(error.value))
    assert len({*names}) == 2


def test_seeds_find_a_race_and_the_clock_is_exact(programs, capsys):
    race = (
        "if rank:\n    comm.send(rank, 0)\nelse:\n    print([comm.recv() for _ in range(size - 1)])"
    )
    assert re.search(
        r"none fails, but with seed \d+ rank 0 does not print",
        main(["--seeds", "9", programs(race)]),
    )
    # before anyone receives
    both = "for one in (1, 2):\n    rank == one and comm.send(one, 0)\n    comm.Barrier()\n"
    both = programs(f"{both}rank or print(comm.recv(), comm.recv())")
    assert "rank 0 does not print what" in main(["-n", "3", "--seeds", "9", both])
    with pytest.raises(SystemExit):
        main(["--seeds", "30", programs(f"{race[:-1]}[0] < 3 or 1 / 0)")])
    assert re.search(r"ZeroDivisionError.*with seed [1-9]", capsys.readouterr().err, re.DOTALL)
    ring = (
        "t = MPI.Wtime()\nfor _ in range(8):\n    comm.sendrecv(0, (rank + 1) %"
        " size)\nprint(MPI.Wtime() - t > 4e-4)"
    )
    text = main(["-n", "3", "--network", "alpha_us=50,gbit=1", programs(ring)])
    assert (
        text
        == "3 ranks with alpha_us=50,gbit=1: 400.5 us of simulated time; the busiest, rank 0, sent"
        " or received 40 B"
    )
    assert main(["-n", "3", "--network", "alpha_us=50,gbit=1", programs(ring)]) == text
    swap = programs("comm.Alltoall(np.zeros(50_000), np.zeros(50_000))")  # half goes to itself
    text = main(["-n", "2", "--network", "alpha_us=50,gbit=1", swap])
    assert "1.65 ms of simulated time" in text


def test_prices_of_what_is_started(programs):
    network = ["-n", "4", "--network", "alpha_us=50,gbit=1"]
    x = "x, y = np.zeros(50_000), np.zeros(50_000)\n"
    seconds = {}
    for call in (
        "Allreduce(x, y)",
        "Iallreduce(x, y).Wait()",
        "Reduce(x, y)",
        "Barrier()",
        "Create_cart([4], True).Neighbor_alltoall(x, y)",
    ):
        text = main([*network, programs(f"{x}comm.{call}")])
        seconds[call] = re.search(r"gbit=1: (\S+ \S+) of simulated", text)[1]
    assert seconds["Allreduce(x, y)"] == seconds["Iallreduce(x, y).Wait()"] == "5 ms"
    assert len({*seconds.values()}) == 4
    # 200 kB to each side and from each: 1.6 ms a message, and links are taken in order of the calls
    neighbors = seconds["Create_cart([4], True).Neighbor_alltoall(x, y)"]
    assert 3.2 < float(neighbors.removesuffix(" ms")) < 6.6
    overlap = "r = comm.Iallreduce(x, y)\nt = MPI.Wtime()\nprint(MPI.Wtime() - t < 1e-3)\nr.Wait()"
    assert "5 ms" in main([*network, programs(x + overlap)])


def test_ranks_that_sleep_between_polls_are_named(programs, monkeypatch):
    monkeypatch.setattr(simrun, "WARNING_S", 3.0)
    poll = "import time\nend = time.time() + {}\nwhile time.time() < end and not comm.Iprobe(): "
    main(["-n", "2", programs(f"{poll.format(1.5)}pass\ncomm.barrier()")])
    refuses(
        CommError,
        r"(?s)deadlock.*rank 1 waits for a message from any rank .*poll",
        lambda: main(["-n", "2", programs(f"{poll.format(60)}time.sleep(0.1)")]),
    )


def test_a_loop_with_a_time_limit_is_no_deadlock(programs, capsys):
    wait = "begin = MPI.Wtime()\nwhile MPI.Wtime() < begin + 5 and not comm.Iprobe(): pass\n"
    for options in ([], ["--network", "alpha_us=50,gbit=1"]):
        main(["-n", "3", *options, programs(f"{wait}print(rank, comm.allreduce(1))")])
        assert "2 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "for _ in range({0}): print('x' * 99)",
        "for _ in range({0}): print('x', end='')",
        """\
        if rank == 0: [comm.send(i, 1, i % 3) for i in range({0})]; comm.send(0, 2)
        if rank == 2: comm.recv(); comm.send(0, 1, 9)
        if rank == 1: comm.recv(source=2)
        if rank == 1:
            [comm.recv(source=0, tag=tag) for tag in (2, 1, 0) for i in range(tag, {0}, 3)]
        """,
        """\
        if rank == 0: [comm.send(i, 1, i) for i in range({0})]; comm.send(0, 2)
        if rank == 2: comm.recv(); comm.send(0, 1, {0})
        if rank == 1: comm.recv(source=2); [comm.recv(tag=i) for i in reversed(range({0}))]
        """,
        """\
        if rank == 0: MPI.Request.Waitall([comm.Isend(np.ones(1), 1, i) for i in range({0})])
        if rank == 1:
            MPI.Request.Waitall([comm.Irecv(np.ones(1), 0, i) for i in reversed(range({0}))])
        """,
    ],
)
def test_time_grows_as_lines_and_messages(text, programs):
    def seconds(number):
        begin = time.process_time()
        main(["-n", "3", programs(dedent(text).format(number))])
        return time.process_time() - begin

    seconds(100)
    few = min(seconds(800) for _ in range(2))
    assert seconds(6_400) < 8 * 2 * few + 0.2


@pytest.mark.parametrize("body", ["pass", "print('x' * 1000)", "threading.Event().wait(2)"])
def test_a_rank_without_end_is_named(body, programs, monkeypatch, capfd):
    assert simrun.WARNING_S == 10
    monkeypatch.setattr(simrun, "WARNING_S", 0.4)
    text = f"""\
import time, threading
end = time.time() + 1
if rank == 1:
    while time.time() < end: {body}
"""
    main(["-n", "2", programs(f"{text}comm.barrier()")])
    assert re.search(
        r"nnmpi: rank 1 has made no call for 0 s\n      at p\.py:9\n  rank 0 waits for barrier.*\n"
        r"      at p\.py:10",
        capfd.readouterr().err,
    )


def test_a_call_after_the_end_is_refused(programs):
    # logging has the process's own atexit, not the rank's
    name = programs("import logging\nlogging.atexit.register(comm.barrier)")
    command = [sys.executable, "-m", "nnmpi", "simrun", "-n", "2", name]
    path = {"PYTHONPATH": str(Path(simrun.__file__).parents[2])}
    done = subprocess.run(
        command, env=os.environ | path, capture_output=True, text=True, timeout=60
    )
    assert re.search(r"rank 1 waits for others when all have ended", done.stderr)


def test_a_pipe_is_no_program(tmp_path):
    os.mkfifo(tmp_path / "p.py")
    usage_error(r"p\.py cannot be read \(not an ordinary file", main, [str(tmp_path / "p.py")])


def test_a_handler_of_signals_is_warned_about(programs):
    text = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    assert main([programs(f"{text}assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL")]) == ""
    with pytest.warns(RuntimeWarning, match="rank 0 handles signal 15, which reaches no"):
        main(["-n", "1", programs(f"{text}signal.signal(signal.SIGTERM, print)")])


@pytest.mark.parametrize("ranks", ["10001", "1000000000"])
def test_too_many_ranks_are_refused(ranks, programs):
    usage_error(
        f"{ranks} ranks are threads.*10000 at most; give fewer",
        lambda: main(["-n", ranks, programs("")]),
    )


def test_small_sends_that_need_buffers_are_found(programs):
    ring = programs("comm.send(0, (rank + 1) % size)\ncomm.recv()")
    assert main([ring]) == ""
    refuses(CommError, "deadlock", main, ["--eager", "0k", ring])
    usage_error("--seed is x; it must be a whole number", main, ["--seed", "x", ring])


@pytest.mark.parametrize(
    "text, status", [("sys.exit(3 * (rank == 1))", 3), ("rank or comm.Abort(7)\ncomm.Barrier()", 7)]
)
def test_the_status_is_the_programs(text, status, programs):
    with pytest.raises(SystemExit) as ending:
        main([programs(text)])
    assert ending.value.code == status


OF_NNMPI = """\
import nnmpi
group = nnmpi.start()
take = comm.irecv(source=MPI.ANY_SOURCE)
x, y = np.full(5, 1.0 + rank), np.full(5, 1.0 + rank)
group.all_reduce(x, "ring")
nnmpi.Group(comm).all_reduce(y, "ring")
comm.send(rank, (rank + 1) % size)
if rank == 0:
    print(
        take.wait(), x, y, group is nnmpi.start(), nnmpi.simulate(lambda _: nnmpi.start().size, 2)
    )
else:
    take.wait()"""


def test_nnmpis_groups_are_the_simulated_ranks(programs, capsys):
    main(["-n", "3", programs(OF_NNMPI)])
    assert capsys.readouterr().out == "2 [6. 6. 6. 6. 6.] [6. 6. 6. 6. 6.] True [2, 2]\n"


def test_nnmpi_is_shared_where_its_folder_is_the_programs():
    modules = RankModules(f"{Path(simrun.__file__).parents[2]}/")
    assert not {"nnmpi.teaching.simrun", "numpy"} & {*modules.find()}


def test_a_closed_pipe_ends_the_printing_alone():
    class Closed(io.StringIO):
        def write(self, text):
            raise error

    error = BrokenPipeError()
    interpreter = simrun.Interpreter(RankModules("/nowhere/"), 1, Closed())
    interpreter.begin()
    assert interpreter.write("a\n") + interpreter.write("b\n") == 4
    error = OSError(28, "No space left on device")
    interpreter = simrun.Interpreter(RankModules("/nowhere/"), 1, Closed())
    interpreter.begin()
    refuses(CommError, "the output cannot be written: No space left", interpreter.write, "a\n")


def test_a_fork_of_a_rank_ends_when_it_waits_or_its_program_does(tmp_path):
    """It has no other rank's thread; status 1 says that it waited."""
    program = f"import os\n{HEAD}child = os.fork()\nif not child and rank:\n    comm.recv()\n"
    program += "if child:\n    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    (tmp_path / "p.py").write_text(program)
    command = [sys.executable, "-m", "nnmpi", "simrun", "-n", "2", str(tmp_path / "p.py")]
    ending = run(command, tmp_path / "output", 20)
    assert (ending.status, ending.output) == (0, "0\n1\n"), ending.output
