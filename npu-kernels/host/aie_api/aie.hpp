// Host model of the few parts of AMD's aie_api that flash_partial.h uses, so that the same source compiles for x86.
//
// It models shapes, lane orders, bf16 rounding (nearest, ties to even) and the order of additions. It does not model cycles, banks, locks and
// the last bits of the hardware. The hardware emulates a float multiplication by bf16 products, and its mmul adds nine aligned terms at once.
// Here each is one IEEE operation, and mmul adds one term after the other in ascending k. With -DAIE_NINE_TERMS, mmul follows the published
// model of the hardware instead: eight products and the accumulator are aligned to the largest exponent, each is rounded to 24 bits, and
// their exact sum is rounded once.
//
// Compile with -ffp-contract=off, because a fused multiply-add rounds only once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

struct bfloat16 {
    uint16_t bits;
};

namespace aie {

inline float widen(bfloat16 v) {
    uint32_t bits = uint32_t(v.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline bfloat16 narrow(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

enum class rounding_mode { conv_even };
inline void set_rounding(rounding_mode) {}

template <class T, unsigned N>
struct vector {
    T lane[N];

    T operator[](unsigned i) const { return lane[i]; }

    template <unsigned M>
    vector<T, M> extract(unsigned part) const {
        static_assert(N % M == 0);
        vector<T, M> out;
        for (unsigned i = 0; i < M; i++) out.lane[i] = lane[part * M + i];
        return out;
    }

    /// Reinterprets the bits as another type of the same size.
    template <class U>
    vector<U, N> cast_to() const {
        static_assert(sizeof(U) == sizeof(T));
        vector<U, N> out;
        std::memcpy(out.lane, lane, sizeof lane);
        return out;
    }
};

template <unsigned N>
struct mask {
    bool lane[N];
};

struct accfloat {};

template <class Tag, unsigned N>
struct accum;

template <unsigned N>
struct accum<accfloat, N> {
    float lane[N];

    accum() = default;
    explicit accum(const vector<float, N> &v) { std::memcpy(lane, v.lane, sizeof lane); }
    explicit accum(const vector<bfloat16, N> &v) {
        for (unsigned i = 0; i < N; i++) lane[i] = widen(v.lane[i]);
    }

    template <class T>
    vector<T, N> to_vector() const {
        vector<T, N> out;
        for (unsigned i = 0; i < N; i++) {
            if constexpr (sizeof(T) == 2) out.lane[i] = narrow(lane[i]);
            else out.lane[i] = lane[i];
        }
        return out;
    }
};

template <unsigned N, class T>
vector<T, N> load_v(const T *p) {
    vector<T, N> out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
}

template <class T, unsigned N>
void store_v(T *p, const vector<T, N> &v) {
    std::memcpy(p, v.lane, sizeof v.lane);
}

template <class T, unsigned N>
vector<T, N> broadcast(T v) {
    vector<T, N> out;
    for (T &x : out.lane) x = v;
    return out;
}

template <class T, unsigned N>
vector<T, N> zeros() {
    vector<T, N> out;
    std::memset(out.lane, 0, sizeof out.lane);
    return out;
}

template <class F, class T, unsigned N>
vector<T, N> each(const vector<T, N> &a, const vector<T, N> &b, F f) {
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = f(a.lane[i], b.lane[i]);
    return out;
}

template <class T, unsigned N>
vector<T, N> add(const vector<T, N> &a, const vector<T, N> &b) {
    return each(a, b, [](T x, T y) { return T(x + y); });
}

template <class T, unsigned N>
vector<T, N> sub(const vector<T, N> &a, const vector<T, N> &b) {
    return each(a, b, [](T x, T y) { return T(x - y); });
}

template <class T, unsigned N>
vector<T, N> max(const vector<T, N> &a, const vector<T, N> &b) {
    return each(a, b, [](T x, T y) { return x > y ? x : y; });
}

template <unsigned N>
accum<accfloat, N> mul(const vector<float, N> &a, const vector<float, N> &b) {
    return accum<accfloat, N>(each(a, b, [](float x, float y) { return x * y; }));
}

/// Returns lane i of `b` where the mask is set, and of `a` elsewhere.
template <class T, unsigned N>
vector<T, N> select(const vector<T, N> &a, const vector<T, N> &b, const mask<N> &m) {
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = m.lane[i] ? b.lane[i] : a.lane[i];
    return out;
}

template <class T, unsigned N>
mask<N> gt(const vector<T, N> &a, const vector<T, N> &b) {
    mask<N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = a.lane[i] > b.lane[i];
    return out;
}

/// Rounds to nearest, ties to even, like rounding_mode::conv_even.
template <class T, unsigned N>
vector<T, N> to_fixed(const vector<float, N> &v, int shift = 0) {
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = T(std::nearbyintf(std::ldexp(v.lane[i], shift)));
    return out;
}

template <class T, unsigned N>
vector<float, N> to_float(const vector<T, N> &v) {
    vector<float, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = float(v.lane[i]);
    return out;
}

template <class T, unsigned N>
vector<T, N> upshift(const vector<T, N> &v, unsigned bits) {
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = T(uint32_t(v.lane[i]) << bits);
    return out;
}

/// Moves lane i + n to lane i. The last n lanes are undefined. Here they are NaN, which a result would show.
template <class T, unsigned N>
vector<T, N> shuffle_down(const vector<T, N> &v, unsigned n) {
    vector<T, N> out;
    for (unsigned i = 0; i < N; i++) out.lane[i] = i + n < N ? v.lane[i + n] : std::numeric_limits<T>::quiet_NaN();
    return out;
}

/// Transposes a row-major matrix of `rows` rows.
template <class T, unsigned N>
vector<T, N> transpose(const vector<T, N> &v, unsigned rows, unsigned cols) {
    vector<T, N> out;
    for (unsigned r = 0; r < rows; r++)
        for (unsigned c = 0; c < cols; c++) out.lane[c * rows + r] = v.lane[r * cols + c];
    return out;
}

template <class T, unsigned N>
vector<T, 2 * N> concat(const vector<T, N> &a, const vector<T, N> &b) {
    vector<T, 2 * N> out;
    std::memcpy(out.lane, a.lane, sizeof a.lane);
    std::memcpy(out.lane + N, b.lane, sizeof b.lane);
    return out;
}

/// Alternates `step` lanes of `a` and `step` lanes of `b`. Returns the first half and the second half.
template <class T, unsigned N>
std::pair<vector<T, N>, vector<T, N>> interleave_zip(const vector<T, N> &a, const vector<T, N> &b, unsigned step) {
    T all[2 * N];
    for (unsigned i = 0; i < N; i++) {
        all[i / step * 2 * step + i % step] = a.lane[i];
        all[i / step * 2 * step + step + i % step] = b.lane[i];
    }
    return {load_v<N>(all), load_v<N>(all + N)};
}

/// Returns the sum of an accumulator and eight products. `a` is a row of 8, `b` a column of 8 with this stride.
inline float mac8(float sum, const bfloat16 *a, const bfloat16 *b, unsigned stride) {
#ifdef AIE_NINE_TERMS
    float term[9];
    int largest = -1000;
    for (int k = 0; k < 9; k++) {
        term[k] = k < 8 ? widen(a[k]) * widen(b[k * stride]) : sum;
        if (term[k] != 0.0f) largest = std::max(largest, std::ilogb(term[k]));
    }
    if (largest == -1000) return 0.0f;
    double all = 0.0;
    for (float t : term) all += std::nearbyint(std::ldexp(double(t), 23 - largest));
    return float(std::ldexp(all, largest - 23));
#else
    for (unsigned k = 0; k < 8; k++) sum = sum + widen(a[k]) * widen(b[k * stride]);
    return sum;
#endif
}

template <unsigned M, unsigned K, unsigned N, class A, class B, class Acc>
struct mmul;

/// Product of 4x8 and 8x4 matrices, both row-major.
template <>
struct mmul<4, 8, 4, bfloat16, bfloat16, accfloat> {
    static constexpr unsigned size_A = 32, size_B = 32, size_C = 16;
    accum<accfloat, 16> c;

    mmul() = default;
    explicit mmul(const accum<accfloat, 16> &start) : c(start) {}

    void mul(const vector<bfloat16, 32> &a, const vector<bfloat16, 32> &b) {
        for (float &x : c.lane) x = 0.0f;
        mac(a, b);
    }

    void mac(const vector<bfloat16, 32> &a, const vector<bfloat16, 32> &b) {
        for (unsigned i = 0; i < 4; i++)
            for (unsigned j = 0; j < 4; j++) c.lane[i * 4 + j] = mac8(c.lane[i * 4 + j], a.lane + i * 8, b.lane + j, 4);
    }

    template <class T>
    vector<T, 16> to_vector() const {
        return c.template to_vector<T>();
    }
};

} // namespace aie
