// Softmax along rows, alone (of attention's scores) and with the cross-entropy. One pass computes
// both the maximum and the sum: Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018.

// The maximum of elements, and the sum of e^(element - maximum). A NaN makes the sum NaN.
struct Powers {
    A top, sum;

    template <int N> __device__ __forceinline__ void take(const A (&values)[N]) {
        A higher = top, rest = 0;
#pragma unroll
        for (int k = 0; k < N; ++k) higher = values[k] > higher ? values[k] : higher;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (values[k] != -infinity()) rest += exp(values[k] - higher);
        }
        sum = (top == higher ? sum : sum * exp(top - higher)) + rest;
        top = higher;
    }

    template <bool BLOCK> __device__ __forceinline__ void join(A* shared) {
        A higher = combine<BLOCK>(top, Largest(), shared);
        sum = combine<BLOCK>(top == higher ? sum : sum * exp(top - higher), Add(), shared);
        top = higher;
    }
};

template <bool BLOCK>
__device__ __forceinline__ void softmax_rows(const P* x, T* y, A scale, long long rows, long long n,
                                             long long queries, bool causal, A* shared) {
    bool packed = aligned(x, y);
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        long long seen = causal ? r % queries + 1 + n - queries : n;
        seen = seen < 0 ? 0 : seen;
        int skew = packed ? (int)(r * n % PACK) : -1;
        const P* from = x + r * n;
        T* to = y + r * n;
        Powers powers = {-infinity(), 0};
        along(0, seen, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<P, N> values = load<N>(from + c);
            A scaled[N];
#pragma unroll
            for (int k = 0; k < N; ++k) scaled[k] = (A)widen(values.at[k]) * scale;
            powers.take(scaled);
        });
        powers.join<BLOCK>(shared);
        A share = 1 / powers.sum;
        along(0, seen, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<P, N> values = load<N>(from + c);
            Pack<T, N> result;
#pragma unroll
            for (int k = 0; k < N; ++k)
                set(result.at[k],
                    exp((A)widen(values.at[k]) * scale - powers.top) * share);
            store<N>(to + c, result);
        });
        for (long long c = seen + threadIdx.x; c < n; c += blockDim.x) set(to[c], (A)0);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_warps(const P* x, T* y, double scale, long long rows, long long n, long long queries,
                  long long causal) {
    softmax_rows<false>(x, y, (A)scale, rows, n, queries, causal != 0, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    softmax_blocks(const P* x, T* y, double scale, long long rows, long long n, long long queries,
                   long long causal) {
    __shared__ A shared[32];
    softmax_rows<true>(x, y, (A)scale, rows, n, queries, causal != 0, shared);
}

template <bool BLOCK>
__device__ __forceinline__ void softmax_grad_rows(const T* grad, const T* y, T* out, A scale,
                                                  long long rows, long long n, long long queries,
                                                  bool causal, A* shared) {
    bool packed = aligned(grad, y, out);
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        long long seen = causal ? r % queries + 1 + n - queries : n, row = r * n;
        seen = seen < 0 ? 0 : seen;
        int skew = packed ? (int)(row % PACK) : -1;
        A sum = 0;
        along(0, seen, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> above = load<N>(grad + row + c), share = load<N>(y + row + c);
#pragma unroll
            for (int k = 0; k < N; ++k) sum += wide(above.at[k]) * wide(share.at[k]);
        });
        sum = combine<BLOCK>(sum, Add(), shared);
        along(0, seen, skew, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> above = load<N>(grad + row + c), share = load<N>(y + row + c);
#pragma unroll
            for (int k = 0; k < N; ++k)
                set(above.at[k], scale * wide(share.at[k]) * (wide(above.at[k]) - sum));
            store<N>(out + row + c, above);
        });
        for (long long c = seen + threadIdx.x; c < n; c += blockDim.x) set(out[row + c], (A)0);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_grad_warps(const T* grad, const T* y, T* out, double scale, long long rows, long long n,
                       long long queries, long long causal) {
    softmax_grad_rows<false>(grad, y, out, (A)scale, rows, n, queries, causal != 0, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    softmax_grad_blocks(const T* grad, const T* y, T* out, double scale, long long rows,
                        long long n, long long queries, long long causal) {
    __shared__ A shared[32];
    softmax_grad_rows<true>(grad, y, out, (A)scale, rows, n, queries, causal != 0, shared);
}

// The losses, and for the gradient the powers of each row: the maxima, then the sums. Rows of the
// logits begin every `lead` elements.
template <bool BLOCK>
__device__ __forceinline__ void loss_rows(const T* logits, const void* labels, int bytes, A* losses,
                                          A* powers, long long rows, long long n, long long lead,
                                          bool ignores, long long ignored, A smoothing, A* shared) {
    bool packed = aligned(logits);
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        const T* from = logits + r * lead;
        long long label = integer(labels, bytes, r);
        A chosen = label >= 0 && label < n ? wide(from[label]) : not_a_number(), sum = 0;
        Powers row = {-infinity(), 0};
        along(0, n, packed ? (int)(r * lead % PACK) : -1, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> values = load<N>(from + c);
            A terms[N];
#pragma unroll
            for (int k = 0; k < N; ++k) {
                terms[k] = wide(values.at[k]);
                sum += terms[k];
            }
            row.take(terms);
        });
        row.join<BLOCK>(shared);
        A target = chosen - row.top;
        if (smoothing != 0) {
            sum = combine<BLOCK>(sum, Add(), shared);
            target = (1 - smoothing) * target + smoothing * (sum / (A)n - row.top);
        }
        if (threadIdx.x == 0) {
            losses[r] = ignores && label == ignored ? (A)0 : log(row.sum) - target;
            powers[r] = row.top;
            powers[rows + r] = row.sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_loss_warps(const T* logits, const void* labels, long long bytes, A* losses, A* powers,
                       long long rows, long long n, long long lead, long long ignores,
                       long long ignored, double smoothing) {
    loss_rows<false>(logits, labels, (int)bytes, losses, powers, rows, n, lead, ignores != 0,
                     ignored, (A)smoothing, nullptr);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    softmax_loss_blocks(const T* logits, const void* labels, long long bytes, A* losses, A* powers,
                        long long rows, long long n, long long lead, long long ignores,
                        long long ignored, double smoothing) {
    __shared__ A shared[32];
    loss_rows<true>(logits, labels, (int)bytes, losses, powers, rows, n, lead, ignores != 0,
                    ignored, (A)smoothing, shared);
}

// The gradient of the losses times theirs: one number for all rows, or one each. Its rows lie as
// the logits' do.
template <bool BLOCK>
__device__ __forceinline__ void loss_grad_rows(const T* logits, const void* labels, int bytes,
                                               const A* powers, const A* grad, T* to_logits,
                                               long long rows, long long n, long long lead,
                                               bool each, bool ignores, long long ignored,
                                               A smoothing) {
    bool packed = aligned(logits, to_logits);
    for (long long r = first_row<BLOCK>(); r < rows; r += row_step<BLOCK>()) {
        const T* from = logits + r * lead;
        T* to = to_logits + r * lead;
        long long label = integer(labels, bytes, r);
        bool skipped = ignores && label == ignored;
        A top = powers[r], share = 1 / powers[rows + r], spread = smoothing / (A)n;
        A factor = grad[each ? r : 0];
        if (label < 0 || label >= n) share = not_a_number();
        along(0, n, packed ? (int)(r * lead % PACK) : -1, [&](long long c, auto count) {
            constexpr int N = decltype(count)::value;
            Pack<T, N> values = load<N>(from + c);
#pragma unroll
            for (int k = 0; k < N; ++k) {
                A value = exp(wide(values.at[k]) - top) * share - spread;
                if (c + k == label) value -= 1 - smoothing;
                set(values.at[k], factor * (skipped ? (A)0 : value));
            }
            store<N>(to + c, values);
        });
    }
}

extern "C" __global__ void __launch_bounds__(256)
    softmax_loss_grad_warps(const T* logits, const void* labels, long long bytes, const A* powers,
                            const A* grad, T* to_logits, long long rows, long long n,
                            long long lead, long long each, long long ignores, long long ignored,
                            double smoothing) {
    loss_grad_rows<false>(logits, labels, (int)bytes, powers, grad, to_logits, rows, n, lead,
                          each != 0, ignores != 0, ignored, (A)smoothing);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    softmax_loss_grad_blocks(const T* logits, const void* labels, long long bytes, const A* powers,
                             const A* grad, T* to_logits, long long rows, long long n,
                             long long lead, long long each, long long ignores, long long ignored,
                             double smoothing) {
    loss_grad_rows<true>(logits, labels, (int)bytes, powers, grad, to_logits, rows, n, lead,
                         each != 0, ignores != 0, ignored, (A)smoothing);
}
