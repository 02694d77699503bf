"""The emulator of kernels: it computes what a device would, and finds what a device would silently get wrong."""

import platform
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from tests.device.fake.emulator import CompileError, LaunchError, RawKernel, RawModule, guarded

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="the emulator needs g++ on x86-64"
)

CODE = r"""
template <class X> __device__ X warp_sum(X v) {
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
    return v;
}
extern "C" __global__ void __launch_bounds__(256) total(const T* __restrict__ x, double* out, long long n) {
    __shared__ double part[8];
    double v = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) v += x[i];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        double s = 0;
        for (int i = 0; i < 8; ++i) s += part[i];
        *out = s;
    }
}
extern "C" __global__ void places(int* out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = block * 1000 + thread;
}
extern "C" __global__ void lanes(int* down, int* up, int* at, unsigned* votes) {
    int i = threadIdx.x;
    down[i] = __shfl_down_sync(0xffffffffu, i, 3);
    up[i] = __shfl_up_sync(0xffffffffu, i, 3, 16);
    at[i] = __shfl_sync(0xffffffffu, i, 5, 8);
    votes[i] = __ballot_sync(0xffffffffu, i % 3 == 0);
}
extern "C" __global__ void racy(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = threadIdx.x;
    x[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void unset(float* x) {
    __shared__ float s[64];
    x[0] = s[5];
}
extern "C" __global__ void again(float* x) {
    __shared__ float s[2];
    for (int turn = 0; turn < 2; ++turn) {
        if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = turn;
        __syncthreads();
        x[threadIdx.x] += s[0] + s[1];
    }
}
extern "C" __global__ void leaves(float* x) {
    if (threadIdx.x == 3) return;
    __syncthreads();
    x[0] = 1;
}
extern "C" __global__ void apart(float* x) {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
    x[0] = 1;
}
extern "C" __global__ void half_a_warp(int* x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (int)threadIdx.x, 1);
}
extern "C" __global__ void beyond(float* x, long long n) { x[n] = 1; }
extern "C" __global__ void reads(const float* x, float* y, long long n) { y[0] = x[n]; }
struct alignas(16) Four { float v[4]; };
extern "C" __global__ void vector(float* x, long long n) { reinterpret_cast<Four*>(x + n)->v[0] = 1; }
extern "C" __global__ void flag(float* x, bool on, double by) { if (on) x[0] = (float)by; }
"""


class Held:
    """Memory with an address, as an array on a device has."""

    def __init__(self, values):
        self.values = np.ascontiguousarray(values)
        self.data = SimpleNamespace(ptr=self.values.ctypes.data)
        self.dtype, self.nbytes, self.flags = self.values.dtype, self.values.nbytes, self.values.flags


def floats(n=64):
    return Held(np.zeros(n, np.float32))


def kernel(name):
    return RawModule(code=CODE, options=("-std=c++17", "-DT=float")).get_function(name)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_a_sum_by_shuffles_and_a_barrier(n):
    """All threads of a block take part."""
    x, out = Held(np.arange(n, dtype=np.float32)), Held(np.full(1, np.nan))
    kernel("total")((1,), (256,), (x, out, n))
    assert out.values[0] == n * (n - 1) / 2


def test_every_thread_of_every_block_runs_once():
    """Grids and blocks of three axes."""
    out = Held(np.zeros((24, 30), np.int32))
    kernel("places")((2, 3, 4), (5, 3, 2), (out,))
    np.testing.assert_array_equal(out.values, np.arange(24)[:, None] * 1000 + np.arange(30))


