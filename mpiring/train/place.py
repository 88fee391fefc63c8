"""Where the network is computed: on the host by NumPy, or on a GPU by CuPy.

What differs between the two is kept here: the array module, the memory of parameters and
gradients, the optimizer's kernel, and how it is found out that a gradient holds inf or nan.

On a GPU a step sends nothing to the host, where every rank has all of the gradient and so
judges by itself. The kernel that updates the weights is told by another kernel whether it
may; the host hears of it when it comes with the next step, by when the answer has long
arrived: it has waited for an exchange since.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mpiring.errors import DeviceError
from mpiring.nn.arrays import Allocate, Array, all_finite
from mpiring.nn.optim import Kernel, Optimizer
from mpiring.parallel.strategies import Checked, Judge

#: Steps after which a GPU's loss is read, where nothing else is asked for: reading waits for it.
_LOG_EVERY = 50


class Place(Protocol):
    """What training needs of where it takes place."""

    name: str  #: for a person
    xp: ModuleType
    allocate: Allocate | None  #: for parameters and gradients; None: the module's own way
    log_every: int  #: steps after which the loss is read

    def kernel(self, optimizer: str) -> Kernel | None:
        """The optimizer's step in one kernel, or None for its own passes."""
        ...

    def judge(self, optimizer: Optimizer) -> Judge:
        """What decides whether a gradient is used, where this rank decides alone."""
        ...

    def is_finite(self, array: Array) -> bool:
        """Whether there is neither inf nor nan in it. Waits for the answer."""
        ...

    def host(self, array: Array) -> Any:
        """The array on the host. Waits for what is still computing it."""
        ...


class Host:
    name = "NumPy"
    xp: ModuleType = np
    allocate: Allocate | None = None
    log_every = 1

    def kernel(self, optimizer: str) -> Kernel | None:
        return None

    def judge(self, optimizer: Optimizer) -> Judge:
        return Checked(optimizer, all_finite)

    def is_finite(self, array: Array) -> bool:
        return all_finite(array)

    def host(self, array: Array) -> Any:
        return np.asarray(array)


class Gpu:
    """One GPU. The first thing in the process that touches one."""

    log_every = _LOG_EVERY

    def __init__(self, local_rank: int, wish: str) -> None:
        """DeviceError or ArgumentError if there is none, or not the one wished for."""
        from mpiring.device import cuda

        self._device = cuda.select_gpu(local_rank, wish)
        self.name = f"CuPy on GPU {self._device.index}"
        self.xp = self._device.xp
        self.allocate: Allocate | None = self._device.empty
        self._finite = cuda.Finite(self._device)

    def kernel(self, optimizer: str) -> Kernel | None:
        return partial(getattr(self._device, optimizer), fine=self._finite.fine)

    def judge(self, optimizer: Optimizer) -> Judge:
        return Deferred(optimizer, self._finite)

    def is_finite(self, array: Array) -> bool:
        self._finite.look(array)
        return self._finite.seen()

    def host(self, array: Array) -> Any:
        return self.xp.asnumpy(array)


class Looks(Protocol):
    """See ``device.cuda.Finite``."""

    def look(self, values: Array) -> None: ...

    def seen(self) -> bool: ...


class Deferred:
    """Launches every step; whether the kernel took it is known one step later."""

    def __init__(self, optimizer: Optimizer, finite: Looks) -> None:
        self._optimizer, self._finite = optimizer, finite
        self._steps = 0
        self._skipped: list[int] = []
        self._open = False  # the latest step has not been heard of

    def step(self, values: Array, gradients: Array) -> None:
        self._settle()  # the formulas of this step count the steps taken before
        self._steps += 1
        self._finite.look(gradients)
        self._optimizer.step(values, gradients)
        self._open = True

    def skipped(self) -> list[int]:
        self._settle()
        return self._skipped

    def _settle(self) -> None:
        if self._open and not self._finite.seen():
            self._skipped.append(self._steps)
            self._optimizer.steps -= 1
        self._open = False


def cuda_missing() -> str:
    """Why this rank cannot train on a GPU, or an empty string. Imports CuPy where it may help."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'mpiring[cuda12]' (or cuda13)"
    try:
        from mpiring.device.cuda import gpu_for

        gpu_for(0)
    except (ImportError, DeviceError) as error:
        return str(error)
    return ""


def check_cuda() -> None:
    """DeviceError: why there is no training on a GPU."""
    why = cuda_missing()
    if why:
        raise DeviceError(f"--device: cuda given, but {why}; allowed are auto and cpu")


def gpu_possible() -> bool:
    """Whether it is worth a look: CuPy takes a second to import. True wherever NVIDIA's driver
    is loaded and CuPy is installed."""
    return os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("cupy") is not None
