// CUDA C++ as g++ can compile it: what the compiler for devices knows by itself, on one thread of the host.
//
// A block's threads are fibers, each with a stack of its own. One runs until it ends or waits (at a barrier, or for the
// other lanes of its warp); then the next one's turn comes. A warp goes as far as it can before the next one starts.
// Kernels that would hang or do what CUDA leaves undefined end with a message: a thread that leaves while others wait,
// threads that wait at different places, addresses outside of the arrays, misaligned addresses, overflow of integers.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmath>

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("emulated_shared")))
#define __syncthreads() emulated::barrier(__LINE__)
#define __syncwarp(...) emulated::warp(__LINE__, ##__VA_ARGS__)
#define __shfl_sync(mask, value, lane, ...) emulated::shuffle(__LINE__, mask, value, emulated::lane_at(lane, ##__VA_ARGS__))
#define __shfl_xor_sync(mask, value, bits, ...) emulated::shuffle(__LINE__, mask, value, emulated::lane_xor(bits, ##__VA_ARGS__))
#define __shfl_down_sync(mask, value, by, ...) emulated::shuffle(__LINE__, mask, value, emulated::lane_down(by, ##__VA_ARGS__))
#define __shfl_up_sync(mask, value, by, ...) emulated::shuffle(__LINE__, mask, value, emulated::lane_up(by, ##__VA_ARGS__))
#define __ballot_sync(mask, truth) emulated::ballot(__LINE__, mask, truth)
#define __any_sync(mask, truth) (emulated::ballot(__LINE__, mask, truth) != 0)
#define __all_sync(mask, truth) (emulated::ballot(__LINE__, mask, truth) == ((mask) & emulated::present()))

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

extern "C" char __attribute__((weak, visibility("hidden"))) __start_emulated_shared[];
extern "C" char __attribute__((weak, visibility("hidden"))) __stop_emulated_shared[];

namespace emulated {

const unsigned MOST = 1024;
const size_t STACK = 128 * 1024;
enum State { NEW, READY, AT_BARRIER, AT_WARP, DONE };
struct Fiber { void* sp; char* stack; State state; int line; unsigned mask; };

static Fiber fibers[MOST];
static char* idle[MOST];
static unsigned idle_count, threads, current;
static void* scheduler;
static void (*body)(void**);
static void** arguments;
static unsigned long long slots[MOST];
static sigjmp_buf way_out;
static char* message;
static size_t message_size;

[[noreturn]] static void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message, message_size, format, values);
    va_end(values);
    siglongjmp(way_out, 1);
}

#if !defined(__x86_64__)
#error "the emulator switches stacks on x86-64 alone"
#endif
extern "C" void emulated_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(".text\n.hidden emulated_switch\n.type emulated_switch, @function\nemulated_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emulated_switch, .-emulated_switch\n");

static void to_scheduler() { emulated_switch(&fibers[current].sp, scheduler); }

static void entry() {
    body(arguments);
    fibers[current].state = DONE;
    to_scheduler();
    abort();
}

static char* take_stack() {
    if (idle_count) return idle[--idle_count];
    void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for a thread's stack");
    mprotect(memory, 4096, PROT_NONE);
    return static_cast<char*>(memory);
}

static void resume(unsigned thread) {
    Fiber& fiber = fibers[thread];
    if (fiber.state == NEW) {
        fiber.stack = take_stack();
        void** top = reinterpret_cast<void**>(fiber.stack + STACK);
        *--top = nullptr;                              // the stack is as after a call
        *--top = reinterpret_cast<void*>(&entry);      // where `ret` goes
        for (int i = 0; i < 6; ++i) *--top = nullptr;  // the registers
        fiber.sp = top;
    }
    fiber.state = READY;
    current = thread;
    threadIdx.x = thread % blockDim.x;
    threadIdx.y = thread / blockDim.x % blockDim.y;
    threadIdx.z = thread / blockDim.x / blockDim.y;
    emulated_switch(&scheduler, fiber.sp);
    if (fiber.state == DONE) idle[idle_count++] = fiber.stack;
}

