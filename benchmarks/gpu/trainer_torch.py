"""PyTorch's side: eager, with the settings that its documentation advises for a card.

Images are channels_last, cuDNN may benchmark its algorithms (`torch.backends.cudnn.benchmark`),
attention is `scaled_dot_product_attention`, bf16 is `torch.autocast`, SGD is the default, which
updates all parameters at once (`foreach`). TF32 is allowed in mode tf32 and forbidden in float32:
PyTorch's default allows it for convolutions.
"""

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.cases import BF16, FLOAT32, TF32, CaseArrays
from benchmarks.gpu.trainer import Arrays, DeviceTrainer
from benchmarks.training.cases import CNN, CROSS_ENTROPY
from benchmarks.training.layouts import from_torch, to_torch
from benchmarks.training.trainer_torch import build


class TorchDeviceTrainer(DeviceTrainer):
    """PyTorch on a device.

    Args:
        arrays: the case.
        mode: FLOAT32, TF32 or BF16.
        device: "cuda", or "cpu" for tests.
        dtype: float64 for the reference.
    """

    def __init__(self, arrays: CaseArrays, mode: str, device: str, dtype: str = FLOAT32) -> None:
        super().__init__(arrays.case, mode)
        self.name = "torch"
        self._device, self._first, self._dtype = device, arrays.weights, getattr(torch, dtype)
        torch.backends.cudnn.benchmark = True
        torch.cuda.empty_cache()
        images = self.case.model == CNN
        order = torch.channels_last if images and dtype == FLOAT32 else torch.contiguous_format
        model = build(self.case).to(self._dtype)
        self._model = model.to(device=device, memory_format=order)
        x, y = map(torch.from_numpy, arrays.batch(dtype))
        if images:
            x = x.permute(0, 3, 1, 2).contiguous(memory_format=order)
        self._x, self._y = x.to(device), y.to(device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, values in zip(
                self._model.parameters(), to_torch(self.case, self._first), strict=True
            ):
                parameter.copy_(torch.from_numpy(values))

    def weights(self) -> Arrays:
        parts = [
            parameter.detach().cpu().contiguous().numpy().reshape(-1)
            for parameter in self._model.parameters()
        ]
        return from_torch(self.case, np.concatenate(parts).astype(np.float64), self._first)

    def step(self) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.mode == TF32
        self._optimizer.param_groups[0]["lr"] = self.lr
        self._optimizer.zero_grad()
        with torch.autocast(self._device, torch.bfloat16, enabled=self.mode == BF16):
            loss = self._loss(self._model(self._x))
        loss.backward()
        self._optimizer.step()
        return loss

    def read(self, loss: Any) -> float:
        return float(loss.item())

    def wait(self) -> None:
        getattr(torch, self._device).synchronize()

    def mark(self) -> Any:
        event = getattr(torch, self._device).Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def close(self) -> None:
        super().close()
        torch.cuda.empty_cache()

    def _loss(self, output: torch.Tensor) -> torch.Tensor:
        loss = (
            torch.nn.functional.cross_entropy
            if self.case.loss == CROSS_ENTROPY
            else torch.nn.functional.mse_loss
        )
        return loss(output, self._y)
