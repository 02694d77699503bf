"""Which test files a change touches, in a small checkout."""

import subprocess

import pytest

from tests.harness.changed import changed_since, touched_tests

FILES = {
    "nnmpi/__init__.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nnmpi.compose.worker import Worker
""",
    "nnmpi/__main__.py": "from nnmpi.commands.table import COMMANDS\n",
    "nnmpi/commands/__init__.py": "",
    "nnmpi/commands/table.py": "COMMANDS = {'plan': 'lab.plan'}\n",
    "nnmpi/base/__init__.py": "",
    "nnmpi/base/units.py": "",
    "nnmpi/compose/__init__.py": "",
    "nnmpi/compose/worker.py": "import nnmpi.base.units\n",
    "nnmpi/data/__init__.py": """
from nnmpi.data.loader import Loader
from nnmpi.data.tables import load
""",
    "nnmpi/data/loader.py": "",
    "nnmpi/data/tables.py": "from nnmpi.base import units\n",
    "nnmpi/lab/__init__.py": "",
    "nnmpi/lab/plan.py": "from nnmpi.base.units import x\n",
    "tests/__init__.py": "",
    "tests/data/__init__.py": "",
    "tests/data/conftest.py": "",
    "tests/data/helper.py": "from nnmpi.data.tables import load\n",
    "tests/data/test_tables.py": "from tests.data.helper import load\n",
    "tests/data/test_loader.py": "from nnmpi import data\nx = data.Loader\n",
    "tests/data/test_load.py": "from nnmpi.data import load\n",
    "tests/test_worker.py": "import nnmpi\nx = nnmpi.Worker\n",
    "tests/test_commands.py": "x = ['-m', 'nnmpi', 'plan']\n",
    "tests/test_docs.py": "from pathlib import Path\nx = Path('docs') / 'house.md'\n",
    "tests/test_alone.py": '"""Says nnmpi.lab.plan."""\n',
    "docs/house.md": "",
    "setup.cfg": "",
}


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "changed, touched",
    [
        ("tests/test_alone.py", "test_alone"),
        ("tests/data/helper.py", "data/test_tables"),
        ("nnmpi/data/loader.py", "data/test_loader"),
        ("nnmpi/data/tables.py", "data/test_load data/test_tables"),
        ("nnmpi/base/units.py", "data/test_load test_worker data/test_tables test_commands"),
        ("nnmpi/lab/plan.py", "test_commands"),
        ("nnmpi/compose/worker.py", "test_worker"),
        ("tests/data/conftest.py", "data/test_load data/test_loader data/test_tables"),
        ("docs/house.md", "test_docs"),
        ("docs/new.md", "test_docs"),
        ("setup.cfg", ""),
        ("nnmpi/data/tables.py tests/test_alone.py", "test_alone data/test_load data/test_tables"),
    ],
)
def test_a_change_touches_what_imports_it_the_nearest_first(changed, touched, checkout):
    expected = [f"tests/{name}.py" for name in touched.split()]
    assert touched_tests(checkout, changed.split()) == expected


def test_a_removed_module_touches_what_imported_it(checkout):
    (checkout / "nnmpi/data/tables.py").unlink()
    assert "tests/data/test_tables.py" in touched_tests(checkout, ["nnmpi/data/tables.py"])


def test_what_has_changed_is_in_the_work_tree_and_on_the_branch(checkout):
    first = git(checkout, "rev-parse", "HEAD")
    assert changed_since(checkout) == []
    git(checkout, "checkout", "-q", "-b", "mine")
    (checkout / "setup.cfg").write_text("x")
    commit(checkout)
    (checkout / "docs/house.md").write_text("x")
    (checkout / ".gitignore").write_text("out\n")
    (checkout / "out").touch()
    (checkout / "tests/test_new.py").touch()
    assert changed_since(checkout, "HEAD") == [".gitignore", "docs/house.md", "tests/test_new.py"]
    assert changed_since(checkout) == changed_since(checkout, first)
    assert "setup.cfg" in changed_since(checkout)
    with pytest.raises(ValueError, match="git diff"):
        changed_since(checkout, "nothing")
