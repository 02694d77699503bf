"""The supervisor: what it does after each kind of end, with jobs that only seem to be; a training
that is killed.
"""

import fcntl
import mmap
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from os import EX_CANTCREAT, EX_DATAERR
from pathlib import Path
from unittest.mock import Mock

import pytest

from nnmpi import simulate
from nnmpi.base.errors import UsageError
from nnmpi.lab import launching
from nnmpi.lab import run as supervisor
from nnmpi.lab.launching import Launcher, find_launcher, given_hosts
from nnmpi.lab.run import USAGE, GaveUp, SupervisedRun, Supervisor, main
from nnmpi.train.cli import main as train_command
from nnmpi.train.cli import without
from tests.harness.job import run
from tests.harness.slow import ONCE_MORE
from tests.train.jobs import LIMIT_S, ROOT, lines, send
from tests.train.test_resume import last_checkpoint

# What stands for mpirun: it writes its words down, and then does what the next line of a list says.
SCRIPT = """#!/bin/sh
printf '%s\\n' "$*" >> {folder}/commands
count=$(wc -l < {folder}/commands)
run={folder}/run
up() {{
    mkdir -p $run/checkpoints; echo '{{}}' > $run/config.json; echo '{{}}' >> $run/starts.jsonl
}}
checkpoint() {{ mkdir -p $run/checkpoints/step-$1; }}
finish() {{ echo '{{}}' > $run/finished.json; }}
stop() {{ echo '{{"step": 2, "of_steps": 9}}' > $run/finished.json; }}
eval "$(sed -n "${{count}}p" {folder}/acts)"
"""
AGENT = '#!/bin/sh\n[ "$1" != "$(cat {folder}/dead)" ]\n'


