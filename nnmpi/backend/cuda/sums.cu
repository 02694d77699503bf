// Sums over all elements of an array, of losses or of squares. Blocks add up in float64, and a second
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

// Of one array: total += the sum; of losses: mean = the sum times a share.
extern "C" __global__ void __launch_bounds__(1024)
    sum_total(const double* partial, A* mean, double* total, double share, long long parts) {
    __shared__ double shared[1024];
    double sum = 0;
    for (long long p = threadIdx.x; p < parts; p += blockDim.x) sum += partial[p];
    sum = sum_of_block(sum, shared);
    if (threadIdx.x) return;
    if (mean) set(*mean, (A)(sum * share));
    if (total) *total += sum;
}

extern "C" __global__ void __launch_bounds__(256)
    squares(const T* x, double* partial, long long n) {
    __shared__ double shared[256];
    double sum = 0;
    for_each(
        n,
        [&](T& at) {
            double value = widen(at);
            sum += value * value;
        },
        in(x));
    sum = sum_of_block(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// A loss of one element and its derivatives; see nnmpi/ops/loss.py for the formulas.
struct Squared {
    __device__ __forceinline__ A value(A x, A t) const { return (x - t) * (x - t); }
    __device__ __forceinline__ A slope(A x, A t) const { return 2 * (x - t); }
    __device__ __forceinline__ A by_target(A x, A t) const { return -slope(x, t); }
};
struct Absolute {
    __device__ __forceinline__ A value(A x, A t) const { return x < t ? t - x : x - t; }
    __device__ __forceinline__ A slope(A x, A t) const {
        A d = x - t;
        return d > 0 ? (A)1 : d < 0 ? (A)-1 : d;  // of NaN: NaN
    }
    __device__ __forceinline__ A by_target(A x, A t) const { return -slope(x, t); }
};
struct Huber {
    A delta;
    __device__ __forceinline__ A slope(A x, A t) const {
        A d = x - t;
        return d > delta ? delta : d < -delta ? -delta : d;
    }
    __device__ __forceinline__ A value(A x, A t) const {
        A c = slope(x, t);
        return c * (x - t - c / 2);
    }
    __device__ __forceinline__ A by_target(A x, A t) const { return -slope(x, t); }
};
struct OfLogit {
    __device__ __forceinline__ A value(A x, A t) const {
        return relu(x) - x * t + logarithm_plus_1(exponential(x < 0 ? x : -x));
    }
    __device__ __forceinline__ A slope(A x, A t) const { return sigmoid_of(x) - t; }
    __device__ __forceinline__ A by_target(A x, A) const { return -x; }
};

// Calls f with the loss of this number in `LOSSES` of nnmpi/backend/plain.py.
template <class F> __device__ __forceinline__ void with_loss(long long form, A delta, F f) {
    switch (form) {
        case 0: return f(Squared());
        case 1: return f(Absolute());
        case 2: return f(Huber{delta});
        default: return f(OfLogit());
    }
}

// Writes each loss; or without `losses` each block's sum.
extern "C" __global__ void __launch_bounds__(256)
    loss(const T* x, const T* target, A* losses, double* partial, long long form, double delta,
         long long n) {
    __shared__ double shared[256];
    double sum = 0;
    with_loss(form, (A)delta, [&](auto of) {
        if (losses)
            for_each(
                n, [=](T& at, T& to, A& loss) { loss = of.value(wide(at), wide(to)); }, in(x),
                in(target), out(losses));
        else
            for_each(
                n, [&](T& at, T& to) { sum += of.value(wide(at), wide(to)); }, in(x), in(target));
    });
    if (losses) return;
    sum = sum_of_block(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// An array for `for_each` that may be missing.
template <class X> struct Maybe {
    X* at;
    template <int N> __device__ __forceinline__ Pack<X, N> get(long long) const { return {}; }
    template <int N>
    __device__ __forceinline__ void put(long long i, const Pack<X, N>& values) const {
        if (at) store<N>(at + i, values);
    }
};
// One number for all elements, or one for each.
struct Above {
    const A* at;
    bool each;
    template <int N> __device__ __forceinline__ Pack<A, N> get(long long i) const {
        if (each) return load<N>(at + i);
        Pack<A, N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) result.at[k] = *at;
        return result;
    }
    template <int N> __device__ __forceinline__ void put(long long, const Pack<A, N>&) const {}
};

extern "C" __global__ void __launch_bounds__(256)
    loss_grad(const T* x, const T* target, const A* grad, T* to_x, T* to_target, long long form,
              double delta, double share, long long each, long long n) {
    A part = (A)share;
    with_loss(form, (A)delta, [=](auto of) {
        for_each(
            n,
            [=](T& at, T& to, A& above, T& first, T& second) {
                A value = wide(at), other = wide(to), factor = above * part;
                set(first, factor * of.slope(value, other));
                set(second, factor * of.by_target(value, other));
            },
            in(x), in(target), Above{grad, each != 0}, Maybe<T>{to_x}, Maybe<T>{to_target});
    });
}
