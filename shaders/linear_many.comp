// Linear layers with scales for groups of columns, for many rows of activations, by matrix
// instructions. A workgroup computes 16 RT WR matrix rows times 8 NT WN rows.
//
// The sums have the bits of linear.glsl. A subgroup computes the parts in the order in which they
// are added, two at a time if steps are short, and keeps the sums that still wait for another one.
// Products of 16 x 8 x 32 cover the columns of a group, are converted to float and added to its
// part. Shared memory has the codes and activations of P steps while the next ones are loaded.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 4;       // tiles of 8 rows of activations per subgroup
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows per subgroup
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step
// Subgroups along the matrix rows. The others are along the rows of activations.
layout(constant_id = 7) const uint WR = 2;
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128;      // threads
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "matrix.glsl"
#include "experts.glsl"
#include "matrix_steps.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // not used
};

const uint P = W > 32 ? 1 : 2;          // parts processed at once
const uint WN = T / 32 / WR;
const uint R = 16 * RT * WR, N = 8 * NT * WN;
const uint X_PIECES = W / 16;           // pieces of 16 bytes of a step's activations
const uint GROUPS = P * G;
shared uvec4 stage[2][R * PITCH_CODES + N * PITCH];
// Factors for the groups of P steps. A pair has two matrix rows 8 apart, which a lane has of a
// tile, or two adjacent rows of activations.
shared vec2 scales[2][GROUPS][R / 2], leasts[2][GROUPS][HAS_MIN ? R / 2 : 1];
shared vec2 sx_pairs[2][GROUPS][N / 2], bases[2][GROUPS][HAS_MIN ? N / 2 : 1];
// A thread's loads for P steps: of codes, of pieces of activations, and of their scales.
const uint LC = (P * R + T - 1) / T, LX = P * X_PIECES * N / T, LS = (GROUPS * N + T - 1) / T;
const uint KEPT = RT * NT * P * 4;      // floats of the current parts

#define EACH \
    [[unroll]] for (uint t = 0; t < RT; t++) [[unroll]] for (uint n = 0; n < NT; n++) \
        [[unroll]] for (uint p = 0; p < P; p++) [[unroll]] for (uint i = 0; i < 4; i++)
#define PLACE (((t * NT + n) * P + p) * 4 + i)
// The first part of a turn, in bit-reversed order: 0, 16, 8, 24, ...
#define PART(turn) (bitfieldReverse(turn) >> (26 + P) << (P - 1))

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, N, more_n, more, first, m0, live)) return;
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint blocks = (a.n + R - 1) / R, n = more_n >> (16 * i) & 0xffff;
        if (block < blocks || n == 0) break;
        block -= blocks;
        a.matrix = more[i];
        a.n = n;
    }
    const uint n0 = block * R, thread = gl_LocalInvocationID.x;
    const uint lane = gl_SubgroupInvocationID, four = lane % 4, eight = lane / 4;
    const uint row0 = gl_SubgroupID % WR * (16 * RT), col0 = gl_SubgroupID / WR * (8 * NT);
    Values values = Values(a.x);

    // Addresses of this thread's loads. Adjacent threads load adjacent bytes.
    RowCodes codes[LC];
    uint64_t side[LC];
    uint at_x[LX], at_sx[LS];
    [[unroll]] for (uint k = 0; k < LC; k++) {
        const uint row = matrix_row(a.n, min(n0 + (k * T + thread) / P, a.n - 1));
        codes[k] = row_codes(a.matrix.codes, matrix_rows(a.n), row, a.steps);
        side[k] = a.matrix.side + uint64_t(row) * (a.steps / SIDE_STEPS * SIDE_BYTES);
    }
    [[unroll]] for (uint k = 0; k < LX; k++) {
        const uint m = min(m0 + (k * T + thread) / (P * X_PIECES), live - 1);
        at_x[k] = input_row(first + m) * (a.stride / 16) + thread % X_PIECES;
    }
    [[unroll]] for (uint k = 0; k < LS; k++) {
        const uint i = k * T + thread, m = min(m0 + i / GROUPS, live - 1);
        at_sx[k] = input_row(first + m) * (a.steps * G) + i % G;
    }
    StepCodes next[LC];
    uvec4 next_side[LC];
    uvec4 next_x[LX];
    float next_sx[LS], next_base[LS];