def make_script(file, text):
    file.write_text(text.format(folder=file.parent))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that supervises jobs which do what its lines say; it returns their
    commands, and notes.
    """
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)

    def supervise(*acts, words="--model mlp --dp 4", kind="Open MPI", **plan):
        (tmp_path / "acts").write_text("\n".join(acts) + "\n")
        launcher = Launcher(kind, make_script(tmp_path / "mpirun", SCRIPT))
        text = []
        given = {"ranks": 4, "restarts": 3, **plan}
        made = SupervisedRun(tuple(words.split()), tmp_path / "run", resumes=False, **given)
        try:
            text.append(Supervisor(made, launcher, text.append).run())
        except GaveUp as error:
            text.append(f"{error.exit_status}: {error}")
        commands = (
            (tmp_path / "commands").read_text().splitlines()
            if (tmp_path / "commands").exists()
            else []
        )
        return [
            command.partition(f"{sys.executable} -m nnmpi.train ")[::2] for command in commands
        ], text

    return supervise


def test_a_reader_that_has_gone_ends_no_supervision(monkeypatch):
    """Nor does a log on a full disk."""
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    supervisor._say("started again")
    monkeypatch.setattr("builtins.print", Mock(side_effect=OSError(28, "No space left on device")))
    supervisor._say("started again")


def test_a_host_is_no_option_of_ssh():
    with pytest.raises(UsageError, match="would read as an option"):
        main(["-n", "2", "--hosts=-oProxyCommand=touch x", "--", "--dataset", "iris"])


def test_it_starts_again_until_the_run_has_proved_its_end(play):
    """A status of 0 alone proves nothing; after the first start the run's own options hold, on any
    number of ranks.
    """
    acts = "exit 3", "up; checkpoint 00000020; kill -9 $$", "checkpoint 00000040; exit 0", "finish"
    commands, text = play(*acts)
    folder = commands[0][1].partition("--out=")[2]  # in one word, as its name may begin with a dash
    again = f"--resume={folder} --trust --dp auto"
    assert [words for _, words in commands] == [f"--model mlp --dp 4 --out={folder}"] * 2 + [
        again
    ] * 2
    assert [start.strip() for start, _ in commands] == ["-n 4"] * 4
    assert "failed (status 3); again in" in text[1]
    assert "SIGKILL (status 137); again now, from step 20" in text[3]
    assert "is not finished" in text[5]
    assert text[-1].startswith("finished after 4 starts; 0% of ")
    assert lines(Path(folder) / "faults.jsonl") == 2  # the first one left no folder


def test_a_lack_of_memory_is_told(play, tmp_path, monkeypatch):
    """By the kernel's count, which another process's end raises, too."""
    monkeypatch.setattr(supervisor, "VMSTAT", counts := tmp_path / "vmstat")
    counts.write_text("pgfault 9\noom_kill 3\n")
    killed = f"up; sed -i 's/oom_kill 3/oom_kill 5/' {counts}; kill -9 $$"
    _, text = play(killed, "kill -9 $$", "finish")
    assert "short meanwhile, and the kernel ended 2 of this node's processes; again" in text[1]
    assert len([line for line in text if "of this node's" in line]) == 1


def test_a_limit_of_steps_is_no_end(play):
    _, text = play("up; stop")
    assert text[-1].startswith(
        "stopped after 2 of 9 steps, the limit of --stop-after, and 1 start;"
    )


def test_it_gives_up_where_nothing_goes_on(play):
    """Progress counts anew; starts in vain are tried with fewer ranks, but never with less than the
    model needs.
    """
    commands, text = play(
        "up; checkpoint 00000007; exit 75", *["exit 1"] * 9, restarts=5, replica=2
    )
    assert [start.split()[1] for start, _ in commands] == ["4", "4", "4", "2", "2", "2", "2"]
    assert "stalled, and its watchdog ended it (status 75); again now, from step 7" in text[1]
    assert text[-1].startswith(
        "1: gave up: 6 starts in a row brought no checkpoint beyond step 7; the last one ended"
    )


def test_on_fewer_ranks_the_given_dp_is_replaced(play):
    """A command refuses an option with two values."""
    commands, _ = play(*["exit 1"] * 9, words="--dp 4 --model mlp", restarts=5, replica=2)
    words = {start.split()[1]: words.partition(" --out=")[0] for start, words in commands}
    assert words == {"4": "--dp 4 --model mlp", "2": "--model mlp --dp auto"}


@pytest.mark.parametrize("status", [USAGE, EX_DATAERR, EX_CANTCREAT])
def test_what_comes_again_is_tried_twice(status, play, tmp_path):
    """Such as a loss that is not finite. No folder is named that is not there."""
    commands, text = play(*["exit 9"] * 4, restarts=2)
    assert text[-1].startswith("9: gave up: 3 starts in a row brought no checkpoint at all")
    assert "nnmpi doctor" not in text[-1] and not (tmp_path / "run").exists()
    (tmp_path / "commands").unlink()
    commands, text = play(
        *["exit 9"] * 2, f"up; checkpoint 00000007; exit {status}", *[f"exit {status}"] * 4
    )
    assert len(commands) == 2 + 2 and "nnmpi doctor" in text[-1]
    assert ("disk is full" in text[-1]) == (status == EX_CANTCREAT)


@pytest.mark.parametrize(
    "act, told",
    [
        ("exit 2", "2: the command itself is refused"),
        ("exit 65", "65: the data are refused"),
        ("up; exit 143", "143: the ranks were told to stop (SIGTERM)"),
    ],
)
def test_what_is_no_fault_is_not_tried_again(act, told, play):
    commands, text = play(act, "finish")
    assert len(commands) == 1
    assert text[-1].startswith(told)


def test_a_job_that_does_not_come_up_is_started_again(play):
    """Such as one with a rank that is stopped before MPI knows of it, which nobody in the job can
    see.
    """
    begin = time.monotonic()
    _, text = play("sleep 100", "up; finish", start_limit_s=0.2)
    assert "it had not come up in 0 s" in text[1]
    assert text[-1].startswith("finished after 2 starts")
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("kind, seconds", [("Open MPI", 100), ("srun", 1.5)])
def test_a_launcher_without_ranks_is_ended(kind, seconds, play, monkeypatch):
    """As Open MPI's, when the link to another host is cut: it waits for that host's daemon.

    Not srun: its step would keep the nodes.
    """
    monkeypatch.setattr(supervisor, "LOOK_S", 0.05)
    monkeypatch.setattr(supervisor, "LAUNCHER_S", 0.2)
    alive = [True] * 3
    monkeypatch.setattr(supervisor, "is_locked", lambda _: bool(alive) and alive.pop())
    begin = time.monotonic()
    _, text = play(f"up; sleep {seconds}", "up; finish", kind=kind)
    assert ("had gone, and its launcher did not end" in text[1]) == (kind == "Open MPI")
    assert text[-1].startswith("finished after 2 starts")
    assert time.monotonic() - begin < 20


def test_a_host_that_does_not_answer_is_left_out(tmp_path, monkeypatch, play):
    """With its ranks, as long as it is away; without any host that answers nothing is started."""
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", make_script(tmp_path / "agent", AGENT))
    (tmp_path / "dead").write_text("nobody")
    dies = f"up; checkpoint 00000001; echo two > {tmp_path}/dead; exit 1"
    returns = f"checkpoint 00000002; echo nobody > {tmp_path}/dead; exit 1"
    commands, text = play(dies, returns, "finish", hosts=("one", "two"))
    starts = [start.strip() for start, _ in commands]
    assert starts == ["-n 4 --host one:2,two:2", "-n 2 --host one:2", "-n 4 --host one:2,two:2"]
    assert text[2].startswith("start 2: 2 ranks without two, ")
    (tmp_path / "dead").write_text("one")
    assert "too few hosts answer (none)" in play("finish", hosts=("one",), restarts=0)[1][-1]


def test_srun_is_used_in_a_job_of_slurms(tmp_path, monkeypatch):
    make_script(tmp_path / "srun", AGENT)
    make_script(
        tmp_path / "scontrol",
        '#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo n1 && echo n2\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert given_hosts() == ["n1", "n2"]
    launcher = find_launcher(4, [])
    assert launcher == Launcher("srun", str(tmp_path / "srun"))
    expected = "-n 3 --overlap --kill-on-bad-exit=1 --nodes 2 --nodelist n1,n2"
    assert launcher.command(3, {"n1": 2, "n2": 2})[1:] == expected.split()


def test_a_launcher_is_asked_with_a_home(tmp_path, monkeypatch):
    """As Open MPI's, which says nothing without one."""
    make_script(tmp_path / "mpirun", '#!/bin/sh\n[ -n "$HOME" ] && echo "mpirun (Open MPI) 5"\n')
    monkeypatch.setenv("NNMPI_MPIRUN", str(tmp_path / "mpirun"))
    monkeypatch.delenv("HOME")
    assert find_launcher(2, []).kind == "Open MPI"
    assert os.environ["HOME"]


