"""python tests/device/cudnn/survey.py: write down what the installed frontend of cuDNN takes, for the fake one.

    functions    names of the parameters of what nnmpi calls
    operations   what the graph's operations take: from the frontend's own tables and from the compiled module's words
    enums        names of members

It asks for names alone, and so needs neither cuDNN nor a device. `--print` writes to the standard output instead.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).parents[1] / "fake" / "cudnn" / "snapshot.json"
FUNCTIONS = ("create_handle", "set_stream", "get_stream", "destroy_handle")
METHODS = ("__init__", "tensor", "relu", "build", "get_workspace_size", "execute", "deselect_numeric_notes")
PLANS = ("get_execution_plan_count", "build_plan_at_index")
SETTERS = ("set_output", "set_dim", "set_stride", "set_data_type", "get_uid")
OPERATIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
ENUMS = ("data_type", "heur_mode", "numerical_note")


def main() -> int:
    """Write the snapshot."""
    text = json.dumps(survey(), indent=1, sort_keys=True) + "\n"
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        SNAPSHOT.write_text(text)
    return 0


def survey() -> dict[str, Any]:
    """Return what the installed frontend takes."""
    import cudnn

    graph, tensor = cudnn.pygraph, cudnn.Tensor
    functions = {name: _names(getattr(cudnn, name)) for name in FUNCTIONS}
    functions |= {f"pygraph.{name}": _names(getattr(graph, name)) for name in METHODS + PLANS}
    functions |= {f"Tensor.{name}": _names(getattr(tensor, name)) for name in SETTERS}
    return {
        "version": cudnn.__version__,
        "functions": functions,
        "operations": {name: _operation(cudnn, name) for name in OPERATIONS} | {"bias": _pointwise(cudnn, "bias")},
        "enums": {name: sorted(getattr(cudnn, name).__members__) for name in ENUMS},
        "errors": [each.__name__ for each in cudnn.cudnnGraphNotSupportedError.__mro__],
    }


def _names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _operation(cudnn: Any, name: str) -> dict[str, list[str]]:
    """Return the tensors and the attributes that an operation takes: what both the table and the binding know."""
    table = sys.modules["cudnn._pygraph"]._STRUCTURED_OPS[name]  # type: ignore[attr-defined]
    words = getattr(cudnn._pybind_module.backend_graph, name).__doc__
    bound = set(re.findall(r"(\w+): ", words.partition("Overloaded")[0]))
    assert bound.issuperset(table["inputs"])
    return {"inputs": list(table["inputs"]), "attributes": sorted(bound.intersection(table["attrs"]))}


def _pointwise(cudnn: Any, name: str) -> dict[str, list[str]]:
    return {"inputs": list(cudnn.pygraph._POINTWISE_TENSOR_ARGS[name]), "attributes": []}


if __name__ == "__main__":
    sys.exit(main())
