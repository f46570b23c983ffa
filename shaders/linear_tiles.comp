// Linear layers for many rows of activations on int8 matrix units: 128 matrix rows times 64 rows of activations a workgroup, 32 times
// 32 a subgroup. The integers and the order of float operations are those of linear.comp, so both give the same bits: with a scale
// a group, steps are met part by part (p, p + 32, ... for p = 0 to 31), and each finished part is added to the total.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 8) const bool SELECTED = false;

#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    F16 scales;  // [n, groups]; [n, 2] for i8a
    uint64_t x;  // i8 [rows, stride]
    F32 sx;      // [rows, groups]
    I32 sums;    // [rows, groups]
    F32 out_;    // [rows, n]
    Step step_;
    uint n;      // matrix rows
    uint steps;  // of 32 columns
    uint stride;
    uint groups; // of a row
};

const uint BN = 128, BM = 64;          // rows of both sides
const uint PIECES = 2 * BITS / 8;      // 16-byte loads of a row's step: 32 columns
const uint LOADS = BN * PIECES / 128;  // of a thread, for two steps
const uint PITCH = 3;                  // 16-byte pieces from row to row of an unpacked tile: no two rows meet in a bank

shared uvec4 wt[2][BN * PITCH];
shared uvec4 xt[2][BM * PITCH];
shared float ws[2][BN];
shared float xs[2][BM];
shared int joined[8][256];

#define C_INT coopmat<int, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define C_FLOAT coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

// Four columns as signed values: doubled for i2, less 128 for i8a.
uint signed_four(uint word, uint k) {
    const uint v = uint(four(word, k)) * DOUBLE;
    if (OFFSET == 0) return v;
    return ((v | 0x80808080u) - OFFSET * 0x01010101u) ^ 0x80808080u;
}

// The q-th step in the order that they are met in; beyond the last where there is none.
uint nth_step(uint q, uint turns) { return GROUPED ? q / turns + 32 * (q % turns) : q; }

uvec4 raw_w[LOADS];
uvec4 raw_x;
float raw_ws, raw_xs;

// Loads for steps q and q + 1, into registers.
void fetch(uint q, uint turns, uint n0, uint r0, uint last_row) {
    const uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        // Neighbouring lanes load neighbouring pieces of a row, then the next row.
        const uint id = i * 256 + t, o = id / (BN * PIECES), row = id / PIECES % BN, piece = id % PIECES;
        const uint s = min(nth_step(q + o, turns), steps - 1), block = s / 8 * 8, width = min(8, steps - block);
        const uint64_t at = codes + uint64_t(min(n0 + row, n - 1)) * (steps * PIECES * 16);
        raw_w[i] = U32x4(at).v[block * PIECES + piece * width + s % 8];
    }
    const uint o = t / 128, row = t / 2 % BM, half_ = t % 2;
    const uint s = min(nth_step(q + o, turns), steps - 1), r = min(r0 + row, last_row);
    raw_x = U32x4(x + r * stride).v[s * 2 + half_];
    if (GROUPED) {
        const uint sw = min(nth_step(q + t / BN, turns), steps - 1);
        raw_ws = float(scales.v[min(n0 + t % BN, n - 1) * groups + sw]) * UNIT;
        raw_xs = sx.v[r * groups + s];
    }
}

// From registers to shared memory, unpacked.
void store() {
    const uint t = gl_LocalInvocationID.x;
    [[unroll]] for (uint i = 0; i < LOADS; i++) {
        const uint id = i * 256 + t, o = id / (BN * PIECES), row = id / PIECES % BN, piece = id % PIECES;
        [[unroll]] for (uint q = 0; q < PER_WORD; q++) {
            uvec4 words;
            [[unroll]] for (uint e = 0; e < 4; e++) {
                const uint word = q * 4 + e;
                words[e] = signed_four(raw_w[i][word / PER_WORD], word % PER_WORD);
            }
            wt[o][row * PITCH + piece * PER_WORD + q] = words;
        }
    }
    xt[t / 128][(t / 2 % BM) * PITCH + t % 2] = raw_x;
    if (GROUPED) {
        ws[t / BN][t % BN] = raw_ws;
        if (t % 2 == 0) xs[t / 128][t / 2 % BM] = raw_xs;
    }
}

