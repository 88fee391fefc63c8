"""The CUDA device on a real GPU. Skipped where there is none.

Ranks are threads here and messages go from pinned memory to pinned memory, so
that one process and one GPU are enough; the same with processes and MPI is the
GPU check's part.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice, check_reduction
from mpiring.engine.execution import Binding, Execution
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import DtypeError
from mpiring.nn.optim import SGD, Adam
from mpiring.schedule.catalog import Plan, schedule
from mpiring.schedule.chunks import split
from mpiring.schedule.ops import Buffer
from mpiring.schedule.staging import staged
from mpiring.simulation.world import VirtualTransport, World
from mpiring.task import Completion, Task

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
if not cupy.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from mpiring.device.cuda import CudaDevice, Finite, device_of, wrap  # noqa: E402

OPS = ("sum", "prod", "max", "min", "land", "lor", "lxor", "band", "bor", "bxor")
DTYPES = ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")

#: Busy for a while, then writes its last argument everywhere.
SLOW = r"""
extern "C" __global__ void slow(float* x, int n, long long cycles, float value) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}
"""


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


def finish(completion: Completion) -> None:
    while not completion.done():
        pass


def run(task: Task) -> None:
    task.start()
    finish(task)


def sample(dtype: Any, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, count).astype(dtype)
    values = rng.standard_normal(count)
    if dtype.kind == "c":
        return (values + 1j * rng.standard_normal(count)).astype(dtype)
    values[rng.random(count) < 0.1] = np.nan
    return values.astype(dtype)


@pytest.mark.parametrize(("op", "dtype"), itertools.product(OPS, DTYPES))
def test_reductions_are_those_of_the_host(device: CudaDevice, op: str, dtype: str) -> None:
    try:
        check_reduction(Reduction(op), np.dtype(dtype))
    except DtypeError:
        with pytest.raises(DtypeError):
            device.reduce(device.empty(1, dtype), device.empty(1, dtype), Reduction(op))
        return
    for count, at, to in ((1, 0, 0), (1023, 0, 1), (1023, 1, 1), (1 << 20, 3, 3)):
        source, expected = sample(dtype, count, 1), sample(dtype, count, 2)
        a, b = device.empty(count + at, dtype)[at:], device.empty(count + to, dtype)[to:]
        a.set(source)
        b.set(expected)
        cupy.cuda.get_current_stream().synchronize()
        run(device.reduce(a, b, Reduction(op)))
        with np.errstate(all="ignore"):
            HostDevice().reduce(source, expected, Reduction(op)).start()
        tolerance = {"c8": 1e-6, "c16": 1e-14}.get(dtype, 0)
        np.testing.assert_allclose(b.get(), expected, rtol=tolerance, atol=0)


def test_copies_go_there_and_back(device: CudaDevice) -> None:
    values = sample("f4", 100_003, 3)
    one, two = device.staging(values.size, "f4"), device.staging(values.size, "f4")
    there, inside = device.empty(values.size, "f4"), device.empty(values.size, "f4")
    one[:] = values
    run(device.copy(one, there))
    run(device.copy(there, inside))
    run(device.scale(inside, 2.0))
    run(device.copy(inside, two))
    np.testing.assert_array_equal(two, 2 * values)


def test_the_callers_slow_kernel_is_waited_for_and_only_observed(device: CudaDevice) -> None:
    slow = cupy.RawKernel(SLOW, "slow")
    array = cupy.zeros(1000, "f4")
    host = device.staging(1000, "f4")
    copy = device.copy(array, host)
    cupy.cuda.Device(0).synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        slow((1,), (256,), (array, np.int32(1000), np.int64(200_000_000), np.float32(7)))
        gate = device.record(array)
    assert not gate.done()  # a tenth of a second of work; record did not wait for it
    finish(gate)
    run(copy)
    assert (host == 7).all()


def test_memory_is_plain_enough_for_other_processes(device: CudaDevice) -> None:
    array, ordinary = device.empty(1000, "f4"), cupy.empty(10)
    assert device.owns(array) and not device.owns(ordinary)
    exported = device.export(array[10:])
    assert exported is not None
    handle, start = exported
    assert len(handle) == 64 and start % 4 == 0
    assert device.export(ordinary) is None
    assert device.plain(array) and device.plain(ordinary)


def test_memory_of_asynchronous_pools_and_managed_memory_is_told_from_plain(
    device: CudaDevice,
) -> None:
    special = [cupy.cuda.malloc_managed(4096), cupy.cuda.malloc_async(4096)]
    for memory in special:
        array = cupy.ndarray((1024,), np.float32, memory)
        array.fill(1)
        cupy.cuda.Device(0).synchronize()
        assert not device.plain(array) and not device.owns(array)


def test_a_step_is_left_out_where_a_gradient_is_not_finite(device: CudaDevice) -> None:
    finite, count = Finite(device), 100_003
    values, gradients = cupy.ones(count, "f4"), cupy.ones(count, "f4")
    for bad, left_out in ((1.0, False), (np.nan, True), (np.inf, True), (2.0, False)):
        before = float(values[0])
        gradients[-1] = bad
        finite.look(gradients)
        device.sgd(
            values, gradients, {}, {"lr": 0.5, "momentum": 0, "weight_decay": 0}, finite.fine
        )
        assert finite.seen() is not left_out
        assert float(values[0]) == before - 0.5 * (not left_out)


def test_memory_stays_flat(device: CudaDevice) -> None:
    def free() -> int:
        cupy.get_default_memory_pool().free_all_blocks()
        return cupy.cuda.runtime.memGetInfo()[0]

    device.staging(1 << 20, "f4")
    before = free()
    for count in np.random.default_rng(0).integers(1, 1 << 20, 200):
        array, host = device.empty(count, "f4"), device.staging(count, "f4")
        run(device.copy(array, host))
    assert before - free() < 16 << 20


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}), (Adam, {"weight_decay": 0.01})],
)
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_fused_steps_are_those_of_the_optimizers(
    device: CudaDevice, kind: Any, options: dict[str, float], dtype: str
) -> None:
    count = 100_003
    values = np.nan_to_num(sample(dtype, count, 4))
    on_gpu = cupy.asarray(values)
    kernel = device.sgd if kind is SGD else device.adam
    fused = kind(count, dtype, **options, xp=cupy, kernel=kernel)
    plain = kind(count, dtype, **options)
    for seed in range(3):
        gradients = np.nan_to_num(sample(dtype, count, seed))
        fused.step(on_gpu, cupy.asarray(gradients))
        plain.step(values, gradients)
    tolerance = {"f2": 4e-3, "f4": 1e-5, "f8": 1e-13}[dtype]
    np.testing.assert_allclose(on_gpu.get(), values, tolerance, tolerance)


def test_a_torch_tensor_is_not_copied(device: CudaDevice) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(10, device="cuda", dtype=torch.float32)
    array = wrap(tensor)
    assert array.data.ptr == tensor.data_ptr() and device_of(array).index == 0
    finish(device.record(array))
    assert array.get().tolist() == list(range(10))


@pytest.mark.parametrize(("size", "count"), [(2, 1_000_003), (3, 1 << 20), (4, 5)])
def test_a_staged_all_reduce_between_slow_producers_and_any_stream(size: int, count: int) -> None:
    plan = Plan("allreduce", "ring", split(0, count, size), True, 1 << 16)

    def program(transport: VirtualTransport, engine: ProgressEngine) -> np.ndarray:
        device = CudaDevice(0)
        own = staged(schedule(plan, transport.rank), 1 << 15)
        data = cupy.zeros(count, "f4")
        buffers = {
            Buffer.DATA: data,
            Buffer.SCRATCH: device.scratch(own.scratch, "f4"),
            Buffer.HOST: device.staging(own.staging, "f4"),
        }
        execution = Execution(own, Binding(buffers, device, transport, 1, Reduction("sum")))
        cupy.cuda.get_current_stream().synchronize()
        engine = ProgressEngine(idle=lambda: world.pause(transport.rank))
        with cupy.cuda.Stream(non_blocking=True):
            cycles = np.int64(20_000_000)
            cupy.RawKernel(SLOW, "slow")(
                (1,), (256,), (data, np.int32(count), cycles, np.float32(transport.rank + 1))
            )
            engine.start(execution, [device.record(data)])
        engine.wait(lambda: execution.finished)
        if execution.error is not None:
            raise execution.error
        with cupy.cuda.Stream(non_blocking=True):
            return (data * 2).get()

    world = World(size)
    for result in world.run(program):
        assert (result == size * (size + 1)).all()
