"""A CuPy that works without a GPU: to run whole programs, with ``PYTHONPATH`` on this folder.

Arrays are NumPy's, in shared memory, so that one process opens what another has exported, as
CUDA IPC does. Work is done when it is launched, but events take some questions until they say
so. The kernels are told by their text and done by NumPy; that the text is right, other tests
show.

It has only what the library, the trainer and the GPU check use; functions of arrays that are
not here are NumPy's.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import random
import sys
import types
from contextlib import suppress
from typing import Any

import numpy as np

__version__ = "0, at work without a GPU"


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


_alive: dict[int, Memory] = {}  # by address


class Memory:
    """An allocation: a file in /dev/shm, which goes when this does."""

    count = itertools.count()

    def __init__(self, size: int) -> None:
        self.size, self.device_id = max(1, size), 0
        self.name = f"/dev/shm/working-cupy-{os.getpid()}-{next(Memory.count)}"
        with open(self.name, "wb") as file:
            file.truncate(self.size)
        self.octets = opened(self.name)
        self.ptr = self.octets.ctypes.data
        _alive[self.ptr] = self

    def __del__(self) -> None:
        if _alive is None:  # the interpreter is going
            return
        _alive.pop(self.ptr, None)
        with suppress(OSError):
            os.unlink(self.name)


@atexit.register
def sweep() -> None:
    """What is left at exit is not collected, but its files must go."""
    for memory in list(_alive.values()):
        with suppress(OSError):
            os.unlink(memory.name)


def opened(name: str) -> np.ndarray:
    with open(name, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = 0) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, max(0, device_id)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class ndarray(np.ndarray):
    """Results of NumPy's functions are of this class too; their memory is a pool's."""

    def __new__(
        cls, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None
    ) -> Any:
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memptr = memptr or MemoryPointer(Memory(nbytes), 0)
        octets = (ctypes.c_char * nbytes).from_address(memptr.ptr)
        octets.owner = memptr  # type: ignore[attr-defined]
        self = np.ndarray.__new__(cls, shape, dtype, octets)
        self.memory = memptr.mem
        return self

    def __array_finalize__(self, other: Any) -> None:
        self.memory = getattr(other, "memory", None)

    @property
    def data(self) -> MemoryPointer:  # type: ignore[override]
        address, memory = self.__array_interface__["data"][0], self.memory
        if memory is None or not memory.ptr <= address <= memory.ptr + memory.size:
            memory = UnownedMemory(address, self.nbytes, self)
        return MemoryPointer(memory, address - memory.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.__array_interface__, "version": 3, "stream": 1}

    def get(self, out: Any = None) -> np.ndarray:
        out = np.empty(self.shape, self.dtype) if out is None else out
        np.copyto(out, self.view(np.ndarray))
        return out

    def set(self, values: np.ndarray) -> None:
        self[...] = values


def asarray(values: Any, dtype: Any = None) -> ndarray:
    if isinstance(values, ndarray):
        return values
    values = np.asarray(values, dtype)
    array = ndarray(values.shape, values.dtype)
    array[...] = values
    return array


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, value: float, dtype: Any = float) -> ndarray:
    array = ndarray(shape, dtype)
    array.fill(value)
    return array


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def empty_like(array: ndarray) -> ndarray:
    return ndarray(array.shape, array.dtype)


def asnumpy(array: Any) -> np.ndarray:
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def get_default_memory_pool() -> Any:
    return types.SimpleNamespace(free_all_blocks=lambda: None)


def __getattr__(name: str) -> Any:
    function = getattr(np, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        return result.view(ndarray) if isinstance(result, np.ndarray) else result

    return call if callable(function) and not isinstance(function, type) else function


# -- kernels


class RawKernel:
    """Known by its text."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        self.kernel = self
        self._run = {"sgd": sgd, "adam": adam, "all_finite": all_finite, "slow": slow}.get(name)
        if self._run is None:
            self._run = reduction(code)

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], **options: Any) -> None:
        with np.errstate(all="ignore"):
            self._run(*arguments)


