// Pooling of channels-last images, for windows of any size, stride and border. Backward gathers:
// the thread of a pixel sums the gradients of the windows that contain it. So no two threads write
// to the same element.

struct Frame {
    long long h, w, c, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
};

// A winner is the position of the maximum in its window, an integer of 1, 2 or 4 bytes.
template <int N>
__device__ __forceinline__ void keep_winners(void* winner, int bytes, long long i,
                                             const unsigned (&places)[N]) {
    if (bytes == 1) {
        Pack<unsigned char, N> numbers;
#pragma unroll
        for (int k = 0; k < N; ++k) numbers.at[k] = (unsigned char)places[k];
        store<N>((unsigned char*)winner + i, numbers);
        return;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        if (bytes == 2) ((unsigned short*)winner)[i + k] = (unsigned short)places[k];
        else ((unsigned*)winner)[i + k] = places[k];
    }
}
__device__ __forceinline__ unsigned winner_at(const void* winner, int bytes, long long i) {
    if (bytes == 1) return ((const unsigned char*)winner)[i];
    if (bytes == 2) return ((const unsigned short*)winner)[i];
    return ((const unsigned*)winner)[i];
}

// The maximum of each window, the first one of ties; a NaN is the maximum.
template <class I, int N>
__device__ __forceinline__ void largest(const T* x, T* y, void* winner, int bytes, I units,
                                        const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, out_h = (I)f.out_h,
      out_w = (I)f.out_w;
    int h = (int)f.h, w = (int)f.w, kernel_h = (int)f.kernel_h, kernel_w = (int)f.kernel_w;
    for (I u = start; u < units; u += step) {
        I pixel = u / lanes, lane = u - pixel * lanes, line = pixel / out_w, image = line / out_h;
        int top = (int)(line - image * out_h) * (int)f.stride_h - (int)f.pad_h,
            left = (int)(pixel - line * out_w) * (int)f.stride_w - (int)f.pad_w;
        const T* from = x + (long long)image * h * w * f.c + (long long)lane * N;
        A best[N];
        unsigned place[N];
        // the first pixel inside the image wins a window of -infinity
        for (int k = 0; k < N; ++k) {
            best[k] = -infinity();
            place[k] = (unsigned)((top < 0 ? -top * kernel_w : 0) + (left < 0 ? -left : 0));
        }
        for (int i = 0; i < kernel_h; ++i)
            for (int j = 0; j < kernel_w; ++j) {
                if (top + i < 0 || top + i >= h || left + j < 0 || left + j >= w) continue;
                Pack<T, N> values = load<N>(from + ((long long)(top + i) * w + left + j) * f.c);
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    A value = wide(values.at[k]);
                    bool wins = value > best[k] || value != value;
                    place[k] = wins ? (unsigned)(i * kernel_w + j) : place[k];
                    best[k] = wins ? value : best[k];
                }
            }
        long long to = (long long)u * N;
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) set(result.at[k], best[k]);
        store<N>(y + to, result);
        if (winner) keep_winners<N>(winner, bytes, to, place);
    }
}

#define FRAME_OF_ARGUMENTS \
    const Frame f = {h, w, c, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w}

// Runs a function on packs if the arrays are aligned, with 32-bit indices if they suffice.
#define BY_UNITS(function, packed, elements, ...)                                          \
    do {                                                                                   \
        long long units = (packed) ? (elements) / PACK : (elements);                       \
        bool small = units + size_of_grid() < NNMPI_SMALL;                                 \
        if ((packed) && small) function<unsigned, PACK>(__VA_ARGS__, (unsigned)units, f);  \
        else if (packed)                                                                   \
            function<unsigned long long, PACK>(__VA_ARGS__, (unsigned long long)units, f); \
        else if (small) function<unsigned, 1>(__VA_ARGS__, (unsigned)units, f);            \
        else function<unsigned long long, 1>(__VA_ARGS__, (unsigned long long)units, f);   \
    } while (0)

