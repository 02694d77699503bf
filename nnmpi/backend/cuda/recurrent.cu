// Time steps of recurrent layers beside their products, see nnmpi/ops/recurrent.py.
// A thread computes whole cells, one element of the state each: a step has so few that packs of
// 16 bytes would leave most multiprocessors without work. It reads all before it writes: the
// compiler, to which the arrays might overlap, would let loads wait for stores.

__device__ __forceinline__ A sigmoid(A x) { return (A)0.5 + (A)0.5 * tanh((A)0.5 * x); }

// Calls f for the elements of (rows, n) with an element's index, that of its first gate in
// (rows, GATES n), its column, and the biases of its gates.
template <int GATES, class F>
__device__ __forceinline__ void for_cells(const T* bias, long long rows, long long n, F f) {
    for (long long column = first_of_grid(); column < n; column += size_of_grid()) {
        A shift[GATES] = {};
        if (bias)
#pragma unroll
            for (int k = 0; k < GATES; ++k) shift[k] = wide(bias[k * n + column]);
#pragma unroll 1  // most threads have one row; several at once would need twice the registers
        for (long long row = blockIdx.y * (long long)blockDim.y + threadIdx.y; row < rows;
             row += gridDim.y * (long long)blockDim.y)
            f(row * n + column, GATES * row * n + column, column, shift);
    }
}

// The gates i, f, o, g as tanh, of half the argument for the three sigmoids (1 + tanh(x / 2)) / 2.
extern "C" __global__ void __launch_bounds__(256)
    lstm_step(T* gates, const T* product, const T* bias, const T* c, T* new_c, T* new_h,
              long long rows, long long n) {
    for_cells<4>(bias, rows, n, [=](long long at, long long first, long long, const A* shift) {
        A gate[4], last_c = wide(c[at]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            A x = wide(gates[first + k * n]) + shift[k] + wide(product[first + k * n]);
            gate[k] = k < 3 ? (A)0.5 * x : x;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) set(gates[first + k * n], gate[k] = tanh(gate[k]));
        A cell = (A)0.5 * ((1 + gate[1]) * last_c + (1 + gate[0]) * gate[3]);
        set(new_c[at], cell);
        set(new_h[at], (A)0.5 * (1 + gate[2]) * tanh(cell));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    lstm_step_grad(const T* gates, T* slopes, const T* h, const T* grad, const T* cell,
                   const T* last_c, T* c, long long rows, long long n) {
    for_cells<4>(nullptr, rows, n, [=](long long at, long long first, long long, const A*) {
        A i = wide(gates[first]), f = wide(gates[first + n]), o = wide(gates[first + 2 * n]),
          g = wide(gates[first + 3 * n]);
        A to_h = (A)0.5 * (wide(h[at]) + wide(grad[at])), before = wide(last_c[at]);
        A to_c = wide(c[at]), t = tanh(wide(cell[at]));
        to_c = (A)0.5 * (to_c + to_h * (1 + o) * (1 - t * t));
        set(slopes[first], (A)0.5 * to_c * g * (1 - i * i));
        set(slopes[first + n], (A)0.5 * to_c * before * (1 - f * f));
        set(slopes[first + 2 * n], (A)0.5 * to_h * t * (1 - o * o));
        set(slopes[first + 3 * n], to_c * (1 + i) * (1 - g * g));
        set(c[at], to_c * (1 + f));
    });
}

// The gates r, z, n; inner = h R_n + b_n, which r multiplies.
extern "C" __global__ void __launch_bounds__(256)
    gru_step(T* gates, const T* product, const T* bias, const T* inner_bias, T* inner, const T* h,
             T* new_h, long long rows, long long n) {
    for_cells<3>(bias, rows, n, [=](long long at, long long i, long long column, const A* shift) {
        A r = wide(gates[i]) + shift[0] + wide(product[i]),
          z = wide(gates[i + n]) + shift[1] + wide(product[i + n]),
          m = wide(product[i + 2 * n]) + wide(inner_bias[column]),
          value = wide(gates[i + 2 * n]) + shift[2], before = wide(h[at]);
        r = sigmoid(r), z = sigmoid(z), value = tanh(value + r * m);
        set(gates[i], r);
        set(gates[i + n], z);
        set(gates[i + 2 * n], value);
        set(inner[at], m);
        set(new_h[at], value + z * (before - value));
    });
}

extern "C" __global__ void __launch_bounds__(256)
    gru_step_grad(const T* gates, T* slopes, T* to_product, const T* inner, const T* h,
                  const T* grad, T* to_h, long long rows, long long n) {
    for_cells<3>(nullptr, rows, n, [=](long long at, long long i, long long, const A*) {
        A r = wide(gates[i]), z = wide(gates[i + n]), value = wide(gates[i + 2 * n]);
        A total = wide(to_h[at]) + wide(grad[at]), before = wide(h[at]), m = wide(inner[at]);
        A to_n = total * (1 - z) * (1 - value * value);
        A to_r = to_n * m * r * (1 - r);
        A to_z = total * (before - value) * z * (1 - z);
        set(slopes[i], to_r);
        set(slopes[i + n], to_z);
        set(slopes[i + 2 * n], to_n);
        set(to_product[i], to_r);
        set(to_product[i + n], to_z);
        set(to_product[i + 2 * n], to_n * r);
        set(to_h[at], total * z);
    });
}
