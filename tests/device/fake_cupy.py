"""As much of CuPy as ``device/cuda.py`` calls: arrays in host memory, calls in a log.

Each entry of ``Gpu.log`` is (what, current device, arguments that matter). Kernels
and copies do not run, so that a test decides what an event says.
``REAL`` maps the names that stand-ins replace, for a test to look them up in CuPy.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Gpu:
    """The state of the make-believe machine."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.current = 0
        self.log: list[tuple[Any, ...]] = []
        self.status = 600  # what eventQuery answers
        self.room = 1 << 30
        self.pooled = 0
        self.stream_of = {index: 7000 + index for index in range(count)}
        self.handles = 100
        self.special: set[int] = set()  # addresses that cannot be exported

    def note(self, what: str, *details: Any) -> None:
        self.log.append((what, self.current, *details))

    def handle(self) -> int:
        self.handles += 1
        return self.handles


def make(gpu: Gpu) -> types.ModuleType:
    """A module that can stand in for ``cupy``, over ``gpu``."""
    cupy = types.ModuleType("cupy")
    cuda = types.ModuleType("cupy.cuda")
    runtime = types.ModuleType("cupy.cuda.runtime")
    cupy.cuda, cuda.runtime = cuda, runtime

    class Memory:
        def __init__(self, size: int) -> None:
            gpu.note("malloc", size)
            if size > gpu.room:
                raise CUDARuntimeError(2)
            self.bytes = np.zeros(size, np.uint8)
            self.ptr, self.device_id = self.bytes.ctypes.data, gpu.current

    class UnownedMemory:
        def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
            self.ptr, self.size, self._owner = ptr, size, owner
            self.device_id = getattr(owner, "gpu", gpu.current) if device_id < 0 else device_id

    class MemoryPointer:
        def __init__(self, mem: Any, offset: int) -> None:
            self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    class ndarray:
        def __init__(self, shape, dtype=float, memptr=None, strides=None) -> None:
            self.shape, self.dtype, self.strides = tuple(shape), np.dtype(dtype), strides
            self.data = memptr or MemoryPointer(Memory(self.nbytes), 0)

        @property
        def size(self) -> int:
            return int(np.prod(self.shape))

        @property
        def nbytes(self) -> int:
            return self.size * self.dtype.itemsize

        def fill(self, value: float) -> None:
            gpu.note("fill", value)

        def __getitem__(self, part: slice) -> ndarray:
            start, stop, _ = part.indices(self.size)
            at = self.data.ptr - self.data.mem.ptr + start * self.dtype.itemsize
            return ndarray((stop - start,), self.dtype, MemoryPointer(self.data.mem, at))

    class Stream:
        def __init__(self, non_blocking: bool = False) -> None:
            self.ptr, self.non_blocking, self.device = gpu.handle(), non_blocking, gpu.current

    class Event:
        def __init__(self, disable_timing: bool = False) -> None:
            self.ptr, self.timing = gpu.handle(), not disable_timing
            gpu.note("event", self.timing)

    class Device:
        def __init__(self, index: int) -> None:
            self.attributes = {"MultiProcessorCount": 4}

    class RawKernel:
        def __init__(self, code: str, name: str, options: tuple[str, ...]) -> None:
            self.code, self.name = code, name

        @property
        def kernel(self) -> Any:
            gpu.note("compile", self.name)

            def function(grid, block, arguments, stream=None) -> None:
                gpu.note("launch", self.name, grid, block, arguments, stream.ptr)

            return function

    class Pool:
        def free_all_blocks(self) -> None:
            gpu.note("free_all_blocks")
            gpu.room += gpu.pooled
            gpu.pooled = 0

    def from_dlpack(array: Any) -> ndarray:
        gpu.note("from_dlpack")
        return ndarray(array.shape, array.dtype, MemoryPointer(UnownedMemory(1, 1, array), 0))

    def set_device(index: int) -> None:
        gpu.current = index
        gpu.note("setDevice", index)

    def get_device_count() -> int:
        if gpu.count < 0:
            raise CUDARuntimeError(35)
        return gpu.count

    def current_stream() -> Any:
        return types.SimpleNamespace(ptr=gpu.stream_of[gpu.current])

    def pinned(size: int) -> np.ndarray:
        gpu.note("pinned", size)
        return np.zeros(512 * -(-size // 512), np.uint8)  # CuPy's pool rounds up

    def event_query(event: int) -> int:
        gpu.note("query", event)
        return gpu.status

    def ipc_handle(pointer: int) -> bytes:
        gpu.note("export", pointer)
        if pointer in gpu.special:
            raise CUDARuntimeError(1)
        return pointer.to_bytes(64, "little")

    def ipc_open(handle: bytes) -> int:
        gpu.note("open", handle)
        return int.from_bytes(handle, "little") + (1 << 40)

    runtime.CUDARuntimeError = CUDARuntimeError
    runtime.ipcGetMemHandle, runtime.ipcOpenMemHandle = ipc_handle, ipc_open
    runtime.deviceSynchronize = lambda: gpu.note("synchronize")
    runtime.memcpyDefault = 4
    runtime.getDevice = lambda: gpu.current
    runtime.setDevice = set_device
    runtime.getDeviceCount = get_device_count
    runtime.eventRecord = lambda event, stream: gpu.note("record", event, stream)
    runtime.eventQuery = event_query
    runtime.memsetAsync = lambda *arguments: gpu.note("memset", *arguments)
    runtime.memcpyAsync = lambda *arguments: gpu.note("memcpy", *arguments)
    cuda.Memory, cuda.UnownedMemory, cuda.MemoryPointer = Memory, UnownedMemory, MemoryPointer
    cuda.Stream, cuda.Event, cuda.Device = Stream, Event, Device
    cuda.get_current_stream = current_stream
    cuda.alloc_pinned_memory = pinned
    cupy.ndarray, cupy.RawKernel, cupy.from_dlpack = ndarray, RawKernel, from_dlpack
    cupy.empty = lambda shape, dtype: ndarray(shape, dtype)
    cupy.get_default_memory_pool = Pool
    return cupy
