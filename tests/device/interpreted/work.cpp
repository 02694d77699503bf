// What instructions do: for each a function, a template where several types have it.
#include "work.h"

#include <cfenv>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace ptx {
namespace {

struct bfloat16 {
    uint16_t bits;
};
using float16 = _Float16;

template <class T> constexpr bool is_real = std::is_same_v<T, float> || std::is_same_v<T, double>;
template <class T> constexpr bool is_float = is_real<T> || std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>;

template <class T> T bits_as(uint64_t bits) {
    T x;
    memcpy(&x, &bits, sizeof(T));
    return x;
}
template <class T> uint64_t bits_from(T x) {
    if constexpr (std::is_integral_v<T>) return (uint64_t)(std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>)x;
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof(T));
    return bits;
}

double wide(bfloat16 x) { return bits_as<float>((uint64_t)x.bits << 16); }
double wide(double x) { return x; }

bfloat16 to_bfloat16(float x, char directed) {
    uint32_t bits = (uint32_t)bits_from(x);
    if (x != x) return {0x7FFF};
    if (directed != 'z') bits += 0x7FFF + (bits >> 16 & 1);
    return {(uint16_t)(bits >> 16)};
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

template <class T> T in(const Thread& t, const Ins& i, int slot) {
    T x = bits_as<T>(t.r[slot]);
    if constexpr (std::is_same_v<T, float>)
        if (i.flush) x = flushed(x);
    return x;
}
template <class T> void out(Thread& t, const Ins& i, T x) {
    if constexpr (is_real<T>)
        if (i.saturate) x = x > 0 ? std::min(x, (T)1) : (T)0;
    if constexpr (std::is_same_v<T, float>)
        if (i.flush) x = flushed(x);
    t.r[i.d] = bits_from(x);
}

// Computes as the instruction rounds. What is given to `opaque` is not computed at another time.
template <class T> T opaque(T x) {
    if constexpr (is_real<T>) asm volatile("" : "+x"(x));
    else asm volatile("" : "+r"(x));
    return x;
}
template <class F> auto directed(const Ins& i, F compute) {
    if (!i.directed) [[likely]]
        return compute();
    int before = fegetround();
    fesetround(i.directed == 'z' ? FE_TOWARDZERO : i.directed == 'm' ? FE_DOWNWARD : FE_UPWARD);
    auto result = compute();
    fesetround(before);
    return result;
}

// ---------------------------------------------------------------- arithmetic

struct Add { template <class T> T operator()(T x, T y) const { return (T)(x + y); } };
struct Sub { template <class T> T operator()(T x, T y) const { return (T)(x - y); } };
struct Mul { template <class T> T operator()(T x, T y) const { return (T)(x * y); } };
struct Div {
    template <class T> T operator()(T x, T y) const {
        if constexpr (is_real<T>) return x / y;
        else return y == 0 ? (T)-1 : y == (T)-1 && std::is_signed_v<T> ? (T)-x : (T)(x / y);
    }
};
struct Rem {
    template <class T> T operator()(T x, T y) const { return y == 0 ? x : y == (T)-1 && std::is_signed_v<T> ? (T)0 : (T)(x % y); }
};
template <bool LARGER> struct Extremum {
    template <class T> T operator()(T x, T y) const {
        if constexpr (is_real<T>) {
            if (x != x) return y;
            if (y != y) return x;
            if (x == y) return std::signbit(x) == LARGER ? y : x;
        }
        return (x > y) == LARGER ? x : y;
    }
};
struct MulHigh {
    template <class T> T operator()(T x, T y) const {
        using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        return (T)((Wide)x * (Wide)y >> 8 * sizeof(T));
    }
};
struct Left {
    template <class T> T operator()(T x, uint32_t n) const { return n >= 8 * sizeof(T) ? (T)0 : (T)(x << n); }
};
struct Right {
    template <class T> T operator()(T x, uint32_t n) const {
        const uint32_t most = 8 * sizeof(T) - 1;
        return n <= most ? (T)(x >> n) : std::is_signed_v<T> ? (T)(x >> most) : (T)0;
    }
};

template <class T, class F> void binary(Thread& t, const Ins& i) {
    T x = in<T>(t, i, i.a), y = in<T>(t, i, i.b);
    out<T>(t, i, directed(i, [&] { return F()(opaque(x), opaque(y)); }));
}
template <class T, class F> void whole(Thread& t, const Ins& i) { out<T>(t, i, F()(bits_as<T>(t.r[i.a]), bits_as<T>(t.r[i.b]))); }
template <class T, class F> void shift(Thread& t, const Ins& i) { out<T>(t, i, F()(bits_as<T>(t.r[i.a]), (uint32_t)t.r[i.b])); }
template <class T> void fused(Thread& t, const Ins& i) {
    T x = in<T>(t, i, i.a), y = in<T>(t, i, i.b), z = in<T>(t, i, i.c);
    out<T>(t, i, directed(i, [&] { return (T)std::fma(opaque(x), opaque(y), opaque(z)); }));
}
template <class T> void mad(Thread& t, const Ins& i) { out<T>(t, i, (T)(bits_as<T>(t.r[i.a]) * bits_as<T>(t.r[i.b]) + bits_as<T>(t.r[i.c]))); }
template <class T> void mul_wide(Thread& t, const Ins& i) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    Wide product = (Wide)bits_as<T>(t.r[i.a]) * (Wide)bits_as<T>(t.r[i.b]) + (i.c ? (Wide)t.r[i.c] : 0);
    t.r[i.d] = sizeof(T) == 4 ? (uint64_t)product : (uint64_t)product & 0xFFFFFFFF;
}
// x + y + carry, in 32 bits; of a product x is the low or the high half (mode 1 and 2), and to take away is mode 3.
void chained(Thread& t, const Ins& i) {
    uint64_t x = (uint32_t)t.r[i.a], y = (uint32_t)t.r[i.b], carry = i.takes_carry && t.carry;
    if (i.mode == 1 || i.mode == 2) {
        x = i.mode == 1 ? (uint32_t)(x * y) : x * y >> 32;
        y = (uint32_t)t.r[i.c];
    }
    uint64_t result = i.mode == 3 ? x - y - carry : x + y + carry;
    if (i.carries) t.carry = result >> 32 & 1;
    t.r[i.d] = (uint32_t)result;
}

