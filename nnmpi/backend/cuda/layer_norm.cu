// Layer normalization, row by row. Forward saves no normalized rows: backward computes them again
// from the input and the rows' means, which saves writing an array. Without a shift (null) the means
// are 0: root mean square normalization.

template <bool BLOCK>
__device__ __forceinline__ void normalize(const T* x, const P* scale, const P* shift, A eps, T* y,
                                          A* inverse, A* mean, long long rows, long long n,
                                          A* shared) {
    int skew = aligned(x, scale, shift, y) && n % PACK == 0 ? 0 : -1;
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        const T* from = x + r * n;
        // Sums of differences from the first element: a constant row gives exactly 0, and a large
        // mean cancels no digits.
        A base = shift ? wide(from[0]) : (A)0, middle = 0;
        A sum = 0, squares = 0;
        if (shift) along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> values = load<N>(from + c);
#pragma unroll
            for (int k = 0; k < N; ++k) sum += wide(values.at[k]) - base;
        });
        if (shift) middle = combine<BLOCK>(sum, Add(), shared) / (A)n;
        along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> values = load<N>(from + c);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A difference = wide(values.at[k]) - base - middle;
                squares += difference * difference;
            }
        });
        A variance = combine<BLOCK>(squares, Add(), shared) / (A)n + eps;
        A factor = root(variance) / variance;  // NaN for infinity; 1 / root would hide it as 0
        if (threadIdx.x == 0) {
            inverse[r] = factor;
            mean[r] = base + middle;
        }
        along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> values = load<N>(from + c);
            Pack<P, N> times = load<N>(scale + c), plus = shift ? load<N>(shift + c) : times;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A unit = (wide(values.at[k]) - base - middle) * factor * (A)widen(times.at[k]);
                set(values.at[k], shift ? unit + (A)widen(plus.at[k]) : unit);
            }
            store<N>(y + r * n + c, values);
        });
    }
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_warps(const T* x, const P* scale, const P* shift, double eps, T* y, A* inverse,
                     A* mean, long long rows, long long n) {
    normalize<false>(x, scale, shift, (A)eps, y, inverse, mean, rows, n, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    layer_norm_blocks(const T* x, const P* scale, const P* shift, double eps, T* y, A* inverse,
                      A* mean, long long rows, long long n) {
    __shared__ A shared[32];
    normalize<true>(x, scale, shift, (A)eps, y, inverse, mean, rows, n, shared);
}

template <bool BLOCK>
__device__ __forceinline__ void input_gradient(const T* grad, const T* x, const A* inverse,
                                               const A* mean, const P* scale, T* to_x,
                                               bool centered, long long rows, long long n,
                                               A* shared) {
    int skew = aligned(grad, x, scale, to_x) && n % PACK == 0 ? 0 : -1;
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        long long row = r * n;
        A factor = inverse[r], less = mean[r];
        A total = 0, inner = 0;
        along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> above = load<N>(grad + row + c), values = load<N>(x + row + c);
            Pack<P, N> weights = load<N>(scale + c);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A product = wide(above.at[k]) * (A)widen(weights.at[k]);
                total += product;
                inner += product * ((wide(values.at[k]) - less) * factor);
            }
        });
        total = centered ? combine<BLOCK>(total, Add(), shared) / (A)n : (A)0;
        inner = combine<BLOCK>(inner, Add(), shared) / (A)n;
        along(0, n, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> above = load<N>(grad + row + c), values = load<N>(x + row + c);
            Pack<P, N> weights = load<N>(scale + c);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A normal = (wide(values.at[k]) - less) * factor;
                set(above.at[k],
                    (wide(above.at[k]) * (A)widen(weights.at[k]) - total - normal * inner) *
                        factor);
            }
            store<N>(to_x + row + c, above);
        });
    }
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_grad_warps(const T* grad, const T* x, const A* inverse, const A* mean,
                          const P* scale, T* to_x, long long centered, long long rows,
                          long long n) {
    input_gradient<false>(grad, x, inverse, mean, scale, to_x, centered != 0, rows, n, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    layer_norm_grad_blocks(const T* grad, const T* x, const A* inverse, const A* mean,
                           const P* scale, T* to_x, long long centered, long long rows,
                           long long n) {
    __shared__ A shared[32];
    input_gradient<true>(grad, x, inverse, mean, scale, to_x, centered != 0, rows, n, shared);
}

template <int N>
__device__ __forceinline__ void parameter_sums(const T* grad, const T* x, const A* inverse,
                                               const A* mean, P* to_scale, P* to_shift, A* partial,
                                               A* shared, long long rows, long long n) {
    P* const result[2] = {to_scale, to_shift};
    sum_columns<N, 2>(rows, n, result, partial, shared, [&](long long) {
        return [=](long long i, long long r, A(&sums)[2][N]) {
            Pack<T, N> above = load<N>(grad + i), values = load<N>(x + i);
            A less = mean[r], factor = inverse[r];
#pragma unroll
            for (int k = 0; k < N; ++k) {
                sums[0][k] += wide(above.at[k]) * ((wide(values.at[k]) - less) * factor);
                sums[1][k] += wide(above.at[k]);
            }
        };
    });
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_sums(const T* grad, const T* x, const A* inverse, const A* mean, P* to_scale,
                    P* to_shift, A* partial, long long rows, long long n) {
    __shared__ A shared[256 * PACK];
    if (aligned(grad, x) && n % PACK == 0)
        parameter_sums<PACK>(grad, x, inverse, mean, to_scale, to_shift, partial, shared, rows,
                             n);
    else
        parameter_sums<1>(grad, x, inverse, mean, to_scale, to_shift, partial, shared, rows, n);
}

extern "C" __global__ void __launch_bounds__(256)
    layer_norm_total(const A* partial, P* to_scale, P* to_shift, long long parts, long long n) {
    NNMPI_COLUMN_TOTALS(2, to_scale, to_shift);
}
