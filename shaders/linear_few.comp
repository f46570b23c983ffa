// Linear layers with steps of 32 columns for a few rows of activations, by matrix instructions: 16
// RT matrix rows times 8 NT rows by sixteen subgroups.
//
// The sums are those of linear.glsl, bit for bit. A subgroup has two of the 32 parts (2w and 2w +
// 1) of all its tiles. Each product of 16 x 8 x 32 is one group of columns, which becomes float and
// is added to its part. At the end the parts are joined as in linear.glsl. Codes become int8 in the
// subgroup's own piece of shared memory. The place of an element of a matrix is probed when the
// device is opened, see matrix_probe.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 1;       // tiles of 8 rows of activations
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "matrix.glsl"
#include "matrix_steps.glsl"

const uint SG = 32, SUBGROUPS = 16;
#include "heads.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the matrices beside it, 16 bits each; 0: there is none
    Matrix more[2];
    uint64_t epilogue;  // of HEADS
};

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer FloatTwos {
    vec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer IntTwos {
    ivec2 v[];
};

const uint TILE_A = 16 * PITCH_CODES - 1, TILE_B = 8 * PITCH;
const uint STAGE = TILE_A + NT * TILE_B - 1; // of a subgroup
// Distance of rows of activations where parts are joined.
const uint JOIN = 17, JOINS = SUBGROUPS * 8 * JOIN;
shared uvec4 stage[SUBGROUPS * STAGE > JOINS ? SUBGROUPS * STAGE : JOINS];

void main() {
    const uint live = live_rows(args.step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * 8 * NT;
    if (m0 > 0 && m0 >= live) return;
    const uint ROWS = 16 * RT;
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y, which = 0;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint blocks = (a.n + ROWS - 1) / ROWS, n = more_n >> (16 * i) & 0xffff;
        if (block < blocks || n == 0) break;
        block -= blocks;
        a.matrix = more[i];
        a.n = n;
        which = i + 1;
    }
    const uint lane = gl_SubgroupInvocationID, team = gl_SubgroupID;
    const uint four = lane % 4, eight = lane / 4;
    const uint n0 = block * ROWS, first = live_row(a.step_, SELECTED, 0);
    const uint rounds = a.steps > 2 * team ? (a.steps - 2 * team + 31) / 32 : 0;
    const uint pair = rounds == 0 ? 0 : team; // a team without work loads something

    // This lane's part of a round: codes and side of a step of one row, activations by 16 bytes,
    // and their scales and sums by two. Neighbouring lanes load neighbouring bytes.
    const uint own_row = lane / 2, own_step = lane % 2;
    RowCodes codes[RT];
    uint64_t side[RT];
    uint at_x[NT], at_sx[2 * NT];
    [[unroll]] for (uint t = 0; t < RT; t++) {
        const uint row = min(n0 + 16 * t + own_row, a.n - 1);
        codes[t] = row_codes(a.matrix.codes, a.n, row, a.steps);
        side[t] = a.matrix.side + uint64_t(row) * (a.steps / SIDE_STEPS * SIDE_BYTES);
    }
    const uint step_ = 2 * pair + own_step;
    [[unroll]] for (uint n = 0; n < NT; n++) {
        const uint row = first + min(m0 + 8 * n + eight, live - 1);
        at_x[n] = row * (a.stride / 16) + 4 * pair + four;
    }
    [[unroll]] for (uint k = 0; k < 2 * NT; k++) {
        const uint row = first + min(m0 + 8 * (k / 2) + 2 * four + k % 2, live - 1);
        at_sx[k] = (row * (a.steps / 2) + pair) * G;
    }
    Values values = Values(a.x);
    FloatTwos sxs = FloatTwos(uint64_t(a.sx));
    IntTwos xsums = IntTwos(uint64_t(a.sums));

    float sums[RT][NT][2][4]; // of tiles, by part and element
    Product whole[RT][NT];
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) {
            if (!GROUPED) whole[t][n] = Product(0);
            [[unroll]] for (uint p = 0; p < 8; p++) sums[t][n][p / 4][p % 4] = 0.0;
        }

    // Past the last round, the last round is loaded again: unconditional loads go out early.
    const uint last = max(rounds, 1) - 1;
    StepCodes w[RT];
    uvec4 words[RT]; // of the side
    uvec4 x[NT];
    [[unroll]] for (uint t = 0; t < RT; t++) {
        load_codes(codes[t], step_, a.steps, w[t]);
        if (GROUPED) words[t] = load_side(side[t], step_);
    }
    [[unroll]] for (uint n = 0; n < NT; n++) x[n] = values.v[at_x[n]];

    const uint mine = gl_SubgroupID * STAGE;
    const uint to = mine + own_row * PITCH_CODES + own_step * PIECES;
    if (G == 2) stage[to + 1] = uvec4(0);
    for (uint j = 0; j < rounds; j++) {
        const uint next = min(j + 1, last);
        vec2 sx[2 * NT][G], base[2 * NT][G];
        if (GROUPED)
            [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                [[unroll]] for (uint q = 0; q < G; q++) {
                    const uint at = at_sx[k] + 16 * G * j + q;
                    sx[k][q] = sxs.v[at];
                    base[k][q] = vec2(0.0);
                    if (HAS_MIN) {
                        precise vec2 of_sums = vec2(xsums.v[at]) * sx[k][q];
                        base[k][q] = of_sums;
                    }
                    sx[k][q] *= PRODUCT_UNIT;
                }
        Activations b[NT][2];
        [[unroll]] for (uint t = 0; t < RT; t++) {
            Factors own;
            if (GROUPED) own = factors_of(words[t], step_);
            subgroup_fence();
            if (t == 0)
                [[unroll]] for (uint n = 0; n < NT; n++)
                    stage[mine + TILE_A + (8 * n + eight) * PITCH + four] = x[n];
            stage[to] = columns_of(w[t], 0);
            stage[to + PIECES - 1] = columns_of(w[t], 1);
            subgroup_fence();
            load_codes(codes[t], step_ + 32 * next, a.steps, w[t]);
            if (GROUPED) words[t] = load_side(side[t], step_ + 32 * next);
            if (t == 0)
                [[unroll]] for (uint n = 0; n < NT; n++) x[n] = values.v[at_x[n] + 64 * next];
            [[unroll]] for (uint e = 0; e < 2 * G; e++) {
                const uint p = e / G, g = e % G;
                Weights c;
                coopMatLoad(c, stage, mine + PIECES * p + g, PITCH_CODES,
                    gl_CooperativeMatrixLayoutRowMajor);
                // Another lane has the factors of this row and step.
                float scale[2], least[2];
                if (GROUPED)
                    [[unroll]] for (uint h = 0; h < 2; h++) {
                        const uint owner = 2 * (eight + 8 * h) + p;
                        scale[h] = subgroupShuffle(own.scale[g], owner);
                        least[h] = 0.0;
                        if (HAS_MIN) least[h] = subgroupShuffle(own.least[g], owner);
                    }
                [[unroll]] for (uint n = 0; n < NT; n++) {
                    if (t == 0 && g == 0)
                        coopMatLoad(b[n][p], stage, mine + TILE_A + n * TILE_B + 2 * p, PITCH,
                            gl_CooperativeMatrixLayoutColumnMajor);
                    if (!GROUPED) {
                        whole[t][n] = coopMatMulAdd(c, b[n][p], whole[t][n]);
                        continue;
                    }
                    const Product d = coopMatMulAdd(c, b[n][p], Product(floatBitsToInt(MAGIC)));
                    [[unroll]] for (uint i = 0; i < 4; i++) {
                        const uint k = 2 * n + i % 2;
                        sums[t][n][p][i] = add_group(d[i], sx[k][e / 2][e % 2], scale[i / 2],
                            base[k][e / 2][e % 2], least[i / 2], sums[t][n][p][i]);
                    }
                }
            }
        }
    }

    // Joins the parts of all subgroups, a tile at a time: a thread takes one element.
    const uint thread = gl_LocalInvocationID.x, row_ = thread % 16, col = thread / 16;
    [[unroll]] for (uint n = 0; n < NT; n++)
        [[unroll]] for (uint t = 0; t < RT; t++) {
            barrier();
            [[unroll]] for (uint i = 0; i < 4; i++) {
                const uint at = (team * 8 + 2 * four + i % 2) * JOIN + 8 * (i / 2) + eight;
                if (GROUPED)
                    stage[at].xy = floatBitsToUint(vec2(sums[t][n][0][i], sums[t][n][1][i]));
                else stage[at].x = uint(whole[t][n][i]);
            }
            barrier();
            const uint row = n0 + 16 * t + row_, m = m0 + 8 * n + col, from = col * JOIN + row_,
                r = first + m;
            if (col >= 8 || row >= a.n || m >= live) continue;
            if (GROUPED) {
                vec2 v[SUBGROUPS];
                [[unroll]] for (uint q = 0; q < SUBGROUPS; q++)
                    v[q] = uintBitsToFloat(stage[q * (8 * JOIN) + from].xy);
                [[unroll]] for (uint d = SUBGROUPS / 2; d > 0; d /= 2)
                    [[unroll]] for (uint q = 0; q < d; q++) {
                        precise vec2 both = v[q] + v[q + d];
                        v[q] = both;
                    }
                precise float y = v[0].x + v[0].y;
                a.matrix.out_.v[r * a.n + row] = y;
            } else {
                int sum = 0;
                [[unroll]] for (uint q = 0; q < SUBGROUPS; q++)
                    sum += int(stage[q * (8 * JOIN) + from].x);
                a.matrix.out_.v[r * a.n + row] =
                    row_result(sum, a.sums.v[r], a.sx.v[r], a.matrix.side, row);
            }
        }
    if (HEADS) finish_heads(epilogue, which, n0, ROWS, m0, min(8 * NT, live - m0), first);
}
