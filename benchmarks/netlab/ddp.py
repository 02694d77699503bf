"""Steps of PyTorch's DDP over gloo, paced as a case of `netlab steps`: `python -m benchmarks.netlab.ddp JOB.json`.

Started by mpirun, one rank on each host, as the train command is. A gradient is final when its share of the backward's
time is over, so that DDP's buckets go under the backward as they would. Rank 0 writes the
moments at which its steps began.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives.gloo import INTERFACE, join, stop_gloo
from nnmpi.launcher import read_launch


def main(job):
    """Train an MLP for some steps."""
    launch, times = read_launch(os.environ), job["times"]
    os.environ |= {INTERFACE: "eth0", "MASTER_ADDR": job["master"], "MASTER_PORT": "29400"}
    join(launch.rank, launch.size, "env://")
    sizes = job["sizes"]
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    began = 0.0

    def last_until(seconds, *_):
        time.sleep(max(0.0, began + seconds - time.perf_counter()))

    whole, done = sum(p.numel() for p in model.parameters()), 0
    for parameter in reversed(list(model.parameters())):
        done += parameter.numel()
        parameter.register_hook(partial(last_until, times["B"] * done / whole))
    ranks = DistributedDataParallel(model)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    x, y = torch.randn(job["rows"], sizes[0]), torch.zeros(job["rows"], dtype=torch.int64)
    begins = []
    for _ in range(job["steps"]):
        began = time.perf_counter()
        begins.append(began)
        optimizer.zero_grad()
        result = loss(ranks(x), y)
        last_until(times["F"])
        began = time.perf_counter()
        result.backward()
        began = time.perf_counter()
        optimizer.step()
        last_until(times["STEP"])
    if launch.rank == 0:
        Path(job["out"]).write_text(json.dumps(begins))
    stop_gloo()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
