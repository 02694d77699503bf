"""docs/cluster.md on a real Slurm of three nodes, namespaces of this machine. See README.md.

python benchmarks/cluster            # as root on Debian, with the network or a package cache
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

# the checkout, so that the modules here have their full names
sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.harness import tables  # noqa: E402
from benchmarks.harness.command import Parser  # noqa: E402
from benchmarks.netlab.lab import Speed, call, lab_of  # noqa: E402
from benchmarks.netlab.launch import environment  # noqa: E402
from nnmpi.base.errors import UsageError  # noqa: E402
from nnmpi.lab.launching import find_launcher  # noqa: E402

NODES, INSIDE, NO_PACKAGES = 3, "NNMPI_CLUSTER_INSIDE", 3
PACKAGES = "slurm-wlm slurm-wlm-basic-plugins libpmix-dev munge"  # Slurm loads libpmix.so
# A root of its own: the machine's, read only, under a layer in memory that takes the packages.
BOX = f"""
set -eu
mount -t tmpfs -o size=3g none "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay -o lowerdir=/,upperdir="$1/up",workdir="$1/work" none "$1/root"
cd "$1/root"
mount -t proc proc proc
for folder in dev sys tmp; do mount --rbind "/$folder" "$folder"; done
export DEBIAN_FRONTEND=noninteractive
chroot . sh -c 'which slurmctld munged || apt-get install -y --no-install-recommends {PACKAGES}' \
>"$1/log" 2>&1 ||
    {{ tail -n 3 "$1/log" >&2; exit {NO_PACKAGES}; }}
shift
mkdir .old
pivot_root . .old
umount -l .old
cd /
exec "$@"
"""
CONF = f"""
ClusterName=lab
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TmpFS=/run
SlurmdTimeout=15
KillWait=10
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation=/run/state
SlurmdSpoolDir=/run/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
NodeName=h[0-{NODES - 1}] NodeAddr=10.77.0.[1-{NODES}] CPUs=2 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = """
mount -t tmpfs none /run
mkdir -p /run/munge /run/state /run/spool
chown munge /run/munge
runuser -u munge -- munged --force --socket=/run/munge/munge.socket.2 --log-file=/run/munge/log \
    --pid-file=/run/munge/pid --seed-file=/run/munge/seed
"""
TRAIN = "$nnmpi train --dataset iris --model mlp --no-jit --log-every 1"
ENDLESS = "--epochs 99999 --slow ms=50 --save-every 20steps --max-steps"
# (instruction, script on the head, what it prints: a regular expression). $srun and $nnmpi are set.
CASES = [
    (
        "each prints the same size",
        '$srun -n 3 $python -c "import nnmpi; print(nnmpi.start().size)" | grep -cx 3',
        r"^3$",
    ),
    (
        "a job",
        f'sbatch --wait -n 3 --wrap "$srun {TRAIN} --epochs 2 --out job" && cat job/console.txt',
        r"3 ranks on \d nodes(.|\n)*epoch 2/2",
    ),
    ("salloc", f"salloc -n 2 $srun {TRAIN} --epochs 1 --out salloc", r"epoch 1/1"),
    (
        "an array",
        f"""sbatch --wait --array=0-1%1 -n 2 \
--wrap "$srun {TRAIN} --epochs 1 --out lr-\\$SLURM_ARRAY_TASK_ID"
grep -l accuracy lr-*/finished.json""",
        r"lr-0/(.|\n)*lr-1/",
    ),
    (
        "comm fit, and plan, of three nodes",
        """export NNMPI_DATA=$PWD/data OMP_NUM_THREADS=1
$srun -N 3 -n 3 $nnmpi comm fit
$srun -N 3 -n 3 $nnmpi plan --dataset digits --model mlp --batch-size 96 --no-jit""",
        r"3 ranks on 3 nodes(.|\n)*all-reduces of steps took(.|\n)*messages: fitted to",
    ),
    (
        "start or resume, requeued",
        f"""cat >again.sh <<END
#!/bin/sh
if [ -e again/config.json ]; then $srun $nnmpi train --resume again
else $srun {TRAIN} {ENDLESS} 99999 --out again; fi
END
job=$(sbatch --parsable --requeue --open-mode=append -o again.log -n 3 again.sh)
until grep -qs '"global_step": 30' again/metrics.jsonl; do sleep 1; done
scontrol requeue $job
until scontrol update JobId=$job StartTime=now 2>&-; do sleep 1; done
until grep -q 'resuming from' again.log; do sleep 1; done
scancel $job; cat again.log""",
        r"stopped by SIGTERM after step (\d+)(.|\n)*resuming from \S+step-0*\1\b",
    ),
    (
        "nnmpi run, a node lost",
        f"""cat >lost.sh <<END
#!/bin/sh
export SLURM_MPI_TYPE=$type
$nnmpi run -n 3 -- {TRAIN.removeprefix("$nnmpi train")} {ENDLESS} 400 --out lost
END
job=$(sbatch --parsable --no-kill -N 3 -n 3 -o lost.log lost.sh)
until grep -qs '"global_step": 30' lost/metrics.jsonl; do sleep 1; done
kill -9 $h2
until [ -z "$(squeue -h -j $job)" ]; do sleep 1; done; cat lost.log""",
        r"without h2(.|\n)*finished after 2 starts",
    ),
]
CHECKED, LIMIT_S = 3, 900.0  # the first cases run in CI


