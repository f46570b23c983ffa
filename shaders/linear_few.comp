// Linear layers with 4-bit codes for a few rows of activations, by matrix instructions: 16 RT
// matrix rows times 8 NT rows by eight subgroups.
//
// The sums are those of linear.glsl, bit for bit. A subgroup has four of the 32 parts (4w .. 4w +
// 3) of all its tiles. Each product of 16 x 8 x 32 is one group of columns, which becomes float and
// is added to its part. At the end the parts are joined as in linear.glsl. Codes become int8 in the
// subgroup's own piece of shared memory, two groups at a time. The place of an element of a matrix
// is probed when the device is opened, see matrix_probe.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "matrix.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 1;       // tiles of 8 rows of activations
layout(constant_id = 3) const uint RT = 2;       // tiles of 16 matrix rows
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const uint U = 1;        // rounds whose codes are on their way
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 512;      // threads
#include "codes.glsl"

const uint SG = 32, SUBGROUPS = T / SG;
#include "heads.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the matrices beside it, 16 bits each; 0: there is none
    Matrix more[2];
    uint64_t epilogue;  // of HEADS
};

const uint TEAMS = 8;                 // subgroups that share the parts of a row
const uint BANDS = T / (32 * TEAMS);  // of RT tiles, one below the other
const uint TILE_A = 16 * PITCH, TILE_B = 8 * PITCH, STAGE = TILE_A + NT * TILE_B; // of a subgroup
// Distance of rows of activations where parts are joined.
const uint JOIN = 17;
const uint JOINS = TEAMS * 8 * JOIN;  // of a band
shared uvec4 stage[BANDS * (TEAMS * STAGE > JOINS ? TEAMS * STAGE : JOINS)];

void main() {
    const uint live = live_rows(args.step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * 8 * NT;
    if (m0 > 0 && m0 >= live) return;
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
    const uint n0 = block * ROWS + band * (16 * RT), first = live_row(a.step_, SELECTED, 0);
    const uint rounds = a.steps > 4 * team ? (a.steps - 4 * team + 31) / 32 : 0;
    const uint quad = rounds == 0 ? 0 : team; // a team without work loads something

    // Beginnings of this lane's part of a round: codes by 16 bytes (a step), scales and those of
    // activations by four, activations by 16 bytes.
    uint at_a[2 * RT], at_x[2 * NT], at_sx[2 * NT];
    [[unroll]] for (uint k = 0; k < 2 * RT; k++)
        at_a[k] = min(n0 + 8 * k + eight, a.n - 1) * a.steps + 4 * quad;
    [[unroll]] for (uint k = 0; k < 2 * NT; k++) {
        at_x[k] =
            (first + min(m0 + 4 * k + lane / 8, live - 1)) * (a.stride / 16) + 8 * quad + lane % 8;
        at_sx[k] =
            (first + min(m0 + 8 * (k / 2) + 2 * four + k % 2, live - 1)) * (a.steps / 4) + quad;
    }
    Codes codes = Codes(a.matrix.codes), values = Codes(a.x);
    ScaleFours scales = ScaleFours(uint64_t(a.matrix.scales));
    FloatFours sxs = FloatFours(uint64_t(a.sx));

    float sums[RT][NT][4][4]; // of tiles, by part and element
    Product whole[RT][NT];
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) {
            if (!GROUPED) whole[t][n] = Product(0);
            [[unroll]] for (uint p = 0; p < 16; p++) sums[t][n][p / 4][p % 4] = 0.0;
        }

    // Past the last round, the last round is loaded again: unconditional loads go out early.
    const uint last = max(rounds, 1) - 1;
    uvec4 w[U][2 * RT], x[2 * NT];
    uvec2 scale[U][2 * RT];
    [[unroll]] for (uint u = 0; u < U; u++)
        [[unroll]] for (uint k = 0; k < 2 * RT; k++) {
            w[u][k] = codes.v[at_a[k] + four + 32 * min(u, last)];
            if (GROUPED) scale[u][k] = scales.v[at_a[k] / 4 + 8 * min(u, last)];
        }
    [[unroll]] for (uint k = 0; k < 2 * NT; k++) x[k] = values.v[at_x[k]];

    const uint mine = gl_SubgroupID * STAGE;
    for (uint j0 = 0; j0 < rounds; j0 += U) {
        [[unroll]] for (uint u = 0; u < U; u++) {
            const uint j = j0 + u;
            if (j >= rounds) break;
            vec4 sx[2 * NT];
            if (GROUPED)
                [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                    sx[k] = sxs.v[at_sx[k] + 8 * j] * PRODUCT_UNIT;
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
                            const uint to = mine + (8 * h + eight) * PITCH + 2 * (four % 2);
                            stage[to] = low_columns(w[u][2 * t + h]);
                            stage[to + 1] = high_columns(w[u][2 * t + h]);
                        }
                    subgroup_fence();
                    const uint next = min(j + U, last);
                    if (half_ == 1)
                        [[unroll]] for (uint h = 0; h < 2; h++)
                            w[u][2 * t + h] = codes.v[at_a[2 * t + h] + four + 32 * next];
                    if (half_ == 1 && t == 0)
                        [[unroll]] for (uint k = 0; k < 2 * NT; k++)
                            x[k] = values.v[at_x[k] + 64 * min(j + 1, last)];
                    [[unroll]] for (uint p = 0; p < 2; p++) {
                        Weights c;
                        coopMatLoad(c, stage, mine + 2 * p, PITCH,
                            gl_CooperativeMatrixLayoutRowMajor);
                        const vec2 now[2] = { half_floats(scale[u][2 * t], half_),
                            half_floats(scale[u][2 * t + 1], half_) };
                        [[unroll]] for (uint n = 0; n < NT; n++) {
                            if (t == 0)
                                coopMatLoad(b[n][p], stage, mine + TILE_A + n * TILE_B + 2 * p,
                                    PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                            if (!GROUPED) {
                                whole[t][n] = coopMatMulAdd(c, b[n][p], whole[t][n]);
                                continue;
                            }
                            const Product d =
                                coopMatMulAdd(c, b[n][p], Product(floatBitsToInt(MAGIC)));
                            const uint part = 2 * half_ + p;
                            [[unroll]] for (uint i = 0; i < 4; i++)
                                sums[t][n][part][i] = add_group(d[i], sx[2 * n + i % 2][part],
                                    now[i / 2][p], sums[t][n][part][i]);
                        }
                    }
                    if (GROUPED && half_ == 1)
                        [[unroll]] for (uint h = 0; h < 2; h++)
                            scale[u][2 * t + h] = scales.v[at_a[2 * t + h] / 4 + 8 * next];
                }
            }
        }
    }

    // Joins the parts of all subgroups, a tile at a time: a thread takes one element.
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
                from = band * JOINS + col * JOIN + row_, r = first + m;
            if (col >= 8 || row >= a.n || m >= live) continue;
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
                a.matrix.out_.v[r * a.n + row] = y;
            } else {
                int sum = 0;
                [[unroll]] for (uint q = 0; q < TEAMS; q++)
                    sum += int(stage[q * (8 * JOIN) + from].x);
                a.matrix.out_.v[r * a.n + row] =
                    row_result(sum, a.sums.v[r], a.sx.v[r], a.matrix.scales, row);
            }
        }
    if (HEADS) finish_heads(epilogue, which, block * ROWS, ROWS, m0, min(8 * NT, live - m0), first);
}
