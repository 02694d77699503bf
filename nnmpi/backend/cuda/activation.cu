// Activations, elementwise or after a linear layer's bias; sums and products of two arrays. GELU is x times
// the normal distribution's cumulative function, exact and in GPT-2's tanh form.

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

// An activation: its value at x, and its derivative from what is kept, x or the value.
struct Rectified {  // keeps the value
    __device__ __forceinline__ A value(A x) const { return relu(x); }
    __device__ __forceinline__ A chain(A grad, A y) const { return y > 0 ? grad : (A)0; }
};
struct Leaky {
    A below;
    __device__ __forceinline__ A value(A x) const { return x > 0 ? x : below * x; }
    __device__ __forceinline__ A chain(A grad, A x) const { return x > 0 ? grad : below * grad; }
};
struct Sigmoid {  // keeps the value
    __device__ __forceinline__ A value(A x) const { return sigmoid_of(x); }
    __device__ __forceinline__ A chain(A grad, A y) const { return grad * (y * (1 - y)); }
};
struct Tanh {  // keeps the value
    __device__ __forceinline__ A value(A x) const { return hyperbolic_tangent(x); }
    __device__ __forceinline__ A chain(A grad, A y) const { return grad * (1 - y * y); }
};
struct Silu {
    __device__ __forceinline__ A value(A x) const { return x * sigmoid_of(x); }
    __device__ __forceinline__ A chain(A grad, A x) const {
        A s = sigmoid_of(x);
        return grad * (s + x * s * (1 - s));
    }
};
template <class F> struct Smooth {
    __device__ __forceinline__ A value(A x) const { return F()(x).value; }
    __device__ __forceinline__ A chain(A grad, A x) const { return grad * F()(x).slope; }
};

// Calls f with the activation of this number in `Activation` of nnmpi/backend/plain.py.
template <class F>
__device__ __forceinline__ void with_activation(long long form, A number, F f) {
    switch (form) {
        case 0: return f(Rectified());
        case 1: return f(Leaky{number});
        case 2: return f(Sigmoid());
        case 3: return f(Tanh());
        case 4: return f(Silu());
        case 5: return f(Smooth<Exact>());
        default: return f(Smooth<ByTanh>());
    }
}

extern "C" __global__ void __launch_bounds__(256)
    activate(const T* x, T* y, long long form, double number, long long n) {
    with_activation(form, (A)number, [=](auto of) {
        for_each(
            n, [=](T& from, T& to) { set(to, of.value(wide(from))); }, in(x), out(y));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    activate_grad(const T* grad, const T* kept, T* to_x, long long form, double number,
                  long long n) {
    with_activation(form, (A)number, [=](auto of) {
        for_each(
            n,
            [=](T& above, T& from, T& to) { set(to, of.chain(wide(above), wide(from))); },
            in(grad), in(kept), out(to_x));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    add(const T* a, const T* b, T* sum, long long n) {
    for_each(
        n, [=](T& first, T& second, T& to) { set(to, wide(first) + wide(second)); }, in(a), in(b),
        out(sum));
}
extern "C" __global__ void __launch_bounds__(256)
    multiply(const T* a, const T* b, T* product, long long n) {
    for_each(
        n, [=](T& first, T& second, T& to) { set(to, wide(first) * wide(second)); }, in(a), in(b),
        out(product));
}
extern "C" __global__ void __launch_bounds__(256)
    add_low(const P* a, const T* b, P* sum, long long n) {
    for_each(
        n, [=](P& first, T& second, P& to) { set(to, (A)widen(first) + wide(second)); }, in(a),
        in(b), out(sum));
}
