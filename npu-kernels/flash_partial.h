// Attention of up to 32 query rows over sealed pages of one kv head, for one AIE2 core. The result is (m, l, O) in f32,
// before the division by l.
//
// A core reads objects of 8 KB from one fifo: a header, the queries, then tiles of keys and values. The header has the number of tiles and
// of rows. Queries are already scaled by log2(e), so that every exponential is a power of two.
//
// Registers have 4x4 blocks as mmul<4,8,4> returns them: lane 4 r + c is row r, column c. All four lanes of a row have its maximum. The sum of
// a row has four parts, one per column, which are added at the end.
#pragma once
#include <aie_api/aie.hpp>
#include <cstdint>

namespace flash {

constexpr uint32_t MAGIC = 0x31504647; // "GFP1"
constexpr uint32_t ABI = 1;
constexpr unsigned OBJECT = 8192;       // bytes of a fifo object
constexpr unsigned MAX_ROWS = 32;       // limits in a header, and maxima and sums in a result
constexpr unsigned PAGE = 256;          // positions
constexpr float NONE = -3.0e38f;        // maximum of a row without keys: finite, so that differences are numbers
constexpr float LOWEST = -120.0f;       // smaller exponents are treated like this one

// Words of the header object.
enum Header : unsigned { H_MAGIC, H_ABI, H_HEAD_DIM, H_TILES, H_ROWS, H_SERIAL, H_RESERVED0, H_RESERVED1, H_LIMITS };
// Words after the maxima and sums of a result: an echo of the header, from which the host recognises the command.
enum Echo : unsigned { E_MAGIC, E_ABI, E_TILES, E_ROWS, E_SERIAL, ECHO_WORDS = 16 };

template <unsigned D>
struct Shape {
    static constexpr unsigned ROWS = 4096 / D;     // query rows of a core
    static constexpr unsigned KEYS = 2048 / D;     // keys of a tile
    static constexpr unsigned KEY_BLOCKS = KEYS / 4, DIM_BLOCKS = D / 4, STEPS = D / 8, ROW_BLOCKS = ROWS / 4;
    static constexpr unsigned VALUES = KEYS * D;   // elements of a tile before its values
    static constexpr unsigned OUT_WORDS = ROWS * D + 2 * MAX_ROWS + ECHO_WORDS;

