"""`costs.json`: what each way of training costs, as it was written last."""

import json
import sys
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("costs.json")
COMMAND = "python -m tests.costs"
MOST_FUNCTIONS = 30  # of a way, the most called first: where growth is looked for
OF_A_RUN = 1.03  # of a run some calls depend on times
OF_ANOTHER_NUMPY = 1.03


def versions():
    """Return what the numbers hold for."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        "numpy": ".".join(np.__version__.split(".")[:2]),
    }


def read():
    """Return the versions, and the costs by way."""
    stored = json.loads(FILE.read_text())
    return stored["versions"], stored["ways"]


def write(ways):
    """Write the costs, a line for each way."""
    lines = [f'  "versions": {json.dumps(versions())},', '  "ways": {']
    lines += [
        f"    {json.dumps(name)}: {json.dumps(cost)}{',' * (name != [*ways][-1])}"
        for name, cost in ways.items()
    ]
    FILE.write_text("\n".join(["{", *lines, "  }", "}", ""]))


def entry(cost, functions):
    """Return what the file says of a way."""
    return {**cost, "functions": dict(functions.most_common(MOST_FUNCTIONS))}


def growth(name, stored, cost, functions, most):
    """Return a sentence on each kind that has grown beyond `most` times what the file says."""
    grown = [
        f"{kind} {stored[kind]} -> {number}"
        for kind, number in cost.items()
        if number > stored[kind] * most
    ]
    if not grown:
        return ""
    before, least = stored["functions"], min(stored["functions"].values())
    dearer = {
        function: f"{function} {before.get(function, 0)} -> {number}"
        for function, number in functions.items()
        if number > before.get(function, least)  # one that is not listed had `least` at most
    }
    listed = sorted(dearer, key=lambda item: before.get(item, 0) - functions[item])[:12]
    return "\n  ".join(
        [
            f"{name} costs more: {', '.join(grown)}. If that is worth it: {COMMAND} '{name}'"
            " writes what it costs now to tests/costs/costs.json. More calls of:",
            *[dearer[item] for item in listed],
        ]
    )
