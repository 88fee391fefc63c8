"""The kernels' text: run as C++ on the host against NumPy, compiled by NVRTC for real GPUs.

A GPU is not needed for either. Run on the host, the text is the same but for the
conversions of float16; each thread of the grid takes its turn. GCC's sanitizer watches
for what a GPU would not forgive: a misaligned access, an overflow that C++ leaves open.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiring.device import kernels
from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice, check_reduction
from mpiring.device.kernels import finite_source, kernel_source, optimizer_source
from mpiring.errors import DtypeError
from mpiring.nn.optim import SGD, Adam

ml_dtypes = pytest.importorskip("ml_dtypes")

OPS = ("sum", "prod", "max", "min", "land", "lor", "lxor", "band", "bor", "bxor")
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
REALS = ["float16", "bfloat16", "float32", "float64"]
DTYPES = ["bool", *INTEGERS, *REALS, "complex64", "complex128"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def defined(op: str, name: str) -> bool:
    try:
        check_reduction(Reduction(op), dtype_of(name))
    except DtypeError:
        return False
    return True


REDUCTIONS = [(op, name) for op, name in itertools.product(OPS, DTYPES) if defined(op, name)]
SCALES = [("scale", name) for name in (*REALS, "complex64", "complex128")]
STEPS = [(op, name) for op, name in itertools.product(("sgd", "adam", "finite"), REALS)]


def source_of(op: str, name: str) -> str:
    if op == "finite":
        return finite_source(name)
    return optimizer_source(op, name) if op in ("sgd", "adam") else kernel_source(op, name)


def together(wanted: list[tuple[str, str]]) -> str:
    """All sources as one text, each with a kernel name of its own: compiled in one go."""
    parts = []
    for op, name in wanted:
        renamed = re.sub(
            r"__global__ void \w+", f"__global__ void {op}_{name}", source_of(op, name)
        )
        parts.append(f"namespace {op}_{name}_ {{\n{renamed}\n}}\n")
    return "".join(parts)


HOST = """
#include <cmath>
#include <cstddef>
#include <cstring>
using std::sqrt;
#define __global__
#define __device__ static inline
struct Dim { unsigned x; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
static unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static float from_half(unsigned short x) { _Float16 y; std::memcpy(&y, &x, 2); return y; }
static unsigned short to_half(float x) {
    _Float16 y = x; unsigned short z; std::memcpy(&z, &y, 2); return z;
}
extern "C" void set(unsigned b, unsigned t, unsigned blocks, unsigned threads) {
    blockIdx.x = b; threadIdx.x = t; gridDim.x = blocks; blockDim.x = threads;
}
"""


@pytest.fixture(autouse=True)
def nothing_undefined(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """``launch(name, *arguments)`` runs a kernel over a small grid, a thread at a time."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to run the kernels' text on the host")
    folder: Path = tmp_path_factory.mktemp("kernels")
    text = together(REDUCTIONS + SCALES + STEPS)
    assert kernels.HALF in text
    (folder / "k.cpp").write_text(HOST + text.replace(kernels.HALF, ""))
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-fsanitize=undefined",
            "-w",
            "-shared",
            "-fPIC",
            "k.cpp",
            "-o",
            "k.so",
        ],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(str(folder / "k.so"))

    def call(name: str, *arguments: np.ndarray | int | float | None) -> None:
        converted = [
            ctypes.c_void_p(a.ctypes.data)
            if isinstance(a, np.ndarray)
            else ctypes.c_double(a)
            if isinstance(a, float)
            else ctypes.c_void_p(None)
            if a is None
            else ctypes.c_ulonglong(a)
            for a in arguments
        ]
        for block, thread in itertools.product(range(2), range(3)):
            library.set(block, thread, 2, 3)
            getattr(library, name)(*converted)

    return call