// Loads steps s to s + P.
#define BRING(s) { \
        [[unroll]] for (uint k = 0; k < LC; k++) { \
            load_codes(codes[k], (s) + thread % P, a.steps, next[k]); \
            next_side[k] = load_side(side[k], (s) + thread % P); \
        } \
        [[unroll]] for (uint k = 0; k < LX; k++) \
            next_x[k] = \
                values.v[at_x[k] + X_PIECES * ((s) + thread / X_PIECES % P)]; \
        [[unroll]] for (uint k = 0; k < LS; k++) { \
            const uint at = at_sx[k] + G * ((s) + thread / G % P); \
            next_sx[k] = a.sx.v[at]; \
            if (HAS_MIN) next_base[k] = float(a.sums.v[at]); \
        } \
    }

    if (G == 2)
        for (uint i = thread; i < 4 * R; i += T)
            stage[i / (2 * R)][i / 2 % R * PITCH_CODES + i % 2 * PIECES + 1] = uvec4(0);
    float sums[RT][NT][P][4]; // per tile, part and element
    float near[RT][NT][P][4], kept[4 * KEPT];
    EACH sums[t][n][p][i] = 0.0;

    BRING(0);
    uint buffer_ = 0;
    for (uint turn = 0; turn < 32 / P; turn++) {
        for (uint s = PART(turn); s < a.steps; s += 32) {
            [[unroll]] for (uint k = 0; k < LC; k++) {
                const uint i = k * T + thread, row = i / P, own_step = i % P;
                if (LC * T > P * R && row >= R) break;
                const uint to = row * PITCH_CODES + own_step * PIECES;
                [[unroll]] for (uint q = 0; q < W / 16; q++)
                    stage[buffer_][to + (G == 2 ? 2 * q : q)] = columns_of(next[k], q);
                const Factors own = factors_of(next_side[k], s + own_step);
                [[unroll]] for (uint g = 0; g < G; g++) {
                    const uint e = own_step * G + g, at = row / 16 * 8 + row % 8;
                    scales[buffer_][e][at][row / 8 % 2] = own.scale[g];
                    if (HAS_MIN) leasts[buffer_][e][at][row / 8 % 2] = own.least[g];
                }
            }
            [[unroll]] for (uint k = 0; k < LX; k++) {
                const uint i = k * T + thread, row = i / (P * X_PIECES);
                stage[buffer_][R * PITCH_CODES + row * PITCH + i % (P * X_PIECES)] = next_x[k];
            }
            [[unroll]] for (uint k = 0; k < LS; k++) {
                const uint i = k * T + thread, m = i / GROUPS, e = i % GROUPS;
                if (LS * T > GROUPS * N && m >= N) break;
                sx_pairs[buffer_][e][m / 2][m % 2] = next_sx[k] * PRODUCT_UNIT;
                precise float base = next_base[k] * next_sx[k];
                if (HAS_MIN) bases[buffer_][e][m / 2][m % 2] = base;
            }
            barrier();
            uint after = turn + 1; // skips parts without steps
            while (PART(after) >= a.steps) after++;
            const uint following = s + 32 < a.steps ? s + 32 : PART(after);
            BRING(following); // after the last turn, loads the first again
            Activations b[NT];
            [[unroll]] for (uint e = 0; e < GROUPS; e++) {
                const uint p = e / G, g = e % G;
                vec2 scale[RT], least[RT], sx[NT], base[NT];
                Product d[RT][NT];
                // Keeps only the products of one group in registers at a time.
                if (e > 0) subgroup_fence();
                [[unroll]] for (uint t = 0; t < RT; t++) {
                    const uint pair = row0 / 2 + 8 * t + eight;
                    scale[t] = scales[buffer_][e][pair];
                    least[t] = vec2(0.0);
                    if (HAS_MIN) least[t] = leasts[buffer_][e][pair];
                }
                [[unroll]] for (uint n = 0; n < NT; n++) {
                    const uint pair = col0 / 2 + 4 * n + four;
                    sx[n] = sx_pairs[buffer_][e][pair];
                    base[n] = vec2(0.0);
                    if (HAS_MIN) base[n] = bases[buffer_][e][pair];
                }
                // The slots of an expert may fill only some of the tiles.
                const uint filled = EXPERTS ? (max(live, m0 + col0) - m0 - col0 + 7) / 8 : NT;
                [[unroll]] for (uint w = 0; w < W / 32; w++) {
                    Weights c[RT];
                    [[unroll]] for (uint t = 0; t < RT; t++) {
                        const uint from =
                            (row0 + 16 * t) * PITCH_CODES + PIECES * p + 2 * w + g;
                        coopMatLoad(c[t], stage[buffer_], from, PITCH_CODES,
                            gl_CooperativeMatrixLayoutRowMajor);
                    }
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        if (EXPERTS && n >= filled) break;
                        const uint from = R * PITCH_CODES + (col0 + 8 * n) * PITCH
                            + X_PIECES * p + 2 * w;
                        if (g == 0)
                            coopMatLoad(b[n], stage[buffer_], from, PITCH,
                                gl_CooperativeMatrixLayoutColumnMajor);
                        [[unroll]] for (uint t = 0; t < RT; t++) {
                            if (w == 0) d[t][n] = Product(floatBitsToInt(MAGIC));
                            d[t][n] = coopMatMulAdd(c[t], b[n], d[t][n]);
                            if (w < W / 32 - 1) continue;
                            [[unroll]] for (uint i = 0; i < 4; i++)
                                sums[t][n][p][i] = add_group(d[t][n][i], sx[n][i % 2],
                                    scale[t][i / 2], base[n][i % 2], least[t][i / 2],
                                    sums[t][n][p][i]);
                        }
                    }
                }
            }
            buffer_ = 1 - buffer_;
        }
        // Adds the part to the one that waits for it, or keeps it until the next part is done.
        if ((turn & 1) == 0) {
            EACH near[t][n][p][i] = sums[t][n][p][i];
        } else {
            EACH {
                precise float both = near[t][n][p][i] + sums[t][n][p][i];
                sums[t][n][p][i] = both;
            }
            uint level = 0;
            for (; (turn >> level + 1 & 1) != 0; level++)
                EACH {
                    precise float both = kept[level * KEPT + PLACE] + sums[t][n][p][i];
                    sums[t][n][p][i] = both;
                }
            if (turn == 32 / P - 1) break;
            EACH kept[level * KEPT + PLACE] = sums[t][n][p][i];
        }
        EACH sums[t][n][p][i] = 0.0;
    }

    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++)
            [[unroll]] for (uint i = 0; i < 4; i++) {
                const uint row = n0 + row0 + 16 * t + 8 * (i / 2) + eight,
                    m = m0 + col0 + 8 * n + 2 * four + i % 2;
                if (row >= a.n || m >= live) continue;
                precise float y = sums[t][n][0][i];
                if (P > 1) y += sums[t][n][P - 1][i];
                a.matrix.out_.v[output_row(first + m) * a.n + row] = y;
            }
}
