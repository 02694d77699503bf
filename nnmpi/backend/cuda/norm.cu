// Normalization by channels, of x (samples, rows, n) with a channel in each column: a batch is one
// sample, and of groups of channels each image is one. Every column of a sample has a mean and a
// variance. The mean is kept as its distance from the column's first element, so that a mean that
// is large beside the deviation cancels no digits.

// The first row of a block's rows, which are consecutive, and the number of them.
struct Share {
    long long first, count;
};
__device__ __forceinline__ Share share_of(long long block, long long blocks, long long rows) {
    long long each = (rows + blocks - 1) / blocks, first = block * each;
    return {first, first >= rows ? 0 : rows - first < each ? rows - first : each};
}

// ---------------------------------------------------------------- means and variances

__device__ __forceinline__ void keep_moments(const T* x, P* offset, P* variance, P* mean,
                                             long long c, A middle, A squares, long long rows) {
    set(offset[c], middle);
    set(variance[c], squares / (A)rows);
    set(mean[c], wide(x[c]) + middle);
}

// Welford's updates in a thread, and the formula of Chan, Golub and LeVeque over the block: both
// keep the digits of a variance that is small beside the mean's square.
template <int N>
__device__ __forceinline__ void block_moments(const T* x, P* offset, P* variance, P* mean,
                                              A* partial, A (*shared)[256 * N], long long rows,
                                              long long n) {
    int width = blockDim.x, mine = threadIdx.y * width + threadIdx.x;
    Share share = share_of(blockIdx.y, gridDim.y, rows);
    for (long long from = blockIdx.x * (long long)width * N; from < n; from += size_of_grid() * N) {
        long long c = from + threadIdx.x * N;
        A base[N], middle[N] = {}, squares[N] = {}, count = 0;
        if (c < n) {
            Pack<T, N> first = load<N>(x + c);
#pragma unroll
            for (int k = 0; k < N; ++k) base[k] = wide(first.at[k]);
            const T* at = x + share.first * n + c;
#pragma unroll 4
            for (long long r = threadIdx.y; r < share.count; r += blockDim.y) {
                Pack<T, N> values = load<N>(at + r * n);
                count += 1;
                A part = 1 / count;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    A value = wide(values.at[k]) - base[k], away = value - middle[k];
                    middle[k] += away * part;
                    squares[k] += away * (value - middle[k]);
                }
            }
        }
        for (int half = blockDim.y / 2; half; half /= 2) {
            if ((int)threadIdx.y >= half && (int)threadIdx.y < 2 * half) {
                shared[2][mine] = count;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    shared[0][k * 256 + mine] = middle[k];
                    shared[1][k * 256 + mine] = squares[k];
                }
            }
            __syncthreads();
            int other = mine + half * width;
            if ((int)threadIdx.y < half && shared[2][other] > 0) {
                A more = shared[2][other], total = count + more, part = more / total;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    A away = shared[0][k * 256 + other] - middle[k];
                    middle[k] += away * part;
                    squares[k] += shared[1][k * 256 + other] + away * away * count * part;
                }
                count = total;
            }
        }  // no second barrier, as in `sum_columns`
        if (threadIdx.y || c >= n) continue;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (gridDim.y > 1) {
                partial[blockIdx.y * 2ll * n + c + k] = middle[k];
                partial[(blockIdx.y * 2ll + 1) * n + c + k] = squares[k];
            } else
                keep_moments(x, offset, variance, mean, c + k, middle[k], squares[k], rows);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    moments(const T* x, P* offset, P* variance, P* mean, A* partial, long long rows, long long n,
            long long samples) {
    __shared__ A shared[3][256 * PACK];
    bool packed = aligned(x) && n % PACK == 0;
    over_samples(samples, [&](long long s) {
        long long i = s * rows * n, c = s * n;
        A* parts = partial + c * 2 * gridDim.y;
        if (packed)
            block_moments<PACK>(x + i, offset + c, variance + c, mean + c, parts, shared, rows, n);
        else
            block_moments<1>(x + i, offset + c, variance + c, mean + c, parts,
                             reinterpret_cast<A(*)[256]>(shared), rows, n);
    });
}