template <class T> void negate(Thread& t, const Ins& i) { out<T>(t, i, (T)-in<T>(t, i, i.a)); }
template <class T> void absolute(Thread& t, const Ins& i) {
    T x = in<T>(t, i, i.a);
    if constexpr (is_real<T>) out<T>(t, i, std::fabs(x));
    else out<T>(t, i, x < 0 ? (T)-x : x);
}
template <class T> void copy_sign(Thread& t, const Ins& i) { out<T>(t, i, std::copysign(bits_as<T>(t.r[i.b]), bits_as<T>(t.r[i.a]))); }

struct Root { double operator()(double x) const { return std::sqrt(x); } };
struct OverRoot { double operator()(double x) const { return 1 / std::sqrt(x); } };
struct Over { double operator()(double x) const { return 1 / x; } };
struct PowerOf2 { double operator()(double x) const { return std::exp2(x); } };
struct Log2 { double operator()(double x) const { return std::log2(x); } };
struct Sine { double operator()(double x) const { return std::sin(x); } };
struct Cosine { double operator()(double x) const { return std::cos(x); } };
struct Tangent { double operator()(double x) const { return std::tanh(x); } };
template <class T, class F> void real(Thread& t, const Ins& i) {
    T x = in<T>(t, i, i.a);
    uint64_t bits = bits_from((T)F()(x));
    if (sizeof(T) == 8 && i.mode) bits &= 0xFFFFFFFF00000000;  // an approximation has the upper half alone
    out<T>(t, i, bits_as<T>(bits));
}

// ---------------------------------------------------------------- bits, comparisons, conversions

