"""Programs written for mpi4py: each mistake is named with its ranks and lines; right ones print
what mpirun prints.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from nnmpi.base.errors import CommError, UsageError
from nnmpi.teaching.simrun import main
from tests.harness.job import mpirun, run

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
    "a ring of long sends": (
        "comm.Send(np.zeros(9999), (rank + 1) % size)\ncomm.Recv(np.zeros(9999))",
        CommError,
        r"deadlock.*(rank \d -> ){3}.*rank 1 waits for send to rank 2 with tag 0.*p\.py:6",
    ),
    "nobody sends": (
        "if rank == 1:\n    comm.recv(source=MPI.ANY_SOURCE, tag=4)",
        CommError,
        (
            r"deadlock.*rank 1 waits for receive from any rank with tag 4.*p\.py:7.*ended: rank 0,"
            r" rank 2"
        ),
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
        CommError,
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
    "no program": ("if rank == 1\n", SystemExit, r'^1\n  File "p\.py", line 6\n.*SyntaxError'),
    "no tag": (
        "rank or comm.send(0, 1, tag=-5)",
        SystemExit,
        r"send's tag is -5; give a whole number of at least 0.*on rank 0",
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
        "MPI.Win",
        SystemExit,
        r"line 6.*has no mpi4py.MPI.Win; .*docs/reference/mpi4py.md lists its calls",
    ),
    "two groups": (
        "comm.Create_intercom(0, comm, 1)",
        SystemExit,
        r"has no Intracomm.Create_intercom; ",
    ),
    "a module that talks": ("import talks", UsageError, "talks communicates while it is imported"),
}

# Programs that are right. Their lines are compared with those of mpirun, in any order.
RIGHT = {
    "a function of its own, and requests that are over": (
        """\
        print(comm.allreduce(rank + 1, op=lambda x, y: x * y))
        data = np.full(1, rank)
        requests = [comm.Irecv(data, (rank - 1) % size), comm.Isend(np.full(1, rank), (rank + 1) % size)]
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
        comm.Sendrecv(x, dest=left, sendtag=2, recvbuf=y, source=right, recvtag=MPI.ANY_TAG, status=status)
        print(rank, y[:4], status.Get_source() == right, status.Get_tag(), status.Get_count(MPI.DOUBLE))
        request = comm.isend("x" * rank, left)
        received = comm.irecv(source=right)
        comm.Send([None, MPI.BYTE], left, 5); comm.Recv([None, MPI.BYTE], right, 5)
        print(MPI.COMM_SELF.allreduce(rank), MPI.COMM_SELF.Get_size())
        print(rank, received.wait(), request.test()[1], comm.recv(source=MPI.PROC_NULL))
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
        right, left, status, request = (rank + 1) % size, (rank - 1) % size, MPI.Status(), MPI.Request()
        request.Wait(); print(request.Test(), request == MPI.REQUEST_NULL)
        request = comm.isend(obj=None, dest=right, tag=3)
        print(rank, comm.recv(source=left, tag=3, status=status), MPI.SUCCESS)
        request.wait()
        request = comm.irecv(source=left); comm.Barrier(); comm.send(dest=right, obj=rank); print(rank, request.wait())
        data = np.zeros(1, int); request = comm.Irecv(data, left); comm.Barrier()
        comm.Rsend(np.full(1, rank), dest=right); request.Wait(); print(rank, data)
        print(rank, comm.sendrecv(sendobj=rank, dest=right, source=left), comm.bcast(obj=rank, root=1))
        print(rank, comm.scatter(sendobj=[*range(size)]), comm.gather(sendobj=rank, root=1), comm.allgather(sendobj=1))
        print(rank, comm.alltoall(sendobj=[rank] * size), comm.reduce(sendobj=1, op=MPI.SUM), comm.allreduce(sendobj=2))
        """
    ),
    "collectives": (
        """\
        x, whole, mine = np.arange(2) + 10 * rank, np.zeros((size, 2), int), np.zeros(2, int)
        comm.Allgather(x, whole); print(rank, whole.tolist())
        comm.Alltoall(np.arange(size) + 10 * rank, whole[:, 0].copy()); comm.Bcast([whole, MPI.LONG], root=1)
        comm.Scatter(whole if rank == 1 else None, mine, root=1); print(rank, mine)
        comm.Gather(mine, whole if rank == 0 else None); print(rank, whole.tolist())
        for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN, MPI.LAND, MPI.LOR, MPI.BAND, MPI.BOR):
            comm.Allreduce(x, mine, op); print(rank, mine, comm.allreduce(rank, op), comm.reduce(rank, op, root=1))
        comm.Allreduce(MPI.IN_PLACE, x); comm.Scan(x, mine); print(rank, x, mine, comm.scan(rank))
        comm.Reduce(x, mine, root=2); print(rank, mine if rank == 2 else "")
        own = np.zeros(rank + 1, "i"); counts = [1, 2, 3][:size]; total = sum(counts)
        comm.Reduce_scatter(np.arange(total, dtype="i") * rank, own, counts); print(rank, own)
        comm.Reduce_scatter_block(np.arange(2 * size), mine); print(rank, mine)
        parts = np.zeros(total + 1, "i")
        comm.Allgatherv(own, [parts, counts, [0, 2, 4], MPI.INT]); print(rank, parts)
        comm.Gatherv(own, (parts, counts) if rank == 0 else None)
        comm.Scatterv([parts, counts, None, MPI.INT] if rank == 0 else None, own); print(rank, own)
        comm.Alltoallv([np.arange(size) + rank, [1] * size], [whole, ([1] * size, range(0, 2 * size, 2))])
        print(rank, whole.tolist(), comm.bcast(rank, 1), comm.scatter([[i] for i in range(size)]), comm.gather(rank))
        print(rank, comm.allgather("a" * rank), comm.alltoall([(rank, i) for i in range(size)]))
        """
    ),
    "communicators": (
        """\
        row = comm.Split(rank % 2, -rank); print(rank, row.Get_rank(), row.allgather(rank))
        print(rank, comm.Split(MPI.UNDEFINED if rank else 0) == MPI.COMM_NULL, comm.Dup().allreduce(1))
        grid = comm.Create_cart([size, 1], periods=[True, False])
        print(rank, grid.Get_coords(rank), grid.Shift(0, 1), grid.Shift(1, 1)[0] == MPI.PROC_NULL, grid.coords)
        """
    ),
    "modules and numbers": (
        """\
        import random, pickle, helper
        class Own:
            def __init__(self): self.rank = rank
        np.random.seed(rank); random.seed(rank)
        found = comm.allgather(Own())
        print(helper.RANK == rank, [each.rank for each in found], isinstance(found[0], Own), __name__)
        print(rank, np.random.rand(), random.random(), sys.argv[1:], end="")
        comm.Barrier(); print(" whole")
        """
    ),
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a program and its modules into the current folder; returns its name."""
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n")
    Path("talks.py").write_text("from mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n")

    def write(text: str) -> str:
        Path("p.py").write_text(HEAD + dedent(text))
        return "p.py"

    return write


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_mistake_is_named(
    defect: str, programs: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    text, kind, sentence = DEFECTS[defect]
    for seed in "012":
        with pytest.raises(kind) as error:
            main(["-n", "3", "--seed", seed, programs(text)])
        assert re.search(sentence, f"{error.value}\n{capsys.readouterr().err}", re.DOTALL)


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_prints_what_mpirun_prints(
    name: str, programs: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = programs(RIGHT[name])
    text = main(["-n", "3", "--seeds", "4", program, "a", "--b"])
    assert text == "4 seeds: none fails, and all print the same"
    ending = run([*mpirun(3), sys.executable, program, "a", "--b"], tmp_path / "output", 60.0)
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(ending.output.splitlines())


def test_seeds_find_a_race_and_the_clock_is_exact(
    programs: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_small_sends_that_need_buffers_are_found(programs: Callable[[str], str]) -> None:
    ring = programs("comm.send(0, (rank + 1) % size)\ncomm.recv()")
    assert main([ring]) == ""
    with pytest.raises(CommError, match="deadlock"):
        main(["--eager", "0k", ring])
    with pytest.raises(UsageError, match="--seed is x; it must be a whole number"):
        main(["--seed", "x", ring])


@pytest.mark.parametrize(
    ("text", "status"),
    [("sys.exit(3 * (rank == 1))", 3), ("rank or comm.Abort(7)\ncomm.Barrier()", 7)],
)
def test_the_status_is_the_programs(text: str, status: int, programs: Callable[[str], str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([programs(text)])
    assert ending.value.code == status
