"""scripts/check, with tools that find what they are told: its last line is the verdict."""

import os
import subprocess

import pytest

from tests.scripts.test_environment import PYTHON, Checkout

FINDS = """\
    *"$PART"*) printf '%s\\n' "$FINDING"; exit 1 ;;
    *) echo "python $*" >>"$LOG" ;;
"""
SHELLCHECK = (
    '#!/bin/sh\ncase $PART in shellcheck) echo "scripts/test:5:1: warning"; exit 1 ;; esac\n'
)
NOTHING = "nothing that is called so"


def check(folder, part=NOTHING, finding=""):
    """Return the status of scripts/check, its last line and all of what it prints."""
    checkout = Checkout(folder)
    python = checkout.add_python()
    python.write_text(python.read_text().replace(PYTHON.splitlines()[-2] + "\n", FINDS))
    shellcheck = checkout.root / ".venv/bin/shellcheck"
    variables = checkout.environ | {"PART": part, "FINDING": finding}
    variables["PATH"] += os.pathsep + os.environ["PATH"]
    probe = ["sh", str(checkout.root / "scripts/probe"), "dev"]
    subprocess.run(probe, env=variables, check=True, capture_output=True)
    shellcheck.write_text(SHELLCHECK)
    shellcheck.chmod(0o755)
    command = ["sh", str(checkout.root / "scripts/check")]
    ending = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert ending.stdout, ending.stderr
    return ending.returncode, ending.stdout.splitlines()[-1], ending.stdout


def test_the_last_line_names_what_passed(tmp_path):
    status, verdict, text = check(tmp_path)
    assert status == 0 and text.count("\n") == 1
    assert verdict.endswith(" s: format, lint, types, shell, floors, solutions, layering")
    assert verdict.startswith("passed in ")


@pytest.mark.parametrize(
    "part, finding, named",
    [
        ("ruff format", "Would reformat: nnmpi/a.py\n1 file would be", "format (nnmpi/a.py)"),
        ("ruff check", "E501 long\n   --> nnmpi/a.py:12:101\n", "lint (nnmpi/a.py:12)"),
        ("mypy", "nnmpi/b/c.py:3: error: x\nnnmpi/d.py:4: error", "types (nnmpi/b/c.py:3)"),
        ("shellcheck", "", "shell (scripts/test:5)"),
        ("size --check", "docs/house.md:38: other floors", "floors (docs/house.md:38)"),
        ("scripts/solutions", "it died", "solutions (?)"),
        (
            "pytest",
            "E         nnmpi/a.py:7: imports up\n\ntests/layering/test_layering.py:25: Assert",
            "layering (nnmpi/a.py:7)",
        ),
    ],
)
def test_the_last_line_names_what_failed_and_where(part, finding, named, tmp_path):
    status, verdict, text = check(tmp_path, part, finding)
    assert status == 1
    assert verdict.startswith("FAILED in ") and f": {named}; passed: " in verdict
    assert len(verdict.partition("; passed: ")[2].split(", ")) == 6
    assert finding in text and f"==== {named.partition(' ')[0]} ====" in text