template <class F> void bitwise(Thread& t, const Ins& i) { t.r[i.d] = F()(t.r[i.a], t.r[i.b]); }
template <class T> void complement(Thread& t, const Ins& i) { t.r[i.d] = (T)~t.r[i.a]; }
void truth_not(Thread& t, const Ins& i) { t.r[i.d] = ~t.r[i.a] & 1; }
void truth(Thread& t, const Ins& i) { t.r[i.d] = t.r[i.a] & 1; }
void select(Thread& t, const Ins& i) { t.r[i.d] = t.r[t.r[i.c] & 1 ? i.a : i.b]; }
void ones(Thread& t, const Ins& i) { t.r[i.d] = (uint64_t)__builtin_popcountll(i.mode == 4 ? (uint32_t)t.r[i.a] : t.r[i.a]); }
void leading_zeros(Thread& t, const Ins& i) {
    uint64_t x = i.mode == 4 ? (uint32_t)t.r[i.a] : t.r[i.a];
    t.r[i.d] = x ? (uint64_t)__builtin_clzll(x) - (64 - 8 * i.mode) : 8 * i.mode;
}
void permute(Thread& t, const Ins& i) {
    uint64_t pool = (uint32_t)t.r[i.a] | t.r[i.b] << 32, result = 0;
    for (int n = 0; n < 4; ++n) {
        unsigned which = t.r[i.c] >> 4 * n & 15;
        uint8_t byte = (uint8_t)(pool >> 8 * (which & 7));
        if (which & 8) byte = (int8_t)byte < 0 ? 255 : 0;
        result |= (uint64_t)byte << 8 * n;
    }
    t.r[i.d] = result;
}
// The low bits of a, so many as e says, in b from bit c on.
void insert(Thread& t, const Ins& i) {
    unsigned from = t.r[i.c] & 255, length = t.r[i.e] & 255, bits = 8 * i.mode;
    uint64_t mask = length >= 64 ? ~0ull : (1ull << length) - 1;
    mask = from >= bits ? 0 : mask << from;
    uint64_t result = (t.r[i.b] & ~mask) | (from >= bits ? 0 : t.r[i.a] << from & mask);
    t.r[i.d] = bits == 32 ? (uint32_t)result : result;
}

void move(Thread& t, const Ins& i) { t.r[i.d] = t.r[i.a]; }
template <class T> void move_parts(Thread& t, const Ins& i) {
    if (i.count == 1 && i.mode == 0) return move(t, i);
    int bits = 8 * sizeof(T) / i.count;
    uint64_t mask = (1ull << bits) - 1, from = t.r[i.a], joined = 0;
    for (int n = 0; n < i.count; ++n) {
        if (i.mode) joined |= (t.r[i.more[n]] & mask) << bits * n;
        else t.r[i.more[n]] = from >> bits * n & mask;
    }
    if (i.mode) t.r[i.d] = joined;
}

const char* const COMPARISONS[] = {"eq", "ne", "lt", "le", "gt", "ge", "num", "nan"};
template <class T> bool compares(int how, T x, T y) {
    switch (how) {
        case 0: return x == y;
        case 1: return x != y;
        case 2: return x < y;
        case 3: return x <= y;
        case 4: return x > y;
        default: return x >= y;
    }
}
template <class T> void compare(Thread& t, const Ins& i) {
    T x = in<T>(t, i, i.a), y = in<T>(t, i, i.b);
    bool lost = x != x || y != y;  // NaN
    t.r[i.d] = i.mode > 5 ? lost == (i.mode == 7) : lost ? i.unordered : compares(i.mode, x, y);
}

double rounded(double x, char how) { return how == 'n' ? std::nearbyint(x) : how == 'm' ? std::floor(x) : how == 'p' ? std::ceil(x) : std::trunc(x); }

