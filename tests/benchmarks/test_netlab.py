"""The lab's parts that need no root: plans, commands, refusals, and what is made of a job's findings."""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.netlab import link, steps
from benchmarks.netlab.bench import Plan, fit_of
from benchmarks.netlab.build import Builder, address_of, write_agent
from benchmarks.netlab.command import main, make_plan, parse
from benchmarks.netlab.host import Host
from benchmarks.netlab.lab import Lab, find, sweep, take_down
from benchmarks.netlab.launch import LIBRARIES, environment, find_library, parse_settings, run_job
from benchmarks.netlab.link import Speed
from benchmarks.netlab.process import Process, children_of
from benchmarks.netlab.row import LinkTimes, summary, verdict
from benchmarks.netlab.shell import TOOLS, LabError, check_machine
from benchmarks.netlab.state import State
from benchmarks.netlab.steps import CASES, StepsRun, StepTimes, draw
from nnmpi.comm.choose import choose
from nnmpi.errors import LaunchError, UsageError

LINK = {
    "alpha_s": 1e-3,
    "beta_s_per_byte": 1e-7,
    "gamma_s_per_byte": 1e-10,
    "native": [[1024, 0.01], [2**20, 0.5], [2**21, 0.9]],
}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """A lab's folder in a place of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return State("test")


def add_script(folder: Path, name: str, text: str) -> None:
    """Put a shell script into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def plan(**changes: str) -> Plan:
    words = {"hosts": "2,4", "rate": "100mbit", "sizes": "1m,2m", "algorithms": "ps,ring", "cut": "1g", "repeats": "3"}
    return make_plan(parse(["bench", *(f"--{name}={word}" for name, word in {**words, **changes}.items())]))


def row(algorithm: str, measured_s: float, predicted_s: float, sent: float = 1e9, expected: float = 0) -> LinkTimes:
    return LinkTimes("MPI", "100mbit", 16, 2**20, algorithm, (measured_s,), predicted_s, "tree", expected, sent, 0.5)


def test_lists_are_read_without_doubles() -> None:
    read = plan(hosts="2, 16,2", rate="50mbit,1gbit", sizes="64k,1m", algorithms="ring,native")
    assert (read.hosts, read.sizes, read.algorithms) == ((2, 16), (65536, 2**20), ("ring", "native"))
    assert [speed.bits_per_s for speed in read.speeds] == [50e6, 1e9]
    assert make_plan(parse(["bench", "--operation", "broadcast"])).algorithms == ("ring", "tree", "native")


@pytest.mark.parametrize(
    ("option", "word", "says"),
    [
        ("operation", "gossip", "'gossip' is unknown; the names are all-reduce, broadcast"),
        ("operation", "broadcast", "there is no broadcast by 'ps'"),
        ("hosts", "1", "'1' is not a number of hosts from 2"),
        ("hosts", "four", "'four' is not a number of hosts"),
        ("hosts", "2,201", "'201' is not a number"),
        ("rate", "100", "'100' is not a rate; write it like 100mbit"),
        ("rate", "fast", "'fast' is not a rate"),
        ("sizes", "many", "'many' is not a number of bytes"),
        ("sizes", "6", "a multiple of 4 bytes, not 6"),
        ("algorithms", "ring,star", "argument --algorithms: 'star' is unknown; the names are ring"),
    ],
)
def test_words_that_mean_nothing_are_refused(option: str, word: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan(**{option: word})


def test_a_time_is_measured_at_least_once() -> None:
    with pytest.raises(UsageError, match="argument --repeats: '0' is not a whole number above 0"):
        plan(repeats="0")


def test_jobs_on_more_hosts_and_slower_links_have_more_time() -> None:
    limits = [plan().limit_s(hosts, Speed(rate)) for hosts, rate in ((2, "1gbit"), (16, "1gbit"), (16, "50mbit"))]
    assert limits == sorted(limits)
    assert limits[2] > 3 * 5 * 2 * 15 * 3 * 2**20 / (50e6 / 8)


def test_a_packet_never_exceeds_the_bucket() -> None:
    speed = Speed("200mbit")
    packet, bucket = link.limit("eth0", speed)
    assert packet[-2:] == ("gso_max_size", "12000")
    assert bucket[-7:] == ("tbf", "rate", "200mbit", "burst", "16384", "latency", "50ms")
    assert speed.packet_bytes < speed.burst_bytes
    assert speed.payload_bytes_per_s == pytest.approx(25e6 * 0.9564, rel=1e-3)


def test_a_kernel_without_token_bucket_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_script(tmp_path, "ip", "exit 0")
    add_script(tmp_path, "tc", "echo 'Error: Specified qdisc kind is unknown.' >&2; exit 2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LabError, match="qdisc kind is unknown.*modprobe sch_tbf"):
        link.apply((), "eth0", Speed())


def test_only_root_may_and_the_sentence_says_what_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="only root may make; .* sudo"):
        check_machine(user=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert main(["up"]) == 2
    assert "only root" in capsys.readouterr().err


@pytest.mark.parametrize("missing", TOOLS)
def test_missing_tools_are_named(missing: str, tmp_path: Path) -> None:
    for tool in TOOLS:
        if tool != missing:
            add_script(tmp_path, tool, "exit 0")
    with pytest.raises(UsageError, match=f"^{missing} cannot be found; install iproute2"):
        check_machine(user=0, path=str(tmp_path))


def test_a_lab_has_a_folder_of_its_own(state: State) -> None:
    state.create()
    assert state.exists()
    assert state.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UsageError, match="a lab named test already .*choose another --name"):
        state.create()
    assert take_down(state)
    assert not state.folder.exists()
    assert not take_down(state)


def test_what_no_lab_has_made_is_left_alone(state: State, tmp_path: Path) -> None:
    state.folder.mkdir(mode=0o755)
    (state.folder / "precious").touch()
    with pytest.raises(LabError, match="not made by a lab"):
        take_down(state)
    assert sweep() == []
    assert (state.folder / "precious").exists()
    other = State("link")
    other.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LabError, match="not made by a lab"):
        take_down(other)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits and dashes"):
        State(name)