    static_assert(2 * VALUES * 2 == OBJECT, "a tile fills an object");
    static_assert(ROWS * D * 2 == OBJECT, "so do the queries");
    static_assert(KEYS % 8 == 0 && D % 8 == 0 && PAGE % KEYS == 0);
};

// State of a core between calls.
template <unsigned D>
struct State {
    alignas(32) bfloat16 q[Shape<D>::ROWS * D];          // [row blocks, steps, 4, 8]
    alignas(32) float m[Shape<D>::ROW_BLOCKS * 16];      // row maxima
    alignas(32) float l[Shape<D>::ROW_BLOCKS * 16];      // row sums, one part per column
    alignas(32) int32_t limit[Shape<D>::ROW_BLOCKS * 16]; // number of tiles that a row attends to
    uint32_t tiles, rows, serial, done;
};

// Bytes of a core's data memory in use, of 64 KB in four banks: two input objects, the result, the state with the queries, and a stack of 4 KB.
// The default stack of 1 KB would overflow into buffers.
template <unsigned D>
constexpr unsigned L1_BYTES = 2 * OBJECT + Shape<D>::OUT_WORDS * 4 + sizeof(State<D>) + 4096;
static_assert(L1_BYTES<128> <= 48 * 1024 && L1_BYTES<256> <= 48 * 1024, "three quarters of a core's data memory");

using Quad = aie::vector<float, 16>;

// 2^x for -120 <= x <= 0: 2^i times a cubic of the fraction, |fraction| <= 1/2. The relative error is below 1.1e-4, and 0 at x = 0.
inline Quad exp2_block(Quad x) {
    const aie::vector<int32_t, 16> whole = aie::to_fixed<int32_t>(x);
    const Quad f = aie::sub(x, aie::to_float(whole));
    Quad p = aie::mul(f, aie::broadcast<float, 16>(0.05500901117920876f)).to_vector<float>();
    p = aie::add(p, aie::broadcast<float, 16>(0.24221116304397583f));
    p = aie::mul(p, f).to_vector<float>();
    p = aie::add(p, aie::broadcast<float, 16>(0.693282961845398f));
    p = aie::mul(p, f).to_vector<float>();
    p = aie::add(p, aie::broadcast<float, 16>(1.0f));
    const auto power = aie::upshift(aie::add(whole, aie::broadcast<int32_t, 16>(127)), 23).cast_to<float>();
    return aie::mul(p, power).to_vector<float>();
}

inline Quad lowered(Quad a, Quad b) {
    return exp2_block(aie::max(aie::sub(a, b), aie::broadcast<float, 16>(LOWEST)));
}

// Copies lanes 0 to 3 of a transposed block, one per row, to all lanes of their rows.
inline Quad spread(Quad turned) {
    const auto four = turned.extract<4>(0);
    const auto eight = aie::concat(four, four);
    return aie::transpose(aie::concat(eight, eight), 4, 4);
}

inline Quad row_max(Quad block) {
    Quad t = aie::transpose(block, 4, 4);
    t = aie::max(t, aie::shuffle_down(t, 8));
    t = aie::max(t, aie::shuffle_down(t, 4));
    return spread(t);
}

// Reads the header. If it is not one of this kernel, `rows` is 0, and the result has no sums and no serial number.
template <unsigned D>
void begin(const uint32_t *header, State<D> &s) {
    const uint32_t rows = header[H_ROWS];
    const bool known = header[H_MAGIC] == MAGIC && header[H_ABI] == ABI && header[H_HEAD_DIM] == D;
    const bool good = known && (rows == 0 || rows == 4 || rows == 16 || rows == 32) && rows <= Shape<D>::ROWS;
    s.tiles = known ? header[H_TILES] : 0;
    s.rows = good ? rows : 0;
    s.serial = good ? header[H_SERIAL] : 0;
    s.done = 0;
    for (unsigned i = 0; i < Shape<D>::ROW_BLOCKS * 16; i++)
        s.limit[i] = good ? int32_t(header[H_LIMITS + i / 16 * 4 + i % 16 / 4]) : 0;
}

template <unsigned D>
void query(const bfloat16 *object, State<D> &s, float *out) {
    for (unsigned i = 0; i < Shape<D>::ROWS * D; i += 32) aie::store_v(s.q + i, aie::load_v<32>(object + i));
    for (unsigned i = 0; i < Shape<D>::ROW_BLOCKS * 16; i += 16) {
        aie::store_v(s.m + i, aie::broadcast<float, 16>(NONE));
        aie::store_v(s.l + i, aie::zeros<float, 16>());
    }
    for (unsigned i = 0; i < Shape<D>::ROWS * D; i += 16) aie::store_v(out + i, aie::zeros<float, 16>());
}

// Computes attention over one tile: keys [key blocks, steps, 8, 4], then values [KEYS / 8, dim blocks, 8, 4].
template <unsigned D>
void tile(const bfloat16 *object, State<D> &s, float *out) {
    using S = Shape<D>;
    using M = aie::mmul<4, 8, 4, bfloat16, bfloat16, aie::accfloat>;
    aie::set_rounding(aie::rounding_mode::conv_even);
    const bfloat16 *keys = object, *values = object + S::VALUES;
    const auto now = aie::broadcast<int32_t, 16>(int32_t(s.done));
    for (unsigned rb = 0; rb < s.rows / 4; rb++) {
        // Scores of 4 rows with all keys of the tile.
        Quad score[S::KEY_BLOCKS];
        for (unsigned kb = 0; kb < S::KEY_BLOCKS; kb++) {
            const bfloat16 *a = s.q + rb * 4 * D, *b = keys + kb * 4 * D;
            M c;
            c.mul(aie::load_v<32>(a), aie::load_v<32>(b));
            for (unsigned d = 1; d < S::STEPS; d++) c.mac(aie::load_v<32>(a + d * 32), aie::load_v<32>(b + d * 32));
            score[kb] = c.to_vector<float>();
        }
        Quad most = score[0];
        for (unsigned kb = 1; kb < S::KEY_BLOCKS; kb++) most = aie::max(most, score[kb]);

        // A row that does not attend to this tile keeps its state.
        const auto sees = aie::gt(aie::load_v<16>(s.limit + rb * 16), now);
        const Quad m_old = aie::load_v<16>(s.m + rb * 16), l_old = aie::load_v<16>(s.l + rb * 16);
        const Quad tile_m = row_max(most);
        const Quad m_new = aie::max(m_old, tile_m);
        const Quad m = aie::select(tile_m, m_new, sees);
        const Quad factor = lowered(aie::select(m, m_old, sees), m);
        aie::store_v(s.m + rb * 16, aie::select(m_old, m_new, sees));

        // Exponentials are rounded to bf16, as they are multiplied by the values. The sums add the rounded ones too.
        aie::vector<bfloat16, 16> p[S::KEY_BLOCKS];
        Quad l = aie::mul(l_old, factor).template to_vector<float>();
        for (unsigned kb = 0; kb < S::KEY_BLOCKS; kb++) {
            p[kb] = aie::accum<aie::accfloat, 16>(lowered(score[kb], m)).template to_vector<bfloat16>();
            l = aie::add(l, aie::accum<aie::accfloat, 16>(p[kb]).template to_vector<float>());
        }
        aie::store_v(s.l + rb * 16, aie::select(l_old, l, sees));

        aie::vector<bfloat16, 32> left[S::KEYS / 8];
        for (unsigned k = 0; k < S::KEYS / 8; k++) {
            const auto rows = aie::interleave_zip(p[2 * k], p[2 * k + 1], 4);
            left[k] = aie::concat(rows.first, rows.second);
        }
        for (unsigned db = 0; db < S::DIM_BLOCKS; db++) {
            float *o = out + (rb * S::DIM_BLOCKS + db) * 16;
            const Quad o_old = aie::load_v<16>(o);
            M c(aie::mul(o_old, factor));
            for (unsigned k = 0; k < S::KEYS / 8; k++) c.mac(left[k], aie::load_v<32>(values + (k * S::DIM_BLOCKS + db) * 32));
            aie::store_v(o, aie::select(o_old, c.template to_vector<float>(), sees));
        }
    }
    s.done++;
}

// Writes the end of the result, after the outputs [row blocks, dim blocks, 4, 4]: maxima [32], sums [32], and the echo of the header [16 words].
template <unsigned D>
void end(State<D> &s, float *out) {
    float *maxima = out + Shape<D>::ROWS * D, *sums = maxima + MAX_ROWS;
    for (unsigned r = 0; r < MAX_ROWS; r++) {
        const bool mine = r < s.rows;
        const float *l = s.l + r / 4 * 16 + r % 4 * 4;
        maxima[r] = mine ? s.m[r / 4 * 16 + r % 4 * 4] : NONE;
        sums[r] = mine ? (l[0] + l[2]) + (l[1] + l[3]) : 0.0f;
    }
    uint32_t *echo = reinterpret_cast<uint32_t *>(sums + MAX_ROWS);
    for (unsigned i = 0; i < ECHO_WORDS; i++) echo[i] = 0;
    echo[E_MAGIC] = MAGIC;
    echo[E_ABI] = ABI;
    echo[E_TILES] = s.done;
    echo[E_ROWS] = s.rows;
    echo[E_SERIAL] = s.serial;
}

} // namespace flash
