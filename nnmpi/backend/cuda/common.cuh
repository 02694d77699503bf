// The common part of all kernels. No header is included, so CUDA's run-time compiler needs no path.
//
//   T   the type of activations: float, double, float16 or bfloat16
//   P   the type of parameters and their gradients: T, or float if T has 16 bits
//   A   the type of arithmetic: float, or double if T or P is
struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
using T = NNMPI_T;
using P = NNMPI_P;
using A = NNMPI_A;

// Below this many elements indices are computed in 32 bits. Tests set another number.
#ifndef NNMPI_SMALL
#define NNMPI_SMALL 0x7FFFFFFFll
#endif

// ---------------------------------------------------------------- 16-bit numbers

__device__ __forceinline__ float widen(float16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}
__device__ __forceinline__ float16 to_float16(float x) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
}

__device__ __forceinline__ float widen(bfloat16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
__device__ __forceinline__ bfloat16 to_bfloat16(float x) {
#if __CUDA_ARCH__ >= 800
    bfloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
#else
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {(unsigned short)0x7FFF};  // NaN
    // to the nearest, ties to even
    return {(unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
#endif
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

template <class X> struct Narrow;
template <> struct Narrow<float> {
    static __device__ __forceinline__ float of(A x) { return (float)x; }
};
template <> struct Narrow<double> {
    static __device__ __forceinline__ double of(A x) { return (double)x; }
};
template <> struct Narrow<float16> {
    static __device__ __forceinline__ float16 of(A x) { return to_float16((float)x); }
};
template <> struct Narrow<bfloat16> {
    static __device__ __forceinline__ bfloat16 of(A x) { return to_bfloat16((float)x); }
};

// Rounds to a type.
template <class X> __device__ __forceinline__ X narrow(A x) { return Narrow<X>::of(x); }
template <class X> __device__ __forceinline__ void set(X& target, A x) {
    target = Narrow<X>::of(x);
}

__device__ __forceinline__ A wide(T x) { return (A)widen(x); }

// ---------------------------------------------------------------- functions

__device__ __forceinline__ A infinity() { return (A)__int_as_float(0x7F800000); }
__device__ __forceinline__ A not_a_number() { return (A)__int_as_float(0x7FC00000); }
// Of a NaN and a number: NaN.
template <class X> __device__ __forceinline__ X maximum(X x, X y) {
    return x >= y || x != x ? x : y;
}
template <class X> __device__ __forceinline__ X minimum(X x, X y) {
    return x <= y || x != x ? x : y;
}
template <class X> __device__ __forceinline__ X sign(X x) {
    return x > 0 ? (X)1 : x < 0 ? (X)-1 : x;
}

// ---------------------------------------------------------------- 16 bytes at a time

[[maybe_unused]] constexpr int PACK = 16 / (int)sizeof(T);

// N elements, read and written by instructions of 16 bytes.
template <class X, int N> struct alignas(sizeof(X) * N < 16 ? sizeof(X) * N : 16) Pack {
    X at[N];
};
template <int N, class X> __device__ __forceinline__ Pack<X, N> load(const X* from) {
    return *reinterpret_cast<const Pack<X, N>*>(from);
}
template <int N, class X> __device__ __forceinline__ void store(X* to, const Pack<X, N>& values) {
    // Inline assembly, since the compiler often splits a pack into stores of single elements.
    constexpr int BYTES = (int)sizeof(Pack<X, N>);
    if constexpr (BYTES % 16 == 0) {
        union {
            Pack<X, N> pack;
            unsigned words[BYTES / 4];
        } as = {values};
#pragma unroll
        for (int i = 0; i < BYTES / 4; i += 4)
            asm volatile(
                "{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v4.b32 [at], {%1, %2, %3, "
                "%4}; }" ::"l"((char*)to + 4 * i),
                "r"(as.words[i]), "r"(as.words[i + 1]), "r"(as.words[i + 2]), "r"(as.words[i + 3])
                : "memory");
        return;
    }
    if constexpr (BYTES == 8 && N > 1) {
        union {
            Pack<X, N> pack;
            unsigned words[2];
        } as = {values};
        asm volatile(
            "{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v2.b32 [at], {%1, %2}; }" ::"l"(
                to),
            "r"(as.words[0]), "r"(as.words[1])
            : "memory");
        return;
    }
    *reinterpret_cast<Pack<X, N>*>(to) = values;
}

// Whether all these addresses are multiples of 16 bytes; a null pointer is.
template <class... X> __device__ __forceinline__ bool aligned(const X*... at) {
    return ((((unsigned long long)at & 15) == 0) && ...);
}

__device__ __forceinline__ long long first_of_grid() {
    return blockIdx.x * (long long)blockDim.x + threadIdx.x;
}
__device__ __forceinline__ long long size_of_grid() { return gridDim.x * (long long)blockDim.x; }

template <int N> struct Count {
    static constexpr int value = N;
};

// Calls f(first element, their number as a constant) for n elements, which the threads of the grid
// divide: packs, if the arrays begin at multiples of 16 bytes, and the rest one by one.
template <class F> __device__ __forceinline__ void over_packs(long long n, bool packed, F f) {
    long long start = first_of_grid(), step = size_of_grid(), packs = packed ? n / PACK : 0;
    for (long long i = start; i < packs; i += step) f(i * PACK, Count<PACK>());
    for (long long i = packs * PACK + start; i < n; i += step) f(i, Count<1>());
}

// An optimizer's update changes nothing if its guard, a number, is infinite or NaN: the host need
// not know whether a gradient is finite when it launches the update.
__device__ __forceinline__ bool refuses(const double* guard) {
    return guard && !(*guard - *guard == 0);
}

// ------------------------------------------ matrices (rows, n): columns along x, rows along y

// Calls f(sample) for each sample of this grid, which are along z.
template <class F> __device__ __forceinline__ void over_samples(long long samples, F f) {
    for (long long s = blockIdx.z; s < samples; s += gridDim.z) {
        f(s);
        __syncthreads();  // shared memory serves the next sample
    }
}

// Calls f(c) once for each pack of N columns, and its result with (index r n + c, row r).
template <int N, class F>
__device__ __forceinline__ void over_columns(long long rows, long long n, F f) {
    for (long long c = first_of_grid() * N; c < n; c += size_of_grid() * N) {
        auto at = f(c);  // holds the values that all rows share, such as the bias
        for (long long r = blockIdx.y * (long long)blockDim.y + threadIdx.y; r < rows;
             r += gridDim.y * (long long)blockDim.y)
            at(r * n + c, r);
    }
}

// Sums columns, in blocks of 256 threads with at least 4 along y: f(c) is called once for each pack
// of N columns, and its result with (index r n + c, row r, sums) adds to M times N sums. A block sums its rows in a fixed order, so the result depends on the
// sizes alone. With one block per column it goes to result, else to partial (gridDim.y, M, n).
template <int N, int M, class F>
__device__ __forceinline__ void sum_columns(long long rows, long long n, P* const (&result)[M],
                                            A* partial, A* shared, F f) {
    int width = blockDim.x, mine = threadIdx.y * width + threadIdx.x;
    for (long long first = blockIdx.x * (long long)width * N; first < n;
         first += size_of_grid() * N) {
        long long c = first + threadIdx.x * N;
        A sums[M][N] = {};
        if (c < n) {
            auto add = f(c);
            for (long long r = blockIdx.y * (long long)blockDim.y + threadIdx.y; r < rows;
                 r += gridDim.y * (long long)blockDim.y)
                add(r * n + c, r, sums);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            if (!result[m]) continue;
            for (int half = blockDim.y / 2; half; half /= 2) {
                if ((int)threadIdx.y >= half && (int)threadIdx.y < 2 * half)
#pragma unroll
                    for (int k = 0; k < N; ++k) shared[k * 256 + mine] = sums[m][k];
                __syncthreads();
                if ((int)threadIdx.y < half)
#pragma unroll
                    for (int k = 0; k < N; ++k) sums[m][k] += shared[k * 256 + mine + half * width];
            }  // no second barrier: the next turn writes below the elements that this one reads
            if (threadIdx.y == 0 && c < n)
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    if (gridDim.y > 1)
                        partial[(blockIdx.y * (long long)M + m) * n + c + k] = sums[m][k];
                    else
                        set(result[m][c + k], sums[m][k]);
                }
        }
    }
}

// The second phase: result[m] = the sum of partial (parts, M, n) over the parts. Each of the M n
// columns has one thread along x.
template <int M>
__device__ __forceinline__ void column_totals(const A* partial, long long parts, long long n,
                                              P* const (&result)[M], A* shared) {
    int mine = threadIdx.y * 32 + threadIdx.x;
    long long c = blockIdx.x * 32ll + threadIdx.x;
    A sum = 0;
    P* target = nullptr;
#pragma unroll
    for (int m = 0; m < M; ++m)
        if (c >= m * n && c < (m + 1) * n && result[m]) target = result[m] + (c - m * n);
    if (target)
        for (long long p = threadIdx.y; p < parts; p += 8) sum += partial[p * M * n + c];
    shared[mine] = sum;
    __syncthreads();
    if (threadIdx.y || !target) return;
    for (int p = 1; p < 8; ++p) sum += shared[mine + p * 32];
    set(*target, sum);
}

// ---------------------------------------------- rows: a team per row, which is a warp or a block

struct Add {
    template <class X> __device__ __forceinline__ X operator()(X x, X y) const { return x + y; }
};
struct Largest {
    template <class X> __device__ __forceinline__ X operator()(X x, X y) const {
        return maximum(x, y);
    }
};

// Combines a value of each thread of the team; all get the result. The block's shape is (threads)
// for one team, (32, warps) for teams of warps.
template <bool BLOCK, class X, class F>
__device__ __forceinline__ X combine(X value, F f, X* shared) {
#pragma unroll
    for (int by = 16; by; by /= 2) value = f(value, (X)__shfl_xor_sync(0xFFFFFFFFu, value, by));
    if (!BLOCK) return value;
    int warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int i = 1; i < warps; ++i) value = f(value, shared[i]);
    __syncthreads();
    return value;
}

// The number of this thread's first row, and the number of rows that the grid computes at a time.
template <bool BLOCK> __device__ __forceinline__ long long first_row() {
    return BLOCK ? (long long)blockIdx.x : blockIdx.x * (long long)blockDim.y + threadIdx.y;
}
template <bool BLOCK> __device__ __forceinline__ long long row_step() {
    return BLOCK ? (long long)gridDim.x : gridDim.x * (long long)blockDim.y;
}

// Calls f(first column, their number as a constant) for the columns begin <= c < end, distributed
// over the team. Columns between two addresses that are multiples of 16 bytes are read in packs.
// skew is the distance, in elements, of the row's first element from such an address; -1 if the
// arrays differ in it: then all columns are read one by one.
template <class F>
__device__ __forceinline__ void along(long long begin, long long end, int skew, F f) {
    if (skew >= 0) {
        long long head = (begin + skew + PACK - 1) / PACK * PACK - skew,
                  tail = (end + skew) / PACK * PACK - skew;
        if (head < tail) {
            for (long long c = begin + threadIdx.x; c < head; c += blockDim.x) f(c, Count<1>());
            for (long long c = head + threadIdx.x * PACK; c < tail; c += blockDim.x * PACK)
                f(c, Count<PACK>());
            begin = tail;
        }
    }
    for (long long c = begin + threadIdx.x; c < end; c += blockDim.x) f(c, Count<1>());
}

// ---------------------------------------------------------------- integers of any kind

// The i-th of integers of 1, 2, 4 or 8 bytes (a negative number for unsigned ones). Unsigned
// integers of 8 bytes are read as signed: too large ones become negative, which callers refuse
// anyway.
__device__ __forceinline__ long long integer(const void* at, int bytes, long long i) {
    switch (bytes) {
        case 1: return ((const signed char*)at)[i];
        case 2: return ((const short*)at)[i];
        case 4: return ((const int*)at)[i];
        case -1: return ((const unsigned char*)at)[i];
        case -2: return ((const unsigned short*)at)[i];
        case -4: return ((const unsigned*)at)[i];
        default: return ((const long long*)at)[i];
    }
}