def aligned(values: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins ``offset`` elements behind a 16-byte boundary, sentinels around it."""
    size = values.itemsize
    raw = np.full(values.nbytes + 64 + offset * size, 0xA5, np.uint8)
    start = -raw.ctypes.data % 16 + 16 + offset * size
    view = raw[start : start + values.nbytes].view(values.dtype)
    view[:] = values
    return view


def sample(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    dtype = dtype_of(name)
    if name == "bool":
        return rng.random(count) < 0.5
    if name in INTEGERS:
        values = rng.integers(-(1 << 62), 1 << 62, count).astype(dtype)
        values[rng.random(count) < 0.2] = 0
        return values
    values = rng.standard_normal(count)
    if name.startswith("complex"):
        return (values + 1j * rng.standard_normal(count)).astype(dtype)
    values = values * 10.0 ** rng.integers(-9, 5, count)  # subnormal and infinite halves too
    for special in (np.nan, np.inf, -np.inf, 0.0):
        values[rng.random(count) < 0.05] = special
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def comparable(values: np.ndarray) -> np.ndarray:
    """NumPy's comparisons take the NaNs of short floats for different ones."""
    return values.astype("f4") if values.dtype.name in ("float16", "bfloat16") else values


@pytest.mark.parametrize(("op", "name"), REDUCTIONS)
def test_a_reduction_is_that_of_the_host(launch: Callable[..., None], op: str, name: str) -> None:
    rng = np.random.default_rng(3)
    # Counts around the width of a pack, begun on a boundary and beside it, together and not.
    for count, at, shift in itertools.product((1, 2, 17, 70), (0, 1), (0, 1)):
        source = aligned(sample(name, count, rng), at)
        target = aligned(sample(name, count, rng), at + shift)
        kept = source.copy()
        expected = target.copy()
        with np.errstate(all="ignore"):
            HostDevice().reduce(source, expected, Reduction(op)).start()
        around = target.base
        before = around.copy()
        launch(f"{op}_{name}", source, target, count, 0.0)
        tolerance = 1e-6 if name == "complex64" else 1e-14 if name == "complex128" else 0
        np.testing.assert_allclose(comparable(target), comparable(expected), rtol=tolerance, atol=0)
        np.testing.assert_array_equal(comparable(source), comparable(kept))
        inside = target.ctypes.data - around.ctypes.data
        outside = np.ones(around.size, bool)
        outside[inside : inside + target.nbytes] = False
        np.testing.assert_array_equal(around[outside], before[outside])


@pytest.mark.parametrize(("op", "name"), SCALES)
def test_scale_is_that_of_the_host(launch: Callable[..., None], op: str, name: str) -> None:
    values = sample(name, 41, np.random.default_rng(4))
    target, expected = aligned(values, 1), values.copy()
    with np.errstate(all="ignore"):
        HostDevice().scale(expected, 1 / 3).start()
    factor = float(expected.dtype.type(1 / 3).real)
    launch(f"{op}_{name}", target, target, target.size, factor)
    tolerance = 1e-7 if name == "complex64" else 1e-15 if name == "complex128" else 0
    wide = "c16" if name.startswith("complex") else "f8"
    np.testing.assert_allclose(target.astype(wide), expected.astype(wide), rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_converted_without_loss(launch: Callable[..., None], name: str) -> None:
    """Every 16-bit pattern survives the way to float32 and back."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(name))
    target = every.copy()
    launch(f"sum_{name}", np.zeros_like(every), target, every.size, 0.0)
    number = ~np.isnan(every.astype("f4"))
    np.testing.assert_array_equal(comparable(target[number]), comparable(every[number]))
    assert np.isnan(comparable(target[~number])).all()


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "optimizer",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05},
        {"lr": 0.01, "weight_decay": 0.01, "betas": (0.8, 0.99)},
    ],
)
def test_a_fused_step_is_that_of_the_optimizer(
    launch: Callable[..., None], optimizer: dict[str, Any], name: str
) -> None:
    """The optimizers of ``nn`` take the kernels as they are: same names, same state."""
    kind, kernel_name = (Adam, "adam") if "betas" in optimizer else (SGD, "sgd")

    def kernel(
        values: np.ndarray,
        gradients: np.ndarray,
        state: dict[str, np.ndarray],
        scalars: dict[str, float],
    ) -> None:
        arrays = list(state.values()) or [None]
        numbers = [float(scalars[n]) for n in kernels.SCALARS[kernel_name]]
        every = (values, gradients, *arrays, values.size, *numbers)
        launch(f"{kernel_name}_{name}", *every, np.zeros(1, np.uint32))  # changes nothing
        launch(f"{kernel_name}_{name}", *every, next(fine))

    fine = itertools.cycle((None, np.ones(1, np.uint32)))
    dtype, count = dtype_of(name), 33
    rng = np.random.default_rng(5)
    fused = kind(count, dtype, **optimizer, kernel=kernel)
    plain = kind(count, dtype, **optimizer)
    values = rng.standard_normal(count).astype(dtype)
    expected = values.copy()
    for _ in range(4):
        gradients = rng.standard_normal(count).astype(dtype)
        fused.step(values, gradients)
        plain.step(expected, gradients)
    tolerance = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-13}[name]
    np.testing.assert_allclose(values.astype("f8"), expected.astype("f8"), tolerance, tolerance)


@pytest.mark.parametrize("name", REALS)
def test_inf_and_nan_are_found_wherever_they_are(launch: Callable[..., None], name: str) -> None:
    values = np.linspace(-3, 3, 41).astype(dtype_of(name))
    values[3] = float(ml_dtypes.finfo(values.dtype).max)
    fine = np.ones(1, np.uint32)
    launch(f"finite_{name}", values, values.size, fine)
    assert fine[0] == 1
    for at, bad in itertools.product((0, 20, 40), (np.nan, np.inf, -np.inf)):
        broken, fine = values.copy(), np.ones(1, np.uint32)
        broken[at] = bad
        launch(f"finite_{name}", broken, broken.size, fine)
        assert fine[0] == 0


@pytest.mark.parametrize("name", DTYPES)
def test_what_the_host_refuses_is_refused(name: str) -> None:
    for op in OPS:
        if not defined(op, name):
            with pytest.raises(DtypeError, match=f"{op} is not defined for dtype {name}"):
                kernel_source(op, name)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(DtypeError, match="datetime64"):
        kernel_source("sum", "datetime64[s]")
    with pytest.raises(DtypeError, match="int32"):
        optimizer_source("adam", "int32")
    with pytest.raises(DtypeError, match="all_finite takes real numbers, not int32"):
        finite_source("int32")


class Nvrtc:
    """As much of NVRTC as compiling a text needs."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("the wheel nvidia-cuda-nvrtc-cu12 is not installed")
        (found,) = Path(next(iter(spec.submodule_search_locations))).glob("lib/libnvrtc.so.*")
        self.library = ctypes.CDLL(str(found))

    def compile(self, text: str, *options: str, result: str = "PTX") -> bytes:
        program = ctypes.c_void_p()
        call = self.library
        assert call.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None
        ) == 0  # fmt: skip
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = call.nvrtcCompileProgram(program, len(options), flags)
        if status:
            size = ctypes.c_size_t()
            call.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call.nvrtcGetProgramLog(program, log)
            pytest.fail(log.value.decode())
        size = ctypes.c_size_t()
        assert getattr(call, f"nvrtcGet{result}Size")(program, ctypes.byref(size)) == 0
        output = ctypes.create_string_buffer(size.value)
        assert getattr(call, f"nvrtcGet{result}")(program, output) == 0
        return output.raw


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_all_kernels_compile(nvrtc: Nvrtc, architecture: int) -> None:
    wanted = REDUCTIONS + SCALES + STEPS
    ptx = nvrtc.compile(together(wanted), f"--gpu-architecture=compute_{architecture}").decode()
    entries = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    assert sorted(entries) == sorted(f"{op}_{name}" for op, name in wanted)


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_one_kernel_compiles_to_machine_code_with_16_byte_accesses(
    nvrtc: Nvrtc, architecture: int
) -> None:
    text = kernel_source("sum", "float32")
    cubin = nvrtc.compile(text, f"--gpu-architecture=sm_{architecture}", result="CUBIN")
    assert cubin.startswith(b"\x7fELF")
    ptx = nvrtc.compile(text, f"--gpu-architecture=compute_{architecture}").decode()
    assert ptx.count("ld.global.v4") >= 2 and "st.global.v4" in ptx
    assert ".local" not in ptx