def test_a_lab_that_is_not_up_is_not_found(state: State) -> None:
    with pytest.raises(UsageError, match="no lab named test is up"):
        find(state)


@pytest.mark.parametrize("count", [0, 201])
def test_hosts_out_of_range_are_refused_before_anything_is_made(count: int, state: State) -> None:
    with pytest.raises(UsageError, match=f"1 to 200 hosts, not {count}"):
        Builder(state, count, Speed())
    assert not state.folder.exists()


def test_labs_of_dead_makers_are_swept_and_those_of_living_ones_are_not(state: State) -> None:
    dead = subprocess.Popen(["sleep", "60"])
    record = {"maker": vars(Process.of(dead.pid)), "started": []}
    state.create()
    state.write(record)
    assert sweep() == []
    dead.kill()
    dead.wait()
    assert sweep() == ["test"]
    assert not state.folder.exists()


def test_a_process_is_told_from_a_later_one_of_its_number() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as process:
        outer = Process.of(process.pid)
        inner = outer.child()
        assert [inner] == children_of(process.pid)
        assert inner.inner_pid(level=0) == inner.pid
        another = Process(inner.pid, inner.began - 1)
        another.end()
        assert inner.is_alive()
        assert not another.is_alive()
        inner.end()
        outer.end()
        assert not inner.is_alive()
    with pytest.raises(ProcessLookupError):
        outer.child(limit_s=0.0)


def test_the_agent_enters_the_host_that_is_named(tmp_path: Path) -> None:
    me = Process.of(os.getpid())
    hosts = [Host(name, address_of(name), me, 40 + i) for i, name in enumerate(("h0", "h1"))]
    agent = write_agent(tmp_path, hosts)
    add_script(tmp_path / "bin", "nsenter", 'printf "%s\\n" "$@"')

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{tmp_path}/bin:/bin:/usr/bin"}
        return subprocess.run([agent, *words], env=environ, capture_output=True, text=True, timeout=20)

    for name in ("h1", "10.77.0.2"):
        said = ask("-x", "-q", name, "prted", "--an 'option'").stdout.splitlines()
        assert said[:3] == ["--target", "41", "--net"]
        assert said[-1] == "prted --an 'option'"
        assert f"TMPDIR={tmp_path}/h1/tmp" in said
    unknown = ask("h2", "true")
    assert unknown.returncode == 255
    assert "no host h2" in unknown.stderr


def test_the_callers_mpi_settings_do_not_reach_the_lab() -> None:
    caller = {
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
        "MPIR_CVAR_NOLOCAL": "1",
        "HOME": "/root",
        "PYTHONPATH": "a",
    }
    lab = environment(caller, Path("/lab/agent"), [Path("/code")])
    assert lab["OMPI_MCA_btl"] == "tcp,self"
    assert lab["PRTE_MCA_plm_ssh_agent"] == lab["HYDRA_LAUNCHER_EXEC"] == "/lab/agent"
    assert not {"OMPI_MCA_mtl", "MPIR_CVAR_NOLOCAL"} & set(lab)
    assert (lab["HOME"], lab["PYTHONPATH"]) == ("/root", f"/code{os.pathsep}a")
    assert not any(name.startswith(("OMPI_MCA", "HYDRA")) for name in environment(caller))