extern "C" __global__ void __launch_bounds__(256)
    max_pool(const T* x, T* y, void* winner, long long bytes, long long n, long long h, long long w,
             long long c, long long out_h, long long out_w, long long kernel_h, long long kernel_w,
             long long stride_h, long long stride_w, long long pad_h, long long pad_w) {
    FRAME_OF_ARGUMENTS;
    BY_UNITS(largest, c % PACK == 0 && aligned(x, y, winner), n * out_h * out_w * c, x, y, winner,
             (int)bytes);
}

// The first and the last window that contain a pixel, along one axis.
__device__ __forceinline__ int first_window(int pixel, int kernel, int stride) {
    return pixel < kernel ? 0 : (pixel - kernel) / stride + 1;
}
__device__ __forceinline__ int last_window(int pixel, int stride, int count) {
    int last = pixel / stride;
    return last < count ? last : count - 1;
}

// Adds the gradient of each window to the pixel of its maximum.
template <class I, int N>
__device__ __forceinline__ void to_winners(const T* grad, const void* winner, int bytes, T* result,
                                           I units, const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, h = (I)f.h,
      w = (I)f.w;
    int kernel_h = (int)f.kernel_h, kernel_w = (int)f.kernel_w, out_h = (int)f.out_h,
        out_w = (int)f.out_w;
    for (I u = start; u < units; u += step) {
        I pixel = u / lanes, lane = u - pixel * lanes, line = pixel / w, image = line / h;
        int row = (int)(line - image * h) + (int)f.pad_h,
            column = (int)(pixel - line * w) + (int)f.pad_w;
        A sums[N] = {};
        int last_i = last_window(row, (int)f.stride_h, out_h),
            last_j = last_window(column, (int)f.stride_w, out_w);
        for (int i = first_window(row, kernel_h, (int)f.stride_h); i <= last_i; ++i)
            for (int j = first_window(column, kernel_w, (int)f.stride_w); j <= last_j; ++j) {
                long long from =
                    (((long long)image * out_h + i) * out_w + j) * f.c + (long long)lane * N;
                unsigned mine = (unsigned)((row - i * (int)f.stride_h) * kernel_w + column -
                                           j * (int)f.stride_w);
                Pack<T, N> above = load<N>(grad + from);
                if (bytes == 1) {
                    Pack<unsigned char, N> places = load<N>((const unsigned char*)winner + from);
#pragma unroll
                    for (int k = 0; k < N; ++k)
                        sums[k] += places.at[k] == mine ? wide(above.at[k]) : (A)0;
                } else {
#pragma unroll
                    for (int k = 0; k < N; ++k)
                        sums[k] +=
                            winner_at(winner, bytes, from + k) == mine ? wide(above.at[k]) : (A)0;
                }
            }
        Pack<T, N> values;
#pragma unroll
        for (int k = 0; k < N; ++k) set(values.at[k], sums[k]);
        store<N>(result + (long long)u * N, values);
    }
}
extern "C" __global__ void __launch_bounds__(256)
    max_pool_grad(const T* grad, const void* winner, T* out, long long bytes, long long n,
                  long long h, long long w, long long c, long long out_h, long long out_w,
                  long long kernel_h, long long kernel_w, long long stride_h, long long stride_w,
                  long long pad_h, long long pad_w) {
    FRAME_OF_ARGUMENTS;
    BY_UNITS(to_winners, c % PACK == 0 && aligned(grad, out, winner), n * h * w * c, grad, winner,
             (int)bytes, out);
}