def test_where_the_run_is_belongs_to_the_supervisor():
    words = [
        "--out",
        "a",
        "--hidden",
        "3",
        "-4",
        "--resume=b",
        "--lr",
        "1e-3",
        "--resume",
        "c",
        "--quiet",
    ]
    assert without(("--out", "--resume"), words) == [
        "--hidden",
        "3",
        "-4",
        "--lr",
        "1e-3",
        "--quiet",
    ]


def test_shared_memory_of_killed_ranks_goes(tmp_path, monkeypatch):
    """Of no process that still maps it, and nothing else."""
    monkeypatch.setattr(launching, "SHARED_MEMORY", tmp_path)
    for name in (
        "mpich_shm_dead",
        "sm_segment.host.0.1",
        "ucx_shm_posix_1f",
        "mpich_shm_alive",
        "precious",
    ):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    (tmp_path / "mpich_shm_going").symlink_to("gone")  # as one that somebody removes meanwhile
    with (tmp_path / "mpich_shm_alive").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        launching.remove_segments()
        assert len([*tmp_path.iterdir()]) == 6  # so new that they may be mapped at any moment
        monkeypatch.setattr(launching, "NEW_S", -1.0)
        launching.remove_segments()
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        "mpich_shm_alive",
        "mpich_shm_going",
        "precious",
    ]


def test_wrong_options_are_one_sentence(tmp_path):
    """Of either command, before anything is started."""
    for words, text in {
        "-n 0 -- --model mlp": "--ranks is 0; give a whole number, 1 or more",
        "--restarts -1 -- --model mlp": "--restarts is -1; give",
        "--start-limit nan -- --model mlp": "--start-limit is nan; give",
        "-n 2 --model mlp": (
            "--model is an option of the train command; write it after --, as in nnmpi run -n 2"
        ),
        "-n 2 -- --modle mlp": "--modle is not an option; did you mean --model",
        "-n 3 -- --pp 2": "-n 3 is not a multiple of the 2 ranks",
        "-n 2 -- --simulate 4": "--simulate trains in one process",
        "-n 2 -- --ranks 2": "nnmpi run starts the ranks; write -n 4 before --",
    }.items():
        with pytest.raises(UsageError) as error:
            main(words.split())
        assert str(error.value).startswith(text) and "\n" not in str(error.value)
    ending = run(
        [sys.executable, "-m", "nnmpi", "run", *words.split()], tmp_path / "output", LIMIT_S
    )
    assert ending.status == 2
    assert ending.output.startswith(f"nnmpi: {text}") and ending.output.count("\n") == 1, (
        ending.output
    )


# ---- real jobs ----

