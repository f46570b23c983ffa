// Linear layers with trellis codes. A workgroup decodes the 16 matrix rows of one row of tiles and
// multiplies them by up to M rows of int8 activations. A lane decodes whole tiles (16 rows, 16
// columns), so that no bits are read twice. All sums are integers.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"
#include "args.glsl"
#include "experts.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 64;
layout(constant_id = 3) const uint M = 1;
layout(constant_id = 17) const uint STEP = 4;        // new bits of a state
layout(constant_id = 19) const uint MULTIPLIER = 1;
layout(constant_id = 8) const bool SELECTED = false;

const uint SUBGROUPS = T / SG;

#include "trellis.glsl"
#include "heads.glsl"
#include "norm.glsl"

layout(push_constant, scalar) uniform Push {
    // Codes: [tile rows, blocks of 8 tile columns, pieces of a tile, tiles of the block]. A step is
    // a tile.
    LinearArgs args;
    uint more_n;     // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;   // for HEADS or NORM
};

const uint PIECE = TILE_WORDS % 4 == 0 ? 4 : 2;
const uint STATES = 8; // in a row of a tile

shared int tile_parts[SUBGROUPS][16 * M];

// Word of the state that ends before bit `end` of the tile's circular string.
uint word_at(uint w[TILE_WORDS], uint end) {
    const uint at = (end - 1) / 32, part = end % 32;
    if (part == 0 || part >= STATE_BITS) {
        return word_of_state(bitfieldExtract(w[at], int(32 - part) % 32, int(STATE_BITS)));
    }
    const uint before = w[at == 0 ? TILE_WORDS - 1 : at - 1];
    return word_of_state((before << part | w[at] >> (32 - part)) & STATE_MASK);
}

void main() {
    uint first, m0, live;
    if (!take_rows(args, SELECTED, M, more_n, more, first, m0, live)) return;
    LinearArgs a = args;
    uint tile_row = gl_WorkGroupID.y;
    const uint which = take_matrix(a, tile_row, 16, more_n, more);
    const uint tiles = a.steps, own_row = matrix_row(a.n, tile_row * 16) / 16;
    const uint64_t base = a.matrix.codes + uint64_t(own_row) * tiles * (TILE_WORDS * 4);
    uint xr[M];
    [[unroll]] for (uint m = 0; m < M; m++) xr[m] = input_row(first + min(m0 + m, live - 1));

    int acc[16][M];
    [[unroll]] for (uint r = 0; r < 16; r++)
        [[unroll]] for (uint m = 0; m < M; m++) acc[r][m] = 0;

    for (uint t = gl_LocalInvocationID.x; t < tiles; t += T) {
        const uint block = t / 8 * 8, lane = t % 8, width = min(8, tiles - block);
        uint w[TILE_WORDS];
        [[unroll]] for (uint q = 0; q < TILE_WORDS; q += PIECE) {
            const uint piece = (block * TILE_WORDS + q * width) / PIECE + lane;
            if (PIECE == 2) {
                const uvec2 v = U32x2(base + uint64_t(piece * 8)).v[0];
                w[q] = v.x, w[q + 1] = v.y;
            } else {
                const uvec4 v = U32x4(base + uint64_t(piece * 16)).v[0];
                [[unroll]] for (uint e = 0; e < 4; e++) w[q + e] = v[e];
            }
        }
        uvec4 xs[M];
        [[unroll]] for (uint m = 0; m < M; m++)
            xs[m] = U32x4(a.x + uint64_t(xr[m] * a.stride + t * 16)).v[0];
        [[unroll]] for (uint i = 0; i < STATES; i++) {
            // The activations of the two columns of a state, four times each.
            int x0[M], x1[M];
            [[unroll]] for (uint m = 0; m < M; m++) {
                const i8vec4 four = unpack8(int(xs[m][i / 2]));
                x0[m] = pack32(i8vec4(four[2 * i % 4])),
                    x1[m] = pack32(i8vec4(four[2 * i % 4 + 1]));
            }
            [[unroll]] for (uint r = 0; r < 16; r++) {
                const uint word = word_at(w, r * ROW_BITS + (i + 1) * STEP);
                const int first_ = nibbles_of(word, 0), second = nibbles_of(word, 1);
                [[unroll]] for (uint m = 0; m < M; m++) {
                    acc[r][m] += dotPacked4x8EXT(first_, x0[m]);
                    acc[r][m] += dotPacked4x8EXT(second, x1[m]);
                }
            }
        }
    }

    [[unroll]] for (uint r = 0; r < 16; r++)
        [[unroll]] for (uint m = 0; m < M; m++) {
            int s = acc[r][m];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s += subgroupShuffleXor(s, d);
            if (gl_SubgroupInvocationID == 0) tile_parts[gl_SubgroupID][r * M + m] = s;
        }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < 16 * M; i += T) {
        const uint m = i % M, row = tile_row * 16 + i / M;
        if (m0 + m >= live || row >= a.n) continue;
        int sum = 0;
        for (uint k = 0; k < SUBGROUPS; k++) sum += tile_parts[k][i];
        const uint place = first + m0 + m, r = input_row(place);
        precise float product = float(sum - TRELLIS_OFFSET * a.sums.v[r]) * a.sx.v[r];
        precise float y = product * float(F16(a.matrix.side).v[matrix_row(a.n, row)]);
        a.matrix.out_.v[output_row(place) * a.n + row] = y;
    }
    if (HEADS) finish_heads(epilogue, which, tile_row * 16, 16, m0, min(M, live - m0), first);
    if (NORM) finish_norm(epilogue, (a.n + 15) / 16, first, live);
}