// The sum of each window, times a share; the border counts as 0.
template <class I, int N>
__device__ __forceinline__ void window_sums(const T* x, T* y, A share, I units, const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, out_h = (I)f.out_h,
      out_w = (I)f.out_w;
    int h = (int)f.h, w = (int)f.w;
    for (I u = start; u < units; u += step) {
        I pixel = u / lanes, lane = u - pixel * lanes, line = pixel / out_w, image = line / out_h;
        int top = (int)(line - image * out_h) * (int)f.stride_h - (int)f.pad_h,
            left = (int)(pixel - line * out_w) * (int)f.stride_w - (int)f.pad_w;
        int bottom = min(top + (int)f.kernel_h, h), right = min(left + (int)f.kernel_w, w);
        const T* from = x + (long long)image * h * w * f.c + (long long)lane * N;
        A sums[N] = {};
        for (int i = max(top, 0); i < bottom; ++i)
            for (int j = max(left, 0); j < right; ++j) {
                Pack<T, N> values = load<N>(from + ((long long)i * w + j) * f.c);
#pragma unroll
                for (int k = 0; k < N; ++k) sums[k] += wide(values.at[k]);
            }
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) set(result.at[k], sums[k] * share);
        store<N>(y + (long long)u * N, result);
    }
}
extern "C" __global__ void __launch_bounds__(256)
    avg_pool(const T* x, T* y, double share, long long n, long long h, long long w, long long c,
             long long out_h, long long out_w, long long kernel_h, long long kernel_w,
             long long stride_h, long long stride_w, long long pad_h, long long pad_w) {
    FRAME_OF_ARGUMENTS;
    BY_UNITS(window_sums, c % PACK == 0 && aligned(x, y), n * out_h * out_w * c, x, y, (A)share);
}

// The sum over the windows that contain a pixel, times a share.
template <class I, int N>
__device__ __forceinline__ void pixel_sums(const T* grad, T* to_x, A share, I units,
                                           const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, h = (I)f.h,
      w = (I)f.w;
    int out_h = (int)f.out_h, out_w = (int)f.out_w;
    for (I u = start; u < units; u += step) {
        I pixel = u / lanes, lane = u - pixel * lanes, line = pixel / w, image = line / h;
        int row = (int)(line - image * h) + (int)f.pad_h,
            column = (int)(pixel - line * w) + (int)f.pad_w;
        int last_i = last_window(row, (int)f.stride_h, out_h),
            last_j = last_window(column, (int)f.stride_w, out_w);
        A sums[N] = {};
        for (int i = first_window(row, (int)f.kernel_h, (int)f.stride_h); i <= last_i; ++i)
            for (int j = first_window(column, (int)f.kernel_w, (int)f.stride_w); j <= last_j; ++j) {
                Pack<T, N> above = load<N>(
                    grad + (((long long)image * out_h + i) * out_w + j) * f.c +
                    (long long)lane * N);
#pragma unroll
                for (int k = 0; k < N; ++k) sums[k] += wide(above.at[k]);
            }
        Pack<T, N> values;
#pragma unroll
        for (int k = 0; k < N; ++k) set(values.at[k], sums[k] * share);
        store<N>(to_x + (long long)u * N, values);
    }
}
extern "C" __global__ void __launch_bounds__(256)
    avg_pool_grad(const T* grad, T* to_x, double share, long long n, long long h, long long w,
                  long long c, long long out_h, long long out_w, long long kernel_h,
                  long long kernel_w, long long stride_h, long long stride_w, long long pad_h,
                  long long pad_w) {
    FRAME_OF_ARGUMENTS;
    BY_UNITS(pixel_sums, c % PACK == 0 && aligned(grad, to_x), n * h * w * c, grad, to_x,
             (A)share);
}

// The sums of whole images (rows, n), times a share: a block sums its columns of an image.
template <int N>
__device__ __forceinline__ void image_sums(const T* x, P* y, A share, A* shared, long long rows,
                                           long long n) {
    P* const result[1] = {y};
    sum_columns<N, 1>(rows, n, result, nullptr, shared, [&](long long) {
        return [=](long long i, long long, A(&sums)[1][N]) {
            Pack<T, N> values = load<N>(x + i);
#pragma unroll
            for (int k = 0; k < N; ++k) sums[0][k] += wide(values.at[k]) * share;
        };
    });
}
extern "C" __global__ void __launch_bounds__(256)
    whole_pool(const T* x, P* y, double share, long long rows, long long n, long long images) {
    __shared__ A shared[256 * PACK];
    bool packed = aligned(x) && n % PACK == 0;
    for (long long i = blockIdx.z; i < images; i += gridDim.z) {
        if (packed) image_sums<PACK>(x + i * rows * n, y + i * n, (A)share, shared, rows, n);
        else image_sums<1>(x + i * rows * n, y + i * n, (A)share, shared, rows, n);
        __syncthreads();
    }
}
