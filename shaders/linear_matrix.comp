// Linear layers for 16 rows of activations at a time on int8 matrix units: TN matrix rows a workgroup, eight subgroups that share the
// columns. The integers and the order of float operations are those of linear.comp, so both give the same bits: subgroup w adds up
// parts 4w .. 4w + 3 of 32 (steps 4w + q, 4w + q + 32, ...), and the parts are added from 0 to 31.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 3) const uint TILES = 2;    // of 16 matrix rows
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 8) const bool SELECTED = false;

#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    U32x4 codes;
    F16 scales;  // [n, groups]; [n, 2] for i8a
    U32 x;       // i8 [rows + 16, stride]
    F32 sx;      // [rows, groups]
    I32 sums;    // [rows, groups]
    F32 out_;    // [rows, n]
    Step step_;
    uint n;      // matrix rows
    uint steps;  // of a matrix row
    uint stride;
    uint groups; // of a row
};

const uint PIECES = W * BITS / 128;   // 16-byte loads of a row's step
const uint PITCH = W + 16;            // bytes from row to row of the unpacked tile: no two rows meet in a bank
const uint STAGE = 2 * 16 * PITCH / 16; // 16-byte pieces of a subgroup's two unpacked steps

shared uvec4 unpacked[8 * STAGE];
shared int joined[8][256]; // parts of a tile, eight at a time
shared float weight_scales[8][2][16];
shared float x_scales[8][2][16];

#define C_INT coopmat<int, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define C_FLOAT coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>

// Four columns as signed values: doubled for i2, less 128 for i8a.
uint signed_four(uint word, uint k) {
    const uint x = uint(four(word, k)) * DOUBLE;
    if (OFFSET == 0) return x;
    return ((x | 0x80808080u) - OFFSET * 0x01010101u) ^ 0x80808080u;
}

