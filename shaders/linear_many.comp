// Linear layers with scales for groups of columns, for many rows of activations, by matrix
// instructions. A subgroup computes 16 matrix rows times 8 NT rows of activations. The subgroups of
// a workgroup share the activations.
//
// The sums have the bits of linear.glsl. A subgroup computes the parts in the order in which they
// are added and keeps the sums that still wait for another one. Products of 16 x 8 x 32 cover the
// columns of a group, are converted to float and added to the part. Shared memory has a chunk of
// codes and activations. While it is multiplied, the codes of the next chunk and the activations of
// the chunk after that are loaded.
//
// If there are few workgroups, SHARES of them share the parts of their rows, and the last one adds
// up their sums.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint NT = 4;       // tiles of 8 rows of activations
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const bool PARTIAL = false; // the last chunk has fewer columns
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128;      // threads
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
layout(constant_id = 30) const uint SHARES = 1;
#include "matrix.glsl"
#include "experts.glsl"
#include "last.glsl"
#include "matrix_steps.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // Shares, if SHARES > 1
};

// [workgroups, SHARES, elements of a thread, threads]: sums of shares, and counters of workgroups
// that are done.
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Shares {
    uint64_t sums;
    uint64_t counts;
};

const uint SUBGROUPS = T / 32, OWN_PARTS = PARTS / SHARES;
const uint LEVELS = OWN_PARTS == 16 ? 4 : OWN_PARTS == 8 ? 3 : OWN_PARTS == 4 ? 2 : 1;
const uint R = 16 * SUBGROUPS, N = 8 * NT;
const uint CHUNK_GROUPS = CHUNK * G;          // of a chunk
shared uvec4 stage[SUBGROUPS * TILE], stage_x[2][N * PITCH_X], pairs[SUBGROUPS][G][4][8];
// Scales of pairs of rows of activations, and scales with the factors of minima. A thread loads
// those of some groups of one row.
shared vec2 scales[2][CHUNK_GROUPS][HAS_MIN ? 1 : N / 2];
shared vec4 both[2][CHUNK_GROUPS][HAS_MIN ? N / 2 : 1];
const uint OWN_GROUPS = N * CHUNK_GROUPS > T ? N * CHUNK_GROUPS / T : 1;
const uint LX = (8 * N + T - 1) / T;    // pieces of activations that a thread loads
const uint KEPT = NT * 4;               // floats of a part

#define EACH [[unroll]] for (uint n = 0; n < NT; n++) [[unroll]] for (uint i = 0; i < 4; i++)

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, N, more_n, more, first, m0, live)) return;
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y;
    take_matrix(a, block, R, more_n, more);
    const uint thread = gl_LocalInvocationID.x, lane = gl_SubgroupInvocationID;
    // Place of this lane's elements, and the quarter and row of its loads.
    const uint four = lane % 4, eight = lane / 4, own_four = lane / 8, own_eight = lane % 8;
    const uint n0 = block * R, own_n0 = n0 + 16 * gl_SubgroupID, mine = gl_SubgroupID * TILE;
    const uint chunks = (a.steps + CHUNK - 1) / CHUNK;
    Values values = Values(a.x);

    RowCodes codes[2];
    uint skip_side[2], at_x[LX];
    const uint row0 = matrix_row(a.n, n0);
    const uint64_t side = side_rows(a.matrix.side, row0, a.steps);
    [[unroll]] for (uint h = 0; h < 2; h++) {
        const uint skip = min(own_n0 + 8 * h + own_eight, a.n - 1) - n0;
        codes[h] = row_codes(a.matrix.codes, matrix_rows(a.n), row0, skip, a.steps);
        skip_side[h] = side_skip(row0, skip, a.steps);
    }
    const uint pieces = a.stride / 16;
    [[unroll]] for (uint k = 0; k < LX; k++)
        at_x[k] = input_row(first + min(m0 + (k * T + thread) / 8, live - 1)) * pieces;
    const uint own_m = thread * OWN_GROUPS / CHUNK_GROUPS;
    const uint own_group = thread * OWN_GROUPS % CHUNK_GROUPS;
    const uint at_sx = input_row(first + min(m0 + own_m, live - 1)) * (a.steps * G);

    Quarter w[2];
    uvec4 words[2], x[LX]; // words of the side
    float sx[OWN_GROUPS];
    int xsum[OWN_GROUPS];
#define BRING(chunk) \
    [[unroll]] for (uint h = 0; h < 2; h++) { \
        const uint s = (chunk) * CHUNK + own_four * CHUNK / 4; \
        load_quarter(codes[h], s, own_four, w[h]); \
        words[h] = load_side(side, skip_side[h], s); \
    }
#define BRING_X(chunk) { \
        [[unroll]] for (uint k = 0; k < LX; k++) \
            x[k] = values.v[at_x[k] + min(8 * (chunk) + thread % 8, pieces - 1)]; \
        [[unroll]] for (uint e = 0; e < OWN_GROUPS; e++) { \
            const uint at = \
                at_sx + min(CHUNK_GROUPS * (chunk) + own_group + e, a.steps * G - 1); \
            sx[e] = a.sx.v[at]; \
            if (HAS_MIN) xsum[e] = a.sums.v[at]; \
        } \
    }
#define PUT_X(to) { \
        [[unroll]] for (uint k = 0; k < LX; k++) \
            if (8 * N % T == 0 || k * T + thread < 8 * N) \
                stage_x[to][(k * T + thread) / 8 * PITCH_X + thread % 8] = x[k]; \
        if (own_m < N) \
            [[unroll]] for (uint e = 0; e < OWN_GROUPS; e++) { \
                const uint group = own_group + e, pair = own_m / 2, side_ = own_m % 2; \
                precise float base = float(xsum[e]) * sx[e]; \
                const float scale = sx[e] * PRODUCT_UNIT; \
                if (HAS_MIN) { \
                    both[to][group][pair][side_] = scale; \
                    both[to][group][pair][2 + side_] = base; \
                } else scales[to][group][pair][side_] = scale; \
            } \
    }
