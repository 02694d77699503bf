// Rows of a table picked by integers. Here P is the table's dtype, and T that of what is picked.

template <int N>
__device__ __forceinline__ void pick_rows(const P* table, const void* indices, int bytes, T* out, long long count, long long entries, long long n) {
    long long lanes = n / N, units = count * lanes;
    for (long long u = first_of_grid(); u < units; u += size_of_grid()) {
        long long r = u / lanes, c = (u - r * lanes) * N, entry = integer(indices, bytes, r);
        Pack<T, N> values;
        if (entry >= 0 && entry < entries) {
            Pack<P, N> row = load<N>(table + entry * n + c);
#pragma unroll
            for (int k = 0; k < N; ++k) set(values.at[k], (A)widen(row.at[k]));
        } else {
#pragma unroll
            for (int k = 0; k < N; ++k) set(values.at[k], not_a_number());
        }
        store<N>(out + r * n + c, values);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    embedding(const P* table, const void* indices, long long bytes, T* out, long long count, long long entries, long long n) {
    if (aligned(table, out) && n % PACK == 0) pick_rows<PACK>(table, indices, (int)bytes, out, count, entries, n);
    else pick_rows<1>(table, indices, (int)bytes, out, count, entries, n);
}

// order: the places of the indices, sorted by index. A block adds up all rows of one index, where its run in the order
// begins; every eighth is one thread's, and these sums are added in a fixed order.
extern "C" __global__ void __launch_bounds__(256) embedding_grad(const T* grad, const void* indices, long long bytes, const long long* order, P* out,
                                                                 long long count, long long entries, long long n, long long add) {
    __shared__ A shared[256];
    long long entry = integer(indices, (int)bytes, order[blockIdx.x]);
    if (entry < 0 || entry >= entries) return;
    if (blockIdx.x > 0 && integer(indices, (int)bytes, order[blockIdx.x - 1]) == entry) return;
    int mine = threadIdx.y * 32 + threadIdx.x;
    for (long long first = blockIdx.y * 32ll; first < n; first += gridDim.y * 32ll) {
        long long c = first + threadIdx.x;
        A sum = 0;
        for (long long p = blockIdx.x + (long long)threadIdx.y; p < count; p += 8) {
            long long place = order[p];
            if (integer(indices, (int)bytes, place) != entry) break;
            if (c < n) sum += wide(grad[place * n + c]);
        }
        shared[mine] = sum;
        __syncthreads();
        if (threadIdx.y == 0 && c < n) {
            for (int p = 1; p < 8; ++p) sum += shared[mine + p * 32];
            P& to = out[entry * n + c];
            set(to, add ? (A)widen(to) + sum : sum);
        }
        __syncthreads();
    }
}
