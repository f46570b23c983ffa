// Linear layers with integer codes: TEAM_ROWS packed matrix rows times M rows of int8 activations,
// by a team of threads.
//
// A row is divided into chunks of 128 columns, or of one step if steps are longer. Part p of PARTS
// has chunks p, p + PARTS, and so on. Integer sums are exact. If groups of columns have scales, a
// part adds up its steps in order: of each the first group, its minimum, and the second group. The
// parts are added in pairs (0 and 1, 2 and 3, ...), then the sums of pairs, and so on. Every kernel
// does so for any shape, so all have the same bits. Layout of the codes:
// crates/vulkan/src/lower/layout.rs.
//
// A thread computes one part of NR rows that are 8 apart. Eight neighbouring threads have the same
// part of eight neighbouring rows.
//
// The including file defines M, NR, U (steps of a chunk that are loaded at the same time), T
// (threads), SG, CODE, SIDE, W (columns of a step), GROUPED, and PARTIAL (the last chunk has fewer
// steps).

#include "codes.glsl"
#include "steps.glsl"
#include "side.glsl"

const uint XQ = W / 16;           // 16-byte loads of activations per step
const uint FOURS = W / 4 / G;     // groups of four columns that share a scale
const uint SCALES = U * G;        // of columns, loaded at the same time
const uint TEAM = 8 * PARTS;
const uint TEAM_ROWS = 8 * NR;
// Parts of a row in a subgroup, and subgroups with parts of a row.
const uint OWN = SG < 16 ? 1 : SG < TEAM ? SG / 8 : PARTS, SHARES = PARTS / OWN;
// With more rows, the addresses of their scales and sums would fill AMD's scalar registers.
const bool BY_OFFSET = (HAS_MIN || OFFSET != 0) && M > 8;

