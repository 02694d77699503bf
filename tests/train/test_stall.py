"""Jobs in which one rank does not come: told, ended with a status of its own, and a record of each
rank is left.
"""

import re
import signal
import time

import pytest

from nnmpi.comm.mpi.shutdown import STALLED
from tests.harness.slow import ONCE_MORE, once_more
from tests.train.jobs import lines, once, send, train

NET = """
import os, time
from nnmpi import nn
RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
class Slow(nn.Module):
    def __init__(self):
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 12 and RANK == "1":
            time.sleep(100)
        return x

class Pausing(Slow):
    def forward(self, x):
        self.calls += 1
        if self.calls == 12 and RANK == "1":
            open("pausing", "w").close()
            for _ in range(30):
                time.sleep(0.1)
        return x

class Computing(Slow):
    def forward(self, x):
        self.calls += 1
        if self.calls == 12 and RANK == "2":
            end = time.monotonic() + 9
            while time.monotonic() < end:
                sum(range(9999))
                time.sleep(0.005)
        return x

def computing(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), Computing(), nn.Linear(5, classes))

def pausing(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), Pausing(), nn.Linear(5, classes))

def asleep(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), Slow(), nn.Linear(5, classes))

def awake(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, classes))
"""

WARNS_SOON = "from nnmpi.comm import world\nworld.WARNING_S = 4.0  # not ten\n"


@pytest.mark.parametrize(
    "fault", ["asleep in a layer", pytest.param("stopped", marks=pytest.mark.slow(ONCE_MORE))]
)
def test_a_rank_that_does_not_come_is_named_and_the_job_ends(fault, tmp_path):
    """Under messages; a stopped rank 0 cannot answer, so the other one speaks."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "sitecustomize.py").write_text(WARNS_SOON)
    asleep = fault.startswith("asleep")
    words = (
        f"--model net.py:{'asleep' if asleep else 'awake'} --dataset iris --epochs 4000 --no-jit"
        " --allreduce ring "
    )
    words += f"--out {tmp_path}/run --stall-limit 6 --log-every 1"

    def stop():
        send(signal.SIGSTOP, str(tmp_path), "ranks", rank=0)

    begun = once(lambda: not asleep and lines(tmp_path / "run/metrics.jsonl") > 3, stop, ends=False)
    ending = train(tmp_path, words, ranks=2, is_lost=begun)
    assert ending.status == STALLED, ending.output
    guilty = (
        r"rank 1 is at net\.py:11 in forward \(step \d+\)"
        if asleep
        else "rank 0 has (?:not|never) been heard of"
    )
    waiting = r"rank \d waits in .*, called at "
    for sentence in (
        rf"waiting for \d+ s: {guilty}.*{waiting}",
        rf"the job is ended: .*{guilty}.*{waiting}",
    ):
        assert len(re.findall(sentence, ending.output)) == 1, ending.output
    records = {file.name for file in (tmp_path / "run/flight").iterdir()}
    # the abort may wake rank 0
    assert records >= ({"rank-0.txt", "rank-1.txt"} if asleep else {"rank-1.txt"})
    record = (tmp_path / "run/flight/rank-1.txt").read_text()
    assert (
        "seconds ago" in record
        and "messages of 2 ranks" in record
        and "most recent call first" in record
    )


@pytest.mark.parametrize("stopped", [once_more(False), True])
def test_between_nodes_an_alive_rank_is_heard_and_a_stopped_one_named(
    stopped, tmp_path, monkeypatch
):
    """By the network, on one machine; UCX, MPICH's default there, tells what nobody received."""
    monkeypatch.setenv("MPIR_CVAR_NOLOCAL", "1")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "sitecustomize.py").write_text(WARNS_SOON)

    def stop():
        if stopped:
            send(signal.SIGSTOP, str(tmp_path), "ranks", rank=2)

    words = (
        f"--model net.py:{'awake' if stopped else 'computing'} --dataset iris --no-jit "
        f"--epochs {4000 if stopped else 6} --out {tmp_path}/run --stall-limit 6"
        " --log-every 1"
    )
    begun = once(lambda: lines(tmp_path / "run/metrics.jsonl") > 3, stop, ends=False)
    ending = train(tmp_path, words, ranks=3, is_lost=begun)
    if stopped:
        assert ending.status == STALLED, ending.output
        assert len(re.findall("the job is ended: ", ending.output)) == 1, ending.output
        # never, where it was stopped before its first message arrived
        assert re.search("rank 2 has (not|never) been heard of", ending.output), ending.output
    else:
        assert ending.status == 0, ending.output
        assert "heard of" not in ending.output and "not matched" not in ending.output


@pytest.mark.slow(ONCE_MORE)
def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path):
    """The time in which nobody could go on is no wait, although a rank was waiting when it
    began.
    """
    (tmp_path / "net.py").write_text(NET)

    def stop():
        time.sleep(0.5)  # until the other rank waits
        send(signal.SIGSTOP, str(tmp_path), "ranks")
        time.sleep(6)
        send(signal.SIGCONT, str(tmp_path), "ranks")

    words = f"--model net.py:pausing --dataset iris --epochs 20 --no-jit --out {tmp_path}/run "
    stopped = once((tmp_path / "pausing").exists, stop, ends=False)
    ending = train(tmp_path, words + "--stall-limit 12", ranks=2, is_lost=stopped)
    assert ending.status == 0, ending.output
    assert ending.seconds > 9 and "waiting for" not in ending.output
