// Linear layers with integer codes: NR packed weight rows times M rows of int8 activations, by a
// team of LANES lanes.
//
// In each round, a lane computes one step of W columns of all NR rows. Integer sums are exact. If
// groups of columns have scales, part p of 32 adds up steps p, p + 32, ... in order: of each step
// the first group, its minimum, and the second group. The parts are added in pairs that are 16
// apart, then 8, 4, 2, 1. Every kernel does so for any shape, so all have the same bits. Layout of
// the codes: crates/vulkan/src/lower/layout.rs.
//
// The including file defines M, NR, U (rounds that are loaded at the same time), LANES, CODE, SIDE,
// W (columns of a step) and GROUPED.

#include "codes.glsl"
#include "side.glsl"
#include "steps.glsl"

const uint XQ = W / 16;           // 16-byte loads of activations per step
const uint FOURS = W / 4 / G;     // groups of four columns that share a scale
const uint QP = GROUPED ? 32 / LANES : 1; // parts per lane
// With more rows, the addresses of their scales and sums would fill AMD's scalar registers.
const bool BY_OFFSET = HAS_MIN && M > 8;

int join_parts(int a, int b) {
    if (!GROUPED) return a + b;
    precise float both = intBitsToFloat(a) + intBitsToFloat(b);
    return floatBitsToInt(both);
}

// Multiplies matrix rows n0 to n0 + NR by rows m0 to m0 + M of the `live` rows of activations,
// which begin at row `first`.
void linear(LinearArgs a, uint n0, uint m0, uint first, uint live) {
    const uint lane = gl_SubgroupInvocationID % LANES;

    // Rows after the last one are computed again but not stored. Data that the whole team reads has
    // one address, to which each lane adds a 32-bit offset. On some devices such loads need no
    // further instruction.
    uint64_t x[M], sx[M], sums[M], side[NR];
    uint at_sx[M];
    RowCodes codes[NR];
    [[unroll]] for (uint m = 0; m < M; m++) {
        const uint xr = input_row(first + min(m0 + m, live - 1));
        x[m] = a.x + uint64_t(xr) * a.stride;
        at_sx[m] = BY_OFFSET ? xr * (4 * G * a.steps) : 0;
        const uint64_t row = BY_OFFSET ? uint64_t(0) : uint64_t(xr) * (4 * G * a.steps);
        sx[m] = uint64_t(a.sx) + row;
        sums[m] = uint64_t(a.sums) + row;
    }
    [[unroll]] for (uint i = 0; i < NR; i++) {
        const uint row = matrix_row(a.n, min(n0 + i, a.n - 1));
        codes[i] = row_codes(a.matrix.codes, matrix_rows(a.n), row, a.steps);
        side[i] = a.matrix.side + uint64_t(row) * (a.steps / SIDE_STEPS * SIDE_BYTES);
    }

    int isum[NR * M];
    float fsum[QP][NR * M];
    [[unroll]] for (uint i = 0; i < NR * M; i++) {
        isum[i] = 0;
        [[unroll]] for (uint q = 0; q < QP; q++) fsum[q][i] = 0.0;
    }

    const uint ROUND = LANES * QP; // steps in a round of all parts
    for (uint s0 = 0; s0 < a.steps; s0 += ROUND * U) {
        // All U rounds are loaded first, so that the loads are in flight at the same time.
        StepCodes w[U * QP][NR];
        uvec4 words[U * QP][NR];
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint inside = min(s0 + u * LANES + lane, a.steps - 1);
            [[unroll]] for (uint i = 0; i < NR; i++) {
                load_codes(codes[i], inside, a.steps, w[u][i]);
                if (GROUPED) words[u][i] = load_side(side[i], inside);
            }
        }
        [[unroll]] for (uint u = 0; u < U * QP; u++) {
            const uint s = s0 + u * LANES + lane;
            if (s >= a.steps) continue;
            Factors factors[NR];
            if (GROUPED)
                [[unroll]] for (uint i = 0; i < NR; i++) factors[i] = factors_of(words[u][i], s);
            [[unroll]] for (uint m = 0; m < M; m++) {
                uvec4 xs[XQ];
                [[unroll]] for (uint q = 0; q < XQ; q++)
                    xs[q] = U32x4(x[m] + uint64_t(s * (16 * XQ))).v[q];
                float sxg[G], base[G]; // base: factor of a minimum
                int xsum[G];
                const uint at = at_sx[m] + s * (4 * G);
                [[unroll]] for (uint g = 0; g < G; g++) {
                    if (!GROUPED) continue;
                    sxg[g] = F32(sx[m] + uint64_t(at)).v[g];
                    xsum[g] = 0;
                    if (OFFSET != 0 || HAS_MIN) xsum[g] = I32(sums[m] + uint64_t(at)).v[g];
                    precise float of_sum = float(xsum[g]) * sxg[g];
                    base[g] = of_sum;
                    sxg[g] *= PRODUCT_UNIT;
                }
                [[unroll]] for (uint i = 0; i < NR; i++) {
                    const uint k = i * M + m;
                    [[unroll]] for (uint g = 0; g < G; g++) {
                        int d = GROUPED ? 0 : isum[k];
                        [[unroll]] for (uint f = 0; f < FOURS; f++) {
                            const uint k4 = g * FOURS + f; // index of four columns
                            d += dotPacked4x8EXT(
                                int(operand_of(w[u][i], k4)), int(xs[k4 / 4][k4 % 4]));
                        }
                        if (!GROUPED) {
                            isum[k] = d;
                            continue;
                        }
                        precise float product = float(DOUBLE * d - OFFSET * xsum[g]) * sxg[g];
                        precise float more =
                            fma(product, factors[i].scale[g], fsum[u % QP][k]);
                        if (HAS_MIN) more = fma(base[g], factors[i].least[g], more);
                        fsum[u % QP][k] = more;
                    }
                }
            }
        }
    }

    // Adds the parts of each lane, then those of different lanes. The values are divided among the
    // lanes, and a lane ends with PER_LANE of them. If there are fewer values than lanes, SPARE
    // lanes have the same value.
    int y[NR * M]; // integers, or the bits of floats
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
            const uint place = first + m0 + m, r = input_row(place);
            a.matrix.out_.v[output_row(place) * a.n + row] =
                GROUPED ? intBitsToFloat(y[k])
                    : row_result(y[k], a.sums.v[r], a.sx.v[r], a.matrix.side,
                        matrix_row(a.n, row));
        }
}