template <class To, class From> void convert(Thread& t, const Ins& i) {
    From given = in<From>(t, i, i.a);
    if constexpr (is_float<From>) {
        double x = wide(given);
        if (i.round || !is_float<To>) x = rounded(x, i.round);
        if constexpr (std::is_same_v<To, bfloat16>) out<To>(t, i, to_bfloat16((float)x, i.directed));
        else if constexpr (is_float<To>) out<To>(t, i, directed(i, [&] { return (To)opaque(x); }));
        else {
            const double least = std::is_signed_v<To> ? -std::ldexp(1.0, 8 * sizeof(To) - 1) : 0.0;
            const double above = std::ldexp(1.0, 8 * sizeof(To) - std::is_signed_v<To>);
            const To lowest = std::is_signed_v<To> ? (To)((To)1 << (8 * sizeof(To) - 1)) : (To)0;
            if (x != x) out<To>(t, i, sizeof(To) == 8 ? (To)(1ull << 63) : (To)0);
            else out<To>(t, i, x < least ? lowest : x >= above ? (To)~lowest : (To)x);
        }
    } else if constexpr (std::is_same_v<To, bfloat16>) out<To>(t, i, to_bfloat16((float)given, i.directed));
    else if constexpr (is_float<To>) out<To>(t, i, directed(i, [&] { return (To)opaque(given); }));
    else if (i.saturate) {
        __int128 least = std::is_signed_v<To> ? -((__int128)1 << (8 * sizeof(To) - 1)) : 0;
        __int128 most = ((__int128)1 << (8 * sizeof(To) - std::is_signed_v<To>)) - 1;
        out<To>(t, i, (To)std::clamp((__int128)given, least, most));
    } else out<To>(t, i, (To)given);
}

// ---------------------------------------------------------------- memory

// Returns where the bytes are, after a look whether they may be touched.
uint8_t* touched(Thread& t, const Ins& i, size_t size) {
    uint64_t at = t.r[i.a] + (uint64_t)i.offset;
    const Block& block = *t.block;
    auto within = [&](const uint8_t* base, size_t length) { return at >= (uint64_t)base && at + size <= (uint64_t)base + length; };
    if (i.space == SHARED) {
        at = (uint64_t)block.shared + (uint32_t)at;
        if (!within(block.shared, block.shared_bytes)) fail(t, 700, "outside of shared memory");
    } else if (i.space == FRAME) {
        if (!within(t.frame, block.kernel->frame_bytes)) fail(t, 700, "outside of the thread's own memory");
    } else if (!reachable(at, size) && !within(block.shared, block.shared_bytes) && !within(t.frame, block.kernel->frame_bytes)) {
        fail(t, 700, std::to_string(size) + " bytes at " + std::to_string(at) + ", which are no array's");
    }
    if (at % size) fail(t, 716, "a misaligned address");
    return (uint8_t*)at;
}
template <class T> void load(Thread& t, const Ins& i) {
    const uint8_t* from = touched(t, i, sizeof(T) * (size_t)i.count);
    for (int n = 0; n < i.count; ++n, from += sizeof(T)) {
        T x;
        memcpy(&x, from, sizeof(T));
        t.r[i.more[n]] = bits_from(x);
    }
}
template <class T> void store(Thread& t, const Ins& i) {
    uint8_t* to = touched(t, i, sizeof(T) * (size_t)i.count);
    for (int n = 0; n < i.count; ++n) memcpy(to + (size_t)n * sizeof(T), &t.r[i.more[n]], sizeof(T));
}
template <class T, class F> void atomic(Thread& t, const Ins& i) {
    uint8_t* place = touched(t, i, sizeof(T));
    T before;
    memcpy(&before, place, sizeof(T));
    T after = F()(before, bits_as<T>(t.r[i.b]));
    memcpy(place, &after, sizeof(T));
    t.r[i.more[0]] = bits_from(before);
}
template <bool TO> void in_shared(Thread& t, const Ins& i) {
    uint64_t base = (uint64_t)t.block->shared;
    t.r[i.d] = TO ? t.r[i.a] - base : t.r[i.a] + base;
}

// ---------------------------------------------------------------- where it goes on

void branch(Thread& t, const Ins& i) { t.pc = (int)i.offset; }
void leave(Thread& t, const Ins&) {
    if (t.back.empty()) t.state = DONE;
    else {
        t.pc = t.back.back();
        t.back.pop_back();
    }
}
void end(Thread& t, const Ins&) { t.state = DONE; }
void trap(Thread& t, const Ins&) { fail(t, 710, "a trap"); }
template <State S> void wait(Thread& t, const Ins& i) {
    t.at = &i;
    t.state = S;
}

