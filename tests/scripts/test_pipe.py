"""A benchmark whose reader is gone, as `| head` is, ends without a traceback."""

import os
import subprocess
import sys
from pathlib import Path


def test_a_closed_pipe_ends_a_benchmark():
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "benchmarks.scaling", "--max-ranks", "8", "--sizes", "1k"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        words, cwd=root, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")
