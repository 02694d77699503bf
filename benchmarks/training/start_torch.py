"""The shortest program that trains with PyTorch: `torchrun --nproc_per_node P start_torch.py FOLDER`; see start.py."""

import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    sizes = (784, 128, 127, 126, 125, 124, 123, 10)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = 128 // distributed.get_world_size()
    x, y = torch.zeros(rows, 784), torch.zeros(rows, dtype=torch.int64)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    Path(sys.argv[1], str(distributed.get_rank())).write_text(str(time.time()))
    distributed.barrier()  # gloo may abort a process whose peer has left
    distributed.destroy_process_group()
