"""The double of cuDNN's frontend is what is installed, and the installed one takes the graphs that nnmpi builds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.library import real_environment

FOLDER = Path(__file__).parent
SNAPSHOT = FOLDER.parent / "fake" / "cudnn" / "snapshot.json"
installed = pytest.mark.skipif(
    not any(Path(each, "cudnn", "_pygraph.py").is_file() for each in sys.path),
    reason="nvidia-cudnn-frontend is not installed",
)

# The real frontend as far as it goes without cuDNN: graphs are written down, sizes and types inferred, and handed over.
REAL = """
import json
import cudnn
from nnmpi.backend import cudnn as ours

class Frontend:
    def __getattr__(self, name):
        return getattr(cudnn, name)

    def create_handle(self):
        return cudnn.Handle(1, 0, 0)

    def backend_version_string(self):
        return "none"

def build(self, heuristics=None, ctx=None):
    for node in self.nodes:
        node.infer_properties(self.context)
        node.validate()
    outside = [type_(t) for t in self.tensors.values() if not t.is_virtual]
    found.append([outside, [n.node_type.name for n in self.nodes]])
    self._lower_to_cpp()  # the compiled module takes every argument, too
    self.get_workspace_size = lambda: 0

def type_(t):
    t.validate()
    return [list(t.dim), list(t.stride), t.data_type.name]

found = []
cudnn.pygraph.build = build
problem = ours.Problem((2, 8, 9, 6), (2, 4, 5, 4), (3, 3), (2, 2), (1, 1), (1, 1), 2)
library = ours.Cudnn(Frontend(), None)
for job in (
    ours.Job("fprop", problem, "float32", "float32", True, True, False),
    ours.Job("dgrad", problem, "float16", "float16"),
    ours.Job("wgrad", problem, "bfloat16", "float32"),
):
    library._build(job)
print(json.dumps(found))
"""


def real(*command: str) -> str:
    """Return what a Python without the double prints."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        cwd=FOLDER.parents[2],
        timeout=100,
        env=real_environment(),
    )
    return done.stdout


@installed
def test_the_snapshot_is_the_installed_frontend() -> None:
    """Names, parameters and members; the version may differ as long as these do not."""
    found = json.loads(real(str(FOLDER / "survey.py"), "--print"))
    kept = json.loads(SNAPSHOT.read_text())
    del found["version"], kept["version"]
    assert found == kept


@installed
def test_the_installed_frontend_takes_the_graphs() -> None:
    """Every operation with every argument that nnmpi gives, and the sizes that the frontend makes of them."""
    images = [[2, 6, 8, 9], [432, 1, 54, 6]]
    kernels = [[4, 3, 3, 3], [27, 1, 9, 3]]
    results = [[2, 4, 4, 5], [80, 1, 20, 4]]
    assert json.loads(real("-c", REAL)) == [
        [
            [
                [*images, "FLOAT"],
                [*kernels, "FLOAT"],
                [[1, 4, 1, 1], [4, 1, 4, 4], "FLOAT"],
                [*results, "FLOAT"],
            ],
            ["CONV_FPROP", "POINTWISE", "POINTWISE"],
        ],
        [[[*results, "HALF"], [*kernels, "HALF"], [*images, "HALF"]], ["CONV_DGRAD"]],
        [[[*images, "BFLOAT16"], [*results, "BFLOAT16"], [*kernels, "FLOAT"]], ["CONV_WGRAD"]],
    ]
