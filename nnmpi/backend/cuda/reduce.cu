// The sum of squares, which is added up in double.

__device__ __forceinline__ double block_sum(double value, double* shared) {
#pragma unroll
    for (int by = 16; by; by /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, by);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i) value += shared[i];
    return value;
}

// Of 256 threads. Which thread adds what depends on the number of elements and blocks alone; an array that is not
// aligned is read element by element in the same order.
extern "C" __global__ void __launch_bounds__(256) squares(const T* x, double* sums, long long n, long long add) {
    __shared__ double shared[8];
    double sum = 0;
    bool packed = aligned(x);
    long long packs = n / PACK;
    for (long long i = first_of_grid(); i < packs; i += size_of_grid()) {
        Pack<T, PACK> values;
        if (packed) values = load<PACK>(x + i * PACK);
        else
            for (int k = 0; k < PACK; ++k) values.at[k] = x[i * PACK + k];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            double value = (double)widen(values.at[k]);
            sum += value * value;
        }
    }
    for (long long i = packs * PACK + first_of_grid(); i < n; i += size_of_grid()) sum += (double)widen(x[i]) * (double)widen(x[i]);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = gridDim.x == 1 && add ? sums[0] + sum : sum;
}

extern "C" __global__ void __launch_bounds__(256) squares_total(const double* sums, double* out, long long parts, long long add) {
    __shared__ double shared[8];
    double sum = 0;
    for (long long i = threadIdx.x; i < parts; i += 256) sum += sums[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *out = add ? *out + sum : sum;
}