void main() {
    const uint w = gl_SubgroupID;
    const uint live = live_rows(step_, SELECTED), m0 = gl_WorkGroupID.x * BM;
    if (m0 >= live) return;
    const uint r0 = live_row(step_, SELECTED, m0), last_row = live_row(step_, SELECTED, live - 1);
    const uint n0 = gl_WorkGroupID.y * BN;
    const uint wn = w / 2 * 32, wm = w % 2 * 32; // the subgroup's part of the tile
    const uint turns = (steps + 31) / 32, count = GROUPED ? 32 * turns : steps;

    C_INT isum[2][2];
    C_FLOAT part[2][2], total[2][2];
    [[unroll]] for (uint i = 0; i < 2; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) {
            isum[i][j] = C_INT(0);
            part[i][j] = C_FLOAT(0.0);
            total[i][j] = C_FLOAT(-0.0); // adding to it leaves the first part as it is
        }

    fetch(0, turns, n0, r0, last_row);
    for (uint q = 0; q < count; q += 2) {
        store();
        barrier();
        if (q + 2 < count) fetch(q + 2, turns, n0, r0, last_row);
        [[unroll]] for (uint o = 0; o < 2; o++) {
            if (q + o < count && nth_step(q + o, turns) < steps) {
                coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA> a[2];
                coopmat<int8_t, gl_ScopeSubgroup, 32, 16, gl_MatrixUseB> b[2];
                [[unroll]] for (uint i = 0; i < 2; i++) {
                    coopMatLoad(a[i], wt[o], (wn + 16 * i) * PITCH, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    coopMatLoad(b[i], xt[o], (wm + 16 * i) * PITCH, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                }
                C_FLOAT ms[2], mx[2];
                if (GROUPED)
                    [[unroll]] for (uint i = 0; i < 2; i++) {
                        coopMatLoad(ms[i], ws[o], wn + 16 * i, 0, gl_CooperativeMatrixLayoutColumnMajor);
                        coopMatLoad(mx[i], xs[o], wm + 16 * i, 0, gl_CooperativeMatrixLayoutRowMajor);
                    }
                [[unroll]] for (uint i = 0; i < 2; i++)
                    [[unroll]] for (uint j = 0; j < 2; j++) {
                        if (!GROUPED) {
                            isum[i][j] = coopMatMulAdd(a[i], b[j], isum[i][j]);
                            continue;
                        }
                        const C_INT sum = coopMatMulAdd(a[i], b[j], C_INT(0));
                        [[unroll]] for (uint e = 0; e < sum.length(); e++) {
                            precise float product = float(sum[e]) * mx[j][e];
                            precise float more = fma(product, ms[i][e], part[i][j][e]);
                            part[i][j][e] = more;
                        }
                    }
            }
            if (GROUPED && (q + o + 1) % turns == 0 && q + o < count)
                [[unroll]] for (uint i = 0; i < 2; i++)
                    [[unroll]] for (uint j = 0; j < 2; j++) {
                        [[unroll]] for (uint e = 0; e < part[i][j].length(); e++) {
                            precise float more = total[i][j][e] + part[i][j][e];
                            total[i][j][e] = more;
                        }
                        part[i][j] = C_FLOAT(0.0);
                    }
        }
        barrier();
    }

    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < 2; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) {
            C_INT bits = isum[i][j];
            if (GROUPED)
                [[unroll]] for (uint e = 0; e < bits.length(); e++) bits[e] = floatBitsToInt(total[i][j][e]);
            subgroupBarrier();
            coopMatStore(bits, joined[w], 0, 16, gl_CooperativeMatrixLayoutColumnMajor);
            subgroupMemoryBarrierShared();
            subgroupBarrier();
            for (uint id = lane; id < 256; id += gl_SubgroupSize) {
                const uint row = n0 + wn + 16 * i + id % 16, m = m0 + wm + 16 * j + id / 16;
                if (m >= live || row >= n) continue;
                const uint r = live_row(step_, SELECTED, m);
                const int value = joined[w][id];
                precise float y = intBitsToFloat(value);
                if (!GROUPED) {
                    if (CODE == CODE_I8A) {
                        y = row_result(value, sums.v[r], sx.v[r], scales, row);
                    } else {
                        precise float product = float(value) * sx.v[r];
                        y = product * (float(scales.v[row]) * UNIT);
                    }
                }
                out_.v[r * n + row] = y;
            }
        }
}
