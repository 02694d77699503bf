// The products of cuBLAS, on the host: sums in float64, rounded once. It refuses what cuBLAS refuses.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
API int device_enqueue(void* stream, std::function<void()> work);
API bool device_has(const void* at, uint64_t size);
API void device_fail(int code, const char* why);

namespace {

enum Status { OK = 0, INVALID_VALUE = 7, FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { SINGLE = 0, DOUBLE = 1, HALF = 2, BRAIN = 14 };
enum Sum { IN_32 = 68, IN_64 = 70, IN_TF32 = 77 };
enum Math { TF32 = 3 };

struct Handle {
    void* stream = nullptr;
    int math = 0, pointers = 0;
};

template <class T> double at(const void* p, int64_t i) { return ((const T*)p)[i]; }
double get(const void* p, int type, int64_t i) {
    if (type != BRAIN) return type == SINGLE ? at<float>(p, i) : type == DOUBLE ? at<double>(p, i) : at<_Float16>(p, i);
    uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
void put(void* p, int type, int64_t i, double x) {
    float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    if (type == SINGLE) ((float*)p)[i] = single;
    else if (type == DOUBLE) ((double*)p)[i] = x;
    else if (type == HALF) ((_Float16*)p)[i] = (_Float16)single;
    else ((uint16_t*)p)[i] = x != x ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
int bytes_of(int type) { return type == DOUBLE ? 8 : type == SINGLE ? 4 : 2; }
double to_tf32(double x) {
    float single = (float)x;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    bits = (bits + 0x1000) & 0xFFFFE000;
    memcpy(&single, &bits, 4);
    return single;
}

// A matrix, or a stack of them, in columns.
struct Matrix {
    const void* p;
    int type, lead;
    long long apart;
    bool listed = false;  // p is a list of their addresses, on the device
    int transposed = 0, rows = 0, columns = 0;  // as it is multiplied

    int height() const { return transposed ? columns : rows; }
    int width() const { return transposed ? rows : columns; }
    Matrix of(int which) const {
        Matrix one = *this;
        one.p = listed ? ((const void* const*)p)[which] : (const char*)p + which * apart * bytes_of(type);
        return one;
    }
    bool fits() const {
        if (!rows || !columns) return true;
        return device_has(p, (((uint64_t)width() - 1) * (uint64_t)lead + (uint64_t)height()) * (uint64_t)bytes_of(type));
    }
    int64_t place(int row, int column) const { return transposed ? (int64_t)row * lead + column : (int64_t)column * lead + row; }
};

struct Product {
    Matrix stack_a, stack_b, stack_c;
    double alpha, beta;
    int count;
    bool tf32;

    void operator()() const {
        size_t m = (size_t)stack_c.rows, n = (size_t)stack_c.columns, k = (size_t)stack_a.columns;
        std::vector<double> left(m * k), right(k * n);
        for (int i = 0; i < count; ++i) {
            Matrix a = stack_a.of(i), b = stack_b.of(i), c = stack_c.of(i);
            if (!a.fits() || !b.fits() || !c.fits()) device_fail(700, "a product of matrices that reach out of their arrays");
            for (size_t row = 0; row < m; ++row)
                for (size_t q = 0; q < k; ++q) left[row * k + q] = get(a.p, a.type, a.place((int)row, (int)q));
            for (size_t column = 0; column < n; ++column)
                for (size_t q = 0; q < k; ++q) right[column * k + q] = get(b.p, b.type, b.place((int)q, (int)column));
            for (auto* factor : {&left, &right})
                for (double& x : *factor)
                    if (tf32) x = to_tf32(x);
            for (size_t column = 0; column < n; ++column)
                for (size_t row = 0; row < m; ++row) {
                    double sum = 0;
                    for (size_t q = 0; q < k; ++q) sum += left[row * k + q] * right[column * k + q];
                    int64_t to = c.place((int)row, (int)column);
                    put((void*)c.p, c.type, to, alpha * sum + (beta == 0 ? 0 : beta * get(c.p, c.type, to)));
                }
        }
    }
};

bool is_allowed(int from, int to, int sum) {
    if (sum == IN_64) return from == DOUBLE && to == DOUBLE;
    if (sum == IN_TF32) return from == SINGLE && to == SINGLE;
    return sum == IN_32 && from != DOUBLE && (to == from || (to == SINGLE && from != SINGLE));
}

int multiply(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, Matrix a, Matrix b, const void* beta, Matrix c, int count, int sum) {
    const Handle& h = *(Handle*)handle;
    if (a.type != b.type || !is_allowed(a.type, c.type, sum)) return NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || count < 0) return INVALID_VALUE;
    a.transposed = ta, a.rows = m, a.columns = k;
    b.transposed = tb, b.rows = k, b.columns = n;
    c.transposed = 0, c.rows = m, c.columns = n;
    for (const Matrix* each : {&a, &b, &c}) {
        uint64_t unit = each->listed ? sizeof(void*) : (uint64_t)bytes_of(each->type);
        if (each->lead < std::max(1, each->height()) || (uint64_t)each->p % unit) return INVALID_VALUE;
        if (m && n && count && each->rows && each->columns && !device_has(each->p, each->listed ? unit * (uint64_t)count : 1)) return FAILED;
    }
    if (!m || !n || !count) return OK;
    if (h.pointers || device_has(alpha, 1) || device_has(beta, 1)) return NOT_SUPPORTED;  // factors are the host's
    auto factor = [&](const void* p) { return sum == IN_64 ? at<double>(p, 0) : at<float>(p, 0); };
    bool tf32 = sum == IN_TF32 || (a.type == SINGLE && (h.math & 3) == TF32);
    return device_enqueue(h.stream, Product{a, b, c, factor(alpha), factor(beta), count, tf32}) ? FAILED : OK;
}

}  // namespace

API int cublasCreate_v2(void** handle) { return *handle = new Handle, OK; }
API int cublasDestroy_v2(void*) { return OK; }
API int cublasSetStream_v2(void* handle, void* stream) { return ((Handle*)handle)->stream = stream, OK; }
API int cublasSetWorkspace_v2(void*, void* memory, size_t bytes) { return (uint64_t)memory % 256 || !device_has(memory, bytes) ? INVALID_VALUE : OK; }
API int cublasSetMathMode(void* handle, int math) { return math & ~0x13 ? INVALID_VALUE : (((Handle*)handle)->math = math, OK); }
API int cublasGetMathMode(void* handle, int* math) { return *math = ((Handle*)handle)->math, OK; }
API int cublasSetPointerMode_v2(void* handle, int pointers) { return ((Handle*)handle)->pointers = pointers, OK; }
API int cublasGetPointerMode_v2(void* handle, int* pointers) { return *pointers = ((Handle*)handle)->pointers, OK; }

API int cublasGemmStridedBatchedEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda, long long a_apart,
                                   const void* b, int b_type, int ldb, long long b_apart, const void* beta, void* c, int c_type, int ldc,
                                   long long c_apart, int count, int sum, int) {
    return multiply(h, ta, tb, m, n, k, alpha, {a, a_type, lda, a_apart}, {b, b_type, ldb, b_apart}, beta, {c, c_type, ldc, c_apart}, count, sum);
}
API int cublasGemmEx(void* h, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda, const void* b, int b_type,
                     int ldb, const void* beta, void* c, int c_type, int ldc, int sum, int how) {
    return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, sum, how);
}
// Those that CuPy's own products call.
#define PLAIN(letter, real, type, sum)                                                                                                          \
    API int cublas##letter##gemm_v2(void* h, int ta, int tb, int m, int n, int k, const real* alpha, const real* a, int lda, const real* b, int ldb, \
                                    const real* beta, real* c, int ldc) {                                                                       \
        return cublasGemmEx(h, ta, tb, m, n, k, alpha, a, type, lda, b, type, ldb, beta, c, type, ldc, sum, 0);                                 \
    }                                                                                                                                           \
    API int cublas##letter##gemmStridedBatched(void* h, int ta, int tb, int m, int n, int k, const real* alpha, const real* a, int lda,         \
                                               long long a_apart, const real* b, int ldb, long long b_apart, const real* beta, real* c, int ldc, \
                                               long long c_apart, int count) {                                                                  \
        return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type, lda, a_apart, b, type, ldb, b_apart, beta, c, type, ldc, c_apart, count, sum, 0); \
    }                                                                                                                                           \
    API int cublas##letter##gemmBatched(void* h, int ta, int tb, int m, int n, int k, const real* alpha, const void* a, int lda, const void* b, \
                                        int ldb, const real* beta, const void* c, int ldc, int count) {                                         \
        return multiply(h, ta, tb, m, n, k, alpha, {a, type, lda, 0, true}, {b, type, ldb, 0, true}, beta, {c, type, ldc, 0, true}, count, sum); \
    }
PLAIN(S, float, SINGLE, IN_32)
PLAIN(D, double, DOUBLE, IN_64)
