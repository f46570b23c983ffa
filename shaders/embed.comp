// Writes rows of the embedding table as f32, multiplied by a factor. A workgroup writes one row.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 256;
layout(constant_id = 3) const uint COLS = 128;
layout(constant_id = 4) const uint CODE = 0;     // see codes.glsl; 4 bf16, 5 f32, 6 trellis
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const bool HADAMARD = false;
layout(constant_id = 9) const uint STEP = 4;
layout(constant_id = 11) const uint MULTIPLIER = 1;
layout(constant_id = 27) const uint SIDE = 1;    // see side.glsl
#include "attention.glsl"
#include "args.glsl"
#include "codes.glsl"
#include "steps.glsl"
#include "side.glsl"
#include "trellis.glsl"
#include "row.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    uint64_t side;
    F32 out_; // [rows, COLS]
    Step step_;
    float factor;
    uint max_rows;
    uint n; // rows of the table
};

const uint CODE_BF16 = 4, CODE_F32 = 5;

// Returns word `i` of a tile. Eight tiles are stored together in alternating pieces of 16 bytes, or
// of 8 bytes if the words of a tile are not a multiple of 4.
uint word_of(uint64_t row, uint tile, uint tiles, uint i) {
    const uint piece = TILE_WORDS % 4 == 0 ? 4 : 2, block = tile / 8 * 8,
        width = min(8, tiles - block);
    return U32(row + uint64_t(4 * (block * TILE_WORDS
        + (i / piece * width + tile % 8) * piece + i % piece))).v[0];
}

float trellis_value(uint token, uint col) {
    const uint tiles = COLS / 16, tile = col / 16;
    const uint64_t row = codes + uint64_t(token / 16) * tiles * (TILE_WORDS * 4);
    const uint end = token % 16 * ROW_BITS + (col % 16 / 2 + 1) * STEP, at = (end - 1) / 32,
        part = end % 32;
    uint state = word_of(row, tile, tiles, at);
    if (part != 0) {
        state >>= 32 - part;
        if (part < STATE_BITS)
            state |=
                word_of(row, tile, tiles, at == 0 ? TILE_WORDS - 1 : at - 1) << part;
    }
    return float(weight_of(word_of_state(state & STATE_MASK), col % 2));
}

float value(uint token, uint col) {
    if (CODE == CODE_F32) return F32(codes + uint64_t(token) * (COLS * 4) + uint64_t(col * 4)).v[0];
    if (CODE == CODE_BF16)
        return uintBitsToFloat(uint(U16(codes + uint64_t(token) * (COLS * 2)
            + uint64_t(col * 2)).v[0]) << 16);
    if (CODE == CODE_TRELLIS) {
        precise float y = trellis_value(token, col) * float(F16(side).v[token]);
        return y;
    }
    const uint steps = (COLS + W - 1) / W, s = col / W, in_step = col % W;
    const uint k = in_step / 4, k_low = k % PER_LOW, k_high = k % PER_HIGH;
    const RowCodes row = row_codes(codes, n, token, 0, steps);
    uint low, high = 0;
    if (IS_GRID)
        low = open_octet(row.high,
            octet_of(dwords_from(row.low, s * (4 * OCTET_BITS)), k / 2))[k % 2];
    else {
        const uint word = k / PER_LOW, q = word / PIECE_WORDS * PIECE_WORDS;
        low = CodeWord(row.low
            + uint64_t(step_place(row, s) + q * NEXT_PIECE + 4 * (word - q))).v;
    }
    if (HIGH > 0)
        high = CodeWord(
            row.high + uint64_t(row.skip_high + s * HIGH_EIGHT + k / PER_HIGH * 4)).v;
    const int code = int(operand(low, k_low, high, k_high)) << (24 - in_step % 4 * 8) >> 24;
    const int q = (DOUBLE * code - OFFSET >> TOP) + (CODE == CODE_I8A ? 128 : 0);
    const uint64_t own = GROUPED ? side_rows(side, token, steps)
        : side + uint64_t(token) * SIDE_BYTES;
    const uint at = GROUPED ? s : 0, skip = GROUPED ? side_skip(token, 0, steps) : 0;
    const Factors f = factors_of(load_side(own, skip, at), at);
    const uint group = in_step * G / W;
    precise float y = float(q) * f.scale[group];
    if (HAS_MIN) y = y + f.least[group]; // the product is exact
    return y;
}

void main() {
    if (gl_WorkGroupID.x >= step_.rows - step_.first) return;
    const uint r = step_.first + gl_WorkGroupID.x, token = step_.v[STEP_TOKENS * max_rows + r];
    if (token >= FIRST_PLACE) return; // its embedding was written before the pass
    for (uint block = gl_SubgroupID; block * 128 < COLS; block += T / SG) {
        float v[PER];
        const uint col = column(block);
        [[unroll]] for (uint i = 0; i < PER; i++)
            v[i] = col + i < COLS ? value(token, col + i) : 0.0;
        if (HADAMARD) butterflies(v);
        [[unroll]] for (uint i = 0; i < PER; i++) {
            if (HADAMARD) {
                precise float scaled = v[i] * INV_SQRT_128;
                v[i] = with_sign(scaled, col + i);
            }
            precise float y = v[i] * factor;
            v[i] = y;
        }
        store_block(out_, r, block, COLS, v);
    }
}