// Over the blocks, in float64: first the mean, then what their means are away from it.
extern "C" __global__ void __launch_bounds__(1024)
    moments_total(const T* x, P* offset, P* variance, P* mean, const A* partial, long long parts,
                  long long rows, long long n, long long samples) {
    __shared__ double shared[32][33];
    long long c = blockIdx.x * 32ll + threadIdx.x;
    auto sum = [&](double value) {  // over y
        shared[threadIdx.y][threadIdx.x] = value;
        __syncthreads();
        value = 0;
        for (int i = 0; i < 32; ++i) value += shared[i][threadIdx.x];
        __syncthreads();
        return value;
    };
    over_samples(samples, [&](long long s) {
        long long i = s * rows * n, column = s * n;
        const A* from = partial + column * 2 * parts + c;
        double first = 0, second = 0;
        if (c < n)
            for (long long p = threadIdx.y; p < parts; p += 32)
                first += (double)share_of(p, parts, rows).count * from[2 * p * n];
        double middle = sum(first) / (double)rows;
        if (c < n)
            for (long long p = threadIdx.y; p < parts; p += 32) {
                double away = from[2 * p * n] - middle;
                second += from[(2 * p + 1) * n] +
                          (double)share_of(p, parts, rows).count * away * away;
            }
        second = sum(second);
        if (threadIdx.y == 0 && c < n)
            keep_moments(x + i, offset + column, variance + column, mean + column, c, (A)middle,
                         (A)second, rows);
    });
}

// Calls f(first column, distance of another column's first element from that one's) in one warp for
// each group of `count` columns.
template <class F>
__device__ __forceinline__ void over_groups(long long samples, long long n, long long count, F f) {
    long long groups = n / count;
    for (long long g = first_row<false>(); g < samples * groups; g += row_step<false>())
        f(g / groups, g / groups * n + g % groups * count);
}

// The columns of a group get the group's mean and variance in place of their own.
extern "C" __global__ void __launch_bounds__(256)
    group_moments(const T* x, P* offset, P* variance, long long rows, long long n,
                  long long samples, long long count) {
    over_groups(samples, n, count, [&](long long sample, long long first) {
        const T* at = x + sample * (rows - 1) * n + first;  // the sample's first row
        A base = wide(at[0]), sum = 0, squares = 0;
        for (long long c = threadIdx.x; c < count; c += 32)
            sum += wide(at[c]) - base + (A)widen(offset[first + c]);
        A middle = combine<false>(sum, Add(), (A*)nullptr) / (A)count;
        for (long long c = threadIdx.x; c < count; c += 32) {
            A away = wide(at[c]) - base + (A)widen(offset[first + c]) - middle;
            squares += (A)widen(variance[first + c]) + away * away;
        }
        squares = combine<false>(squares, Add(), (A*)nullptr) / (A)count;
        for (long long c = threadIdx.x; c < count; c += 32) {
            set(offset[first + c], middle - (wide(at[c]) - base));
            set(variance[first + c], squares);
        }
    });
}

// The means over a group's columns of scale times the sums of `norm_sums`.
extern "C" __global__ void __launch_bounds__(256)
    group_sums(const P* shifts, const P* slopes, const P* scale, P* center, P* slope, long long n,
               long long samples, long long count) {
    over_groups(samples, n, count, [&](long long, long long first) {
        A sums[2] = {};
        for (long long c = threadIdx.x; c < count; c += 32) {
            A factor = (A)widen(scale[(first + c) % n]);
            sums[0] += factor * (A)widen(shifts[first + c]);
            sums[1] += factor * (A)widen(slopes[first + c]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
            sums[m] = combine<false>(sums[m], Add(), (A*)nullptr) / (A)count;
        for (long long c = threadIdx.x; c < count; c += 32) {
            set(center[first + c], sums[0]);
            set(slope[first + c], sums[1]);
        }
    });
}
