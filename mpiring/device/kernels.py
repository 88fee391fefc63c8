"""The GPU kernels as CUDA C++ text: pure strings, so that a test can compile and run them anywhere.

All of them are limited by memory, so each makes one pass: every operand read
once, every result written once. Sixteen bytes a thread where both arrays allow it.

The text includes no header, so NVRTC alone compiles it, without a CUDA toolkit.
float16 and bfloat16 are stored as 16 bits and computed in float32, rounded once
to nearest even. Integers wrap around, as in NumPy. ``max`` and ``min`` keep a NaN.
"""

from __future__ import annotations

from string import Template
from typing import NamedTuple

from mpiring.errors import DtypeError


class _Number(NamedTuple):
    """How a dtype is stored, and computed with."""

    kind: str  #: i integer, b bool, f real, c complex
    stored: str
    computed: str  #: integers wrap only where C++ computes unsigned
    load: str = "x"
    store: str = "x"


_INTEGERS = {
    f"{sign}int{bits}": _Number(
        "i",
        f"{'unsigned' if sign else 'signed'} {name}",
        "unsigned long long" if bits == 64 else "unsigned int",
    )
    for sign in ("", "u")
    for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
}

_NUMBERS = {
    **_INTEGERS,
    "bool": _Number("b", "unsigned char", "unsigned char"),
    "float16": _Number("f", "unsigned short", "float", "from_half(x)", "to_half(x)"),
    "bfloat16": _Number("f", "unsigned short", "float", "from_bfloat(x)", "to_bfloat(x)"),
    "float32": _Number("f", "float", "float"),
    "float64": _Number("f", "double", "double"),
    "complex64": _Number("c", "Complex<float>", "Complex<float>"),
    "complex128": _Number("c", "Complex<double>", "Complex<double>"),
}

#: By op and kind of number: the result from a (source) and b (target), computed as C.
_REAL = {"sum": "a + b", "prod": "a * b", "scale": "b * C(factor)"}
_ORDER = {"max": "a >= b || a != a ? a : b", "min": "a <= b || a != a ? a : b"}
_LOGICAL = {
    "land": "a && b",
    "lor": "a || b",
    "lxor": "!a != !b",
    "band": "a & b",
    "bor": "a | b",
    "bxor": "a ^ b",
}
_RESULTS = {
    "i": {"sum": "a + b", "prod": "a * b", **_ORDER, **_LOGICAL},
    "b": _LOGICAL,
    "f": {**_REAL, **_ORDER},
    "c": {
        "sum": "C{a.re + b.re, a.im + b.im}",
        "prod": "C{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}",
        "scale": "C{decltype(b.re)(b.re * factor), decltype(b.im)(b.im * factor)}",
    },
}

#: float16 by the GPU's own conversions. (The host has others: a test puts them here.)
HALF = """
__device__ float from_half(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ unsigned short to_half(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
"""

_PRELUDE = (
    """
typedef unsigned long long Count;
template <typename R> struct Complex { R re, im; };
"""
    + HALF
    + """
// bfloat16 is the upper half of a float32.
__device__ float from_bfloat(unsigned short x) { return __uint_as_float((unsigned int)x << 16); }
__device__ unsigned short to_bfloat(float x) {
    if (x != x) return 0x7fff;  // rounding could carry a NaN over into the sign
    unsigned int bits = __float_as_uint(x);
    return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

typedef $stored T;
typedef $computed C;
__device__ C load(T x) { return C($load); }
__device__ T store(C x) { return T($store); }

// This thread's elements: first, first + stride, ...
__device__ Count first() { return blockIdx.x * (Count)blockDim.x + threadIdx.x; }
__device__ Count stride() { return gridDim.x * (Count)blockDim.x; }
"""
)

_APPLY = """
struct alignas(16) Pack { T item[16 / sizeof(T)]; };

__device__ T combine(T source, T target, double factor) {
    C a = load(source), b = load(target);
    return store($result);
}

// target = source (op) target, for n elements. The two may be the same.
extern "C" __global__ void apply(const T* source, T* target, Count n, double factor) {
    // A span may begin anywhere. Where both begin equally far from a 16-byte boundary,
    // all but the elements before the first boundary and after the last go in packs.
    const Count width = 16 / sizeof(T);
    Count head = n, packs = 0;
    if (((size_t)source ^ (size_t)target) % 16 == 0) {
        head = (16 - (size_t)target % 16) % 16 / sizeof(T);
        if (head > n) head = n;
        packs = (n - head) / width;
    }
    for (Count i = first(); i < packs; i += stride()) {
        Pack from = ((const Pack*)(source + head))[i], to = ((const Pack*)(target + head))[i];
        #pragma unroll
        for (int k = 0; k < width; ++k) to.item[k] = combine(from.item[k], to.item[k], factor);
        ((Pack*)(target + head))[i] = to;
    }
    for (Count i = first(); i < head; i += stride())
        target[i] = combine(source[i], target[i], factor);
    for (Count i = head + packs * width + first(); i < n; i += stride())
        target[i] = combine(source[i], target[i], factor);
}
"""