// ---------------------------------------------------------------- the table

template <class... T> struct Types {};
using Whole = Types<uint32_t, int32_t, uint64_t, int64_t, uint16_t, int16_t>;
using Real = Types<float, double>;
using Numbers = Types<float, double, uint32_t, int32_t, uint64_t, int64_t, uint16_t, int16_t>;
using Unsigned = Types<uint32_t, uint64_t, uint16_t, uint8_t>;
using All = Types<float, double, uint32_t, int32_t, uint64_t, int64_t, uint16_t, int16_t, uint8_t, int8_t, float16, bfloat16>;

template <class T> bool is_named(const std::string& name) {
    if (is_float<T>) return name == (std::is_same_v<T, bfloat16> ? "bf16" : "f" + std::to_string(8 * sizeof(T)));
    std::string bits = std::to_string(8 * sizeof(T));
    return name == (std::is_signed_v<T> ? "s" : "u") + bits || (!std::is_signed_v<T> && name == "b" + bits);
}
// Returns what `make` gives for the type of that name.
template <class F, class... T> Work among(Types<T...>, const std::string& name, F make) {
    Work found = nullptr;
    ((is_named<T>(name) && (found = make.template operator()<T>(), true)) || ...);
    return found;
}

#define OF(types, ...) return among(types(), type, []<class T>() -> Work { return __VA_ARGS__; })

Work find(const Form& f, Ins& i) {
    const std::string &name = f.name, type = f.types.empty() ? "" : f.types.back();
    bool truths = type == "pred", chain = f.has("cc") || name == "addc" || name == "subc" || name == "madc";
    if (chain) {
        if (type != "u32") return nullptr;
        i.carries = f.has("cc");
        i.takes_carry = name.back() == 'c';
        i.mode = name[0] == 'm' ? (f.has("hi") ? 2 : 1) : name[0] == 's' ? 3 : 0;
        return chained;
    }
    if (name == "mov" && truths) return truth;
    if (name == "mov") OF(All, move_parts<T>);
    if (name == "ld") OF(All, load<T>);
    if (name == "st") OF(All, store<T>);
    if (name == "add") OF(Numbers, binary<T, Add>);
    if (name == "sub") OF(Numbers, binary<T, Sub>);
    if (name == "div") OF(Numbers, binary<T, Div>);
    if (name == "rem") OF(Whole, whole<T, Rem>);
    if (name == "min") OF(Numbers, binary<T, Extremum<false>>);
    if (name == "max") OF(Numbers, binary<T, Extremum<true>>);
    if (name == "mul" && f.has("hi")) OF(Whole, whole<T, MulHigh>);
    if ((name == "mul" || name == "mad") && f.has("wide")) OF(Whole, mul_wide<T>);
    if (name == "mul") OF(Numbers, binary<T, Mul>);
    if (name == "mad" && f.has("lo")) OF(Whole, mad<T>);
    if (name == "fma") OF(Real, fused<T>);
    if (name == "neg") OF(Numbers, negate<T>);
    if (name == "abs") OF(Numbers, absolute<T>);
    if (name == "copysign") OF(Real, copy_sign<T>);
    if (name == "shl") OF(Unsigned, shift<T, Left>);
    if (name == "shr") OF(Whole, shift<T, Right>);
    i.mode = f.has("approx");
    if (name == "sqrt") OF(Real, real<T, Root>);
    if (name == "rsqrt") OF(Real, real<T, OverRoot>);
    if (name == "rcp") OF(Real, real<T, Over>);
    if (name == "ex2") OF(Real, real<T, PowerOf2>);
    if (name == "lg2") OF(Real, real<T, Log2>);
    if (name == "sin") OF(Real, real<T, Sine>);
    if (name == "cos") OF(Real, real<T, Cosine>);
    if (name == "tanh") OF(Real, real<T, Tangent>);
    i.mode = (int)bytes_of(type);
    if (name == "and") return bitwise<std::bit_and<uint64_t>>;
    if (name == "or") return bitwise<std::bit_or<uint64_t>>;
    if (name == "xor") return bitwise<std::bit_xor<uint64_t>>;
    if (name == "not" && truths) return truth_not;
    if (name == "not") OF(Unsigned, complement<T>);
    if (name == "selp") return select;
    if (name == "popc") return ones;
    if (name == "clz") return leading_zeros;
    if (name == "prmt" && f.parts.size() == 1) return permute;
    if (name == "bfi") return insert;
    if (name == "setp" && f.parts.size() == (f.has("ftz") ? 3u : 2u)) {
        static const std::map<std::string, std::string> aliases = {{"lo", "lt"}, {"ls", "le"}, {"hi", "gt"}, {"hs", "ge"}};
        std::string how = f.parts[0];
        if (aliases.count(how)) how = aliases.at(how);
        i.unordered = how.size() == 3 && how.back() == 'u';
        i.mode = (int)(std::find(COMPARISONS, COMPARISONS + 8, i.unordered ? how.substr(0, 2) : how) - COMPARISONS);
        if (i.mode > 7) return nullptr;
        OF(Numbers, compare<T>);
    }
    if (name == "cvt" && f.types.size() == 2)
        return among(All(), f.types[0], [&]<class To>() { return among(All(), type, []<class From>() -> Work { return convert<To, From>; }); });
    if (name == "cvta" && f.has("shared")) return f.has("to") ? in_shared<true> : in_shared<false>;
    if (name == "cvta") return move;
    if ((name == "atom" || name == "red") && f.has("add")) OF(Numbers, atomic<T, Add>);
    if (name == "bra") return branch;
    if (name == "ret") return leave;
    if (name == "exit") return end;
    if (name == "trap") return trap;
    if (name == "bar" && f.has("warp")) {
        i.mode = -1;
        return wait<AT_WARP>;
    }
    if (name == "bar" && f.parts.size() == 1) return wait<AT_BARRIER>;
    if (name == "shfl") {
        i.mode = f.has("bfly") ? 0 : f.has("up") ? 1 : f.has("down") ? 2 : 3;
        return wait<AT_WARP>;
    }
    return nullptr;
}

}  // namespace