// Chunk after `chunk`, part by part. After the last one, it is loaded again.
#define AFTER(chunk) ((chunk) + PARTS < chunks ? (chunk) + PARTS \
    : min((chunk) % PARTS + 1, chunks - 1))

    if (G == 2) // the zeros between groups
        [[unroll]] for (uint h = 0; h < 2; h++)
            stage[mine + four * QUARTER + (8 * h + eight) * PITCH + 1] = uvec4(0);
    float sums[NT][4], kept[LEVELS * KEPT]; // per tile and element
    EACH sums[n][i] = 0.0;
    const uint share = gl_WorkGroupID.z, part0 = share * OWN_PARTS;
    BRING_X(part0);
    PUT_X(0);
    uint next = AFTER(part0), buffer_ = 0;
    BRING_X(next);
    BRING(part0);
    barrier();
    // The slots of an expert may fill only some of the tiles.
    const uint filled = EXPERTS ? (live - m0 + 7) / 8 : NT;
    for (uint part = 0; part < OWN_PARTS; part++) {
        for (uint chunk = part0 + part; chunk < chunks; chunk += PARTS) {
            PUT_X(1 - buffer_);
            subgroup_fence();
            Factors own[2];
            [[unroll]] for (uint h = 0; h < 2; h++) {
                const uint to = mine + own_four * QUARTER + (8 * h + own_eight) * PITCH;
                stage[to] = columns_of(w[h], 0);
                stage[to + G] = columns_of(w[h], 1);
                own[h] = factors_of(words[h], chunk * CHUNK + own_four * CHUNK / 4);
            }
            [[unroll]] for (uint g = 0; g < G; g++)
                pairs[gl_SubgroupID][g][own_four][own_eight] = pair_of(own[0], own[1], g);
            subgroup_fence();
            BRING(next);
            next = AFTER(next);
            BRING_X(next);
            [[unroll]] for (uint e = 0; e < CHUNK_GROUPS; e++) {
                const uint s = e / G, g = e % G, QUARTERS = 4 / CHUNK; // in a group
                if (PARTIAL && chunk * CHUNK + s >= a.steps) break;
                Weights c[QUARTERS];
                [[unroll]] for (uint q = 0; q < QUARTERS; q++)
                    coopMatLoad(c[q], stage, mine + (s * QUARTERS + q) * QUARTER + g, PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
                const vec4 factors =
                    uintBitsToFloat(pairs[gl_SubgroupID][g][s * QUARTERS][eight]);
                [[unroll]] for (uint n = 0; n < NT; n++) {
                    if (EXPERTS && n >= filled) break;
                    Product d = Product(floatBitsToInt(MAGIC));
                    [[unroll]] for (uint q = 0; q < QUARTERS; q++) {
                        Activations b;
                        coopMatLoad(b, stage_x[buffer_],
                            8 * n * PITCH_X + 2 * (s * QUARTERS + q), PITCH_X,
                            gl_CooperativeMatrixLayoutColumnMajor);
                        d = coopMatMulAdd(c[q], b, d);
                    }
                    vec4 sxs; // of two rows, and two bases
                    if (HAS_MIN) sxs = both[buffer_][e][4 * n + four];
                    else sxs.xy = scales[buffer_][e][4 * n + four], sxs.zw = vec2(0.0);
                    [[unroll]] for (uint i = 0; i < 4; i++)
                        sums[n][i] = add_group(d[i], sxs[i % 2], factors[i / 2], sxs[2 + i % 2],
                            factors[2 + i / 2], sums[n][i]);
                }
            }
            buffer_ = 1 - buffer_;
            barrier();
        }
        // Adds the part to the one that waits for it, or keeps it until the next part is done.
        uint level = 0;
        for (; (part >> level & 1) != 0; level++)
            EACH {
                precise float both = kept[level * KEPT + 4 * n + i] + sums[n][i];
                sums[n][i] = both;
            }
        if (part == OWN_PARTS - 1) break;
        EACH {
            kept[level * KEPT + 4 * n + i] = sums[n][i];
            sums[n][i] = 0.0;
        }
    }

    if (SHARES > 1) {
        const uint unit = gl_WorkGroupID.y * ((max(live, 1) + N - 1) / N) + gl_WorkGroupID.x;
        Shares join = Shares(epilogue);
        const uint64_t at = join.sums + uint64_t(unit * SHARES) * (4 * KEPT * T);
        SharedF32 all = SharedF32(at);
        EACH all.v[(share * KEPT + 4 * n + i) * T + thread] = sums[n][i];
        if (!is_last(join.counts, unit, SHARES)) return;
        EACH {
            float v[SHARES];
            [[unroll]] for (uint q = 0; q < SHARES; q++)
                v[q] = all.v[(q * KEPT + 4 * n + i) * T + thread];
            [[unroll]] for (uint d = 1; d < SHARES; d *= 2)
                [[unroll]] for (uint q = 0; q < SHARES; q += 2 * d) {
                    precise float both = v[q] + v[q + d];
                    v[q] = both;
                }
            sums[n][i] = v[0];
        }
    }

    EACH {
        const uint row = own_n0 + 8 * (i / 2) + eight, m = m0 + 8 * n + 2 * four + i % 2;
        if (row < a.n && m < live) a.matrix.out_.v[output_row(first + m) * a.n + row] = sums[n][i];
    }
}
