// Sums of squares over all elements of an array. Blocks add up in float64, and a second
// kernel adds up the blocks: in an order that depends on the sizes alone.

// Adds up a number of each thread; thread 0 gets the sum. The block has a power of two of threads.
__device__ __forceinline__ double sum_of_block(double value, double* shared) {
    int mine = threadIdx.x;
    shared[mine] = value;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (mine < half) shared[mine] += shared[mine + half];
        __syncthreads();
    }
    return shared[0];
}

// total += the sum of the blocks.
extern "C" __global__ void __launch_bounds__(1024)
    sum_total(const double* partial, double* total, long long parts) {
    __shared__ double shared[1024];
    double sum = 0;
    for (long long p = threadIdx.x; p < parts; p += blockDim.x) sum += partial[p];
    sum = sum_of_block(sum, shared);
    if (threadIdx.x == 0) *total += sum;
}

extern "C" __global__ void __launch_bounds__(256)
    squares(const T* x, double* partial, long long n) {
    __shared__ double shared[256];
    double sum = 0;
    over_packs(n, aligned(x), [&](long long i, auto count) {
        constexpr int N = decltype(count)::value;
        Pack<T, N> values = load<N>(x + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            double value = widen(values.at[k]);
            sum += value * value;
        }
    });
    sum = sum_of_block(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}