void main() {
    const uint lane = gl_SubgroupInvocationID, w = gl_SubgroupID;
    const uint live = live_rows(step_, SELECTED), m0 = gl_WorkGroupID.x * 16;
    if (m0 >= live) return;
    const uint r0 = live_row(step_, SELECTED, m0);
    const uint n0 = gl_WorkGroupID.y * 16 * TILES;
    const uint row = lane / 2, odd = lane % 2;

    C_INT isum[TILES];
    C_FLOAT fsum[4][TILES];
    [[unroll]] for (uint i = 0; i < TILES; i++) {
        isum[i] = C_INT(0);
        [[unroll]] for (uint p = 0; p < 4; p++) fsum[p][i] = C_FLOAT(0.0);
    }

    for (uint s0 = 4 * w; s0 < steps; s0 += 32) {
        // A lane loads its row's part of two pairs of steps.
        uvec4 raw[2][TILES][PIECES];
        float ws[2][TILES], xs[2];
        [[unroll]] for (uint h = 0; h < 2; h++) {
            const uint s = s0 + 2 * h + odd, inside = min(s, steps - 1);
            const uint block = inside / 8 * 8, width = min(8, steps - block);
            [[unroll]] for (uint i = 0; i < TILES; i++) {
                const uint r = min(n0 + 16 * i + row, n - 1);
                [[unroll]] for (uint q = 0; q < PIECES; q++) {
                    const uint64_t at = uint64_t(codes) + uint64_t(r) * (steps * PIECES * 16);
                    const uvec4 v = U32x4(at).v[block * PIECES + q * width + inside % 8];
                    raw[h][i][q] = v;
                }
                if (GROUPED) ws[h][i] = float(scales.v[r * groups + inside]) * UNIT;
            }
            if (GROUPED) xs[h] = sx.v[(r0 + min(row, live - 1 - m0)) * groups + inside];
        }
        [[unroll]] for (uint h = 0; h < 2; h++) {
            if (s0 + 2 * h >= steps) break;
            if (GROUPED) x_scales[w][odd][row] = xs[h];
            [[unroll]] for (uint i = 0; i < TILES; i++) {
                if (GROUPED) weight_scales[w][odd][row] = ws[h][i];
                [[unroll]] for (uint q = 0; q < PIECES * PER_WORD; q++) {
                    uvec4 four_words;
                    [[unroll]] for (uint e = 0; e < 4; e++) {
                        const uint word = q * 4 + e; // of the unpacked row
                        four_words[e] = signed_four(raw[h][i][word / PER_WORD / 4][word / PER_WORD % 4], word % PER_WORD);
                    }
                    unpacked[w * STAGE + (odd * 16 + row) * (PITCH / 16) + q] = four_words;
                }
                subgroupMemoryBarrierShared();
                subgroupBarrier();
                [[unroll]] for (uint o = 0; o < 2; o++) {
                    const uint s = s0 + 2 * h + o;
                    if (s >= steps) break;
                    C_INT sum = GROUPED ? C_INT(0) : isum[i];
                    [[unroll]] for (uint c = 0; c < W; c += 32) {
                        coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA> a;
                        coopmat<int8_t, gl_ScopeSubgroup, 32, 16, gl_MatrixUseB> b;
                        coopMatLoad(a, unpacked, w * STAGE + (o * 16 * PITCH + c) / 16, PITCH / 16, gl_CooperativeMatrixLayoutRowMajor);
                        coopMatLoad(b, x.v, (r0 * stride + s * W + c) / 4, stride / 4, gl_CooperativeMatrixLayoutColumnMajor);
                        sum = coopMatMulAdd(a, b, sum);
                    }
                    if (!GROUPED) {
                        isum[i] = sum;
                        continue;
                    }
                    C_FLOAT ms, mx;
                    coopMatLoad(ms, weight_scales[w][o], 0, 0, gl_CooperativeMatrixLayoutColumnMajor);
                    coopMatLoad(mx, x_scales[w][o], 0, 0, gl_CooperativeMatrixLayoutRowMajor);
                    [[unroll]] for (uint e = 0; e < sum.length(); e++) {
                        precise float product = float(sum[e]) * mx[e];
                        precise float more = fma(product, ms[e], fsum[2 * h + o][i][e]);
                        fsum[2 * h + o][i][e] = more;
                    }
                }
                subgroupBarrier();
            }
        }
    }

    // The parts of a tile, in order, eight at a time: those of two subgroups, or a sum of each.
    const uint t = gl_LocalInvocationID.x, tn = t % 16, tm = t / 16;
    [[unroll]] for (uint i = 0; i < TILES; i++) {
        precise float y = 0.0;
        int sum = 0;
        [[unroll]] for (uint w0 = 0; w0 < 8; w0 += GROUPED ? 2 : 8) {
            barrier();
            if (!GROUPED) {
                coopMatStore(isum[i], joined[w], 0, 16, gl_CooperativeMatrixLayoutColumnMajor);
            } else if (w / 2 == w0 / 2) {
                [[unroll]] for (uint p = 0; p < 4; p++) {
                    C_INT bits;
                    [[unroll]] for (uint e = 0; e < bits.length(); e++) bits[e] = floatBitsToInt(fsum[p][i][e]);
                    coopMatStore(bits, joined[w % 2 * 4 + p], 0, 16, gl_CooperativeMatrixLayoutColumnMajor);
                }
            }
            barrier();
            [[unroll]] for (uint p = 0; p < 8; p++) {
                sum += joined[p][t];
                y = w0 + p == 0 ? intBitsToFloat(joined[p][t]) : y + intBitsToFloat(joined[p][t]);
            }
        }
        const uint r = r0 + tm, out_row = n0 + 16 * i + tn;
        if (m0 + tm >= live || out_row >= n) continue;
        if (!GROUPED) {
            if (CODE == CODE_I8A) {
                y = row_result(sum, sums.v[r], sx.v[r], scales, out_row);
            } else {
                precise float product = float(sum) * sx.v[r];
                y = product * (float(scales.v[out_row]) * UNIT);
            }
        }
        out_.v[r * n + out_row] = y;
    }
}
