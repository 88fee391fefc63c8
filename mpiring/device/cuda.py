"""CUDA GPUs through CuPy: the only module that imports it, and then only when asked for.

Thin on purpose: what to launch when is decided in ``streams``, what the kernels
do in ``kernels``; here are the calls that only CuPy can make. Each runs with its
own device current and leaves the caller's as it was; a device that is current
already is not even set, since setting one opens a context.

Memory. What MPI and other processes may see comes from plain cudaMalloc: memory
from a pool cannot be exported, and some MPIs misread it. The caller's own
arrays, wherever they come from, are only touched by kernels and copies.

Streams. The caller's work on an array is on the stream that its
``__cuda_array_interface__`` names, else on CuPy's current stream. (DLPack's
protocol makes the latter wait for the producer by itself.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from mpiring.device.base import Array, Reduction
from mpiring.device.host import address_of, check_reduction, window
from mpiring.device.kernels import (
    BLOCK,
    SCALARS,
    blocks,
    finite_source,
    kernel_source,
    optimizer_source,
)
from mpiring.device.pool import Lease
from mpiring.device.streams import ROLES, Event, Launch, Stream, StreamDevice
from mpiring.errors import ArgumentError, DeviceError, DtypeError

_SUCCESS, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_NULL = np.uint64(0)  # a pointer


def gpu_count() -> int:
    """GPUs that this process can see; opens no context. DeviceError without a driver."""
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"no CUDA GPU can be used here: {error}") from error


def gpu_for(local_rank: int, wish: str | int = "auto") -> int:
    """The GPU of a rank: the one wished for, or by turns among the ranks of a node.

    With fewer GPUs than ranks they share. DeviceError where there is no such GPU.
    """
    count = gpu_count()
    if count == 0:
        raise DeviceError("no CUDA GPU is visible to this process (see CUDA_VISIBLE_DEVICES)")
    if wish == "auto":
        return local_rank % count
    if not str(wish).isdecimal():
        raise ArgumentError(f"gpu: {wish!r} given; allowed are auto and numbers from 0")
    if int(wish) >= count:
        raise DeviceError(f"gpu: {wish} does not exist; allowed are 0 to {count - 1}")
    return int(wish)


def select_gpu(local_rank: int, wish: str | int = "auto") -> CudaDevice:
    """Make the rank's GPU current, so that no context is ever opened on another one.

    To be called before anything else touches a GPU.
    """
    index = gpu_for(local_rank, wish)
    runtime.setDevice(index)
    return device(index)


@cache
def device(index: int) -> CudaDevice:
    """The one CudaDevice of this process for a GPU."""
    return CudaDevice(index)


def device_of(array: Array) -> CudaDevice:
    """The CudaDevice of the GPU that a CuPy array lives on, whichever is current."""
    return device(array.data.device_id)


def wrap(array: Any) -> Array:
    """A CuPy array over the memory of ``array``, which stays alive with it; never a copy.

    Takes CuPy's arrays, and whatever offers ``__cuda_array_interface__`` or DLPack
    on a GPU (torch, numba...). An interface that names no stream leaves open when
    the data is there; DLPack settles it, so it goes first then. ArgumentError for
    anything else.
    """
    if isinstance(array, cupy.ndarray):
        return array
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is not None and interface.get("stream") is not None:
            return _foreign(array, interface)
        if hasattr(array, "__dlpack__"):
            return cupy.from_dlpack(array)
        if interface is not None:
            return _foreign(array, interface)
    except (BufferError, RuntimeError, TypeError) as error:
        # For instance a torch tensor that requires grad.
        raise ArgumentError(f"array: {type(array).__name__}: {error}") from error
    raise ArgumentError(
        f"array: {type(array).__name__} given; allowed is what has __cuda_array_interface__ "
        "or DLPack"
    )


@contextmanager
def _current(index: int) -> Iterator[None]:
    """Work on a GPU, whichever is current; that one is not touched unless it must be left."""
    previous = runtime.getDevice()
    if previous == index:
        yield
        return
    runtime.setDevice(index)
    try:
        yield
    finally:
        runtime.setDevice(previous)


class _Own(cupy.cuda.Memory):
    """An allocation by plain cudaMalloc; ``handle`` once it has been exported. The device's pool
    keeps it then: others may have mapped it."""

    handle: bytes | None = None


class _Lent(cupy.cuda.UnownedMemory):
    """A part of such an allocation, which it keeps alive, and the lease, if there is one."""

    def __init__(self, own: _Own, address: int, nbytes: int, lease: Lease | None) -> None:
        self.own = own
        super().__init__(address, nbytes, lease, own.device_id)


class _Foreign(cupy.cuda.UnownedMemory):
    """Memory of another library. Keeps the owner, and the stream that it works on."""

    def __init__(self, pointer: int, size: int, owner: object, stream: int | None) -> None:
        super().__init__(pointer, size, owner)
        self.stream = stream


class _Named(NamedTuple):
    """A stream of somebody else's, by its handle."""

    ptr: int