FIXED = (
    "--backend numpy --model mlp --dataset iris --batch-size 50 --hidden 16 --reduction fixed"
    " --lr-schedule constant"
)


@pytest.mark.slow(ONCE_MORE)
@pytest.mark.timeout(300)
def test_killed_at_random_it_ends_with_the_bits_of_an_undisturbed_run(tmp_path):
    """On three ranks, any of which may be killed, against a run on one."""
    words = f"{FIXED} --epochs 30 --save-every 5steps --log-every 2 --eval-every 0"
    simulate(partial(train_command, f"{words} --out {tmp_path / 'whole'}".split()), 1)
    broken, draws, kills = tmp_path / "broken", random.Random(3), [4, 20]

    def disturb():
        if (
            kills
            and lines(broken / "metrics.jsonl") > kills[0]
            and lines(broken / "starts.jsonl") == 3 - len(kills)
        ):
            kills.pop(0)
            send(signal.SIGKILL, str(broken), "ranks", rank=draws.randrange(3))
        return False

    command = [
        sys.executable,
        "-m",
        "nnmpi",
        "run",
        "-n",
        "3",
        "--",
        *words.split(),
        "--out",
        str(broken),
    ]
    ending = run(command, tmp_path / "output", LIMIT_S, is_lost=disturb, cwd=tmp_path)
    assert ending.status == 0, ending.output
    assert not kills, ending.output
    assert len(re.findall(r"SIGKILL \(status \d+\); again", ending.output)) == 2, ending.output
    assert "finished after 3 starts" in ending.output
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last_checkpoint(broken) / name).read_bytes() == (
            last_checkpoint(tmp_path / "whole") / name
        ).read_bytes()


@pytest.mark.timeout(120)
def test_a_supervisor_that_is_killed_leaves_the_folder_to_the_next(tmp_path):
    """Its job does not go on alone: nobody would start that again."""
    folder = tmp_path / "run"
    words = f"{FIXED} --save-every 5steps --eval-every 0 --log-every 5 --out {folder}".split()
    command = [sys.executable, "-m", "nnmpi", "run", "-n", "2", "--", *words]
    with subprocess.Popen(
        [*command, "--max-steps", "1000000", "--epochs", "1000000", "--no-jit"]
    ) as job:
        while lines(folder / "metrics.jsonl") < 5 and job.poll() is None:
            time.sleep(0.05)
        job.kill()
    steps = 5 * lines(folder / "metrics.jsonl") + 100
    again = [
        sys.executable,
        "-m",
        "nnmpi",
        "run",
        "-n",
        "2",
        "--",
        "--resume",
        str(folder),
        "--max-steps",
        str(steps),
    ]
    ending = run(again, tmp_path / "output", LIMIT_S)
    assert ending.status == 0 and "finished after 1 start" in ending.output, ending.output


def killed_and_again(folder):
    """Kill whole jobs, train one to the end, and print what is left in folders that all share."""
    words = f"-n 3 -- {FIXED} --no-jit --eval-every 0 --log-every 5 --save-every 5steps --out"
    command = [sys.executable, "-m", "nnmpi", "run", *words.split()]
    before = {*os.listdir("/tmp")}
    for victims in ("all", "supervisor", "all"):
        target = folder / f"{victims}-{time.monotonic()}"
        endless = [str(target), "--max-steps", "1000000", "--epochs", "1000000"]
        with subprocess.Popen([*command, *endless]) as job:
            while lines(target / "metrics.jsonl") < 5 and job.poll() is None:
                time.sleep(0.05)
            if victims == "all":
                send(signal.SIGKILL, str(target))
            job.kill()
    subprocess.run([*command, str(folder / "last"), "--max-steps", "5"], check=True)
    print({name: [*{*os.listdir(name)} - before] for name in ("/tmp", "/dev/shm")})


