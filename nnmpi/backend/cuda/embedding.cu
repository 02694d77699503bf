// Rows of a table at integer indices. Here P is the table's type, and T that of the rows read.

template <int N>
__device__ __forceinline__ void pick_rows(const P* table, const void* indices, int bytes, T* out,
                                          long long count, long long entries, long long n) {
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
    embedding(const P* table, const void* indices, long long bytes, T* out, long long count,
              long long entries, long long n) {
    if (aligned(table, out) && n % PACK == 0)
        pick_rows<PACK>(table, indices, (int)bytes, out, count, entries, n);
    else pick_rows<1>(table, indices, (int)bytes, out, count, entries, n);
}

// order: the numbers of the gradient's rows, sorted by their indices. The rows of an index form a
// run, which the block at its start sums: each of the 8 threads along y sums every eighth row, then
// the 8 sums are added in a fixed order.
extern "C" __global__ void __launch_bounds__(256)
    embedding_grad(const T* grad, const void* indices, long long bytes, const long long* order,
                   P* out, long long count, long long entries, long long n, long long add) {
    __shared__ A shared[256];
    long long entry = integer(indices, (int)bytes, order[blockIdx.x]);
    if (entry < 0 || entry >= entries) return;
    if (blockIdx.x > 0 && integer(indices, (int)bytes, order[blockIdx.x - 1]) == entry) return;
    int mine = threadIdx.y * 32 + threadIdx.x;
    for (long long first = blockIdx.y * 32ll; first < n; first += gridDim.y * 32ll) {
        long long c = first + threadIdx.x;
        A sum = 0;
        for (long long p = blockIdx.x + (long long)threadIdx.y; p < count; p += 8) {
            long long row = order[p];
            if (integer(indices, (int)bytes, row) != entry) break;
            if (c < n) sum += wide(grad[row * n + c]);
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