class CudaDriver:
    """One GPU. See ``streams.Driver``."""

    kind = "cuda"
    xp = cupy

    def __init__(self, index: int) -> None:
        self.index = index
        with _current(index):
            self._streams = {role: cupy.cuda.Stream(non_blocking=True) for role in ROLES}
        self._processors = cupy.cuda.Device(index).attributes["MultiProcessorCount"]
        self._function = cache(self._compiled)
        self._mapped: dict[bytes, int] = {}  # by handle: where others' allocations are

    def allocate(self, count: int, dtype: Any) -> Array:
        nbytes = count * np.dtype(dtype).itemsize
        with _current(self.index):
            try:
                memory = _Own(nbytes)
            except runtime.CUDARuntimeError:
                # CuPy's pool holds on to what the caller has freed.
                cupy.get_default_memory_pool().free_all_blocks()
                try:
                    memory = _Own(nbytes)
                except runtime.CUDARuntimeError as error:
                    raise DeviceError(
                        f"GPU {self.index}: no {nbytes} bytes of scratch memory: {error}"
                    ) from error
            return _array(memory, count, dtype)

    def part(self, lease: Lease, count: int, dtype: Any) -> Array:
        memory, start = lease.piece.memory, lease.piece.start
        if self.on_host(memory):
            return window(np.ndarray, address_of(memory) + start, count, dtype, lease)
        own: _Own = memory.data.mem
        nbytes = count * np.dtype(dtype).itemsize
        return _array(_Lent(own, own.ptr + start, nbytes, lease), count, dtype)

    def borrow(self, array: Array) -> Array:
        memory, address = array.data.mem, array.data.ptr
        if self.owns(array):
            own = memory.own if isinstance(memory, _Lent) else memory
            return _array(_Lent(own, address, array.nbytes, None), array.size, array.dtype)
        borrowed = cupy.cuda.UnownedMemory(address, array.nbytes, None, self.index)
        return _array(borrowed, array.size, array.dtype)

    def settle(self) -> None:
        with _current(self.index):
            runtime.deviceSynchronize()

    def plain(self, array: Array) -> bool:
        if self.owns(array):
            return True
        # Managed memory and that of asynchronous pools have no handle.
        try:
            with _current(self.index):
                runtime.ipcGetMemHandle(array.data.ptr)
        except runtime.CUDARuntimeError:
            return False
        return True

    def owns(self, array: Array) -> bool:
        return isinstance(array.data.mem, (_Own, _Lent))

    def shared(self, memory: Array) -> bool:
        return memory.data.mem.handle is not None

    def export(self, array: Array) -> tuple[bytes, int] | None:
        if not self.owns(array):
            return None
        memory = array.data.mem
        own: _Own = memory.own if isinstance(memory, _Lent) else memory
        if own.handle is None:
            with _current(self.index):
                own.handle = runtime.ipcGetMemHandle(own.ptr)
        return own.handle, array.data.ptr - own.ptr

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Array:
        if handle not in self._mapped:
            with _current(self.index):
                self._mapped[handle] = runtime.ipcOpenMemHandle(handle)
        nbytes = count * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(self._mapped[handle] + start, nbytes, self, self.index)
        return _array(memory, count, dtype)

    def pinned(self, count: int, dtype: Any) -> Array:
        nbytes = count * np.dtype(dtype).itemsize
        with _current(self.index):
            memory = cupy.cuda.alloc_pinned_memory(max(1, nbytes))
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype) if nbytes else np.empty(0, dtype)

    def on_host(self, array: Array) -> bool:
        return not isinstance(array, cupy.ndarray)

    def stream(self, role: str, target: Array) -> Stream:
        return self._streams[role]

    def producer(self, array: Array) -> Stream:
        named = getattr(array.data.mem, "stream", None)
        if named is not None:
            return _Named(named)
        with _current(self.index):
            return cupy.cuda.get_current_stream()

    def event(self) -> Event:
        with _current(self.index):
            return cupy.cuda.Event(disable_timing=True)

    def record(self, event: Event, stream: Stream) -> None:
        with _current(self.index):
            runtime.eventRecord(event.ptr, stream.ptr)

    def query(self, event: Event) -> bool:
        with _current(self.index):
            status = runtime.eventQuery(event.ptr)
        if status in (_SUCCESS, _NOT_READY):
            return status == _SUCCESS
        # A kernel failed, ours or the caller's. ``Event.done`` would say no for ever.
        raise DeviceError(f"GPU {self.index}: {runtime.CUDARuntimeError(status)}")

    def reduction(self, src: Array, dst: Array, op: Reduction) -> Launch:
        if op.function is not None:
            raise DtypeError("op: a user's reduction runs on host arrays only")
        check_reduction(op, dst.dtype)
        source = kernel_source(op.name, dst.dtype.name)
        return self._launch(source, "apply", src, dst, np.uint64(dst.size), np.float64(0))

    def scaling(self, dst: Array, factor: float) -> Launch:
        source = kernel_source("scale", dst.dtype.name)
        rounded = np.float64(np.asarray(factor, dst.dtype).real)
        return self._launch(source, "apply", dst, dst, np.uint64(dst.size), rounded)

    def transfer(self, src: Array, dst: Array) -> Launch:
        def launch(stream: Stream) -> None:
            with _current(self.index):
                runtime.memcpyAsync(
                    _address(dst), _address(src), dst.nbytes, runtime.memcpyDefault, stream.ptr
                )

        return launch

    def step(
        self,
        name: str,
        values: Array,
        gradients: Array,
        state: Sequence[Array | None],
        scalars: Mapping[str, float],
        fine: Array | None,
    ) -> None:
        """Launch an optimizer's kernel where the caller's own kernels run."""
        launch = self._launch(
            optimizer_source(name, values.dtype.name),
            name,
            values,
            gradients,
            *(_NULL if array is None else array for array in state),
            np.uint64(values.size),
            *(np.float64(scalars[key]) for key in SCALARS[name]),
            _NULL if fine is None else fine,
        )
        launch(self.producer(values))

    def look(self, values: Array, fine: Array, told: Array) -> None:
        """Write whether ``values`` are finite to ``fine``, and to ``told`` on the host, where the
        caller's own kernels run.
        """
        stream = self.producer(values)
        launch = self._launch(
            finite_source(values.dtype.name), "all_finite", values, np.uint64(values.size), fine
        )
        with _current(self.index):
            runtime.memsetAsync(fine.data.ptr, 1, fine.nbytes, stream.ptr)
        launch(stream)
        self.transfer(fine, told)(stream)

    def _launch(self, source: str, name: str, *arguments: Any) -> Launch:
        """Compiled here, so that no start waits for a compiler."""
        function = self._function(source, name)
        grid = (blocks(arguments[0].size, self._processors),)

        def launch(stream: Stream) -> None:
            with _current(self.index):
                function(grid, (BLOCK,), arguments, stream=stream)

        return launch

    def _compiled(self, source: str, name: str) -> Any:
        with _current(self.index):
            return cupy.RawKernel(source, name, ("--std=c++14",)).kernel


