"""The thin part that only CuPy can do, against a stand-in for the calls that it makes."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpiring.device.base import Reduction
from mpiring.device.kernels import SCALARS
from mpiring.device.pool import SLAB
from mpiring.errors import ArgumentError, DeviceError, DtypeError
from tests.device import fake_cupy

SUM = Reduction("sum")
CURRENT = {0: 7000, 1: 7001}  # CuPy's current stream, by device


@pytest.fixture
def gpu() -> fake_cupy.Gpu:
    return fake_cupy.Gpu()


@pytest.fixture
def cuda(gpu: fake_cupy.Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """``mpiring.device.cuda`` over the stand-in; forgotten afterwards."""
    module = fake_cupy.make(gpu)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", module.cuda.runtime)
    monkeypatch.delitem(sys.modules, "mpiring.device.cuda", raising=False)
    yield importlib.import_module("mpiring.device.cuda")
    sys.modules.pop("mpiring.device.cuda", None)


def calls(gpu: fake_cupy.Gpu, *names: str) -> list[tuple[Any, ...]]:
    return [entry for entry in gpu.log if entry[0] in names]


def test_a_task_launches_and_records_behind_it_on_the_same_stream(gpu, cuda) -> None:
    device = cuda.device(1)
    source, target = device.empty(100, "f4"), device.empty(100, "f4")
    task = device.reduce(source, target, SUM)
    assert not calls(gpu, "launch") and len(calls(gpu, "compile")) == 1
    gpu.log.clear()
    task.start()
    (_, _, name, grid, block, arguments, launched_on), (_, _, _, recorded_on) = calls(
        gpu, "launch", "record"
    )
    assert (name, launched_on) == ("apply", recorded_on)
    assert arguments[0] is source and arguments[1] is target and arguments[2] == 100
    assert grid[0] * block[0] >= 100
    assert [entry[0] for entry in gpu.log if entry[0] != "setDevice"] == ["launch", "record"]
    assert not task.immediate


def test_a_task_is_over_when_its_event_is(gpu, cuda) -> None:
    device = cuda.device(0)
    task = device.scale(device.empty(8, "f4"), 0.5)
    task.start()
    event = calls(gpu, "record")[-1][2]
    assert task.done() is False
    gpu.status = 0
    assert task.done() is True
    assert [entry[2] for entry in calls(gpu, "query")] == [event, event]


def test_a_failed_kernel_is_an_error_and_not_a_wait_for_ever(gpu, cuda) -> None:
    task = cuda.device(0).scale(cuda.device(0).empty(8, "f4"), 0.5)
    task.start()
    gpu.status = 700
    with pytest.raises(DeviceError, match="GPU 0: cudaError 700"):
        task.done()


def test_every_call_runs_on_its_own_device_and_the_current_one_comes_back(gpu, cuda) -> None:
    device = cuda.device(1)
    array, host = device.empty(8, "f4"), device.staging(8, "f4")
    tasks = [
        device.reduce(array[:4], array[4:], SUM),
        device.scale(array, 2.0),
        device.copy(array, host),
        device.copy(host, array),
    ]
    for task in tasks:
        task.start()
        task.done()
    device.record(array).done()
    work = calls(gpu, "malloc", "pinned", "event", "compile", "launch", "memcpy", "record", "query")
    assert len(work) > 20 and {entry[1] for entry in work} == {1}
    assert gpu.current == 0


def test_a_device_that_is_current_already_is_not_set(gpu, cuda) -> None:
    """Setting a device opens a context on it, and so would restoring one."""
    gpu.current = 1
    device = cuda.device(1)
    array = device.empty(8, "f4")
    task = device.reduce(array[:4], array[4:], SUM)
    task.start()
    task.done()
    assert not calls(gpu, "setDevice")


def test_the_ranks_gpu_is_made_current(gpu, cuda) -> None:
    assert [cuda.gpu_for(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert cuda.select_gpu(3).index == 1 and gpu.current == 1
    assert cuda.gpu_for(0, "1") == 1
    with pytest.raises(DeviceError, match="gpu: 2 does not exist; allowed are 0 to 1"):
        cuda.gpu_for(0, 2)
    with pytest.raises(ArgumentError, match="'first' given"):
        cuda.gpu_for(0, "first")
    gpu.count = 0
    with pytest.raises(DeviceError, match="no CUDA GPU is visible"):
        cuda.gpu_for(0)
    gpu.count = -1
    with pytest.raises(DeviceError, match="no CUDA GPU can be used here: cudaError 35"):
        cuda.gpu_for(0)


def test_streams_are_the_librarys_own_and_one_for_each_engine(gpu, cuda) -> None:
    device = cuda.device(0)
    array, host = device.empty(8, "f4"), device.staging(8, "f4")
    work = {
        "reduce": device.reduce(array[:4], array[4:], SUM),
        "scale": device.scale(array, 2.0),
        "inside": device.copy(array[:4], array[4:]),
        "to host": device.copy(array, host),
        "to device": device.copy(host, array),
    }
    used = {}
    for name, task in work.items():
        task.start()
        used[name] = calls(gpu, "record")[-1][3]
    assert used["reduce"] == used["scale"]
    assert len(set(used.values())) == 4
    assert not set(used.values()) & set(CURRENT.values())
    assert all(device.driver.stream(role, array).non_blocking for role in used if " " in role)


def test_copies_name_both_addresses_and_all_bytes(gpu, cuda) -> None:
    device = cuda.device(0)
    array, host = device.empty(10, "f8"), device.staging(10, "f8")
    device.copy(array[2:5], host[4:7]).start()
    device.copy(host[4:7], array[2:5]).start()
    (_, _, *there), (_, _, *back) = calls(gpu, "memcpy")
    on_device, on_host = array.data.ptr + 16, host.ctypes.data + 32
    assert there[:4] == [on_host, on_device, 24, 4]
    assert back[:4] == [on_device, on_host, 24, 4]


def test_the_callers_stream_is_cupys_current_one(gpu, cuda) -> None:
    device = cuda.device(1)
    completion = device.record(device.empty(4, "f4"))
    assert calls(gpu, "record")[-1][3] == CURRENT[1]
    assert completion.done() is False
    gpu.status = 0
    assert completion.done() is True
    assert cuda.device(1).record(np.empty(4)).done() is True  # host arrays are never awaited


class Foreign:
    """An array of another library."""

    shape, dtype = (4,), np.dtype("f4")

    def __init__(self, interface: dict[str, Any] | None = None, gpu: int = 0) -> None:
        self.gpu = gpu
        if interface is not None:
            self.__cuda_array_interface__ = {
                "shape": (4,),
                "typestr": "<f4",
                "data": (0xABC000, False),
                "version": 3,
                **interface,
            }


class WithDlpack(Foreign):
    def __dlpack__(self) -> None: ...


@pytest.mark.parametrize("stream", [1, 2, 0xDEAD])
def test_a_stream_that_the_interface_names_is_the_one_recorded(gpu, cuda, stream: int) -> None:
    """1 and 2 are handles too: of the legacy and of the per-thread default stream."""
    owner = WithDlpack({"stream": stream}, gpu=1)
    array = cuda.wrap(owner)
    assert (array.data.ptr, array.shape, array.data.mem._owner) == (0xABC000, (4,), owner)
    assert not calls(gpu, "from_dlpack")
    device = cuda.device_of(array)
    assert device.index == 1
    device.record(array[1:3])
    assert calls(gpu, "record")[-1][1:] == (1, gpu.handles, stream)


def test_an_interface_without_a_stream_gives_way_to_dlpack(gpu, cuda) -> None:
    for interface in (None, {"version": 2}, {"stream": None}):
        gpu.log.clear()
        array = cuda.wrap(WithDlpack(interface))
        assert calls(gpu, "from_dlpack")
        cuda.device(0).record(array)
        assert calls(gpu, "record")[-1][3] == CURRENT[0]
    gpu.log.clear()
    array = cuda.wrap(Foreign({"stream": None}))
    cuda.device(0).record(array)
    assert not calls(gpu, "from_dlpack") and calls(gpu, "record")[-1][3] == CURRENT[0]


def test_strides_decide_how_much_memory_an_array_covers(gpu, cuda) -> None:
    array = cuda.wrap(Foreign({"stream": 1, "shape": (3, 2), "strides": (16, 4)}))
    assert array.data.mem.size == 2 * 16 + 4 + 4 and array.strides == (16, 4)
    assert cuda.wrap(Foreign({"stream": 1, "shape": (3, 2)})).data.mem.size == 24
    assert cuda.wrap(Foreign({"stream": 1, "shape": (0, 2), "data": (0, False)})).size == 0


def test_what_cannot_be_wrapped_is_named(gpu, cuda) -> None:
    class Requires(Foreign):
        @property
        def __cuda_array_interface__(self) -> None:
            raise RuntimeError("requires grad")

    for bad, complaint in (
        (object(), "object given"),
        (Foreign({"mask": "x", "stream": 1}), "masked"),
        (Foreign({"stream": 0}), "stream 0"),
        (Requires(), "requires grad"),
    ):
        with pytest.raises(ArgumentError, match=f"array: .*{complaint}"):
            cuda.wrap(bad)


def test_memory_for_others_is_plain_and_known(gpu, cuda) -> None:
    device = cuda.device(0)
    own = device.empty(10, "c8")
    assert own.nbytes == 80
    assert device.owns(own) and device.owns(own[2:4])
    assert not device.owns(cuda.cupy.empty((4,), "f4"))
    host = device.staging(10, "c8")
    assert (host.size, host.dtype, host.flags.writeable) == (10, np.dtype("c8"), True)
    assert device.empty(0, "f4").size == device.staging(0, "f4").size == 0


def test_allocations_are_few_and_large(gpu, cuda) -> None:
    device = cuda.device(0)
    arrays = [device.scratch(count, "f4") for count in (1, 100, 1000, 1 << 20)]
    assert [entry[2] for entry in calls(gpu, "malloc")] == [SLAB, 2 * SLAB]
    addresses = [array.data.ptr for array in arrays]
    del arrays
    again = [device.scratch(count, "f4") for count in (1, 100, 1000, 1 << 20)]
    assert len(calls(gpu, "malloc")) == 2
    assert sorted(array.data.ptr for array in again) == sorted(addresses)
    assert not calls(gpu, "synchronize")


def test_memory_that_a_caller_had_is_lent_after_the_device_has_settled(gpu, cuda) -> None:
    device = cuda.device(1)
    device.empty(100, "f4")
    gpu.log.clear()
    device.scratch(100, "f4")
    assert calls(gpu, "synchronize") == [("synchronize", 1)]
    gpu.log.clear()
    device.scratch(100, "f4")
    assert not calls(gpu, "synchronize", "malloc")


def test_only_the_librarys_memory_is_exported_and_then_never_freed(gpu, cuda) -> None:
    device = cuda.device(0)
    assert device.export(cuda.cupy.empty((4,), "f4")) is None
    whole = device.empty(300 << 18, "f4")  # longer than what is kept while nobody uses it
    handle, start = device.export(whole[16:])
    assert (int.from_bytes(handle, "little"), start) == (whole.data.ptr, 64)
    assert device.export(whole)[0] == handle and len(calls(gpu, "export")) == 1
    address = whole.data.ptr
    del whole
    assert device.empty(300 << 18, "f4").data.ptr == address


def test_what_others_exported_is_opened_once(gpu, cuda) -> None:
    device = cuda.device(1)
    handle = (0xABC000).to_bytes(64, "little")
    array = device.mapped(handle, 64, 10, "f4")
    assert (array.data.ptr, array.size, array.data.device_id) == ((1 << 40) + 0xABC040, 10, 1)
    device.mapped(handle, 0, 4, "f8")
    assert calls(gpu, "open") == [("open", 1, handle)]


def test_memory_that_has_no_handle_is_not_plain(gpu, cuda) -> None:
    device = cuda.device(0)
    ordinary, special = cuda.cupy.empty((4,), "f4"), cuda.cupy.empty((4,), "f4")
    gpu.special.add(special.data.ptr)
    assert device.plain(ordinary) and not device.plain(special)
    assert device.plain(device.empty(4, "f4"))


def test_scratch_takes_what_is_held_back(gpu, cuda) -> None:
    """By CuPy's pool, and by the library's own."""
    gpu.room, gpu.pooled = SLAB // 2, SLAB
    assert cuda.device(0).empty(50, "f8").size == 50
    assert calls(gpu, "free_all_blocks")
    with pytest.raises(DeviceError, match="GPU 0: no 4194304 bytes of scratch memory"):
        cuda.device(0).empty(SLAB // 4, "f8")


def test_reductions_that_a_gpu_has_not_are_refused(gpu, cuda) -> None:
    device = cuda.device(0)
    array = device.empty(4, "f4")
    with pytest.raises(DtypeError, match="user"):
        device.reduce(array, array, Reduction("user", np.add))
    with pytest.raises(DtypeError, match="band is not defined for dtype float32"):
        device.reduce(array, array, Reduction("band"))


def test_kernels_are_compiled_once(gpu, cuda) -> None:
    device = cuda.device(0)
    arrays = [device.empty(4, "f4") for _ in range(3)]
    for array in arrays:
        device.reduce(arrays[0], array, SUM)
        device.scale(array, 0.5)
    assert len(calls(gpu, "compile")) == 2


def test_scale_rounds_the_factor_as_the_host_does(gpu, cuda) -> None:
    device = cuda.device(0)
    device.scale(device.empty(4, "f2"), 1 / 3).start()
    assert calls(gpu, "launch")[-1][5][3] == float(np.float16(1 / 3))


def test_optimizers_run_on_the_callers_stream(gpu, cuda) -> None:
    device = cuda.device(1)
    values, gradients, buffer = (device.empty(4, "f4") for _ in range(3))
    scalars = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    device.sgd(values, gradients, {"momentum_buffer": buffer}, scalars)
    _, current, name, _, _, arguments, stream = calls(gpu, "launch")[-1]
    assert (current, name, stream) == (1, "sgd", CURRENT[1])
    assert list(arguments) == [values, gradients, buffer, 4, 0.1, 0.9, 0.01, 0]
    device.sgd(values, gradients, {}, scalars)
    assert calls(gpu, "launch")[-1][5][2] == 0  # a null pointer, not a missing argument
    device.adam(
        values,
        gradients,
        {"mean": buffer, "square": gradients},
        {name: float(n) for n, name in enumerate(SCALARS["adam"])},
    )
    arguments = calls(gpu, "launch")[-1][5]
    assert list(arguments) == [values, gradients, buffer, gradients, 4, *range(8), 0]
    assert not calls(gpu, "record")


def test_what_is_not_finite_is_told_to_kernels_and_later_to_the_host(gpu, cuda) -> None:
    device = cuda.device(1)
    values = device.empty(100, "f2")
    finite = cuda.Finite(device)
    gpu.log.clear()
    finite.look(values)
    order = [entry for entry in gpu.log if entry[0] in ("memset", "launch", "memcpy", "record")]
    assert [entry[0] for entry in order] == ["memset", "launch", "memcpy", "record"]
    (_, _, *cleared), launched, copied, recorded = order
    assert cleared == [finite.fine.data.ptr, 1, 4, CURRENT[1]]
    assert launched[2] == "all_finite" and list(launched[5]) == [values, 100, finite.fine]
    assert launched[6] == copied[-1] == recorded[-1] == CURRENT[1]
    assert list(copied[2:5]) == [finite._told.ctypes.data, finite.fine.data.ptr, 4]
    gpu.status = 0
    for told in (1, 0):
        finite._told[0] = told
        assert finite.seen() is bool(told)
    state = {"momentum_buffer": values}
    scalars = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    device.sgd(values, values, state, scalars, finite.fine)
    assert calls(gpu, "launch")[-1][5][-1] is finite.fine


def test_the_stand_in_has_no_name_that_cupy_lacks() -> None:
    """CuPy itself imports without a GPU."""
    cupy = pytest.importorskip("cupy")
    stand_in = fake_cupy.make(fake_cupy.Gpu())
    for mine, real in (
        (stand_in, cupy),
        (stand_in.cuda, cupy.cuda),
        (stand_in.cuda.runtime, cupy.cuda.runtime),
    ):
        names = [name for name in vars(mine) if not name.startswith("_")]
        assert names and all(hasattr(real, name) for name in names)
