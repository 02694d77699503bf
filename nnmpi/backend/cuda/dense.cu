// Kernels before and after the matrix products of dense layers: bias, ReLU, and sums over the rows.

template <int N, bool RELU>
__device__ __forceinline__ void bias_rows(T* y, const P* bias, long long rows, long long n) {
    over_columns<N>(rows, n, [&](long long c) {
        Pack<P, N> added = load<N>(bias + c);
        return [=](long long i) {
            Pack<T, N> values = load<N>(y + i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A sum = wide(values.at[k]) + (A)widen(added.at[k]);
                set(values.at[k], RELU ? relu(sum) : sum);
            }
            store<N>(y + i, values);
        };
    });
}

extern "C" __global__ void __launch_bounds__(256)
    bias_relu(T* y, const P* bias, long long rows, long long n) {
    if (aligned(y, bias) && n % PACK == 0) bias_rows<PACK, true>(y, bias, rows, n);
    else bias_rows<1, true>(y, bias, rows, n);
}

extern "C" __global__ void __launch_bounds__(256)
    add_bias(T* y, const P* bias, long long rows, long long n) {
    if (aligned(y, bias) && n % PACK == 0) bias_rows<PACK, false>(y, bias, rows, n);
    else bias_rows<1, false>(y, bias, rows, n);
}

// out = grad where saved > 0, or grad * saved. The sums are those of the rounded values in out.
template <int N, bool RELU>
__device__ __forceinline__ void grad_bias(const T* grad, const T* saved, T* out, P* to_bias,
                                          A* partial, A* shared, long long rows, long long n) {
    P* const result[1] = {to_bias};
    sum_columns<N, 1>(rows, n, result, partial, shared, [&](long long) {
        return [=](long long i, long long, A(&sums)[1][N]) {
            Pack<T, N> above = load<N>(grad + i), below = load<N>(saved + i);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A value = wide(above.at[k]), other = wide(below.at[k]);
                set(above.at[k], RELU ? (other > 0 ? value : (A)0) : value * other);
                sums[0][k] += wide(above.at[k]);
            }
            store<N>(out + i, above);
        };
    });
}

extern "C" __global__ void __launch_bounds__(256)
    relu_grad_bias(const T* grad, const T* y, T* out, P* to_bias, A* partial, long long rows,
                   long long n) {
    __shared__ A shared[256 * PACK];
    if (aligned(grad, y, out) && n % PACK == 0)
        grad_bias<PACK, true>(grad, y, out, to_bias, partial, shared, rows, n);
    else grad_bias<1, true>(grad, y, out, to_bias, partial, shared, rows, n);
}

extern "C" __global__ void __launch_bounds__(256)
    slope_grad_bias(const T* grad, const T* slope, T* out, P* to_bias, A* partial, long long rows,
                    long long n) {
    __shared__ A shared[256 * PACK];
    if (aligned(grad, slope, out) && n % PACK == 0)
        grad_bias<PACK, false>(grad, slope, out, to_bias, partial, shared, rows, n);
    else grad_bias<1, false>(grad, slope, out, to_bias, partial, shared, rows, n);
}

template <int N>
__device__ __forceinline__ void only_sum(const T* x, P* out, A* partial, A* shared, long long rows,
                                         long long n) {
    P* const result[1] = {out};
    sum_columns<N, 1>(rows, n, result, partial, shared, [&](long long) {
        return [=](long long i, long long, A(&sums)[1][N]) {
            Pack<T, N> values = load<N>(x + i);
#pragma unroll
            for (int k = 0; k < N; ++k) sums[0][k] += wide(values.at[k]);
        };
    });
}

extern "C" __global__ void __launch_bounds__(256)
    column_sum(const T* x, P* out, A* partial, long long rows, long long n) {
    __shared__ A shared[256 * PACK];
    if (aligned(x) && n % PACK == 0) only_sum<PACK>(x, out, partial, shared, rows, n);
    else only_sum<1>(x, out, partial, shared, rows, n);
}

extern "C" __global__ void __launch_bounds__(256)
    column_total(const A* partial, P* out, long long parts, long long n) {
    NNMPI_COLUMN_TOTALS(1, out);
}
