"""Optimizers whose steps do not grow with the gradient: Adam and its kin, and Lion.

All but Lion compute the numbers of torch.optim's. Weight decay is L2 regularization, added to the
gradient, except in AdamW and Lion.
"""

import math
from typing import Any, ClassVar, Final

import numpy as np

from nnmpi.backend.array import Array
from nnmpi.backend.storage import Storage
from nnmpi.base.errors import UsageError, number, shortened
from nnmpi.optim.optimizer import ByGroup, Optimizer

__all__ = ["Adadelta", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop"]


def decayed(grad: Array, w: Array, decay: float) -> Array:
    """Return the gradient with L2 regularization, unless its factor is False."""
    return grad if decay is False else grad + w * decay


def adam(w: Array, grad: Array, m: Array, v: Array, *more: Any) -> None:
    """Adam's update; more are AMSGrad's array if there is one, and the numbers.

    `rate` and `eps` have the bias corrections, and w its factor unless True.
    """
    *arrays, rate, eps, beta1, beta2, decay, factor = more
    if factor is not True:
        w *= factor
    grad = decayed(grad, w, decay)
    # not the sum of two products, which rounds more; each product in place, for NumPy's sake
    change = grad - m
    change *= 1 - beta1
    m += change
    v *= beta2
    square = grad * grad
    square *= 1 - beta2
    v += square
    for largest in arrays:
        np.maximum(largest, v, out=largest)
        v = largest
    root = np.sqrt(v)
    root += eps
    np.divide(m, root, out=root)
    root *= rate
    w -= root


def two_betas(betas: tuple[float, float]) -> tuple[float, float]:
    """Return two decay rates of averages, each in [0, 1).

    Raises:
        UsageError: for other values.
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise UsageError(
            f"betas are {shortened(repr(betas))}; give two numbers such as (0.9, 0.999)"
        ) from None
    return number("betas[0]", beta1, 1), number("betas[1]", beta2, 1)


class Adam(Optimizer, read_once="betas eps decouples amsgrad"):
    """Adam (Kingma and Ba, 2015), with the numbers of torch.optim.Adam.

        g = gradient + weight_decay * w
        m = beta1 * m + (1 - beta1) * g             slots "m" and "v", initially zeros
        v = beta2 * v + (1 - beta2) * g * g         t: the update's number, from 1
        w = w - lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0.
        betas: the decay rates of m and v, each in [0, 1).
        eps: at least 0, added to the root so that tiny gradients do not cause huge updates; with 0,
            an element whose gradients were all 0 becomes NaN.
        weight_decay: L2 regularization, added to the gradient: one number, or a number by group
            name; groups left out are not decayed.
        amsgrad: whether the largest v so far, slot "largest", stands for v (Reddi et al., "On the
            convergence of Adam and beyond", 2018).

    Raises:
        UsageError: for values out of range or an unknown group.

    Example:
        >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
        >>> optimizer = optim.Adam(model.storage, lr=1e-3)
        >>> ops.cross_entropy(model(np.eye(4, dtype="float32")), np.array([0, 1, 2, 0])).backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    # whether the decay multiplies the weights instead of adding to the gradient
    decouples: ClassVar[bool] = False
    formula = staticmethod(adam)

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: ByGroup = 0.0,
        amsgrad: bool = False,
    ) -> None:
        self.betas: Final = two_betas(betas)
        self.eps: Final = number("eps", eps)
        self.amsgrad: Final = bool(amsgrad)
        super().__init__(storage, lr, weight_decay, slots=("m", "v", "largest")[: 2 + self.amsgrad])

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """See `Optimizer.numbers`."""
        beta1, beta2 = self.betas
        # With r = sqrt(c2) this saves a pass over the block:
        # m / c1 / (sqrt(v / c2) + eps)  =  m * (r / c1) / (sqrt(v) + eps * r)
        root = math.sqrt(1 - beta2**self.steps)
        rate = lr * root / (1 - beta1**self.steps)
        factors = (False, 1 - lr * decay) if self.decouples and decay else (decay, True)
        return rate, self.eps * root, beta1, beta2, *factors


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), as torch.optim.AdamW.

        w = w * (1 - lr * weight_decay)         then Adam's update, without decay in its gradient

    All weights decay at the same rate. In Adam, a weight with large gradients decays more slowly.

    Args:
        storage, lr, betas, eps, amsgrad: see `Adam`, also for errors.
        weight_decay: an update multiplies a weight by 1 - lr * weight_decay. One number, or a
            number by group name; groups left out are not decayed.

    Example:
        >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
        >>> optimizer = optim.AdamW(model.storage, lr=1e-3, weight_decay=0.1)
        >>> ops.cross_entropy(model(np.eye(4, dtype="float32")), np.array([0, 1, 2, 0])).backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    decouples = True

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: ByGroup = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(storage, lr, betas, eps, weight_decay, amsgrad)


def rmsprop(w: Array, grad: Array, v: Array, *more: Any) -> None:
    """RMSprop's update; more are the momentum's array if there is one, and the numbers."""
    *arrays, lr, eps, keep, weight, momentum, decay = more
    grad = decayed(grad, w, decay)
    v *= keep
    v += grad * grad * weight
    change = grad / (np.sqrt(v) + eps)
    for b in arrays:
        b *= momentum
        b += change
        change = b
    w -= change * lr