Form::Form(const std::vector<std::string>& given) : name(given.at(0)), parts(given.begin() + 1, given.end()) {
    for (auto& each : parts)
        if (each == "pred" || bytes_of(each)) types.push_back(each);
}

size_t bytes_of(const std::string& type) {
    if (type == "bf16") return 2;
    if (type == "pred") return 1;
    size_t bits = type.size() > 1 && type.size() < 4 && strchr("busf", type[0]) ? strtoul(type.c_str() + 1, nullptr, 10) : 0;
    return bits == 8 || bits == 16 || bits == 32 || bits == 64 ? bits / 8 : 0;
}

Work work_of(const Form& form, Ins& ins) {
    ins.mode = 0;
    return find(form, ins);
}

void copy_frame(Thread& t, const Ins& i) { memcpy(t.frame + i.a, t.frame + i.b, (size_t)i.c); }
void enter(Thread& t, const Ins& i) {
    t.back.push_back(t.pc);
    t.pc = (int)i.offset;
}

void shuffle(const Ins& i, Thread* const (&lanes)[32]) {
    if (i.mode < 0) return;  // a barrier alone
    uint64_t values[32];
    for (int lane = 0; lane < 32; ++lane) values[lane] = lanes[lane] ? (uint32_t)lanes[lane]->r[i.a] : 0;
    for (int lane = 0; lane < 32; ++lane) {
        Thread* t = lanes[lane];
        if (!t) continue;
        int by = (int)t->r[i.b] & 31, clamp = (int)t->r[i.c] & 31, segment = (int)(t->r[i.c] >> 8) & 31;
        int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
        int from = i.mode == 0 ? lane ^ by : i.mode == 1 ? lane - by : i.mode == 2 ? lane + by : first | (by & ~segment);
        bool inside = i.mode == 1 ? from >= last : from <= last;
        if (!inside) from = lane;
        if (!lanes[from]) fail(*t, 715, "a shuffle from a lane that takes no part");
        t->r[i.more[0]] = values[from];
        if (i.count == 2) t->r[i.more[1]] = inside;
    }
}

}  // namespace ptx
