// Linear layers with steps of 32 columns for a few rows of activations, by matrix instructions.
// Eight subgroups compute 16 RT matrix rows times 8 NT rows.
//
// The sums have the bits of linear.glsl: a subgroup computes two parts of each row, one after the
// other. Each product of 16 x 8 x 32 covers one group of columns. It is converted to float and
// added to the part. Codes are converted to int8 in the subgroup's share of shared memory, a chunk
// of 16 matrix rows at a time. matrix_probe.comp checks the lanes of matrix elements when the
// device is opened.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 1;       // tiles of 8 rows of activations
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows, at most 4
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "matrix.glsl"
#include "experts.glsl"
const uint W = 32;                               // columns of a step, and of a product
#include "matrix_steps.glsl"

const uint SG = 32, SUBGROUPS = PARTS / 2;
#include "heads.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // for HEADS
};

const uint TILE_X = 8 * PITCH_X, STAGE = TILE + TILE_X; // of a subgroup
// The factors of 16 matrix rows replace the activations, which are in registers by then.
#define PAIR(g, quarter, row) (mine + TILE + ((g) * 4 + (quarter)) * 8 + (row))
// Distance between rows of activations where parts are added.
const uint JOIN = 17, JOINS = 8 * JOIN;
shared uvec4 stage[SUBGROUPS * (STAGE > JOINS ? STAGE : JOINS)];
// Scales of pairs of rows of activations for the groups of a chunk, and factors of minima. A lane
// loads those of some groups of one row.
const uint CHUNK_GROUPS = 4 * G, PAIRS = 4 * NT, OWN_GROUPS = 8 * NT * CHUNK_GROUPS / 32;
shared vec2 scales[SUBGROUPS][CHUNK_GROUPS][GROUPED ? PAIRS : 1];
shared vec2 bases[SUBGROUPS][CHUNK_GROUPS][HAS_MIN ? PAIRS : 1];

#define EACH \
    [[unroll]] for (uint t = 0; t < RT; t++) [[unroll]] for (uint n = 0; n < NT; n++) \
        [[unroll]] for (uint i = 0; i < 4; i++)

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, 8 * NT, more_n, more, first, m0, live)) return;
    const uint ROWS = 16 * RT;
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y;
    const uint which = take_matrix(a, block, ROWS, more_n, more);
    const uint lane = gl_SubgroupInvocationID, team = gl_SubgroupID;
    // Place of this lane's elements, and the quarter and row of its loads.
    const uint four = lane % 4, eight = lane / 4, own_four = lane / 8, own_eight = lane % 8;
    const uint n0 = block * ROWS, chunks = a.steps / 4;

    // This lane's loads of a chunk: codes and factors of a quarter, 16 bytes of activations, and
    // their scales and sums.
    RowCodes codes[2 * RT];
    uint skip_side[2 * RT], at_x[2 * NT], at_sx;
    const uint row0 = matrix_row(a.n, n0);
    const uint64_t side = side_rows(a.matrix.side, row0, a.steps);
    [[unroll]] for (uint k = 0; k < 2 * RT; k++) {
        const uint skip = min(8 * k + own_eight, a.n - 1 - n0);
        codes[k] = row_codes(a.matrix.codes, matrix_rows(a.n), row0, skip, a.steps);
        skip_side[k] = side_skip(row0, skip, a.steps);
    }
    [[unroll]] for (uint k = 0; k < 2 * NT; k++)
        at_x[k] = input_row(first + min(m0 + 4 * k + lane / 8, live - 1)) * (a.stride / 16)
            + lane % 8;
    const uint own_m = lane * OWN_GROUPS / CHUNK_GROUPS;
    const uint own_group = lane * OWN_GROUPS % CHUNK_GROUPS;
    at_sx = input_row(first + min(m0 + own_m, live - 1)) * (a.steps * G) + own_group;
    Values values = Values(a.x);

    // Sums of both parts and of the present one, per tile and element.
    float sums[RT][NT][4], own_sums[RT][NT][4];
    Product whole[RT][NT];
    EACH sums[t][n][i] = own_sums[t][n][i] = 0.0;
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) whole[t][n] = Product(0);

    Quarter w[2 * RT];
    uvec4 words[2 * RT]; // of the side
    uvec4 x[2 * NT];
    float sx[OWN_GROUPS];
    int xsum[OWN_GROUPS];
// Loads a quarter of a row of tile k / 2, or the activations, of a chunk.
#define BRING(k, chunk) { \
        load_quarter(codes[k], 4 * (chunk) + own_four, own_four, w[k]); \
        if (GROUPED) words[k] = load_side(side, skip_side[k], 4 * (chunk) + own_four); \
    }
