// Linear layers with 4-bit codes for many rows of activations, by matrix instructions: 16 RT WR
// matrix rows times 8 NT WN rows a workgroup.
//
// The sums are those of linear.glsl, bit for bit. A subgroup walks the parts two by two, in the
// order in which they are joined, and keeps the sums that wait to be joined. Each product of 16 x 8
// x 32 is one group of columns, which becomes float and is added to its part. The workgroup's codes
// and activations of two groups lie in shared memory while the next ones are loaded.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "matrix.glsl"

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
#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the matrices beside it, 16 bits each; 0: there is none
    Matrix more[2];
    uint64_t epilogue;  // not used
};

const uint WN = T / 32 / WR;
const uint R = 16 * RT * WR, N = 8 * NT * WN;
shared uvec4 stage[2][(R + N) * PITCH];
shared vec2 scales[2][2][R / 2];       // by group, of rows 8 apart: what a lane has of a tile
shared vec2 sx_pairs[2][2][N / 2];     // by group, of neighbouring activations: likewise
// Pieces of 16 bytes that a thread loads, first of codes, then of activations.
const uint L = (2 * R + 4 * N) / T;
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
    Codes codes = Codes(a.matrix.codes), values = Codes(a.x);
    ScalePairs row_scales = ScalePairs(uint64_t(a.matrix.scales));
    FloatPairs sxs = FloatPairs(uint64_t(a.sx));

    // This thread's loads of group 0.
    uint at[L], at_scale[2], at_sx[2];
    [[unroll]] for (uint k = 0; k < L; k++) {
        const uint i = k * T + thread, b = i - 2 * R;
        if (i < 2 * R) at[k] = min(n0 + i / 2, a.n - 1) * a.steps + i % 2;
        else at[k] = (first + min(m0 + b / 4, live - 1)) * (a.stride / 16) + b % 4;
    }
    const uint pair = T - 1 - thread; // of activations: other threads than those that bring scales
    [[unroll]] for (uint k = 0; k < 2; k++) {
        at_scale[k] = min(n0 + thread / 8 * 16 + thread % 8 + 8 * k, a.n - 1) * (a.steps / 2);
        at_sx[k] = (first + min(m0 + 2 * pair + k, live - 1)) * (a.steps / 2);
    }
    uvec4 next[L];
    uint next_scale[2];
    vec2 next_sx[2];
#define BRING(g) { \
        [[unroll]] for (uint k = 0; k < L; k++) { \
            if (k * T + thread < 2 * R) next[k] = codes.v[at[k] + (g)]; \
            else next[k] = values.v[at[k] + 2 * (g)]; \
        } \
        if (GROUPED) { \
            if (thread < R / 2) \
                [[unroll]] for (uint k = 0; k < 2; k++) \
                    next_scale[k] = row_scales.v[at_scale[k] + (g) / 2]; \
            if (pair < N / 2) \
                [[unroll]] for (uint k = 0; k < 2; k++) next_sx[k] = sxs.v[at_sx[k] + (g) / 2]; \
        } \
    }

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
        for (uint g = bitfieldReverse(turn) >> 28 << 1; g < a.steps; g += 32) {
            [[unroll]] for (uint k = 0; k < L; k++) {
                const uint i = k * T + thread, b = i - 2 * R;
                if (i < 2 * R) {
                    stage[buffer_][i / 2 * PITCH + 2 * (i % 2)] = low_columns(next[k]);
                    stage[buffer_][i / 2 * PITCH + 2 * (i % 2) + 1] = high_columns(next[k]);
                } else {
                    stage[buffer_][(R + b / 4) * PITCH + b % 4] = next[k];
                }
            }
            if (GROUPED) {
                if (thread < R / 2) {
                    const vec2 s = unpackHalf2x16(next_scale[0]), t = unpackHalf2x16(next_scale[1]);
                    scales[buffer_][0][thread] = vec2(s.x, t.x);
                    scales[buffer_][1][thread] = vec2(s.y, t.y);
                }
                if (pair < N / 2) {
                    const vec2 s = next_sx[0] * PRODUCT_UNIT, t = next_sx[1] * PRODUCT_UNIT;
                    sx_pairs[buffer_][0][pair] = vec2(s.x, t.x);
                    sx_pairs[buffer_][1][pair] = vec2(s.y, t.y);
                }
            }
            barrier();
            const uint after = g + 32 < a.steps ? g + 32 : bitfieldReverse(turn + 1) >> 28 << 1;
            BRING(after); // after the last turn, once more the first
            [[unroll]] for (uint p = 0; p < 2; p++) {
                Weights c[RT];
                Activations b[NT];
                vec2 scale[RT], sx[NT];
                // Keeps the products of one group in registers, not those of both.
                if (p > 0) subgroup_fence();
                [[unroll]] for (uint t = 0; t < RT; t++) {
                    coopMatLoad(c[t], stage[buffer_], (row0 + 16 * t) * PITCH + 2 * p, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
                    if (GROUPED) scale[t] = scales[buffer_][p][row0 / 2 + 8 * t + eight];
                }
                [[unroll]] for (uint n = 0; n < NT; n++) {
                    coopMatLoad(b[n], stage[buffer_], (R + col0 + 8 * n) * PITCH + 2 * p, PITCH,
                        gl_CooperativeMatrixLayoutColumnMajor);
                    if (GROUPED) sx[n] = sx_pairs[buffer_][p][col0 / 2 + 4 * n + four];
                }
                [[unroll]] for (uint t = 0; t < RT; t++)
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        if (!GROUPED) {
                            whole[t][n] = coopMatMulAdd(c[t], b[n], whole[t][n]);
                            continue;
                        }
                        const Product d = coopMatMulAdd(c[t], b[n], Product(floatBitsToInt(MAGIC)));
                        [[unroll]] for (uint i = 0; i < 4; i++)
                            sums[t][n][p][i] =
                                add_group(d[i], sx[n][i % 2], scale[t][i / 2], sums[t][n][p][i]);
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
                        row_result(whole[t][n][i], a.sums.v[r], a.sx.v[r], a.matrix.scales, row);
                }
            }
}
