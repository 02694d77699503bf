// Copies an array, each of whose axes may have any stride, and converts its elements.

template <class X, class Y> struct Convert {
    static __device__ __forceinline__ Y of(X x) { return narrow<Y>((A)widen(x)); }
};
template <class X> struct Convert<X, X> {  // the same bits, also a NaN's
    static __device__ __forceinline__ X of(X x) { return x; }
};

constexpr int AXES = 6;
struct Axes {
    long long length[AXES], from[AXES], to[AXES];  // strides in elements
};

// Copies N elements of the last axis at a time.
template <class I, int N>
__device__ __forceinline__ void copy_packs(const P* x, T* y, I units, const Axes& axes) {
    for (I u = (I)first_of_grid(); u < units; u += (I)size_of_grid()) {
        I left = u;
        long long from = 0, to = 0;
#pragma unroll
        for (int a = AXES - 1; a >= 0; --a) {
            I length = (I)(a == AXES - 1 ? axes.length[a] / N : axes.length[a]);
            I rest = length == 1 ? left : left / length;
            long long at = (long long)(left - rest * length) * (a == AXES - 1 ? N : 1);
            from += at * axes.from[a];
            to += at * axes.to[a];
            left = rest;
        }
        Pack<P, N> values = load<N>(x + from);
        Pack<T, N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) result.at[k] = Convert<P, T>::of(values.at[k]);
        store<N>(y + to, result);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    copy(const P* x, T* y, long long n, long long l0, long long l1, long long l2, long long l3,
         long long l4, long long l5, long long x0, long long x1, long long x2, long long x3,
         long long x4, long long x5, long long y0, long long y1, long long y2, long long y3,
         long long y4, long long y5) {
    if (l5 == n && x5 == 1 && y5 == 1) {
        over_packs(n, aligned(x, y), [&](long long i, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<P, N> values = load<N>(x + i);
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; ++k) result.at[k] = Convert<P, T>::of(values.at[k]);
            store<N>(y + i, result);
        });
        return;
    }
    Axes axes = {{l0, l1, l2, l3, l4, l5}, {x0, x1, x2, x3, x4, x5}, {y0, y1, y2, y3, y4, y5}};
    bool packed = aligned(x, y) && x5 == 1 && y5 == 1 && l5 % PACK == 0 &&
                  (x0 | x1 | x2 | x3 | x4 | y0 | y1 | y2 | y3 | y4) % PACK == 0;
    if (n >= NNMPI_SMALL) {
        if (packed) copy_packs<long long, PACK>(x, y, n / PACK, axes);
        else copy_packs<long long, 1>(x, y, n, axes);
    } else {
        if (packed) copy_packs<unsigned, PACK>(x, y, (unsigned)(n / PACK), axes);
        else copy_packs<unsigned, 1>(x, y, (unsigned)n, axes);
    }
}
