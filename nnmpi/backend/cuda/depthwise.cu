// Convolution of each channel of images (n, h, w, c) by a kernel of its own, (kernel_h, kernel_w, c),
// and its gradients. No thread waits for another one's sums, and none are added in a random order.

constexpr int LANES = PACK < 4 ? PACK : 4;  // channels of a thread, where c is a multiple
constexpr int ACROSS = 4;                      // neighbouring pixels of a thread
constexpr int TAPS = 8;                        // of a row of the kernel, at a time
constexpr int WORKERS = 8;                     // rows of a block of 32 channels, at a time
constexpr int BLOCKS = sizeof(T) == 8 ? 2 : 4;  // of a multiprocessor: without it some registers are kept in memory

struct Frame {
    long long n, h, w, c, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w,
        apart_h, apart_w;
};
#define FRAME_OF_ARGUMENTS                                                                     \
    const Frame f = {n,        h,        w,     c,     out_h,   out_w,  kernel_h, kernel_w, \
                     stride_h, stride_w, pad_h, pad_w, apart_h, apart_w}

// The pixel that a result sees through an element of the kernel, along one axis; at least `size`,
// or negative, if there is none. BACK is for the input's gradient: the results that see a pixel.
template <bool BACK>
__device__ __forceinline__ int seen(int at, int tap, int stride, int pad, int apart) {
    if (!BACK) return at * stride - pad + tap * apart;
    int place = at + pad - tap * apart;
    if (stride == 1 || place < 0) return place;
    return place % stride ? -1 : place / stride;
}

// Each unit is some channels of ACROSS pixels of the result. A row of an image has fewer than 2^31
// elements.
template <bool BACK, class I, int N>
__device__ __forceinline__ void convolve(const T* x, const P* weight, T* y, I units,
                                         const Frame& f) {
    int kernel_h = (int)f.kernel_h, kernel_w = (int)f.kernel_w, c = (int)f.c,
        h = (int)(BACK ? f.out_h : f.h), w = (int)(BACK ? f.out_w : f.w),
        rows = (int)(BACK ? f.h : f.out_h), columns = (int)(BACK ? f.w : f.out_w);
    I lanes = (I)(c / N), groups = (I)((columns + ACROSS - 1) / ACROSS);
    for (I u = (I)first_of_grid(); u < units; u += (I)size_of_grid()) {
        I group = u / lanes, line = group / groups, image = line / (I)rows;
        int channel = (int)(u - group * lanes) * N, row = (int)(line - image * (I)rows),
            first = (int)(group - line * groups) * ACROSS;
        A sums[ACROSS][N] = {};
        const P* by = weight + channel;
        for (int r = 0; r < kernel_h; ++r, by += kernel_w * c) {
            int above = seen<BACK>(row, r, (int)f.stride_h, (int)f.pad_h, (int)f.apart_h);
            if (above < 0 || above >= h) continue;
            const T* from = x + ((long long)image * h + above) * w * c + channel;
            for (int s = 0; s < kernel_w; ++s) {
                Pack<P, N> factors = load<N>(by + s * c);
#pragma unroll
                for (int t = 0; t < ACROSS; ++t) {
                    int beside = seen<BACK>(first + t, s, (int)f.stride_w, (int)f.pad_w,
                                            (int)f.apart_w);
                    if (beside < 0 || beside >= w) continue;
                    Pack<T, N> values = load<N>(from + beside * c);
#pragma unroll
                    for (int k = 0; k < N; ++k)
                        sums[t][k] += wide(values.at[k]) * (A)widen(factors.at[k]);
                }
            }
        }
        T* to = y + ((long long)line * columns + first) * c + channel;
#pragma unroll
        for (int t = 0; t < ACROSS; ++t) {
            if (first + t >= columns) continue;
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; ++k) set(result.at[k], sums[t][k]);
            store<N>(to + t * c, result);
        }
    }
}