static unsigned warp_threads(unsigned first) { return threads - first < 32 ? threads - first : 32; }
static unsigned present() { unsigned n = warp_threads(current / 32 * 32); return n == 32 ? ~0u : (1u << n) - 1; }

// Lets the lanes of a warp go on whose whole mask waits at one place; returns whether any does.
static bool release_warp(unsigned first) {
    bool released = false;
    for (unsigned i = 0; i < warp_threads(first); ++i) {
        Fiber& one = fibers[first + i];
        if (one.state != AT_WARP) continue;
        bool all = true;
        for (unsigned j = 0; j < 32 && all; ++j) {
            if (!(one.mask >> j & 1)) continue;
            if (j >= warp_threads(first)) fail("thread %u's mask %#x names lanes that the block has not", first + i, one.mask);
            const Fiber& other = fibers[first + j];
            all = other.state == AT_WARP && other.line == one.line && other.mask == one.mask;
        }
        if (!all) continue;
        for (unsigned j = 0; j < 32; ++j)
            if (one.mask >> j & 1) fibers[first + j].state = READY;
        released = true;
    }
    return released;
}

// Lets all threads go on where all of them wait at one barrier.
static bool release_block() {
    for (unsigned i = 0; i < threads; ++i)
        if (fibers[i].state != AT_BARRIER) return false;
    for (unsigned i = 0; i < threads; ++i) {
        if (fibers[i].line != fibers[0].line)
            fail("thread 0 waits at the barrier of line %d, thread %u at that of line %d", fibers[0].line, i, fibers[i].line);
        fibers[i].state = READY;
    }
    return true;
}

[[noreturn]] static void stuck() {
    for (unsigned i = 0; i < threads; ++i) {
        if (fibers[i].state != AT_BARRIER && fibers[i].state != AT_WARP) continue;
        unsigned done = 0;
        for (unsigned j = 0; j < threads; ++j) done += fibers[j].state == DONE;
        fail("block (%u, %u, %u) hangs: thread %u waits in line %d (%s), and %u of %u threads have left", blockIdx.x, blockIdx.y,
             blockIdx.z, i, fibers[i].line, fibers[i].state == AT_BARRIER ? "barrier" : "warp", done, threads);
    }
    fail("a block hangs");
}

// Runs a warp until all its threads have left or wait at the barrier: it may be far ahead of the others, as it may be
// on a device.
static bool run_warp(unsigned first, bool backwards) {
    unsigned count = warp_threads(first);
    bool moved = false;
    do {
        for (unsigned i = 0; i < count; ++i) {
            unsigned thread = first + (backwards ? count - 1 - i : i);
            if (fibers[thread].state == NEW || fibers[thread].state == READY) {
                resume(thread);
                moved = true;
            }
        }
    } while (release_warp(first));
    return moved;
}

static void run_block(bool backwards) {
    if (__start_emulated_shared) memset(__start_emulated_shared, 0xFF, __stop_emulated_shared - __start_emulated_shared);
    for (unsigned i = 0; i < threads; ++i) fibers[i].state = NEW;
    unsigned warps = (threads + 31) / 32;
    for (;;) {
        bool moved = false;
        for (unsigned i = 0; i < warps; ++i) moved = run_warp((backwards ? warps - 1 - i : i) * 32, backwards) || moved;
        unsigned left = 0;
        for (unsigned i = 0; i < threads; ++i) left += fibers[i].state != DONE;
        if (!left) return;
        if (!release_block() && !moved) stuck();
    }
}

static void wait(State state, int line, unsigned mask) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    fiber.line = line;
    fiber.mask = mask;
    to_scheduler();
}

static inline void barrier(int line) { wait(AT_BARRIER, line, 0); }
static inline void warp(int line, unsigned mask = ~0u) {
    if (!(mask >> (current % 32) & 1)) fail("thread %u waits in line %d, and is not in its own mask %#x", current, line, mask);
    wait(AT_WARP, line, mask);
}

static inline int lane_in(int lane, int width) { return (int)(current % 32) / width * width + (lane & (width - 1)); }
static inline int lane_at(int lane, int width = 32) { return lane_in(lane, width); }
static inline int lane_xor(int bits, int width = 32) { (void)width; return (int)(current % 32) ^ bits; }
static inline int lane_down(int by, int width = 32) {
    int here = current % 32;
    return here % width + by < width ? here + by : here;
}
static inline int lane_up(int by, int width = 32) {
    int here = current % 32;
    return here % width - by >= 0 ? here - by : here;
}