def start_slurm(lab):
    """Start the daemons on the head and the hosts, and wait for the nodes."""
    Path("/etc/slurm").mkdir(exist_ok=True)
    Path("/etc/slurm/slurm.conf").write_text(CONF)
    Path("/etc/slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    for host, daemon in [(lab._head, "slurmctld"), *((item, "slurmd") for item in lab._hosts)]:
        name = f" -N {host.name}" if daemon == "slurmd" else ""
        call(
            (
                *host.enter(),
                "sh",
                "-c",
                f"set -e\n{DAEMONS}{daemon}{name} || {{ cat /run/slurm*.log >&2; exit 1; }}",
            )
        )
    until_s = time.monotonic() + 60
    ready = f"sinfo -h -t idle -o %D | grep -qx {NODES}"
    while subprocess.run([*lab.enter_head(), "sh", "-c", ready]).returncode:
        if time.monotonic() > until_s:
            raise UsageError("the nodes of Slurm have not come up in a minute")
        time.sleep(0.5)


def run_cases(cases):
    """Run scripts on the head of a new lab; return rows of (instruction, seconds, result)."""
    rows, kind = [], "pmi2" if find_launcher(2, []).kind == "MPICH" else "pmix"
    with lab_of(NODES, Speed("1gbit")) as lab:
        start_slurm(lab)
        python = shlex.quote(sys.executable)
        names = f"type={kind} srun='srun --mpi={kind}' python={python} h2={lab._hosts[2].lab_pid}"
        names += f" nnmpi='{python} -m nnmpi'"
        for name, script, expected in cases:
            begin_s = time.monotonic()
            command = [
                *lab.enter_head(),
                "timeout",
                str(LIMIT_S),
                "sh",
                "-c",
                f"cd {lab.folder}\n{names}\n{script}",
            ]
            done = subprocess.run(
                command,
                env=environment(None) | {"PYTHONPATH": sys.path[0]},
                capture_output=True,
                text=True,
            )
            right = re.search(expected, done.stdout, re.MULTILINE)
            if not right:
                print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
            rows.append((name, time.monotonic() - begin_s, "right" if right else "WRONG"))
            print(*rows[-1], flush=True)
    return rows


def main():
    """Make the lab, run the instructions, and print the table."""
    parser = Parser("python benchmarks/cluster", description=__doc__)
    parser.add_argument("--check", action="store_true", help=f"the first {CHECKED} alone, for CI")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        if os.geteuid() or not shutil.which("apt-get"):
            print("not run: the lab needs root, for its namespaces, and Debian's packages")
            return 0 if options.check else 1
        place = subprocess.check_output(["mktemp", "-d"], text=True).strip()
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", BOX, "box", place]
        command = [*words, sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
        status = subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode
        os.rmdir(place)
        return 0 if options.check and status == NO_PACKAGES else status
    rows = run_cases(CASES[: CHECKED if options.check else None])
    print(
        tables.render(
            [
                ("instruction", lambda row: row[0]),
                ("seconds", lambda row: f"{row[1]:.0f}"),
                ("result", lambda row: row[2]),
            ],
            rows,
        )
    )
    return int(any(row[2] != "right" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
