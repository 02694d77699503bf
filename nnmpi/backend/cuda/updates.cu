// Updates in one pass: those of optimizers over the parameters (see nnmpi/optim for the formulas),
// and those of running statistics.

// An optimizer's update changes nothing if its guard, a number, is infinite or NaN: the host need
// not know whether a gradient is finite when it launches the update.
__device__ __forceinline__ bool refuses(const double* guard) {
    return guard && !(*guard - *guard == 0);
}

extern "C" __global__ void __launch_bounds__(256)
    sgd(T* data, const T* grad, double lr, double decay, const double* guard, long long n) {
    if (refuses(guard)) return;
    A rate = (A)lr, shrink = (A)decay;
    for_each(
        n, [=](T& at, T& above) { set(at, wide(at) - rate * (wide(above) + shrink * wide(at))); },
        both(data), in(grad));
}

extern "C" __global__ void __launch_bounds__(256)
    sgd_momentum(T* data, const T* grad, T* momentum, double lr, double beta, double decay,
                 double nesterov, const double* guard, long long n) {
    if (refuses(guard)) return;
    A rate = (A)lr, fraction = (A)beta, shrink = (A)decay;
    bool ahead = nesterov != 0;
    for_each(
        n,
        [=](T& at, T& above, T& speed) {
            A g = wide(above) + shrink * wide(at), b = fraction * wide(speed) + g;
            set(speed, b);
            set(at, wide(at) - rate * (ahead ? g + fraction * b : b));
        },
        both(data), in(grad), both(momentum));
}

extern "C" __global__ void __launch_bounds__(256)
    adam(T* data, const T* grad, T* m, T* v, double rate, double eps, double beta1, double beta2,
         double decay, double factor, const double* guard, long long n) {
    if (refuses(guard)) return;
    A step = (A)rate, small = (A)eps, to_g = (A)(1 - beta1), fraction = (A)beta2,
      to_square = (A)(1 - beta2), shrink = (A)decay, scale = (A)factor;
    for_each(
        n,
        [=](T& at, T& above, T& mean, T& square) {
            A g = wide(above) + shrink * wide(at);
            A first = wide(mean) + (g - wide(mean)) * to_g,
              second = fraction * wide(square) + to_square * g * g;
            set(mean, first);
            set(square, second);
            set(at, scale * wide(at) - step * first / (root(second) + small));
        },
        both(data), in(grad), both(m), both(v));
}

// Running statistics move a fraction of the way to a batch's mean and to its variance times a factor.
extern "C" __global__ void __launch_bounds__(256)
    track(T* mean, T* variance, const T* to_mean, const T* to_variance, double fraction,
          double factor, long long n) {
    A part = (A)fraction, unbiased = (A)factor;
    for_each(
        n,
        [=](T& first, T& second, T& to_first, T& to_second) {
            set(first, wide(first) + part * (wide(to_first) - wide(first)));
            set(second, wide(second) + part * (wide(to_second) * unbiased - wide(second)));
        },
        both(mean), both(variance), in(to_mean), in(to_variance));
}
