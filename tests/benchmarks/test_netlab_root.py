"""Labs that are really made: what they separate, what they measure, and that nothing is left of them.

They need root and a kernel with namespaces and the token bucket; elsewhere they are skipped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netlab.shell import check_machine
from nnmpi.errors import UsageError
from tests.harness.slow import ONCE_MORE

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0


def why_not() -> str:
    """Return why no lab can be made here; nothing if it can."""
    try:
        check_machine()
    except UsageError as error:
        return str(error)
    bucket = "tc qdisc add dev a0 root tbf rate 1mbit burst 2k latency 1ms"
    probe = f"ip link add a0 type veth peer name a1 && {bucket}"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe], capture_output=True)
    return "" if done.returncode == 0 else f"namespaces or the token bucket are not to be had: {done.stderr.decode()}"


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


class Netlab:
    """The command, with labs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self.environ = {**os.environ, "TMPDIR": str(self.folder)}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the command."""
        command = [sys.executable, str(ROOT / "benchmarks" / "netlab"), *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=self.environ, text=True, cwd=self.folder.parent, **streams)
        self.started.append(process)
        return process

    def end(self) -> None:
        """End what a failing test has left."""
        for process in self.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def run(self, *words: str) -> tuple[int, str]:
        """Run it; return its status and what it printed."""
        process = self.start(*words)
        printed, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, printed

    def processes(self) -> list[str]:
        """Return the command lines of what runs in these labs."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (
                    (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if entry.name.isdigit()
                    else []
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(str(self.folder) in word for word in words):
                found.append(" ".join(words))
        return found

    def check_nothing_left(self) -> None:
        """Make sure that neither files nor processes are left; what was killed may take a moment to go."""
        wait_for(lambda: not self.processes())
        assert list(self.folder.iterdir()) == []


def wait_for(is_so: Callable[[], bool]) -> None:
    """Return when it is so.

    Raises:
        AssertionError: when it is not, after a while.
    """
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def netlab(tmp_path: Path) -> Iterator[Netlab]:
    """The command; whatever a test has left is taken down, with the names that the tests use."""
    found = Netlab(tmp_path)
    yield found
    found.end()
    for name in ("lab", "other"):
        found.run("down", "--name", name)
    found.end()


def test_a_bench_on_two_hosts_sends_over_the_links_and_leaves_nothing(netlab: Netlab, tmp_path: Path) -> None:
    words = "bench --hosts 2 --rate 500mbit --sizes 64k --algorithms ring,ps,native --repeats 1 --json"
    status, printed = netlab.run(*words.split(), str(tmp_path / "result.json"))
    assert status == 0, printed
    netlab.check_nothing_left()
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert [(row["algorithm"], row["bytes"]) for row in result["rows"]] == [
        ("ring", 65536),
        ("ps", 65536),
        ("native", 65536),
    ]
    for row in result["rows"]:
        assert 2 * 65536 <= row["sent_bytes"] < 3 * 65536
    (link,) = result["links"]
    assert 0 < link["alpha_s"] < 0.1
    assert 4e7 < 1 / link["beta_s_per_byte"] < 7e7  # 500 Mbit/s are 59.8 MB/s of payload
    assert "auto picks" in printed


@pytest.mark.slow(ONCE_MORE)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_nothing(number: signal.Signals, netlab: Netlab, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = "bench --hosts 2 --rate 100mbit --sizes 64k,64m --algorithms ring --repeats 1 --json"
    bench = netlab.start(*words.split(), str(file))
    assert bench.stdout is not None
    for line in bench.stdout:  # until the first row, so that ranks run
        if " ring " in line:
            break
    assert netlab.processes()
    bench.send_signal(number)
    status = bench.wait(timeout=30)
    if number == signal.SIGKILL:
        wait_for(lambda: not netlab.processes())
        assert "bench-" in netlab.run("down")[1]
    else:
        assert status == 128 + number
        assert len(json.loads(file.read_text())["rows"]) == 1
    netlab.check_nothing_left()


def test_of_a_lab_that_cannot_be_made_nothing_is_left(netlab: Netlab, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "ip"
    fake.write_text(
        '#!/bin/sh\ncase "$*" in *"name h1"*) echo no such card >&2; exit 1 ;; esac\nPATH=$REST exec ip "$@"\n'
    )
    fake.chmod(0o755)
    netlab.environ |= {"REST": os.environ["PATH"], "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for words in (("up", "--hosts", "3"), ("bench", "--hosts", "3")):
        status, printed = netlab.run(*words)
        assert (status, "failed: no such card" in printed) == (1, True), printed
        netlab.check_nothing_left()


@pytest.mark.slow(ONCE_MORE)
def test_hosts_share_no_memory_and_two_labs_do_not_meet(netlab: Netlab) -> None:
    assert netlab.run("up", "--hosts", "2")[0] == 0
    status, printed = netlab.run("up", "--hosts", "2")
    assert (status, "there is a lab named lab already" in printed) == (2, True)
    assert netlab.run("up", "--hosts", "1", "--name", "other")[0] == 0
    agent = netlab.folder / "nnmpi-netlab-lab" / "agent"
    look = "hostname; ls /dev/shm; cat /proc/1/comm; cat /proc/sys/net/ipv4/tcp_congestion_control; touch /dev/shm/mine"
    for name in ("h0", "h1", "10.77.0.2"):
        host = "h1" if name.startswith("10") else name
        seen = ["mine"] if name.startswith("10") else []
        status, printed = netlab.run("run", str(agent), name, look)
        assert (status, printed.splitlines()) == (0, [host, *seen, "sh", "reno"])
    assert netlab.run("run", "sh", "-c", "exit 7")[0] == 7
    assert netlab.run("down")[0] == 0
    status, printed = netlab.run("bytes", "--name", "other")
    assert (status, printed.splitlines()[1].split()[0]) == (0, "h0")
    assert netlab.run("rate", "--rate", "50mbit", "--name", "other")[0] == 0
    netlab.run("down", "--name", "other")
    netlab.check_nothing_left()


@pytest.mark.slow(ONCE_MORE)
def test_steps_are_measured_simulated_and_run_by_pytorch(netlab: Netlab, tmp_path: Path) -> None:
    """They take as long as their computing at least, and about as long as simulated."""
    pytest.importorskip("torch")
    words = "steps --cases weak --hosts 2 --rate 100mbit --repeats 1 --json"
    assert netlab.run(*words.split(), str(tmp_path / "steps.json"))[0] == 0
    (row,) = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert min(*row["seconds"], *row["torch_s"], row["simulated_s"]) > 0.2
    assert row["ratio"] > 0.5
