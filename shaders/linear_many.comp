// Linear layers with steps of 32 columns for many rows of activations, by matrix instructions: 16
// RT WR matrix rows times 8 NT WN rows a workgroup.
//
// The sums are those of linear.glsl, bit for bit. A subgroup walks the parts two by two, in the
// order in which they are joined, and keeps the sums that wait to be joined. Each product of 16 x 8
// x 32 is one group of columns, which becomes float and is added to its part. The workgroup's codes
// and activations of two steps lie in shared memory while the next ones are loaded.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 4;       // tiles of 8 rows of activations, of a subgroup
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows, of a subgroup
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
// Subgroups beside each other over the matrix rows; the others over the activations.
layout(constant_id = 7) const uint WR = 4;
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 512;      // threads
layout(constant_id = 10) const bool NEAR = true; // what waits for the next part stays in registers
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "matrix.glsl"
#include "matrix_steps.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the matrices beside it, 16 bits each; 0: there is none
    Matrix more[2];
    uint64_t epilogue;  // not used
};

const uint WN = T / 32 / WR;
const uint R = 16 * RT * WR, N = 8 * NT * WN;
shared uvec4 stage[2][R * PITCH_CODES + N * PITCH];
// By the groups of two steps: of rows 8 apart, which is what a lane has of a tile, and of
// neighbouring activations likewise.
shared vec2 scales[2][2 * G][R / 2], leasts[2][2 * G][HAS_MIN ? R / 2 : 1];
shared vec2 sx_pairs[2][2 * G][N / 2], bases[2][2 * G][HAS_MIN ? N / 2 : 1];
// A thread's loads for two steps: steps of codes, pieces of 16 bytes of activations, and scales of
// these.
const uint LC = 2 * R / T, LX = 4 * N / T, LS = 2 * G * N / T;
const uint KEPT = RT * NT * 8;        // floats of two parts

#define EACH \
    [[unroll]] for (uint t = 0; t < RT; t++) [[unroll]] for (uint n = 0; n < NT; n++) \
        [[unroll]] for (uint p = 0; p < 2; p++) [[unroll]] for (uint i = 0; i < 4; i++)
#define PLACE (((t * NT + n) * 2 + p) * 4 + i)