def reduction(code: str) -> Any:
    from mpiring.device.base import Reduction
    from mpiring.device.host import HostDevice
    from mpiring.device.kernels import _NUMBERS, _RESULTS, kernel_source

    (op,) = (
        op
        for dtype, number in _NUMBERS.items()
        for op in _RESULTS[number.kind]
        if kernel_source(op, dtype) == code
    )

    def run(source: Any, target: Any, count: int, factor: float) -> None:
        assert source.size == target.size == count
        device = HostDevice()
        if op == "scale":
            device.scale(target, float(factor)).start()
        else:
            device.reduce(source, target, Reduction(op)).start()

    return run


def sgd(values, g, buffer, count, lr, momentum, weight_decay, fine) -> None:  # type: ignore
    if isinstance(fine, ndarray) and not fine[0]:
        return
    g = g + weight_decay * values
    if isinstance(buffer, ndarray):
        buffer[...] = g = momentum * buffer + g
    values -= lr * g


def adam(  # type: ignore
    values, g, mean, square, count, rate, root, beta1, beta2, rest1, rest2, eps, weight_decay, fine
) -> None:
    if isinstance(fine, ndarray) and not fine[0]:
        return
    g = g + weight_decay * values
    mean[...] = beta1 * mean + rest1 * g
    square[...] = beta2 * square + rest2 * g * g
    values -= rate * mean / (np.sqrt(square) * root + eps)


def all_finite(values: Any, count: int, fine: Any) -> None:
    if not np.isfinite(values).all():
        fine[0] = 0


def slow(array: Any, count: int, cycles: int, value: float) -> None:
    array.fill(value)


# -- cupy.cuda


class Stream:
    handles = itertools.count(1)

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(Stream.handles)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


_questions: dict[int, int] = {}  # by event: until it says yes


class Event:
    handles = itertools.count(1)

    def __init__(self, disable_timing: bool = False) -> None:
        self.ptr = next(Event.handles)

    def __del__(self) -> None:
        _questions.pop(self.ptr, None)


class Device:
    def __init__(self, index: int = 0) -> None:
        self.attributes = {"MultiProcessorCount": 2}

    def synchronize(self) -> None: ...


def event_record(event: int, stream: int) -> None:
    _questions[event] = random.randrange(4)


def event_query(event: int) -> int:
    if not _questions.get(event):
        return 0
    _questions[event] -= 1
    return 600


def ipc_get(pointer: int) -> bytes:
    for start, memory in _alive.items():
        if start <= pointer < start + memory.size:
            return memory.name.encode().ljust(64, b"\0")
    raise CUDARuntimeError(1)


_mapped: list[np.ndarray] = []


def ipc_open(handle: bytes) -> int:
    name = handle.rstrip(b"\0").decode()
    assert f"-{os.getpid()}-" not in name, "CUDA opens no handle in the process that made it"
    _mapped.append(opened(name))
    return _mapped[-1].ctypes.data


runtime = types.ModuleType("cupy.cuda.runtime")
runtime.__dict__.update(
    CUDARuntimeError=CUDARuntimeError,
    memcpyDefault=4,
    getDevice=lambda: 0,
    setDevice=lambda index: None,
    getDeviceCount=lambda: 1,
    eventRecord=event_record,
    eventQuery=event_query,
    memcpyAsync=lambda target, source, nbytes, kind, stream: ctypes.memmove(target, source, nbytes),
    memsetAsync=lambda target, value, nbytes, stream: ctypes.memset(target, value, nbytes),
    deviceSynchronize=lambda: None,
    memGetInfo=lambda: ((1 << 40) - sum(each.size for each in _alive.values()), 1 << 40),
    ipcGetMemHandle=ipc_get,
    ipcOpenMemHandle=ipc_open,
)
_current = Stream()
cuda = types.ModuleType("cupy.cuda")
cuda.__dict__.update(
    runtime=runtime,
    Memory=Memory,
    UnownedMemory=UnownedMemory,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    Event=Event,
    Device=Device,
    get_current_stream=lambda: _current,
    alloc_pinned_memory=bytearray,
    is_available=lambda: True,
)
sys.modules["cupy.cuda"], sys.modules["cupy.cuda.runtime"] = cuda, runtime