def test_settings_have_names() -> None:
    assert parse_settings(["btl_tcp_links=2", "a=b=c"]) == {"btl_tcp_links": "2", "a": "b=c"}
    for word in ("links", "=2"):
        with pytest.raises(UsageError, match=f"'{word}' is not a setting; write NAME=VALUE"):
            parse_settings([word])


def test_another_mpi_than_this_pythons_is_refused() -> None:
    found, version = find_library(None)
    assert version[0].isdigit()
    assert find_library(found) == (found, version)
    (other,) = set(LIBRARIES) - {found}
    with pytest.raises(LaunchError, match=f"for --mpi {other} start this command with the Python of an environment"):
        find_library(other)


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_predictions_are_those_of_the_closed_forms(hosts: int) -> None:
    nbytes, rounds, fit = 2**20, hosts.bit_length() - 1, fit_of(LINK, hosts, "MPI")
    alpha, beta, gamma = LINK["alpha_s"], LINK["beta_s_per_byte"] * nbytes, LINK["gamma_s_per_byte"] * nbytes
    ring = 2 * (hosts - 1) * (alpha + beta / hosts) + (hosts - 1) / hosts * gamma
    assert fit.predict("ring", nbytes) == pytest.approx(ring)
    assert fit.predict("tree", nbytes) == pytest.approx(2 * rounds * (alpha + beta) + rounds * gamma)
    server = 2 * (hosts - 1) * (alpha + beta) + (hosts - 1) * gamma
    assert fit.predict("ps", nbytes) == pytest.approx(server)
    assert fit.predict("native", nbytes, operation="broadcast") == 0.5
    assert fit.predict("tree", nbytes, operation="broadcast") == pytest.approx(rounds * (alpha + beta))
    assert fit.predict("ring", nbytes, operation="all-gather") == pytest.approx((hosts - 1) * (alpha + beta / hosts))
    slow = fit_of({**LINK, "native": [[1024, 10.0]]}, hosts, "MPI")
    assert choose(nbytes, hosts, slow).algorithm in ("ring", "halving-doubling")
    assert choose(nbytes, hosts, fit_of({**LINK, "native": [[1024, 0.0]]}, hosts, "MPI")).algorithm == "native"


