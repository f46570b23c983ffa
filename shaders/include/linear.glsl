// Linear layers with integer codes: packed weight rows times M rows of int8 activations, by one
// team of LANES lanes.
//
// A team walks NR matrix rows side by side, a step of W columns a lane. Integer sums are exact.
// Where each group of W columns has a scale, part p of 32 adds up groups p, p + 32, ... in order.
// The parts are joined two by two, 16 apart, then 8, 4, 2, 1. Every kernel does so for any shape,
// and gives the same bits. Layout of the codes: src/vulkan/lower/layout.rs.
//
// The including file defines M, NR, U (rounds whose loads are in flight together), LANES, CODE, W
// (columns of a step) and GROUPED.

#include "codes.glsl"

const uint WORDS = W * BITS / 32; // of a step, in pieces of 16 bytes (8 where a step has no more)
const uint PIECE = WORDS % 4 == 0 ? 4 : 2;
const uint XQ = W / 16;           // 16-byte loads of a step's activations
const uint QP = GROUPED ? 32 / LANES : 1; // parts of a lane

int join_parts(int a, int b) {
    if (!GROUPED) return a + b;
    precise float both = intBitsToFloat(a) + intBitsToFloat(b);
    return floatBitsToInt(both);
}

// Matrix rows n0 to n0 + NR times rows m0 to m0 + M of the `live` rows of activations, which begin
// at row `first`.
void linear(LinearArgs a, uint n0, uint m0, uint first, uint live) {
    const uint lane = gl_SubgroupInvocationID % LANES;
    const uint row_bytes = a.steps * W * BITS / 8;

    // Rows beyond the last are computed again and not stored. Data that the whole team reads has
    // one address, to which each lane adds 32 bits of its own. On some devices loads of that form
    // need no further instruction.
    uint64_t x[M], sx[M], sums[M], codes[NR], scales[NR];
    [[unroll]] for (uint m = 0; m < M; m++) {
        const uint xr = first + min(m0 + m, live - 1);
        x[m] = a.x + uint64_t(xr) * a.stride;
        sx[m] = uint64_t(a.sx) + uint64_t(xr) * (4 * a.steps);
        sums[m] = uint64_t(a.sums) + uint64_t(xr) * (4 * a.steps);
    }
    [[unroll]] for (uint i = 0; i < NR; i++) {
        const uint row = min(n0 + i, a.n - 1);
        codes[i] = a.matrix.codes + uint64_t(row) * row_bytes;
        scales[i] = uint64_t(a.matrix.scales) + uint64_t(row) * (2 * a.steps);
    }

    int isum[NR * M];
    float fsum[QP][NR * M];
    [[unroll]] for (uint i = 0; i < NR * M; i++) {
        isum[i] = 0;
        [[unroll]] for (uint q = 0; q < QP; q++) fsum[q][i] = 0.0;
    }

    const uint ROUND = LANES * QP; // steps of a round of all parts
    for (uint s0 = 0; s0 < a.steps; s0 += ROUND * U) {
        // Loads of all U rounds come first, so that they are in flight together.
        uint w[U * QP][NR][WORDS];
        float scale[U * QP][NR];
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint s = s0 + u * LANES + lane, inside = min(s, a.steps - 1);
            const uint block = inside / 8 * 8, width = min(8, a.steps - block);
            [[unroll]] for (uint i = 0; i < NR; i++) {
                [[unroll]] for (uint q = 0; q < WORDS; q += PIECE) {
                    const uint piece = (block * WORDS + q * width) / PIECE + inside % 8;
                    if (PIECE == 2) {
                        const uvec2 v = U32x2(codes[i] + uint64_t(piece * 8)).v[0];
                        w[u][i][q] = v.x, w[u][i][q + 1] = v.y;
                    } else {
                        const uvec4 v = U32x4(codes[i] + uint64_t(piece * 16)).v[0];
                        [[unroll]] for (uint e = 0; e < 4; e++) w[u][i][q + e] = v[e];
                    }
                }
                if (GROUPED) scale[u][i] = float(F16(scales[i] + uint64_t(inside * 2)).v[0]) * UNIT;
            }
        }
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint s = s0 + u * LANES + lane;
            if (s >= a.steps) continue;
            [[unroll]] for (uint m = 0; m < M; m++) {
                uvec4 xs[XQ];
                [[unroll]] for (uint q = 0; q < XQ; q++)
                    xs[q] = U32x4(x[m] + uint64_t(s * (16 * XQ))).v[q];
                float sxg = 0.0;
                int xsum = 0;
                if (GROUPED) {
                    sxg = F32(sx[m] + uint64_t(s * 4)).v[0] * PRODUCT_UNIT;
                    if (PRODUCT_OFFSET != 0) xsum = I32(sums[m] + uint64_t(s * 4)).v[0];
                }
                [[unroll]] for (uint i = 0; i < NR; i++) {
                    const uint k = i * M + m;
                    int d = GROUPED ? 0 : isum[k];
                    [[unroll]] for (uint q = 0; q < WORDS; q++)
                        [[unroll]] for (uint b = 0; b < PER_WORD; b++) {
                            const uint at4 = q * PER_WORD + b; // which four columns
                            d += dotPacked4x8EXT(operand(w[u][i][q], b), int(xs[at4 / 4][at4 % 4]));
                        }
                    if (GROUPED) {
                        precise float product = float(DOUBLE * d - PRODUCT_OFFSET * xsum) * sxg;
                        precise float more = fma(product, scale[u][i], fsum[u % QP][k]);
                        fsum[u % QP][k] = more;
                    } else {
                        isum[k] = d;
                    }
                }
            }
        }
    }

    // Joins the parts of one lane, then those of others. The lanes divide the values among them: a
    // lane ends with PER_LANE values. Where there are fewer values than lanes, SPARE lanes have the
    // same one.
    int y[NR * M]; // of floats, their bits
    [[unroll]] for (uint i = 0; i < NR * M; i++) {
        if (GROUPED) {
            [[unroll]] for (uint d = QP / 2; d > 0; d /= 2)
                [[unroll]] for (uint q = 0; q < d; q++) {
                    precise float both = fsum[q][i] + fsum[q + d][i];
                    fsum[q][i] = both;
                }
            y[i] = floatBitsToInt(fsum[0][i]);
        } else {
            y[i] = isum[i];
        }
    }
    const uint PER_LANE = NR * M > LANES ? NR * M / LANES : 1,
        SPARE = NR * M < LANES ? LANES / (NR * M) : 1;
    [[unroll]] for (uint d = LANES / 2, n = NR * M; d > 0; d /= 2) {
        const bool upper = (lane & d) != 0;
        if (n > 1) {
            n /= 2;
            [[unroll]] for (uint i = 0; i < n; i++) {
                const int keep = upper ? y[i + n] : y[i], give = upper ? y[i] : y[i + n];
                y[i] = join_parts(keep, subgroupShuffleXor(give, d));
            }
        } else {
            y[0] = join_parts(y[0], subgroupShuffleXor(y[0], d));
        }
    }
    if (lane % SPARE == 0)
        [[unroll]] for (uint k = 0; k < PER_LANE; k++) {
            const uint value = lane / SPARE * PER_LANE + k, m = value % M, row = n0 + value / M;
            if (m0 + m >= live || row >= a.n) continue;
            const uint r = first + m0 + m;
            a.matrix.out_.v[r * a.n + row] =
                GROUPED ? intBitsToFloat(y[k])
                    : row_result(y[k], a.sums.v[r], a.sx.v[r], a.matrix.scales, row);
        }
}
