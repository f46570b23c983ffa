// Linear layers with integer codes: packed weight rows times up to M rows of int8 activations.
//
// A subgroup walks NR matrix rows, 32 lanes (or all, where it has fewer) side by side, a step of W columns each. Integer sums are
// exact. Where a group of W columns has a scale of its own, part p of 32 adds up groups p, p + 32, ... in order, and the parts are
// added from 0 to 31: every kernel does so, whatever its shape, and gives the same bits. Layout of the codes: src/vulkan/layout.rs.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;      // lanes of a subgroup
layout(constant_id = 2) const uint M = 1;        // rows of activations
layout(constant_id = 3) const uint NR = 1;       // matrix rows of a lane
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step: the group where there is one
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const uint U = 1;        // rounds whose loads are in flight together
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128;      // threads

#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    F16 scales;    // [n, groups]; [n, 2] for i8a
    uint64_t x;    // i8 [rows, stride]
    F32 sx;        // [rows, groups]
    I32 sums;      // [rows, groups]
    F32 out_;      // [rows, n]
    Step step_;
    uint n;        // matrix rows
    uint steps;    // of a matrix row
    uint stride;   // bytes from row to row of x, a multiple of 16
    uint groups;   // of a row
};

const uint WORDS = W * BITS / 32; // of a step, in pieces of 16 bytes (8 where a step has no more)
const uint PIECE = WORDS % 4 == 0 ? 4 : 2;
const uint XQ = W / 16;           // 16-byte loads of a step's activations
const uint LANES = SG < 32 ? SG : 32;
const uint QP = GROUPED ? 32 / LANES : 1; // parts of a lane
const uint TEAMS = T / LANES;
const uint VALUES = NR * M;

shared int parts[TEAMS][VALUES][33]; // of floats, their bits

void main() {
    const uint lane = gl_LocalInvocationID.x % LANES;
    const uint team = gl_LocalInvocationID.x / LANES;
    const uint live = live_rows(step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * M;
    if (m0 > 0 && m0 >= live) return;
    const uint n0 = (gl_WorkGroupID.y * TEAMS + team) * NR;
    const uint row_bytes = steps * W * BITS / 8;

    // Rows beyond the last are computed again and not stored.
    uint xr[M];
    [[unroll]] for (uint m = 0; m < M; m++) xr[m] = live_row(step_, SELECTED, min(m0 + m, live - 1));
    uint64_t at[NR];
    uint nr[NR];
    [[unroll]] for (uint i = 0; i < NR; i++) {
        nr[i] = min(n0 + i, n - 1);
        at[i] = codes + uint64_t(nr[i]) * row_bytes;
    }

    int isum[NR][M];
    float fsum[QP][NR][M];
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++) {
            isum[i][m] = 0;
            [[unroll]] for (uint q = 0; q < QP; q++) fsum[q][i][m] = 0.0;
        }

    const uint ROUND = LANES * QP; // steps of a round of all parts
    for (uint s0 = 0; s0 < steps; s0 += ROUND * U) {
        // All loads of U rounds first: that many are in flight at once.
        uint w[U * QP][NR][WORDS];
        float scale[U * QP][NR];
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint s = s0 + u * LANES + lane, inside = min(s, steps - 1);
            const uint block = inside / 8 * 8, width = min(8, steps - block);
            [[unroll]] for (uint i = 0; i < NR; i++) {
                [[unroll]] for (uint q = 0; q < WORDS; q += PIECE) {
                    const uint piece = (block * WORDS + q * width) / PIECE + inside % 8;
                    if (PIECE == 2) {
                        const uvec2 v = U32x2(at[i]).v[piece];
                        w[u][i][q] = v.x, w[u][i][q + 1] = v.y;
                    } else {
                        const uvec4 v = U32x4(at[i]).v[piece];
                        [[unroll]] for (uint e = 0; e < 4; e++) w[u][i][q + e] = v[e];
                    }
                }
                if (GROUPED) scale[u][i] = float(scales.v[nr[i] * groups + inside]) * UNIT;
            }
        }
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint s = s0 + u * LANES + lane;
            if (s >= steps) continue;
            [[unroll]] for (uint m = 0; m < M; m++) {
                uvec4 xs[XQ];
                [[unroll]] for (uint q = 0; q < XQ; q++) xs[q] = U32x4(x + uint64_t(xr[m]) * stride).v[s * XQ + q];
                float sxg = 0.0;
                int xsum = 0;
                if (GROUPED) {
                    sxg = sx.v[xr[m] * groups + s];
                    xsum = sums.v[xr[m] * groups + s];
                }
                [[unroll]] for (uint i = 0; i < NR; i++) {
                    int d = GROUPED ? 0 : isum[i][m];
                    [[unroll]] for (uint q = 0; q < WORDS; q++)
                        [[unroll]] for (uint b = 0; b < PER_WORD; b++) {
                            const uint at4 = q * PER_WORD + b; // which four columns
                            d += dotPacked4x8EXT(four(w[u][i][q], b), int(xs[at4 / 4][at4 % 4]));
                        }
                    if (GROUPED) {
                        precise float product = float(DOUBLE * d - OFFSET * xsum) * sxg;
                        precise float more = fma(product, scale[u][i], fsum[u % QP][i][m]);
                        fsum[u % QP][i][m] = more;
                    } else {
                        isum[i][m] = d;
                    }
                }
            }
        }
    }

    // Each lane then adds the parts of one value, in order.
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++)
            [[unroll]] for (uint q = 0; q < QP; q++)
                parts[team][i * M + m][q * LANES + lane] = GROUPED ? floatBitsToInt(fsum[q][i][m]) : isum[i][m];
    barrier();
    for (uint value = lane; value < VALUES; value += LANES) {
        const uint m = value % M, row = n0 + value / M;
        if (m0 + m >= live || row >= n) continue;
        const uint r = live_row(step_, SELECTED, m0 + m);
        precise float y = 0.0;
        if (GROUPED) {
            y = intBitsToFloat(parts[team][value][0]);
            for (uint p = 1; p < 32; p++) y = y + intBitsToFloat(parts[team][value][p]);
        } else {
            int sum = 0;
            for (uint p = 0; p < LANES; p++) sum += parts[team][value][p];
            y = row_result(sum, sums.v[r], sx.v[r], scales, row);
        }
        out_.v[r * n + row] = y;
    }
}