def test_lanes_see_one_another():
    """Shuffles of each kind, in narrower groups too, and votes."""
    down, up, at = (Held(np.zeros(32, np.int32)) for _ in range(3))
    votes = Held(np.zeros(32, np.uint32))
    kernel("lanes")((1,), (32,), (down, up, at, votes))
    i = np.arange(32)
    np.testing.assert_array_equal(down.values, np.where(i < 29, i + 3, i))
    np.testing.assert_array_equal(up.values, np.where(i % 16 >= 3, i - 3, i))
    np.testing.assert_array_equal(at.values, i // 8 * 8 + 5)
    assert (votes.values == sum(1 << k for k in range(0, 32, 3))).all()


@pytest.mark.parametrize(
    ("name", "threads", "args", "words"),
    [
        ("leaves", 40, (), "hangs: thread 0 waits .*barrier.* 1 of 40 threads have left"),
        ("apart", 64, (), "thread 0 waits at the barrier of line"),
        ("half_a_warp", 32, (), "hangs: thread 0 waits .*warp.* 16 of 32"),
        ("vector", 1, (1,), "misaligned"),
        ("beyond", 1, (1 << 44,), "outside of the arrays"),
    ],
)
def test_what_would_hang_or_crash(name, threads, args, words):
    """It ends with a sentence, and the next launch works."""
    x = Held(np.zeros(64, np.int32 if name == "half_a_warp" else np.float32))
    with pytest.raises(LaunchError, match=words):
        kernel(name)((1,), (threads,), (x, *args))
    test_a_sum_by_shuffles_and_a_barrier(1000)


@pytest.mark.parametrize("n", [-1, 64])
def test_guard_pages_find_one_element_too_far(n):
    """Written or read, on either side; without them nothing is noticed."""
    for name, args in (("beyond", (floats(), n)), ("reads", (floats(), floats(1), n))):
        with guarded(), pytest.raises(LaunchError, match=r"outside of the arrays|beside its arrays"):
            kernel(name)((1,), (1,), args)


def test_a_guarded_run_finds_races():
    """Threads in reverse order must give the same; what is in shared memory at first is no number.

    A warp that is ahead may write what another has yet to read: a barrier is missing after the reading.
    """
    for name in ("racy", "again"):
        with guarded(), pytest.raises(LaunchError, match="a race"):
            kernel(name)((1,), (64,), (floats(),))
    x = floats()
    kernel("unset")((1,), (1,), (x,))
    assert np.isnan(x.values[0])


def test_a_guarded_run_gives_the_result():
    """In the arrays themselves."""
    x, out = Held(np.arange(10, dtype=np.float32)), Held(np.zeros(1))
    with guarded():
        kernel("total")((1,), (256,), (x, out, 10))
    assert out.values[0] == 45


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((floats(), 1), "takes 3 arguments, not 2"),
        ((floats(), True, np.float32(1)), "of float32"),
        ((floats(), 1, 1.0), "of int64"),
        ((floats(), True, 1), "of int64"),
        ((Held(np.zeros(4)), True, 1.0), "array of float64"),
        ((Held(np.zeros(4, np.float32)).values, True, 1.0), "got a ndarray"),
        ((None, True, 1.0), "got a NoneType"),
        ((1, True, 1.0), "is an address"),
        ((floats(), floats(), 1.0), "got an array"),
    ],
)
def test_arguments_that_do_not_fit(args, words):
    """CuPy would pass them on, and the kernel would read garbage."""
    with pytest.raises(LaunchError, match=words):
        kernel("flag")((1,), (1,), args)


def test_sizes_that_cuda_refuses():
    """Of a grid and of a block; 0 is taken for 1, as CuPy does."""
    with pytest.raises(LaunchError, match="too large"):
        kernel("places")((1,), (1025,), (floats(),))
    with pytest.raises(LaunchError, match="too large"):
        kernel("places")((1, 65536), (1,), (floats(),))
    out = Held(np.full(1, 9, np.int32))
    kernel("places")((0,), (1,), (out,))
    assert out.values[0] == 0


def test_mistakes_in_a_source():
    """What g++ says of them, and a name that is not there."""
    with pytest.raises(CompileError, match="nonsense"):
        RawKernel('extern "C" __global__ void bad() { nonsense; }', "bad").compile()
    with pytest.raises(LookupError, match="no kernel missing; it has again, apart"):
        kernel("missing")