@pytest.mark.timeout(120)
def test_nothing_of_killed_jobs_is_left_after_the_next(tmp_path):
    """Ours, the launcher's and the transports': what a run makes is seen, not a list of names."""
    # the checkout stays, with its interpreter: .ci/run has both in /tmp
    mounts = (
        f"mount --bind {tmp_path} /mnt && mount --bind {ROOT} /srv && mount -t tmpfs none /tmp"
        f" && mkdir -p {ROOT} && mount --bind /srv {ROOT} && mount -t tmpfs none"
    )
    code = "from tests.lab.test_run import *; killed_and_again(Path('/mnt'))"
    inside = f'{mounts} /dev/shm && exec {sys.executable} -c "{code}"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside]
    if subprocess.run([*command[:-1], mounts + " /dev/shm"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    environ = {"PYTHONPATH": str(ROOT), "TMPDIR": None}
    ending = run(command, tmp_path / "output", LIMIT_S, environ)
    assert ending.output.endswith("{'/tmp': [], '/dev/shm': []}\n"), ending.output


@pytest.mark.timeout(120)
def test_a_signal_to_the_supervisor_saves_and_ends_the_training(tmp_path):
    """Its ranks are told, not their launcher, which would give them half a second."""
    broken = tmp_path / "a run"  # what is printed is quoted, as a shell takes it
    words = [*f"-n 2 -- {FIXED} --epochs 100000 --no-jit --log-every 5 --out".split(), str(broken)]
    with subprocess.Popen(
        [sys.executable, "-m", "nnmpi", "run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        while lines(broken / "metrics.jsonl") < 3 and job.poll() is None:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        text = job.communicate(timeout=60)[0]
    assert job.returncode == 143, text
    step = re.search(r"stopped by SIGTERM after step (\d+); continue with", text)
    assert step, text
    assert (
        f"ended by SIGTERM, with a checkpoint of step {step[1]}; continue with: nnmpi run"
        " -n 2" in text
    )
    assert f"nnmpi run -n 2 -- --resume '{broken}'" in text
    assert f"nnmpi train --resume '{broken}'" in text


# The supervisor's temporary folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's folder for temporary files."""
    monkeypatch.setattr(launching.tempfile, "tempdir", str(tmp_path))
    return tmp_path


KILLED = """
import os, sys, tempfile
from nnmpi.lab.launching import temporary_folder
tempfile.tempdir = sys.argv[1]
with temporary_folder() as folder:
    (folder / "of-a-job").write_text("")
    print(folder, flush=True)
    sys.stdin.read() if sys.argv[2:] else os._exit(9)
"""


def start_supervisor(folder, *more):
    words = [sys.executable, "-c", KILLED, str(folder), *more]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=environ, stdin=-1, stdout=-1, text=True)


def test_only_what_a_dead_supervisor_made_is_removed(temporary):
    alive = start_supervisor(temporary, "alive")
    folders = [Path(alive.stdout.readline().strip())]
    dead = start_supervisor(temporary)  # now: the other one's start would remove what is left of it
    folders.append(Path(dead.stdout.readline().strip()))
    dead.communicate()
    mine = [temporary / f"nnmpi-run-{name}" for name in ("notes", "copy", "empty", "locked", "run")]
    for folder in mine:
        folder.mkdir()
    (mine[0] / "notes.txt").write_text("mine")
    shutil.copytree(folders[1], mine[1], dirs_exist_ok=True)  # with the marker
    (mine[3] / ".lock").write_text("")
    (mine[4] / "config.json").write_text("{}")
    (temporary / "nnmpi-run-link").symlink_to(folders[1])
    before = {folder: sorted(file.name for file in folder.iterdir()) for folder in mine}
    assert folders[1].exists()  # `dead` left it
    with launching.temporary_folder() as own:
        assert not folders[1].exists()
        assert (folders[0] / "of-a-job").exists() and own.exists()
    assert {folder: sorted(file.name for file in folder.iterdir()) for folder in mine} == before
    assert not own.exists()
    alive.communicate("")
    assert not folders[0].exists()


def test_a_folder_that_is_just_made_is_not_taken_for_a_dead_ones(temporary, monkeypatch):
    """Whoever looks at any moment between its making and its lock leaves it."""
    looks, real = [], fcntl.flock

    def look(*words):
        (folder,) = temporary.iterdir()
        with pytest.raises(FileNotFoundError):  # no marker of this name yet
            launching._is_abandoned(folder)
        looks.append(folder)
        return real(*words)

    monkeypatch.setattr(fcntl, "flock", look)
    with launching.temporary_folder() as folder:
        monkeypatch.setattr(fcntl, "flock", real)
        with pytest.raises(BlockingIOError):
            launching._is_abandoned(folder)
    assert looks == [folder]


def test_a_job_that_is_killed_takes_nothing_along(temporary):
    """A folder is not Open MPI's because its name has the launcher's number."""
    job = subprocess.Popen(["sleep", "60"], start_new_session=True)
    mine = temporary / f"ompi.{job.pid}"
    mine.mkdir()
    launching.kill(job.pid)
    job.wait()
    assert mine.exists()