def test_messages_that_went_another_way_are_noticed() -> None:
    row("ring", 1.0, 1.0, sent=1001, expected=1000).check_crossed()
    with pytest.raises(LabError, match="ring on 16 hosts sent 999 bytes .* 1000 were to be sent"):
        row("ring", 1.0, 1.0, sent=999, expected=1000).check_crossed()
    least = 2 * 15 * 2**20
    row("native", 1.0, 1.0, sent=least).check_crossed()
    with pytest.raises(LabError, match="went another way"):
        row("native", 1.0, 1.0, sent=least - 1).check_crossed()
    replace(row("native", 1.0, 1.0, sent=least // 2), operation="broadcast").check_crossed()


def test_the_best_and_the_choice_of_auto_are_named() -> None:
    rows = [row("ps", 2.4, 2.5), row("ring", 0.2, 0.19), row("tree", 0.22, 0.2), row("native", 0.3, 0.3)]
    assert verdict(rows) == "best: ring; auto picks tree (10.0% slower)"
    assert verdict(rows[2:]) == "best: tree; auto picks tree"
    assert verdict(rows[3:]) == "best: native; auto picks tree, which was not measured"
    lines = list(summary(rows))
    assert "ps: measured/predicted 0.960 to 0.960" in lines
    assert "16 hosts, 1 MB, 100mbit: ring 12.0x faster than ps" in lines
    assert lines[-1] == "the choice of auto was the best, or within 5% of it, in 0 of 1 places"
    assert list(summary(rows[2:]))[-1].endswith("in 1 of 1 places")


class Outside(Lab):
    """Hosts that are this machine."""

    def enter_head(self) -> tuple[str, ...]:
        """Stay here."""
        return ()


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("exit 0", "1 ranks did not come to their end"),
        ("touch {}/done-0 {}/done-1; echo sorry; exit 3", "status 3, 0 ranks did not .*\nsorry"),
        ("sleep 60", "did not end within 2 s"),
        ('touch {}/done-0 {}/done-1; printf \'{{"a": 1}}\\n{{"a": 2}}\\n{{\' >{}/lines', ""),
    ],
)
def test_a_job_has_succeeded_when_every_rank_says_so(
    does: str, says: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.create()
    folder = state.folder / "job"
    add_script(tmp_path / "bin", "launcher", f"touch {folder}/done-0; " + does.replace("{}", str(folder)).format())
    monkeypatch.setattr("benchmarks.netlab.launch.find_launcher", lambda library: str(tmp_path / "bin" / "launcher"))
    me = Host("h0", "", Process.of(os.getpid()), 1)
    found = run_job(Outside(state, me, me, [me, me]), "openmpi", 2, {}, {}, limit_s=2.0)
    if says:
        with pytest.raises(LabError, match=says):
            list(found)
    else:
        assert list(found) == [{"a": 1}, {"a": 2}]
        assert not folder.exists()


def test_the_command_line_needs_no_mpi_and_no_root_to_explain_itself() -> None:
    began = time.monotonic()
    folder = Path(__file__).parents[2] / "benchmarks" / "netlab"
    done = subprocess.run([sys.executable, folder, "bench", "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, time.monotonic() - began < 30) == (0, True)
    assert "--algorithms" in done.stdout


def test_a_simulated_step_is_the_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its computing, two messages of a ring on two hosts, and the sum of a few numbers; kept in the file."""
    ring, speed = CASES[0], Speed("100mbit")
    link = {"alpha_s": 1e-3, "beta_s_per_byte": 1e-7}
    run = StepsRun("Open MPI 5", "openmpi", {}, {"100mbit": link}, {("100mbit", 2, "ring"): STEP})
    run.simulate_again([(speed, 2, ring), (speed, 4, ring)])
    found = run.rows["100mbit", 2, "ring"]
    nbytes = 4 * (64 * 384 + 384 + 384 * 384 + 384 + 384 * 10 + 10)
    assert found.simulated_s == pytest.approx(0.2 + nbytes * 1e-7 + 3e-3, rel=0.01)
    assert len(run.rows) == 1, "what was not measured is not simulated"
    run.save(tmp_path / "steps.json")
    again = StepsRun("Open MPI 5", "openmpi", {})
    again.load(tmp_path / "steps.json")
    assert (again.rows, again.links) == (run.rows, run.links)
    assert "within 5 %" in capsys.readouterr().out


def test_the_planner_prices_what_was_measured_over_links() -> None:
    """On 2 to 16 hosts, with paced computing: nothing is fitted to a row."""
    folder = Path(__file__).parents[2] / "benchmarks"
    words = (folder / "plan", "--links", folder / "netlab" / "results" / "steps-openmpi.json")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.match(r"\d+ layouts: mean [0-3]\.\d %, worst [0-9]\.\d %, tau 0.9", last), last


@pytest.mark.slow("as many widths of a model as halving finds are looked at, and two trained")
def test_what_is_predicted_to_fit_is_what_fits() -> None:
    """One rank, to the byte; 5 % wider does not."""
    folder = Path(__file__).parents[2] / "benchmarks" / "plan"
    done = subprocess.run([sys.executable, folder, "--edge", "2MiB"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("| none |")) == (0, 2), done.stderr


STEP = StepTimes("100mbit", 2, "ring", (0.2, 0.1, 0.4), 0.188)


def test_rows_of_steps_say_how_far_they_are_off(tmp_path: Path) -> None:
    """By the median of what was measured."""
    assert STEP.measured_s == 0.2
    assert STEP.ratio == pytest.approx(0.94)
    rows = [STEP, StepTimes("100mbit", 4, "ring", (0.1,), 0.12), StepTimes("100mbit", 4, "ps", (0.1,), 0.101)]
    assert steps.summary(rows) == "off by 6.0% (median) to 20.0% at the worst; 1 of 3 within 5 %"
    pytest.importorskip("matplotlib")
    draw(tmp_path / "steps.png", rows)
    assert (tmp_path / "steps.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cases", "rings"], "is unknown"),
        (["--plot", "steps.txt"], "must end in"),
        (["--repeats", "0"], "whole number above 0"),
    ],
)
def test_words_of_steps_that_mean_nothing_are_refused(words: list[str], says: str) -> None:
    """In a sentence."""
    with pytest.raises(UsageError, match=says):
        parse(["steps", *words])