class CudaDevice(StreamDevice):
    """A GPU. DeviceError if it does not exist."""

    driver: CudaDriver

    def __init__(self, index: int = 0) -> None:
        super().__init__(CudaDriver(gpu_for(0, index)))
        self.index = index

    def sgd(
        self,
        values: Array,
        gradients: Array,
        state: Mapping[str, Array],
        scalars: Mapping[str, float],
        fine: Array | None = None,
    ) -> None:
        """The ``kernel`` of ``nn.optim.SGD``: one step in one pass, on CuPy's current stream.

        It does nothing where ``fine`` (see ``Finite``) says that it must not.
        """
        self.driver.step("sgd", values, gradients, [state.get("momentum_buffer")], scalars, fine)

    def adam(
        self,
        values: Array,
        gradients: Array,
        state: Mapping[str, Array],
        scalars: Mapping[str, float],
        fine: Array | None = None,
    ) -> None:
        """The ``kernel`` of ``nn.optim.Adam``, likewise."""
        arrays = [state["mean"], state["square"]]
        self.driver.step("adam", values, gradients, arrays, scalars, fine)


class Finite:
    """Whether arrays hold inf or nan, found out on the GPU, in order with the caller's kernels.

    ``fine`` tells kernels, at once; ``seen`` tells the host, later.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._driver = device.driver
        self.fine = device.empty(1, np.uint32)
        self.fine.fill(1)
        self._told = device.staging(1, np.uint32)
        self._event = device.driver.event()

    def look(self, values: Array) -> None:
        """Find out about ``values``; what was found out before is forgotten."""
        self._driver.look(values, self.fine, self._told)
        self._driver.record(self._event, self._driver.producer(values))

    def seen(self) -> bool:
        """What the latest look found. Waits for its end, so ask after the GPU has done more."""
        while not self._driver.query(self._event):
            time.sleep(0)
        return bool(self._told[0])


def _foreign(owner: Any, interface: dict[str, Any]) -> Array:
    if interface.get("mask") is not None:
        raise ArgumentError("array: masked arrays are not supported")
    stream = interface.get("stream")
    if stream == 0:
        raise ArgumentError("array: its interface names stream 0, which the protocol forbids")
    dtype, shape = np.dtype(interface["typestr"]), interface["shape"]
    if 0 in shape:
        return cupy.empty(shape, dtype)
    strides = interface.get("strides")
    extent = dtype.itemsize + (
        sum((n - 1) * step for n, step in zip(shape, strides))
        if strides
        else (int(np.prod(shape)) - 1) * dtype.itemsize
    )
    memory = _Foreign(interface["data"][0], extent, owner, stream)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _array(memory: Any, count: int, dtype: Any) -> Array:
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))


def _address(array: Array) -> int:
    return array.data.ptr if isinstance(array, cupy.ndarray) else address_of(array)