_FINITE = """
// Clears *fine if any of n values is inf or nan.
extern "C" __global__ void all_finite(const T* values, Count n, unsigned int* fine) {
    bool all = true;
    for (Count i = first(); i < n; i += stride()) {
        C x = load(values[i]);
        all = all && x - x == C(0);  // inf - inf is nan
    }
    if (!all) *fine = 0;
}
"""

# State is kept in the dtype of the arithmetic: float32 for 16-bit values. A step is left out
# where *fine is 0: the host need not know yet whether it is.
_SGD = """
extern "C" __global__ void sgd(
    T* values, const T* gradients, C* buffer, Count n,
    double lr, double momentum, double weight_decay, const unsigned int* fine
) {
    if (fine && !*fine) return;
    for (Count i = first(); i < n; i += stride()) {
        C value = load(values[i]);
        C g = load(gradients[i]) + C(weight_decay) * value;
        if (buffer) buffer[i] = g += C(momentum) * buffer[i];
        values[i] = store(value - C(lr) * g);
    }
}
"""

_ADAM = """
extern "C" __global__ void adam(
    T* values, const T* gradients, C* mean, C* square, Count n,
    double rate, double root, double beta1, double beta2,
    double one_minus_beta1, double one_minus_beta2, double eps, double weight_decay,
    const unsigned int* fine
) {
    if (fine && !*fine) return;
    // rate = lr / (1 - beta1^t) and root = 1 / sqrt(1 - beta2^t) hold the corrections of step t.
    for (Count i = first(); i < n; i += stride()) {
        C value = load(values[i]);
        C g = load(gradients[i]) + C(weight_decay) * value;
        C m = mean[i] = C(beta1) * mean[i] + C(one_minus_beta1) * g;
        C v = square[i] = C(beta2) * square[i] + C(one_minus_beta2) * g * g;
        values[i] = store(value - C(rate) * m / (C(sqrt(v)) * C(root) + C(eps)));
    }
}
"""

#: The optimizers' scalars, in the order of the kernels' parameters.
SCALARS = {
    "sgd": ("lr", "momentum", "weight_decay"),
    "adam": (
        "rate",
        "root",
        "beta1",
        "beta2",
        "one_minus_beta1",
        "one_minus_beta2",
        "eps",
        "weight_decay",
    ),
}

#: Threads in a block, for all kernels.
BLOCK = 256


def blocks(count: int, processors: int) -> int:
    """Blocks that keep all multiprocessors busy, and no more than there are elements for."""
    return max(1, min(-(-count // BLOCK), processors * 2048 // BLOCK))


def kernel_source(op: str, dtype: str) -> str:
    """The text of ``apply(source, target, n, factor)``: ``target = source (op) target``.

    ``op`` is a reduction's name, or ``scale``: ``target = target * factor``.
    ``dtype`` is NumPy's name of it. DtypeError where the op is not defined for it,
    as MPI defines it.
    """
    number = _number(dtype)
    try:
        result = _RESULTS[number.kind][op]
    except KeyError:
        raise DtypeError(
            f"op: {op} is not defined for dtype {dtype} on a GPU; "
            f"it takes {', '.join(_RESULTS[number.kind])}"
        ) from None
    if number.kind == "i" and op not in ("sum", "prod"):
        number = number._replace(computed=number.stored)
    return _filled(_PRELUDE + _APPLY, number, result)


def optimizer_source(name: str, dtype: str) -> str:
    """The text of ``sgd`` or ``adam``: one step over flat arrays of real numbers, in one pass.

    ``sgd(values, gradients, buffer or null, n, *scalars, fine or null)`` and
    ``adam(values, gradients, mean, square, n, *scalars, fine or null)``, the scalars as in
    ``SCALARS``; the formulas are those of torch.optim. 16-bit values have float32 state.
    """
    return _filled(_PRELUDE + {"sgd": _SGD, "adam": _ADAM}[name], _real_number(name, dtype))


def finite_source(dtype: str) -> str:
    """The text of ``all_finite(values, n, fine)``: ``*fine = 0`` if a value is inf or nan."""
    return _filled(_PRELUDE + _FINITE, _real_number("all_finite", dtype))


def _real_number(name: str, dtype: str) -> _Number:
    number = _number(dtype)
    if number.kind != "f":
        raise DtypeError(f"dtype: {name} takes real numbers, not {dtype}")
    return number


def _number(dtype: str) -> _Number:
    try:
        return _NUMBERS[dtype]
    except KeyError:
        raise DtypeError(
            f"dtype: {dtype} is not supported on a GPU; {', '.join(sorted(_NUMBERS))} are"
        ) from None


def _filled(text: str, number: _Number, result: str = "") -> str:
    return Template(text).substitute(number._asdict(), result=result)