template <class X> static inline X shuffle(int line, unsigned mask, X value, int from) {
    static_assert(sizeof(X) <= 8, "shuffles move up to 8 bytes");
    unsigned first = current / 32 * 32;
    memcpy(&slots[current], &value, sizeof(X));
    warp(line, mask);
    if (!(mask >> from & 1)) fail("thread %u reads lane %d in line %d, which is not in the mask %#x", current, from, line, mask);
    X result;
    memcpy(&result, &slots[first + from], sizeof(X));
    warp(-line, mask);
    return result;
}

static inline unsigned ballot(int line, unsigned mask, bool truth) {
    unsigned first = current / 32 * 32, result = 0;
    slots[current] = truth;
    warp(line, mask);
    for (unsigned j = 0; j < 32; ++j)
        if (mask >> j & 1 && slots[first + j]) result |= 1u << j;
    warp(-line, mask);
    return result;
}

static void caught(int number, siginfo_t* info, void*) {
    if (number == SIGILL) snprintf(message, message_size, "block (%u, %u, %u), thread %u: a misaligned address, an overflow or a bad shift",
                                   blockIdx.x, blockIdx.y, blockIdx.z, current);
    else snprintf(message, message_size, "block (%u, %u, %u), thread %u: address %p is outside of the arrays (or the stack)", blockIdx.x,
                  blockIdx.y, blockIdx.z, current, info->si_addr);
    siglongjmp(way_out, 1);
}

static int launch(void (*kernel)(void**), const unsigned* sizes, void** values, int backwards, char* text, size_t text_size) {
    static char alternative[64 * 1024];
    static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    struct sigaction action, before[4];
    stack_t stack = {}, stack_before;
    body = kernel;
    arguments = values;
    message = text;
    message_size = text_size;
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    threads = blockDim.x * blockDim.y * blockDim.z;
    stack.ss_sp = alternative;
    stack.ss_size = sizeof(alternative);
    sigaltstack(&stack, &stack_before);
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &before[i]);
    volatile int result = 0;
    if (sigsetjmp(way_out, 1)) {
        result = 1;  // the fibers' stacks are lost with what was on them
    } else {
        unsigned long long count = 1ull * gridDim.x * gridDim.y * gridDim.z;
        for (unsigned long long i = 0; i < count; ++i) {
            unsigned long long block = backwards ? count - 1 - i : i;
            blockIdx = {unsigned(block % gridDim.x), unsigned(block / gridDim.x % gridDim.y), unsigned(block / gridDim.x / gridDim.y)};
            run_block(backwards);
        }
    }
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
    return result;
}

template <class To, class From> static inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

}  // namespace emulated

static inline float __uint_as_float(unsigned x) { return emulated::bits<float>(x); }
static inline float __int_as_float(int x) { return emulated::bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulated::bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emulated::bits<int>(x); }
static inline double __longlong_as_double(long long x) { return emulated::bits<double>(x); }
static inline long long __double_as_longlong(double x) { return emulated::bits<long long>(x); }
template <class X> static inline X __ldg(const X* x) { return *x; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float x, float y) { return x / y; }
static inline void __threadfence() {}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
template <class X> static inline X min(X x, X y) { return x < y ? x : y; }
template <class X> static inline X max(X x, X y) { return x > y ? x : y; }
template <class X, class Y> static inline X atomicAdd(X* to, Y value) { X before = *to; *to = before + (X)value; return before; }
template <class X, class Y> static inline X atomicMax(X* to, Y value) { X before = *to; if ((X)value > before) *to = (X)value; return before; }
template <class X, class Y> static inline X atomicExch(X* to, Y value) { X before = *to; *to = (X)value; return before; }
template <class X> static inline X atomicCAS(X* to, X old, X value) { X before = *to; if (before == old) *to = value; return before; }
#define __trap() emulated::fail("a kernel stopped itself in line %d", __LINE__)
using std::isfinite;
using std::isinf;
using std::isnan;