shared int part_sums[T / TEAM][M][SHARES][TEAM_ROWS]; // integers, or the bits of floats

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer Inputs { uvec4 v; };
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer InScale { float v; };
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer InSum { int v; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer InScales { vec4 v; };
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer InSums { ivec4 v; };

// Loads the scales of SCALES groups of activations, and their sums if needed. If there are only
// `count` groups, the last one stands in for others.
void load_scales(uint64_t sx, uint64_t sums, uint at, uint count, out float sxs[SCALES],
    out int xsums[SCALES]) {
    const bool summed = OFFSET != 0 || HAS_MIN, whole = SCALES % 4 == 0 && !PARTIAL;
    [[unroll]] for (uint i = 0; i < SCALES; i += whole ? 4 : 1) {
        const uint here = whole ? at + 4 * i : at + 4 * min(i, count - 1);
        if (whole) {
            const vec4 four = InScales(sx + uint64_t(here)).v;
            ivec4 sum_four = ivec4(0);
            if (summed) sum_four = InSums(sums + uint64_t(here)).v;
            [[unroll]] for (uint e = 0; e < 4; e++)
                sxs[i + e & SCALES - 1] = four[e], xsums[i + e & SCALES - 1] = sum_four[e];
        } else {
            sxs[i] = InScale(sx + uint64_t(here)).v;
            xsums[i] = 0;
            if (summed) xsums[i] = InSum(sums + uint64_t(here)).v;
        }
    }
}

// Loads the words of the side for U steps from step s on, a multiple of U. Elements that are
// missing in the last chunk are zero.
void load_sides(uint64_t rows, uint skip, uint s, out uvec4 words[U]) {
    const uint64_t at = rows + uint64_t(skip + side_element(s));
    if (U == 4 && SIDE == SIDE_SCALE) {
        const uvec2 v = SidePair(at).v;
        [[unroll]] for (uint e = 0; e < U; e++)
            words[e] = uvec4(v[e / 2] >> 16 * (e % 2), 0, 0, 0);
    } else if (U == 4 && SIDE == SIDE_SCALE_MIN) {
        const uvec4 v = SideFour(at).v;
        [[unroll]] for (uint e = 0; e < U; e++) words[e] = uvec4(v[e], 0, 0, 0);
    } else if (U <= 4 && (SIDE == SIDE_SIX_BIT_MIN || SIDE == SIDE_SIX_BIT_SPLIT)) {
        // All these steps have the same element.
        words[0] = load_side(rows, skip, s);
        [[unroll]] for (uint e = 1; e < U; e++) words[e] = words[0];
    } else {
        [[unroll]] for (uint e = 0; e < U; e++) words[e] = load_side(rows, skip, s + e);
    }
}

int join_parts(int a, int b) {
    if (!GROUPED) return a + b;
    precise float both = intBitsToFloat(a) + intBitsToFloat(b);
    return floatBitsToInt(both);
}

// Multiplies matrix rows n0 to n0 + TEAM_ROWS by rows m0 to m0 + M of the `live` rows of
// activations, which begin at row `first`. All teams of a workgroup call this.
void linear(LinearArgs a, uint team, uint thread, uint n0, uint m0, uint first, uint live) {
    const uint own = thread % 8, part = thread / 8;

    // Rows after the last one are computed again but not stored. Data that many threads read has
    // one address, to which each adds a 32-bit offset. On some devices such loads need no further
    // instruction.
    uint64_t x[M], sx[M], sums[M];
    uint at_sx[M], skip_side[NR];
    RowCodes codes[NR];
    [[unroll]] for (uint m = 0; m < M; m++) {
        const uint xr = input_row(first + min(m0 + m, live - 1));
        x[m] = a.x + uint64_t(xr) * a.stride;
        at_sx[m] = BY_OFFSET ? xr * (4 * G * a.steps) : 0;
        const uint64_t row = BY_OFFSET ? uint64_t(0) : uint64_t(xr) * (4 * G * a.steps);
        sx[m] = uint64_t(a.sx) + row;
        sums[m] = uint64_t(a.sums) + row;
    }
    const uint start = min(n0, a.n - 1), row0 = matrix_row(a.n, start);
    const uint64_t side = side_rows(a.matrix.side, row0, a.steps);
    [[unroll]] for (uint i = 0; i < NR; i++) {
        const uint skip = min(8 * i + own, a.n - 1 - start);
        codes[i] = row_codes(a.matrix.codes, matrix_rows(a.n), row0, skip, a.steps);
        skip_side[i] = side_skip(row0, skip, a.steps);
    }

    int isum[NR][M];
    float fsum[NR][M];
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++) isum[i][m] = 0, fsum[i][m] = 0.0;

    uint s0 = CHUNK * part;
    while (s0 < a.steps) {
        // U steps are loaded first, so that the loads are in flight at the same time.
        StepCodes w[U][NR];
        uvec4 words[NR][U];
        [[unroll]] for (uint i = 0; i < NR; i++) {
            [[unroll]] for (uint u = 0; u < U; u++) load_codes(codes[i], s0 + u, w[u][i]);
            if (GROUPED) load_sides(side, skip_side[i], s0, words[i]);
        }
        // The first step that is missing in the last chunk.
        const uint end = PARTIAL ? min(U, a.steps - s0) : U;
        uint operands[U][NR][W / 4];
        Factors factors[U][NR];
        [[unroll]] for (uint u = 0; u < U; u++)
            [[unroll]] for (uint i = 0; i < NR; i++) {
                [[unroll]] for (uint k4 = 0; k4 < W / 4; k4++)
                    operands[u][i][k4] = operand_of(w[u][i], k4);
                if (GROUPED) factors[u][i] = factors_of(words[i][u], s0 + u);
            }
        [[unroll]] for (uint m = 0; m < M; m++) {
            float sxs[SCALES];
            int xsums[SCALES];
            if (GROUPED)
                load_scales(sx[m], sums[m], at_sx[m] + s0 * (4 * G), end * G, sxs, xsums);
            [[unroll]] for (uint u = 0; u < U; u++) {
                if (PARTIAL && u >= end) break;
                uvec4 xs[XQ];
                [[unroll]] for (uint q = 0; q < XQ; q++)
                    xs[q] = Inputs(x[m] + uint64_t((s0 + u) * (16 * XQ) + 16 * q)).v;
                [[unroll]] for (uint g = 0; g < G; g++) {
                    float sxg = 0.0, base = 0.0; // base: factor of a minimum
                    int xsum = 0;
                    if (GROUPED) {
                        sxg = sxs[u * G + g], xsum = xsums[u * G + g];
                        precise float of_sum = float(xsum) * sxg;
                        base = of_sum;
                        sxg *= PRODUCT_UNIT;
                    }
                    [[unroll]] for (uint i = 0; i < NR; i++) {
                        int d = GROUPED ? 0 : isum[i][m];
                        [[unroll]] for (uint f = 0; f < FOURS; f++) {
                            const uint k4 = g * FOURS + f; // index of four columns
                            d += dotPacked4x8EXT(
                                int(operands[u][i][k4]), int(xs[k4 / 4][k4 % 4]));
                        }
                        if (!GROUPED) {
                            isum[i][m] = d;
                            continue;
                        }
                        precise float product = float(DOUBLE * d - OFFSET * xsum) * sxg;
                        precise float more = fma(product, factors[u][i].scale[g], fsum[i][m]);
                        if (HAS_MIN) more = fma(base, factors[u][i].least[g], more);
                        fsum[i][m] = more;
                    }
                }
            }
        }
        s0 += U;
        // After a chunk, the next one of this part follows.
        if (U == CHUNK || s0 % CHUNK == 0) s0 += CHUNK * (PARTS - 1);
    }

    // Adds the parts in a subgroup, then those of all.
    [[unroll]] for (uint i = 0; i < NR; i++)
        [[unroll]] for (uint m = 0; m < M; m++) {
            int y = GROUPED ? floatBitsToInt(fsum[i][m]) : isum[i][m];
            [[unroll]] for (uint d = 1; d < OWN; d *= 2)
                y = join_parts(y, subgroupShuffleXor(y, 8 * d));
            if (part % OWN == (i * M + m) % OWN) part_sums[team][m][part / OWN][8 * i + own] = y;
        }
    barrier();
    [[unroll]] for (uint k = 0; k < M * TEAM_ROWS; k += TEAM) {
        const uint value = k + thread, m = value / TEAM_ROWS, in_team = value % TEAM_ROWS;
        if (m >= M) continue;
        int y[SHARES];
        [[unroll]] for (uint q = 0; q < SHARES; q++) y[q] = part_sums[team][m][q][in_team];
        [[unroll]] for (uint d = 1; d < SHARES; d *= 2)
            [[unroll]] for (uint q = 0; q < SHARES; q += 2 * d) y[q] = join_parts(y[q], y[q + d]);
        const uint row = n0 + in_team, place = first + m0 + m;
        if (m0 + m >= live || row >= a.n) continue;
        const uint r = input_row(place);
        a.matrix.out_.v[output_row(place) * a.n + row] = GROUPED ? intBitsToFloat(y[0])
            : row_result(y[0], a.sums.v[r], a.sx.v[r], a.matrix.side, matrix_row(a.n, row));
    }
}
