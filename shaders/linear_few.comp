// Linear layers with steps of 32 columns for a few rows of activations, by matrix instructions.
// Eight subgroups compute 16 RT matrix rows times 8 NT rows.
//
// The sums have the bits of linear.glsl. A subgroup has four of the 32 parts (4w .. 4w + 3) of all
// tiles. Each product of 16 x 8 x 32 covers one group of columns. It is converted to float and
// added to its part. At the end the parts are added as in linear.glsl. Codes are converted to int8
// in the subgroup's part of shared memory, two groups at a time. matrix_probe.comp checks the lanes
// of matrix elements when the device is opened.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 1;       // tiles of 8 rows of activations
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const uint U = 1;        // rounds of codes in flight
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 512;      // threads
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "matrix.glsl"
#include "experts.glsl"
const uint W = 32;                               // columns of a step, and of a product
#include "matrix_steps.glsl"

const uint SG = 32, SUBGROUPS = T / SG;
#include "heads.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // for HEADS
};

const uint TEAMS = 8;                 // subgroups that share the parts of a row
const uint BANDS = T / (32 * TEAMS);  // groups of RT tiles in a workgroup
const uint TILE_A = 16 * PITCH_CODES, TILE_B = 8 * PITCH;
const uint STAGE = TILE_A + NT * TILE_B; // per subgroup
// Distance between rows of activations where parts are added.
const uint JOIN = 17;
const uint JOINS = TEAMS * 8 * JOIN;  // per band
shared uvec4 stage[BANDS * (TEAMS * STAGE > JOINS ? TEAMS * STAGE : JOINS)];

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, 8 * NT, more_n, more, first, m0, live)) return;
    const uint ROWS = 16 * RT * BANDS;
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
    const uint lane = gl_SubgroupInvocationID, team = gl_SubgroupID % TEAMS,
        band = gl_SubgroupID / TEAMS;
    const uint four = lane % 4, eight = lane / 4;
    const uint n0 = block * ROWS + band * (16 * RT);
    const uint rounds = a.steps > 4 * team ? (a.steps - 4 * team + 31) / 32 : 0;
    const uint quad = rounds == 0 ? 0 : team; // a team without work loads valid data

    // This lane's loads of a round: codes and factors of a step, 16 bytes of activations, and four
    // of their scales and sums.
    RowCodes codes[2 * RT];
    uint64_t side[2 * RT];
    uint at_x[2 * NT], at_sx[2 * NT];
    [[unroll]] for (uint k = 0; k < 2 * RT; k++) {
        const uint row = matrix_row(a.n, min(n0 + 8 * k + eight, a.n - 1));
        codes[k] = row_codes(a.matrix.codes, matrix_rows(a.n), row, a.steps);
        side[k] = a.matrix.side + uint64_t(row) * (a.steps / SIDE_STEPS * SIDE_BYTES);
    }
    const uint step_ = 4 * quad + four;
    [[unroll]] for (uint k = 0; k < 2 * NT; k++) {
        const uint of_x = min(m0 + 4 * k + lane / 8, live - 1),
            of_sx = min(m0 + 8 * (k / 2) + 2 * four + k % 2, live - 1);
        at_x[k] = input_row(first + of_x) * (a.stride / 16) + 8 * quad + lane % 8;
        at_sx[k] = (input_row(first + of_sx) * (a.steps / 4) + quad) * G;
    }
    Values values = Values(a.x);
    FloatFours sxs = FloatFours(uint64_t(a.sx));
    IntFours xsums = IntFours(uint64_t(a.sums));

    float sums[RT][NT][4][4]; // per tile, part and element
    Product whole[RT][NT];
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) {
            if (!GROUPED) whole[t][n] = Product(0);
            [[unroll]] for (uint p = 0; p < 16; p++) sums[t][n][p / 4][p % 4] = 0.0;
        }

    // After the last round, the last round is loaded again: unconditional loads are issued early.
    const uint last = max(rounds, 1) - 1;
    StepCodes w[U][2 * RT];
    uvec4 words[U][2 * RT]; // of the side
    uvec4 x[2 * NT];
    [[unroll]] for (uint u = 0; u < U; u++)
        [[unroll]] for (uint k = 0; k < 2 * RT; k++) {
            load_codes(codes[k], step_ + 32 * min(u, last), a.steps, w[u][k]);
            if (GROUPED) words[u][k] = load_side(side[k], step_ + 32 * min(u, last));
        }
    [[unroll]] for (uint k = 0; k < 2 * NT; k++) x[k] = values.v[at_x[k]];

    const uint mine = gl_SubgroupID * STAGE;
    if (G == 2) // the zeros between groups, in each row and step
        stage[mine + lane / 2 * PITCH_CODES + lane % 2 * PIECES + 1] = uvec4(0);
    for (uint j0 = 0; j0 < rounds; j0 += U) {
        [[unroll]] for (uint u = 0; u < U; u++) {
            const uint j = j0 + u;
            if (j >= rounds) break;
            vec4 sx[2 * NT][G], base[2 * NT][G];
            if (GROUPED)
                [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                    [[unroll]] for (uint q = 0; q < G; q++) {
                        const uint at = at_sx[k] + 8 * G * j + q;
                        sx[k][q] = sxs.v[at];
                        if (HAS_MIN) {
                            precise vec4 of_sums = vec4(xsums.v[at]) * sx[k][q];
                            base[k][q] = of_sums;
                        } else {
                            base[k][q] = vec4(0.0);
                        }
                        sx[k][q] *= PRODUCT_UNIT;
                    }
            Factors factors[2 * RT];
            if (GROUPED)
                [[unroll]] for (uint k = 0; k < 2 * RT; k++)
                    factors[k] = factors_of(words[u][k], step_);
            [[unroll]] for (uint half_ = 0; half_ < 2; half_++) {
                Activations b[NT][2];
                subgroup_fence();
                if (lane % 8 / 4 == half_)
                    [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                        stage[mine + TILE_A + (4 * k + lane / 8) * PITCH + four] = x[k];
                [[unroll]] for (uint t = 0; t < RT; t++) {
                    if (t > 0) subgroup_fence();
                    if (four / 2 == half_)
                        [[unroll]] for (uint h = 0; h < 2; h++) {
                            const uint to =
                                mine + (8 * h + eight) * PITCH_CODES + PIECES * (four % 2);
                            stage[to] = columns_of(w[u][2 * t + h], 0);
                            stage[to + PIECES - 1] = columns_of(w[u][2 * t + h], 1);
                        }
                    subgroup_fence();
                    const uint next = step_ + 32 * min(j + U, last);
                    if (half_ == 1)
                        [[unroll]] for (uint h = 0; h < 2; h++)
                            load_codes(codes[2 * t + h], next, a.steps, w[u][2 * t + h]);
                    if (half_ == 1 && t == 0)
                        [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                            x[k] = values.v[at_x[k] + 64 * min(j + 1, last)];
                    [[unroll]] for (uint e = 0; e < 2 * G; e++) {
                        const uint p = e / G, g = e % G, part = 2 * half_ + p;
                        Weights c;
                        coopMatLoad(c, stage, mine + PIECES * p + g, PITCH_CODES,
                            gl_CooperativeMatrixLayoutRowMajor);
                        // The factors of this step are in another lane.
                        float scale[2], least[2];
                        if (GROUPED)
                            [[unroll]] for (uint h = 0; h < 2; h++) {
                                const Factors own = factors[2 * t + h];
                                scale[h] = subgroupShuffle(own.scale[g], lane - four + part);
                                least[h] = 0.0;
                                if (HAS_MIN)
                                    least[h] = subgroupShuffle(own.least[g], lane - four + part);
                            }
                        [[unroll]] for (uint n = 0; n < NT; n++) {
                            if (t == 0 && g == 0)
                                coopMatLoad(b[n][p], stage, mine + TILE_A + n * TILE_B + 2 * p,
                                    PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                            if (!GROUPED) {
                                whole[t][n] = coopMatMulAdd(c, b[n][p], whole[t][n]);
                                continue;
                            }
                            const Product d =
                                coopMatMulAdd(c, b[n][p], Product(floatBitsToInt(MAGIC)));
                            const uint v = G * part + g; // index in the sums of four steps
                            [[unroll]] for (uint i = 0; i < 4; i++) {
                                const uint k = 2 * n + i % 2;
                                sums[t][n][part][i] = add_group(d[i], sx[k][v / 4][v % 4],
                                    scale[i / 2], base[k][v / 4][v % 4], least[i / 2],
                                    sums[t][n][part][i]);
                            }
                        }
                    }
                    if (GROUPED && half_ == 1)
                        [[unroll]] for (uint h = 0; h < 2; h++)
                            words[u][2 * t + h] = load_side(side[2 * t + h], next);
                }
            }
        }
    }

    // Adds the parts of all subgroups, one tile at a time. A thread adds one element.
    const uint thread = gl_LocalInvocationID.x % (32 * TEAMS), row_ = thread % 16,
        col = thread / 16;
    [[unroll]] for (uint n = 0; n < NT; n++)
        [[unroll]] for (uint t = 0; t < RT; t++) {
            barrier();
            [[unroll]] for (uint i = 0; i < 4; i++) {
                const uint to =
                    band * JOINS + (team * 8 + 2 * four + i % 2) * JOIN + 8 * (i / 2) + eight;
                if (GROUPED)
                    stage[to] = floatBitsToUint(vec4(sums[t][n][0][i], sums[t][n][1][i],
                        sums[t][n][2][i], sums[t][n][3][i]));
                else stage[to].x = uint(whole[t][n][i]);
            }
            barrier();
            const uint row = n0 + 16 * t + row_, m = m0 + 8 * n + col,
                from = band * JOINS + col * JOIN + row_;
            if (col >= 8 || row >= a.n || m >= live) continue;
            const uint to = output_row(first + m) * a.n + row;
            if (GROUPED) {
                vec4 v[TEAMS];
                [[unroll]] for (uint q = 0; q < TEAMS; q++)
                    v[q] = uintBitsToFloat(stage[q * (8 * JOIN) + from]);
                [[unroll]] for (uint d = TEAMS / 2; d > 0; d /= 2)
                    [[unroll]] for (uint q = 0; q < d; q++) {
                        precise vec4 both = v[q] + v[q + d];
                        v[q] = both;
                    }
                precise vec2 two = v[0].xy + v[0].zw;
                precise float y = two.x + two.y;
                a.matrix.out_.v[to] = y;
            } else {
                int sum = 0;
                [[unroll]] for (uint q = 0; q < TEAMS; q++)
                    sum += int(stage[q * (8 * JOIN) + from].x);
                const uint r = input_row(first + m);
                a.matrix.out_.v[to] =
                    row_result(sum, a.sums.v[r], a.sx.v[r], a.matrix.side, matrix_row(a.n, row));
            }
        }
    if (HEADS) finish_heads(epilogue, which, block * ROWS, ROWS, m0, min(8 * NT, live - m0), first);
}