template <bool BACK>
__device__ __forceinline__ void by_units(const T* x, const P* weight, T* y, const Frame& f) {
    long long groups = f.n * (BACK ? f.h : f.out_h) *
                       (((BACK ? f.w : f.out_w) + ACROSS - 1) / ACROSS);
    bool packed = f.c % LANES == 0 && aligned(x, weight, y),
         small = groups * f.c + size_of_grid() < NNMPI_SMALL;
    if (packed && small)
        convolve<BACK, unsigned, LANES>(x, weight, y, (unsigned)(groups * f.c / LANES), f);
    else if (small) convolve<BACK, unsigned, 1>(x, weight, y, (unsigned)(groups * f.c), f);
    else convolve<BACK, unsigned long long, 1>(x, weight, y, (unsigned long long)(groups * f.c), f);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    depthwise(const T* x, const P* weight, T* y, long long n, long long h, long long w,
              long long c, long long out_h, long long out_w, long long kernel_h,
              long long kernel_w, long long stride_h, long long stride_w, long long pad_h,
              long long pad_w, long long apart_h, long long apart_w) {
    FRAME_OF_ARGUMENTS;
    by_units<false>(x, weight, y, f);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    depthwise_grad(const T* grad, const P* weight, T* to_x, long long n, long long h, long long w,
                   long long c, long long out_h, long long out_w, long long kernel_h,
                   long long kernel_w, long long stride_h, long long stride_w, long long pad_h,
                   long long pad_w, long long apart_h, long long apart_w) {
    FRAME_OF_ARGUMENTS;
    by_units<true>(grad, weight, to_x, f);
}

// The kernels' gradient: partial sums (gridDim.y, kernel_h, kernel_w, c) over rows of the result,
// of which each block takes every gridDim.y WORKERS-th. A block has 32 channels along x and some
// elements of a row of the kernel along gridDim.z.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    depthwise_sums(const T* x, const T* grad, A* partial, long long n, long long h, long long w,
                   long long c, long long out_h, long long out_w, long long kernel_h,
                   long long kernel_w, long long stride_h, long long stride_w, long long pad_h,
                   long long pad_w, long long apart_h, long long apart_w) {
    __shared__ A shared[WORKERS][32];
    int taps = (int)kernel_w, chunks = (taps + TAPS - 1) / TAPS, r = (int)blockIdx.z / chunks,
        first = ((int)blockIdx.z - r * chunks) * TAPS, width = (int)w, across = (int)out_w,
        step = (int)stride_w, apart = (int)apart_w;
    long long channel = blockIdx.x * 32ll + threadIdx.x, lines = n * out_h, tap = apart * c;
    taps = taps - first < TAPS ? taps - first : TAPS;
    A sums[TAPS] = {};
    if (channel < c)
        for (long long line = blockIdx.y * (long long)WORKERS + threadIdx.y; line < lines;
             line += gridDim.y * (long long)WORKERS) {
            long long image = line / out_h, row = (line - image * out_h) * stride_h - pad_h +
                                                  r * apart_h;
            if (row < 0 || row >= h) continue;
            int left = first * apart - (int)pad_w;
            const T* by = grad + line * across * c + channel;
            const T* from = x + ((image * h + row) * width + left) * c + channel;
            for (int j = 0; j < across; ++j, left += step, from += step * c, by += c) {
                A factor = wide(*by);
                const T* at = from;
#pragma unroll
                for (int s = 0; s < TAPS; ++s, at += tap) {
                    int beside = left + s * apart;
                    if (s < taps && beside >= 0 && beside < width) sums[s] += factor * wide(*at);
                }
            }
        }
#pragma unroll
    for (int s = 0; s < TAPS; ++s) {
        if (s >= taps) break;
        shared[threadIdx.y][threadIdx.x] = sums[s];
        __syncthreads();
        if (threadIdx.y == 0 && channel < c) {
            A total = 0;
            for (int i = 0; i < WORKERS; ++i) total += shared[i][threadIdx.x];
            partial[((blockIdx.y * kernel_h + r) * kernel_w + first + s) * c + channel] = total;
        }
        __syncthreads();
    }
}