void main() {
    const uint live = live_rows(args.step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * N;
    if (m0 > 0 && m0 >= live) return;
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint blocks = (a.n + R - 1) / R, n = more_n >> (16 * i) & 0xffff;
        if (block < blocks || n == 0) break;
        block -= blocks;
        a.matrix = more[i];
        a.n = n;
    }
    const uint n0 = block * R, first = live_row(a.step_, SELECTED, 0),
        thread = gl_LocalInvocationID.x;
    const uint lane = gl_SubgroupInvocationID, four = lane % 4, eight = lane / 4;
    const uint row0 = gl_SubgroupID % WR * (16 * RT), col0 = gl_SubgroupID / WR * (8 * NT);
    Values values = Values(a.x);

    // This thread's loads. Neighbouring threads load neighbouring bytes.
    const uint own_row = thread / 2, own_step = thread % 2, own_m = thread / 4,
        own_piece = thread % 4;
    RowCodes codes[LC];
    uint64_t side[LC];
    uint at_x[LX], at_sx[LS];
    [[unroll]] for (uint k = 0; k < LC; k++) {
        const uint row = min(n0 + k * T / 2 + own_row, a.n - 1);
        codes[k] = row_codes(a.matrix.codes, a.n, row, a.steps);
        side[k] = a.matrix.side + uint64_t(row) * (a.steps / SIDE_STEPS * SIDE_BYTES);
    }
    [[unroll]] for (uint k = 0; k < LX; k++) {
        const uint m = min(m0 + k * T / 4 + own_m, live - 1);
        at_x[k] = (first + m) * (a.stride / 16) + own_piece;
    }
    [[unroll]] for (uint k = 0; k < LS; k++) {
        const uint i = k * T + thread, m = min(m0 + i / (2 * G), live - 1);
        at_sx[k] = (first + m) * (a.steps * G) + i % (2 * G);
    }
    StepCodes next[LC];
    uvec4 next_side[LC];
    uvec4 next_x[LX];
    float next_sx[LS], next_base[LS];
#define BRING(s) { \
        [[unroll]] for (uint k = 0; k < LC; k++) { \
            load_codes(codes[k], (s) + own_step, a.steps, next[k]); \
            if (GROUPED) next_side[k] = load_side(side[k], (s) + own_step); \
        } \
        [[unroll]] for (uint k = 0; k < LX; k++) next_x[k] = values.v[at_x[k] + 2 * (s)]; \
        if (GROUPED) \
            [[unroll]] for (uint k = 0; k < LS; k++) { \
                next_sx[k] = a.sx.v[at_sx[k] + G * (s)]; \
                if (HAS_MIN) next_base[k] = float(a.sums.v[at_sx[k] + G * (s)]); \
            } \
    }

    if (G == 2)
        for (uint i = thread; i < 4 * R; i += T)
            stage[i / (2 * R)][i / 2 % R * PITCH_CODES + i % 2 * PIECES + 1] = uvec4(0);
    float sums[RT][NT][2][4]; // of tiles, by part and element
    Product whole[RT][NT];
    float near[RT][NT][2][4], kept[4 * KEPT];
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) {
            if (!GROUPED) whole[t][n] = Product(0);
            [[unroll]] for (uint p = 0; p < 8; p++) sums[t][n][p / 4][p % 4] = 0.0;
        }

    BRING(0);
    uint buffer_ = 0;
    for (uint turn = 0; turn < 16; turn++) {
        // Parts p and p + 1, p in bit-reversed order: 0, 16, 8, 24, ...
        for (uint s = bitfieldReverse(turn) >> 28 << 1; s < a.steps; s += 32) {
            [[unroll]] for (uint k = 0; k < LC; k++) {
                const uint row = k * T / 2 + own_row;
                const uint to = row * PITCH_CODES + own_step * PIECES;
                stage[buffer_][to] = columns_of(next[k], 0);
                stage[buffer_][to + PIECES - 1] = columns_of(next[k], 1);
                if (!GROUPED) continue;
                const Factors own = factors_of(next_side[k], s + own_step);
                [[unroll]] for (uint g = 0; g < G; g++) {
                    const uint e = own_step * G + g, at = row / 16 * 8 + row % 8;
                    scales[buffer_][e][at][row / 8 % 2] = own.scale[g];
                    if (HAS_MIN) leasts[buffer_][e][at][row / 8 % 2] = own.least[g];
                }
            }
            [[unroll]] for (uint k = 0; k < LX; k++) {
                const uint row = k * T / 4 + own_m;
                stage[buffer_][R * PITCH_CODES + row * PITCH + own_piece] = next_x[k];
            }
            if (GROUPED)
                [[unroll]] for (uint k = 0; k < LS; k++) {
                    const uint i = k * T + thread, m = i / (2 * G), e = i % (2 * G);
                    sx_pairs[buffer_][e][m / 2][m % 2] = next_sx[k] * PRODUCT_UNIT;
                    precise float base = next_base[k] * next_sx[k];
                    if (HAS_MIN) bases[buffer_][e][m / 2][m % 2] = base;
                }
            barrier();
            const uint after = s + 32 < a.steps ? s + 32 : bitfieldReverse(turn + 1) >> 28 << 1;
            BRING(after); // after the last turn, once more the first
            Activations b[NT];
            [[unroll]] for (uint e = 0; e < 2 * G; e++) {
                const uint p = e / G, g = e % G;
                Weights c[RT];
                vec2 scale[RT], least[RT], sx[NT], base[NT];
                // Keeps the products of one group in registers, not those of all.
                if (e > 0) subgroup_fence();
                [[unroll]] for (uint t = 0; t < RT; t++) {
                    const uint from = (row0 + 16 * t) * PITCH_CODES + PIECES * p + g,
                        pair = row0 / 2 + 8 * t + eight;
                    coopMatLoad(c[t], stage[buffer_], from, PITCH_CODES,
                        gl_CooperativeMatrixLayoutRowMajor);
                    if (GROUPED) scale[t] = scales[buffer_][e][pair];
                    least[t] = vec2(0.0);
                    if (GROUPED && HAS_MIN) least[t] = leasts[buffer_][e][pair];
                }
                [[unroll]] for (uint n = 0; n < NT; n++) {
                    const uint from = R * PITCH_CODES + (col0 + 8 * n) * PITCH + 2 * p,
                        pair = col0 / 2 + 4 * n + four;
                    if (g == 0)
                        coopMatLoad(b[n], stage[buffer_], from, PITCH,
                            gl_CooperativeMatrixLayoutColumnMajor);
                    if (GROUPED) sx[n] = sx_pairs[buffer_][e][pair];
                    base[n] = vec2(0.0);
                    if (GROUPED && HAS_MIN) base[n] = bases[buffer_][e][pair];
                }
                [[unroll]] for (uint t = 0; t < RT; t++)
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        if (!GROUPED) {
                            whole[t][n] = coopMatMulAdd(c[t], b[n], whole[t][n]);
                            continue;
                        }
                        const Product d = coopMatMulAdd(c[t], b[n], Product(floatBitsToInt(MAGIC)));
                        [[unroll]] for (uint i = 0; i < 4; i++)
                            sums[t][n][p][i] = add_group(d[i], sx[n][i % 2], scale[t][i / 2],
                                base[n][i % 2], least[t][i / 2], sums[t][n][p][i]);
                    }
            }
            buffer_ = 1 - buffer_;
        }
        if (!GROUPED) continue;
        // The part is joined with the one that waits for it, then waits itself.
        uint level = 0;
        if (NEAR && (turn & 1) != 0) {
            EACH {
                precise float both = near[t][n][p][i] + sums[t][n][p][i];
                sums[t][n][p][i] = both;
            }
            level = 1;
        }
        if (!NEAR || level == 1)
            for (; (turn >> level & 1) != 0; level++)
                EACH {
                    precise float both = kept[level * KEPT + PLACE] + sums[t][n][p][i];
                    sums[t][n][p][i] = both;
                }
        if (turn == 15) break;
        if (NEAR && level == 0) {
            EACH near[t][n][p][i] = sums[t][n][p][i];
        } else {
            EACH kept[level * KEPT + PLACE] = sums[t][n][p][i];
        }
        EACH sums[t][n][p][i] = 0.0;
    }

    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++)
            [[unroll]] for (uint i = 0; i < 4; i++) {
                const uint row = n0 + row0 + 16 * t + 8 * (i / 2) + eight,
                    m = m0 + col0 + 8 * n + 2 * four + i % 2, r = first + m;
                if (row >= a.n || m >= live) continue;
                if (GROUPED) {
                    precise float y = sums[t][n][0][i] + sums[t][n][1][i];
                    a.matrix.out_.v[r * a.n + row] = y;
                } else {
                    a.matrix.out_.v[r * a.n + row] =
                        row_result(whole[t][n][i], a.sums.v[r], a.sx.v[r], a.matrix.side, row);
                }
            }
}
