"""The dozen calls of the CUDA driver that finding out needs, through ctypes.

The doctor and its probe must tell what a machine can do also where CuPy is
missing, doubled or built for another CUDA. The driver is there wherever a GPU
works, its interface is stable, and memory from ``cuMemAlloc`` is what MPI and
CUDA IPC see when a program allocates with ``cudaMalloc``. Nothing here makes a
context until ``use`` is called. Run as a program, it reports the GPUs: a broken
driver then takes nobody along.

Source: CUDA Driver API reference, sections on device, primary context, memory
and IPC management. Names that end in ``_v2`` are the 64-bit forms that ``cuda.h``
maps the plain names to.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpiring.errors import DeviceError
from mpiring.transport import child

LIBRARY = "libcuda.so.1"
NO_DRIVER = f"there is no CUDA driver ({LIBRARY})"
NO_GPU = "the CUDA driver shows no GPU to this process"

_KERNEL = Path("/proc/driver/nvidia")

_Pointer = ctypes.c_uint64  # CUdeviceptr
_out = ctypes.byref


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle: 64 opaque bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process can see; ``index`` counts among those."""

    index: int
    name: str
    memory: int  #: bytes
    uuid: str


def version() -> tuple[int, int] | None:
    """The newest CUDA that the driver on this machine runs, or None without a driver.

    Asks neither for a GPU nor for a context.
    """
    try:
        found = ctypes.c_int()
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(_out(found)):
            return None
    except (OSError, AttributeError):
        return None
    return found.value // 1000, found.value % 1000 // 10


def kernel_module() -> str:
    """What the kernel says about NVIDIA's driver, or an empty string."""
    try:
        return (_KERNEL / "version").read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def installed() -> list[str]:
    """The bus addresses of this machine's GPUs, as the kernel names them."""
    try:
        return sorted(os.listdir(_KERNEL / "gpus"))
    except OSError:
        return []


class Driver:
    """The driver, initialised. Every call raises DeviceError with the driver's own words."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(LIBRARY)
        except OSError:
            raise DeviceError(NO_DRIVER) from None
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, _out(text))
            said = text.value.decode() if text.value else f"error {code}"
            raise DeviceError(f"{name}: {said}")

    def gpus(self) -> list[Gpu]:
        """Every GPU that this process can see."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", _out(count))
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> Gpu:
        name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
        identity = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetName", name, 128, index)
        self._call("cuDeviceTotalMem_v2", _out(memory), index)
        self._call("cuDeviceGetUuid", identity, index)
        return Gpu(index, name.value.decode(), memory.value, str(uuid.UUID(bytes=bytes(identity))))

    def can_access(self, index: int, peer: int) -> bool:
        """Whether GPU ``index`` can address the memory of GPU ``peer``, another one."""
        able = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", _out(able), index, peer)
        return bool(able.value)

    def use(self, index: int) -> None:
        """Make the primary context of a GPU, the one that CuPy and MPI share, current."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", _out(context), index)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes of device memory."""
        pointer = _Pointer()
        self._call("cuMemAlloc_v2", _out(pointer), ctypes.c_size_t(size))
        return pointer.value

    def allocate_pinned(self, size: int) -> int:
        """The address of ``size`` bytes of page-locked host memory."""
        pointer = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", _out(pointer), ctypes.c_size_t(size))
        assert pointer.value is not None
        return pointer.value

    def write(self, target: int, source: int, size: int) -> None:
        """Copy host memory into device memory; over when it returns."""
        self._call(
            "cuMemcpyHtoD_v2", _Pointer(target), ctypes.c_void_p(source), ctypes.c_size_t(size)
        )
        self._call("cuCtxSynchronize")

    def read(self, target: int, source: int, size: int) -> None:
        """Copy device memory into host memory; over when it returns."""
        self._call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(target), _Pointer(source), ctypes.c_size_t(size)
        )

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy device memory into device memory; over when it returns."""
        self._call("cuMemcpyDtoD_v2", _Pointer(target), _Pointer(source), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")

    def export(self, pointer: int) -> bytes:
        """A handle by which another process of this host opens an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", _out(handle), _Pointer(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address, in this process, of what another process exported."""
        pointer, lazily_enable_peer_access = _Pointer(), ctypes.c_uint(1)
        self._call(
            "cuIpcOpenMemHandle_v2",
            _out(pointer),
            _IpcHandle.from_buffer_copy(handle),
            lazily_enable_peer_access,
        )
        return pointer.value


def main() -> None:
    child.begin()
    try:
        child.report(gpus=[asdict(gpu) for gpu in Driver().gpus()])
    except DeviceError as error:
        child.report(failed=str(error))


if __name__ == "__main__":
    main()
