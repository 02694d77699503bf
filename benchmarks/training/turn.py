"""A contestant's turn: a process, or a job on several ranks, which prints what it took."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.training.contestants import PINS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that benchmarks with turns have in common."""
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="turns of each contestant (3)"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each turn (10)")
    parser.add_argument(
        "--precision", default="float32", choices=("float32", "bf16"), help="(float32)"
    )
    parser.add_argument(
        "--peers-python", default=sys.executable, help="the Python that has the peers (this one)"
    )
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)


def start(
    script: str,
    names: Sequence[str],
    is_ours: bool,
    options: argparse.Namespace,
    ranks: int = 1,
    threads: str = "1",
    words: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Give a contestant its turn; return what rank 0 took, or None where it is not installed.

    Args:
        script: the benchmark, which `tell` answers with --take.
        names: the two after --take.
        is_ours: whether it is nnmpi, of this Python; otherwise of --peers-python.
        options: those of `add_options`.
        ranks: processes, by mpirun or by torch.distributed.run.
        threads: of each.
        words: more options of the script.
    """
    python = sys.executable if is_ours else options.peers_python
    taking = [script, "--take", *names, "--steps", str(options.steps)]
    taking += ["--precision", options.precision, *words]
    command = [python, *taking]
    if ranks > 1 and is_ours:
        command = [os.environ.get("NNMPI_MPIRUN", "mpirun"), "-n", str(ranks), *command]
    elif ranks > 1:
        command = [python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), *taking]
    pinned = {f"{library}_NUM_THREADS": threads for library in ("OMP", "OPENBLAS", "MKL")}
    # XLA's pool and gloo's device
    pinned |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "GLOO_SOCKET_IFNAME": "lo"}
    env = {name: value for name, value in os.environ.items() if name not in PINS} | pinned
    ran = subprocess.run(command, env=env, capture_output=True, text=True)
    if ran.returncode == 0:
        result: dict[str, Any] = json.loads(
            next(line for line in ran.stdout.splitlines() if line.startswith("{"))
        )
        return result
    if is_ours or "ModuleNotFoundError" not in ran.stderr:
        raise SystemExit(f"{' '.join(names)}:\n{ran.stderr}")
    return None


def tell(taken: dict[str, Any], is_gloo: bool) -> None:
    """Print on rank 0 what a turn took; end a job of PyTorch's."""
    ranks = [os.environ.get(name, "0") for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")]
    if {*ranks} == {"0"}:
        print(json.dumps(taken), flush=True)
    if is_gloo:
        sys.modules["torch"].distributed.barrier()
        os._exit(0)  # gloo's threads abort an ordinary end now and then
