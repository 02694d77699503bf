// Convolution as a product of matrices: the windows of channels-last images as rows, and the gradient's way back.
//
//   columns (images out_h out_w, kernel_h kernel_w c): row (image, i, j), column (ki, kj, channel)

struct Frame {
    long long h, w, all, first, c, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, spread_h, spread_w;
};

template <class I, int N> __device__ __forceinline__ void gather(const T* x, T* columns, I units, const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, places = (I)(f.kernel_h * f.kernel_w);
    I out_h = (I)f.out_h, out_w = (I)f.out_w, kernel_w = (I)f.kernel_w;
    for (I u = start; u < units; u += step) {
        I window = u / lanes, lane = u - window * lanes, pixel = window / places, place = window - pixel * places;
        I line = pixel / out_w, image = line / out_h, ki = place / kernel_w;
        long long i = (long long)(line - image * out_h) * f.stride_h + (long long)ki * f.spread_h - f.pad_h;
        long long j = (long long)(pixel - line * out_w) * f.stride_w + (long long)(place - ki * kernel_w) * f.spread_w - f.pad_w;
        Pack<T, N> values = {};
        if (i >= 0 && i < f.h && j >= 0 && j < f.w)
            values = load<N>(x + (((long long)image * f.h + i) * f.w + j) * f.all + f.first + (long long)lane * N);
        store<N>(columns + (long long)u * N, values);
    }
}

// Each pixel adds up what the windows that it lies in have for it, in the order of the places.
template <class I, int N> __device__ __forceinline__ void scatter(const T* columns, T* x, I units, const Frame& f) {
    I start = (I)first_of_grid(), step = (I)size_of_grid(), lanes = (I)f.c / N, h = (I)f.h, w = (I)f.w;
    int kernel_h = (int)f.kernel_h, kernel_w = (int)f.kernel_w, stride_h = (int)f.stride_h, stride_w = (int)f.stride_w;
    for (I u = start; u < units; u += step) {
        I pixel = u / lanes, lane = u - pixel * lanes, line = pixel / w, image = line / h;
        int row = (int)(line - image * h) + (int)f.pad_h, column = (int)(pixel - line * w) + (int)f.pad_w;
        A sums[N] = {};
        for (int ki = 0; ki < kernel_h; ++ki) {
            int down = row - ki * (int)f.spread_h, i = down / stride_h;
            if (down < 0 || i * stride_h != down || i >= f.out_h) continue;
            for (int kj = 0; kj < kernel_w; ++kj) {
                int right = column - kj * (int)f.spread_w, j = right / stride_w;
                if (right < 0 || j * stride_w != right || j >= f.out_w) continue;
                long long window = (((long long)image * f.out_h + i) * f.out_w + j) * kernel_h * kernel_w + ki * kernel_w + kj;
                Pack<T, N> values = load<N>(columns + window * f.c + (long long)lane * N);
#pragma unroll
                for (int k = 0; k < N; ++k) sums[k] += wide(values.at[k]);
            }
        }
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) set(result.at[k], sums[k]);
        store<N>(x + (long long)pixel * f.all + f.first + (long long)lane * N, result);
    }
}

// Runs a function by packs where they suit, and by 32-bit numbers where these do.
#define BY_UNITS(function, elements, from, to)                                                                   \
    do {                                                                                                         \
        const Frame f = {h, w, all, first, c, out_h, out_w, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, spread_h, spread_w}; \
        bool packed = c % PACK == 0 && all % PACK == 0 && first % PACK == 0 && aligned(x, columns);              \
        long long units = packed ? (elements) / PACK : (elements);                                               \
        bool small = units + size_of_grid() < NNMPI_SMALL;                                                      \
        if (packed && small) function<unsigned, PACK>(from, to, (unsigned)units, f);                             \
        else if (packed) function<unsigned long long, PACK>(from, to, (unsigned long long)units, f);             \
        else if (small) function<unsigned, 1>(from, to, (unsigned)units, f);                                     \
        else function<unsigned long long, 1>(from, to, (unsigned long long)units, f);                            \
    } while (0)

extern "C" __global__ void __launch_bounds__(256) im2col(const T* x, T* columns, long long n, long long h, long long w, long long all,
    long long first, long long c, long long out_h, long long out_w, long long kernel_h, long long kernel_w, long long stride_h, long long stride_w,
    long long pad_h, long long pad_w, long long spread_h, long long spread_w) {
    BY_UNITS(gather, n * out_h * out_w * kernel_h * kernel_w * c, x, columns);
}

extern "C" __global__ void __launch_bounds__(256) col2im(const T* columns, T* x, long long n, long long h, long long w, long long all,
    long long first, long long c, long long out_h, long long out_w, long long kernel_h, long long kernel_w, long long stride_h, long long stride_w,
    long long pad_h, long long pad_w, long long spread_h, long long spread_w) {
    BY_UNITS(scatter, n * h * w * c, columns, x);
}
