"""PyTorch's side, with the settings that its documentation advises for a card.

Images are channels_last, cuDNN may benchmark its algorithms (`torch.backends.cudnn.benchmark`),
attention is `scaled_dot_product_attention`, AdamW is fused, bf16 is `torch.autocast`. TF32 is
allowed but in mode float32. A compiled contestant compiles the model with its loss.
"""

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.cases import BF16, FLOAT32, TORCH, TORCH_GRAPHS, Case
from benchmarks.gpu.trainer import LR, DeviceTrainer
from benchmarks.training import models


class TorchDeviceTrainer(DeviceTrainer):
    """PyTorch on a device.

    Args:
        case: the model and its batch.
        mode: FLOAT32, TF32 or BF16.
        device: "cuda", or "cpu" for tests.
        way: TORCH, TORCH_COMPILE or TORCH_GRAPHS.
    """

    def __init__(self, case: Case, mode: str, device: str, way: str) -> None:
        self._mode, self._device, self._way = mode, device, way
        torch.backends.cudnn.benchmark = True
        if device == "cuda":
            self._before = torch.cuda.memory_allocated()
        with torch.device(device):
            self._model = case.make(models.their_library())
        with torch.no_grad():
            # both sides define their parameters in one order; nnmpi's buffers follow them
            for parameter, value in zip(self._model.parameters(), case.torch_weights, strict=False):
                parameter.copy_(torch.from_numpy(value).view(parameter.shape))
        x, self._y = (torch.from_numpy(array).to(device) for array in case.data)
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
            self._model.to(memory_format=torch.channels_last)
        self._x = x
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)
        mode_of_compile = "reduce-overhead" if way == TORCH_GRAPHS else None
        self._run = self._loss if way == TORCH else torch.compile(self._loss, mode=mode_of_compile)

    def step(self) -> Any:
        allowed = self._mode != FLOAT32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        if self._way == TORCH_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        self._optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._mode == BF16):
            loss = self._run(self._x, self._y)
        loss.backward()
        self._optimizer.step()
        return loss

    def read(self, loss: Any) -> float:
        return float(loss.item())

    def wait(self) -> None:
        getattr(torch, self._device).synchronize()

    def peak_bytes(self) -> int | None:
        """Return the allocator's growth in one more step, which tries no algorithm of cuDNN."""
        if self._device != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() - self._before

    def close(self) -> None:
        super().close()
        torch.compiler.reset()
        torch.cuda.empty_cache()

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self._model(x).flatten(0, -2), y.flatten())
