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

#ifdef __CUDACC__
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
#else
__device__ __forceinline__ float widen(float16 x) { return __builtin_bit_cast(_Float16, x.bits); }
__device__ __forceinline__ float16 to_float16(float x) {
    return {__builtin_bit_cast(unsigned short, (_Float16)x)};
}
#endif

__device__ __forceinline__ float widen(bfloat16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
__device__ __forceinline__ bfloat16 to_bfloat16(float x) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
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

// ---------------------------------------------------------------- functions in the precision of A

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float logarithm_plus_1(float x) { return log1pf(x); }
__device__ __forceinline__ double logarithm_plus_1(double x) { return log1p(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }

__device__ __forceinline__ A infinity() { return (A)__int_as_float(0x7F800000); }
__device__ __forceinline__ A not_a_number() { return (A)__int_as_float(0x7FC00000); }
__device__ __forceinline__ A relu(A x) { return x < 0 ? (A)0 : x; }  // of NaN: NaN
// e^min(x, 0) / (1 + e^-|x|), in which no exponential overflows
__device__ __forceinline__ A sigmoid_of(A x) {
    A small = exponential(x < 0 ? x : -x);
    return (x < 0 ? small : (A)1) / (1 + small);
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
#ifdef __CUDACC__
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
#endif
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

// An array as an argument of `for_each`: read, written, or both.
template <class X> struct In {
    const X* at;
    template <int N> __device__ __forceinline__ Pack<X, N> get(long long i) const {
        return load<N>(at + i);
    }
    template <int N> __device__ __forceinline__ void put(long long, const Pack<X, N>&) const {}
};
template <class X> struct Out {
    X* at;
    template <int N> __device__ __forceinline__ Pack<X, N> get(long long) const { return {}; }
    template <int N>
    __device__ __forceinline__ void put(long long i, const Pack<X, N>& values) const {
        store<N>(at + i, values);
    }
};
template <class X> struct Both {
    X* at;
    template <int N> __device__ __forceinline__ Pack<X, N> get(long long i) const {
        return load<N>(at + i);
    }
    template <int N>
    __device__ __forceinline__ void put(long long i, const Pack<X, N>& values) const {
        store<N>(at + i, values);
    }
};
template <class X> __device__ __forceinline__ In<X> in(const X* at) { return {at}; }
template <class X> __device__ __forceinline__ Out<X> out(X* at) { return {at}; }
template <class X> __device__ __forceinline__ Both<X> both(X* at) { return {at}; }

template <int N, class F, class... Arrays>
__device__ __forceinline__ void apply(long long i, F f, Arrays... arrays) {
    auto compute = [&](auto... packs) {
#pragma unroll
        for (int k = 0; k < N; ++k) f(packs.at[k]...);
        (arrays.template put<N>(i, packs), ...);
    };
    compute(arrays.template get<N>(i)...);
}

// Calls f with references to the i-th element of every array, for all i < n. The threads of the
// grid divide the elements.
template <class F, class... Arrays>
__device__ __forceinline__ void for_each(long long n, F f, Arrays... arrays) {
    long long start = first_of_grid(), step = size_of_grid(),
              packs = aligned(arrays.at...) ? n / PACK : 0;
    for (long long i = start; i < packs; i += step) apply<PACK>(i * PACK, f, arrays...);
    for (long long i = packs * PACK + start; i < n; i += step) apply<1>(i, f, arrays...);
}

// ------------------------------------------ matrices (rows, n): columns along x, rows along y

// Calls f(c) once for each pack of N columns, and its result with the index r n + c of each row.
template <int N, class F>
__device__ __forceinline__ void over_columns(long long rows, long long n, F f) {
    for (long long c = first_of_grid() * N; c < n; c += size_of_grid() * N) {
        auto at = f(c);  // holds the values that all rows share, such as the bias
        for (long long r = blockIdx.y * (long long)blockDim.y + threadIdx.y; r < rows;
             r += gridDim.y * (long long)blockDim.y)
            at(r * n + c);
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
#define NNMPI_COLUMN_TOTALS(M, ...)     \
    P* const result[M] = {__VA_ARGS__}; \
    __shared__ A shared[256];           \
    column_totals<M>(partial, parts, n, result, shared)
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
    __device__ __forceinline__ A operator()(A x, A y) const { return x + y; }
};
struct Largest {
    __device__ __forceinline__ A operator()(A x, A y) const { return y > x ? y : x; }
};

// Combines a value of each thread of the team; all get the result. The block's shape is (threads)
// for one team, (32, warps) for teams of warps.
template <bool BLOCK, class F> __device__ __forceinline__ A combine(A value, F f, A* shared) {
#pragma unroll
    for (int by = 16; by; by /= 2) value = f(value, (A)__shfl_xor_sync(0xFFFFFFFFu, value, by));
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
template <int N> struct Count {
    static constexpr int value = N;
};
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
