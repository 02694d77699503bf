// GELU, x times the normal distribution's cumulative function, exact and in GPT-2's tanh form.

struct Gelu {
    A value, slope;
};

// x s, s = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct ByTanh {
    __device__ __forceinline__ Gelu operator()(A x) const {
        const A minus_two_c = (A)-1.5957691216057308, cubic = (A)0.044715;
        A square = x * x;
        A s = 1 / (1 + exponential(minus_two_c * (x + cubic * x * square)));
        A value = x * s;
        // s == 0 if e^-2u is infinite: then 0, since 0 times an infinite square would be NaN
        A steep = s == 0 ? (A)0 : s - value * (1 - s) * minus_two_c * (1 + 3 * cubic * square);
        return {value, s == 1 ? (A)1 : steep};
    }
};

// x Phi(x); the derivative is Phi(x) + x density(x)
struct Exact {
    __device__ __forceinline__ Gelu operator()(A x) const {
        A phi = (A)0.5 * (1 + error_function(x * (A)0.70710678118654752));
        return {x * phi, phi + x * (A)0.39894228040143268 * exponential((A)-0.5 * x * x)};
    }
};

template <int N, class F>
__device__ __forceinline__ void with_bias(T* x, const P* bias, T* slope, long long rows,
                                          long long n, F f) {
    over_columns<N>(rows, n, [&](long long c) {
        Pack<P, N> added = load<N>(bias + c);
        return [=](long long i) {
            Pack<T, N> values = load<N>(x + i), steep;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                Gelu result = f(wide(values.at[k]) + (A)widen(added.at[k]));
                set(values.at[k], result.value);
                set(steep.at[k], result.slope);
            }
            store<N>(x + i, values);
            store<N>(slope + i, steep);
        };
    });
}

extern "C" __global__ void __launch_bounds__(256)
    bias_gelu_tanh_slope(T* x, const P* bias, T* slope, long long rows, long long n) {
    if (aligned(x, bias, slope) && n % PACK == 0)
        with_bias<PACK>(x, bias, slope, rows, n, ByTanh());
    else with_bias<1>(x, bias, slope, rows, n, ByTanh());
}
extern "C" __global__ void __launch_bounds__(256)
    bias_gelu_slope(T* x, const P* bias, T* slope, long long rows, long long n) {
    if (aligned(x, bias, slope) && n % PACK == 0) with_bias<PACK>(x, bias, slope, rows, n, Exact());
    else with_bias<1>(x, bias, slope, rows, n, Exact());
}
