// Linear layers with trellis codes: a workgroup decodes the 16 matrix rows of one row of tiles and multiplies them with up to M
// rows of int8 activations. A lane takes whole tiles (16 rows, 16 columns), so that no bits are read twice. All sums are integers.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 64;
layout(constant_id = 3) const uint M = 1;
layout(constant_id = 4) const uint STEP = 4;        // new bits of a state
layout(constant_id = 5) const uint WEIGHTS = 2;     // of a state
layout(constant_id = 6) const uint MULTIPLIER = 1;
layout(constant_id = 8) const bool SELECTED = false;

#include "trellis.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes; // [tile rows, blocks of 8 tile columns, pieces of a tile, tiles of the block]
    F16 scales;     // [n]
    uint64_t x;     // i8 [rows, stride]
    F32 sx;         // [rows]
    I32 sums;       // [rows]
    F32 out_;       // [rows, n]
    Step step_;
    uint n;
    uint tiles;     // in a row of tiles
    uint stride;
};

const uint PIECE = TILE_WORDS % 4 == 0 ? 4 : 2;
const uint STATES = 16 / WEIGHTS; // in a row of a tile
const uint TEAMS = T / SG;

shared int parts[TEAMS][16 * M];

// The state whose last bit is bit `end - 1` of the tile's circular string.
uint state(uint w[TILE_WORDS], uint end) {
    const uint at = (end - 1) / 32, part = end % 32;
    if (part == 0) return w[at] & 0xfff;
    if (part >= 12) return (w[at] >> (32 - part)) & 0xfff;
    return (w[at] >> (32 - part) | w[at == 0 ? TILE_WORDS - 1 : at - 1] << part) & 0xfff;
}

void main() {
    const uint live = live_rows(step_, SELECTED);
    const uint m0 = gl_WorkGroupID.x * M;
    if (m0 > 0 && m0 >= live) return;
    const uint tile_row = gl_WorkGroupID.y;
    const uint64_t base = codes + uint64_t(tile_row) * tiles * (TILE_WORDS * 4);
    uint xr[M];
    [[unroll]] for (uint m = 0; m < M; m++) xr[m] = live_row(step_, SELECTED, min(m0 + m, live - 1));

    int acc[16][M];
    [[unroll]] for (uint r = 0; r < 16; r++)
        [[unroll]] for (uint m = 0; m < M; m++) acc[r][m] = 0;

    for (uint t = gl_LocalInvocationID.x; t < tiles; t += T) {
        const uint block = t / 8 * 8, lane = t % 8, width = min(8, tiles - block);
        uint w[TILE_WORDS];
        [[unroll]] for (uint q = 0; q < TILE_WORDS; q += PIECE) {
            const uint piece = (block * TILE_WORDS + q * width) / PIECE + lane;
            if (PIECE == 2) {
                const uvec2 v = U32x2(base).v[piece];
                w[q] = v.x, w[q + 1] = v.y;
            } else {
                const uvec4 v = U32x4(base).v[piece];
                [[unroll]] for (uint e = 0; e < 4; e++) w[q + e] = v[e];
            }
        }
        uvec4 xs[M];
        [[unroll]] for (uint m = 0; m < M; m++) xs[m] = U32x4(x + uint64_t(xr[m]) * stride).v[t];
        [[unroll]] for (uint i = 0; i < STATES; i++) {
            // The operands that a state's bytes meet: x of one column four times, or of two columns twice each.
            int xi[M];
            [[unroll]] for (uint m = 0; m < M; m++) {
                if (WEIGHTS == 1) {
                    xi[m] = bitfieldExtract(int(xs[m][i / 4]), int(i % 4 * 8), 8);
                } else {
                    const uint two = xs[m][i / 2] >> (i % 2 * 16) & 0xffff;
                    xi[m] = int((two & 0xff) * 0x101 | (two >> 8) * 0x1010000);
                }
            }
            [[unroll]] for (uint r = 0; r < 16; r++) {
                const uint bytes = (state(w, r * ROW_BITS + (i + 1) * STEP) * MULTIPLIER) & 0x7f7f7f7fu;
                const int weight = WEIGHTS == 1 ? dotPacked4x8EXT(int(bytes), 0x01010101) : 0;
                [[unroll]] for (uint m = 0; m < M; m++)
                    acc[r][m] += WEIGHTS == 1 ? weight * xi[m] : dotPacked4x8EXT(int(bytes), xi[m]);
            }
        }
    }

    [[unroll]] for (uint r = 0; r < 16; r++)
        [[unroll]] for (uint m = 0; m < M; m++) {
            int s = acc[r][m];
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s += subgroupShuffleXor(s, d);
            if (gl_SubgroupInvocationID == 0) parts[gl_SubgroupID][r * M + m] = s;
        }
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < 16 * M; i += T) {
        const uint m = i % M, row = tile_row * 16 + i / M;
        if (m0 + m >= live || row >= n) continue;
        int sum = 0;
        for (uint k = 0; k < TEAMS; k++) sum += parts[k][i];
        const uint r = live_row(step_, SELECTED, m0 + m);
        precise float product = float(sum - (WEIGHTS == 1 ? 254 : 127) * sums.v[r]) * sx.v[r];
        precise float y = product * float(scales.v[row]);
        out_.v[r * n + row] = y;
    }
}