class RMSprop(Optimizer, read_once="eps momentum square"):
    """RMSprop (Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5, 2012).

        g = gradient + weight_decay * w
        v = alpha * v + (1 - alpha) * g * g         slot "v", initially zeros
        d = g / (sqrt(v) + eps)
        b = momentum * b + d,  d = b                with momentum: slot "momentum"
        w = w - lr * d

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0.
        alpha: the decay rate of v, in [0, 1).
        eps: at least 0.
        momentum: in [0, 1); 0 needs no state.
        weight_decay: one number, or a number by group name; groups left out are not decayed.

    Raises:
        UsageError: for values out of range or an unknown group.
    """

    square: ClassVar[str] = "v"  # the slot's name
    formula = staticmethod(rmsprop)

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-8,
        momentum: float = 0.0,
        weight_decay: ByGroup = 0.0,
    ) -> None:
        decay = number("alpha", alpha, 1)
        self.factors = (decay, 1 - decay)  # of v and of g * g
        self.eps: Final = number("eps", eps)
        self.momentum: Final = number("momentum", momentum, 1)
        super().__init__(
            storage, lr, weight_decay, slots=(self.square, "momentum")[: 1 + (self.momentum > 0)]
        )

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """See `Optimizer.numbers`."""
        return lr, self.eps, *self.factors, self.momentum, decay


class Adagrad(RMSprop):
    """Adagrad (Duchi, Hazan and Singer, "Adaptive subgradient methods", 2011).

        s = s + g * g                               slot "s", initially zeros
        w = w - lr * g / (sqrt(s) + eps)

    Args:
        storage, lr, eps, weight_decay: see `RMSprop`, also for errors.
    """

    square = "s"

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 0.01,
        eps: float = 1e-10,
        weight_decay: ByGroup = 0.0,
    ) -> None:
        super().__init__(storage, lr, eps=eps, weight_decay=weight_decay)
        self.factors = (1.0, 1.0)


def adadelta(
    w: Array, grad: Array, v: Array, u: Array, lr: float, eps: float, rho: float, decay: float
) -> None:
    """Adadelta's update."""
    grad = decayed(grad, w, decay)
    v *= rho
    v += grad * grad * (1 - rho)
    change = grad / np.sqrt(v + eps) * np.sqrt(u + eps)
    u *= rho
    u += change * change * (1 - rho)
    w -= change * lr


class Adadelta(Optimizer, read_once="rho eps"):
    """Adadelta (Zeiler, "Adadelta: an adaptive learning rate method", 2012).

        v = rho * v + (1 - rho) * g * g             slots "v" and "u", initially zeros
        d = sqrt(u + eps) / sqrt(v + eps) * g
        u = rho * u + (1 - rho) * d * d
        w = w - lr * d

    Args:
        storage, weight_decay: see `RMSprop`, also for errors.
        lr: the factor of the update.
        rho: the decay rate of v and u, in [0, 1).
        eps: above 0; with 0 the first update, and so each one, would be 0.
    """

    formula = staticmethod(adadelta)

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: ByGroup = 0.0,
    ) -> None:
        self.rho: Final = number("rho", rho, 1)
        self.eps: Final = number("eps", eps)
        if self.eps == 0:
            raise UsageError("Adadelta's eps is 0, with which nothing ever moves; give 1e-6 or so")
        super().__init__(storage, lr, weight_decay, slots=("v", "u"))

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """See `Optimizer.numbers`."""
        return lr, self.eps, self.rho, decay


def lion(
    w: Array, grad: Array, m: Array, lr: float, beta1: float, beta2: float, factor: Any
) -> None:
    """Lion's update; w has its factor unless True."""
    if factor is not True:
        w *= factor
    w -= np.sign(m * beta1 + grad * (1 - beta1)) * lr
    m *= beta2
    m += grad * (1 - beta2)


class Lion(Optimizer, read_once="betas"):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

        c = beta1 * m + (1 - beta1) * g             slot "m", initially zeros
        w = w * (1 - lr * weight_decay) - lr * sign(c)
        m = beta2 * m + (1 - beta2) * g

    Every weight moves by the learning rate in every update, so it is 3 to 10 times lower than
    Adam's, and the weight decay, which is decoupled, as many times higher. A gradient that is 0 but
    for rounding moves its weight, too, in a direction that depends on the order of sums: for
    instance that of a bias in front of a batch normalization.

    Args:
        storage: the buffers, see `Storage`.
        lr: the learning rate, at least 0.
        betas: the decay rates of the average in a step's direction, and of the one that is kept;
            each in [0, 1).
        weight_decay: an update multiplies a weight by 1 - lr * weight_decay. One number, or a
            number by group name; groups left out are not decayed.

    Raises:
        UsageError: for values out of range or an unknown group.

    Example:
        >>> model = models.mlp([4], 3, [8]).initialize(seed=0)
        >>> optimizer = optim.Lion(model.storage, lr=1e-3, weight_decay=0.1)
        >>> ops.cross_entropy(model(np.eye(4, dtype="float32")), np.array([0, 1, 2, 0])).backward()
        >>> optimizer.step()
        >>> optimizer.steps
        1
    """

    formula = staticmethod(lion)

    def __init__(
        self,
        storage: Storage,
        lr: ByGroup = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: ByGroup = 0.0,
    ) -> None:
        self.betas: Final = two_betas(betas)
        super().__init__(storage, lr, weight_decay, slots=("m",))

    def numbers(self, lr: float, decay: float) -> tuple[float, ...]:
        """See `Optimizer.numbers`."""
        return lr, *self.betas, 1 - lr * decay if decay else True