#define BRING_X(chunk) { \
        [[unroll]] for (uint k = 0; k < 2 * NT; k++) x[k] = values.v[at_x[k] + 8 * (chunk)]; \
        if (GROUPED) \
            [[unroll]] for (uint e = 0; e < OWN_GROUPS; e++) { \
                sx[e] = a.sx.v[at_sx + CHUNK_GROUPS * (chunk) + e]; \
                if (HAS_MIN) xsum[e] = a.sums.v[at_sx + CHUNK_GROUPS * (chunk) + e]; \
            } \
    }
    // Unconditional loads are issued early, so after the last chunk valid data is loaded.
    uint next = min(2 * team, chunks - 1);
    [[unroll]] for (uint k = 0; k < 2 * RT; k++) BRING(k, next);
    BRING_X(next);

    const uint mine = team * STAGE;
    if (G == 2) // the zeros between groups
        [[unroll]] for (uint i = 0; i < 2; i++)
            stage[mine + four * QUARTER + (8 * i + eight) * PITCH + 1] = uvec4(0);
    for (uint part = 2 * team; part < 2 * team + 2; part++) {
        for (uint chunk = part; chunk < chunks; chunk += PARTS) {
            next = chunk + PARTS < chunks ? chunk + PARTS : min(chunk % PARTS + 1, chunks - 1);
            Activations b[NT][4];
            [[unroll]] for (uint n = 0; n < NT; n++) {
                subgroup_fence();
                [[unroll]] for (uint h = 0; h < 2; h++)
                    stage[mine + TILE + (4 * h + lane / 8) * PITCH_X + lane % 8] = x[2 * n + h];
                if (GROUPED && n == 0)
                    [[unroll]] for (uint e = 0; e < OWN_GROUPS; e++) {
                        const uint group = own_group + e, pair = own_m / 2, side_ = own_m % 2;
                        scales[team][group][pair][side_] = sx[e] * PRODUCT_UNIT;
                        precise float base = float(xsum[e]) * sx[e];
                        if (HAS_MIN) bases[team][group][pair][side_] = base;
                    }
                subgroup_fence();
                [[unroll]] for (uint p = 0; p < 4; p++)
                    coopMatLoad(b[n][p], stage, mine + TILE + 2 * p, PITCH_X,
                        gl_CooperativeMatrixLayoutColumnMajor);
            }
            BRING_X(next);
            [[unroll]] for (uint t = 0; t < RT; t++) {
                subgroup_fence();
                Factors own[2];
                [[unroll]] for (uint h = 0; h < 2; h++) {
                    const uint k = 2 * t + h;
                    const uint to = mine + own_four * QUARTER + (8 * h + own_eight) * PITCH;
                    stage[to] = columns_of(w[k], 0);
                    stage[to + G] = columns_of(w[k], 1);
                    if (GROUPED) own[h] = factors_of(words[k], 4 * chunk + own_four);
                }
                if (GROUPED)
                    [[unroll]] for (uint g = 0; g < G; g++)
                        stage[PAIR(g, own_four, own_eight)] = pair_of(own[0], own[1], g);
                subgroup_fence();
                [[unroll]] for (uint h = 0; h < 2; h++) BRING(2 * t + h, next);
                [[unroll]] for (uint e = 0; e < CHUNK_GROUPS; e++) {
                    const uint p = e / G, g = e % G;
                    Weights c;
                    coopMatLoad(c, stage, mine + p * QUARTER + g, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
                    const vec4 factors = uintBitsToFloat(stage[PAIR(g, p, eight)]);
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        if (!GROUPED) {
                            whole[t][n] = coopMatMulAdd(c, b[n][p], whole[t][n]);
                            continue;
                        }
                        const vec2 sxs = scales[team][e][4 * n + four];
                        vec2 base = vec2(0.0);
                        if (HAS_MIN) base = bases[team][e][4 * n + four];
                        const Product d =
                            coopMatMulAdd(c, b[n][p], Product(floatBitsToInt(MAGIC)));
                        [[unroll]] for (uint i = 0; i < 4; i++)
                            own_sums[t][n][i] = add_group(d[i], sxs[i % 2], factors[i / 2],
                                base[i % 2], factors[2 + i / 2], own_sums[t][n][i]);
                    }
                }
            }
        }
        if (GROUPED)
            EACH {
                precise float both = sums[t][n][i] + own_sums[t][n][i];
                sums[t][n][i] = both;
                own_sums[t][n][i] = 0.0;
            }
    }

    // Adds the parts, eight rows of activations at a time. A thread adds up to four elements.
    const uint thread = gl_LocalInvocationID.x, row_ = thread % 16, col = thread / 16;
    [[unroll]] for (uint n = 0; n < NT; n++) {
        barrier();
        [[unroll]] for (uint i = 0; i < 4; i++) {
            uvec4 v = uvec4(0);
            [[unroll]] for (uint t = 0; t < RT; t++)
                v[t] = GROUPED ? floatBitsToUint(sums[t][n][i]) : uint(whole[t][n][i]);
            stage[team * JOINS + (2 * four + i % 2) * JOIN + 8 * (i / 2) + eight] = v;
        }
        barrier();
        const uint m = m0 + 8 * n + col;
        if (col >= 8 || m >= live) continue;
        vec4 v[SUBGROUPS];
        ivec4 sum = ivec4(0);
        [[unroll]] for (uint q = 0; q < SUBGROUPS; q++) {
            const uvec4 own = stage[q * JOINS + col * JOIN + row_];
            v[q] = uintBitsToFloat(own);
            sum += ivec4(own);
        }
        [[unroll]] for (uint d = 1; d < SUBGROUPS; d *= 2)
            [[unroll]] for (uint q = 0; q < SUBGROUPS; q += 2 * d) {
                precise vec4 both = v[q] + v[q + d];
                v[q] = both;
            }
        const uint r = input_row(first + m), to = output_row(first + m) * a.n;
        [[unroll]] for (uint t = 0; t < RT; t++) {
            const uint row = n0 + 16 * t + row_;
            if (row >= a.n) continue;
            a.matrix.out_.v[to + row] = GROUPED ? v[0][t]
                : row_result(sum[t], a.sums.v[r], a.sx.v[r], a.matrix.side, matrix_row(a.n, row));
        }
    }
    if (HEADS) finish_heads(epilogue, which, block * ROWS, ROWS, m0, min(8 * NT, live - m0), first);
}
