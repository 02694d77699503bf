// Dropout. The bits are those of nnmpi/backend/random.py, a function of key, row and column. So
// backward needs no saved mask: it is the same kernel on the gradient.

__device__ __forceinline__ unsigned mix(unsigned x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

template <int N>
__device__ __forceinline__ void drop(const T* x, T* y, const unsigned* columns, unsigned across,
                                     unsigned down, unsigned threshold, A factor, long long rows,
                                     long long n) {
    long long lanes = n / N, units = rows * lanes;
    for (long long u = first_of_grid(); u < units; u += size_of_grid()) {
        long long r = u / lanes, c = (u - r * lanes) * N;
        unsigned row = mix(mix((unsigned)r + down) + 0x9E3779B9u);
        Pack<T, N> values = load<N>(x + r * n + c);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            unsigned column = columns ? columns[c + k] : (unsigned)(c + k);
            bool stays = mix(mix(column + across) ^ row) >= threshold;
            set(values.at[k], wide(values.at[k]) * (stays ? factor : (A)0));
        }
        store<N>(y + r * n + c, values);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    dropout(const T* x, T* y, const unsigned* columns, const unsigned* key, long long across,
            long long down, long long threshold, double factor, long long rows, long long n) {
    if (key) across = key[0], down = key[1];  // a graph's, written before each launch
    if (aligned(x, y) && n % PACK == 0)
        drop<PACK>(x, y, columns, (unsigned)across, (unsigned)down, (unsigned)threshold, (A)factor,
                   rows, n);
    else
        drop<1>(x, y, columns, (unsigned)across, (unsigned)down, (unsigned)threshold, (A)factor,
                rows, n);
}
