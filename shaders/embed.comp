// Writes one row of the embedding table a workgroup, dequantised to f32 and multiplied by a scale.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 256;
layout(constant_id = 3) const uint COLS = 128;
layout(constant_id = 4) const uint CODE = 0;     // as in codes.glsl; 4 bf16, 5 f32, 6 trellis
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const uint GROUP = 0;    // columns that share a scale; 0: all
layout(constant_id = 7) const bool HADAMARD = false;
layout(constant_id = 9) const uint STEP = 4;
layout(constant_id = 11) const uint MULTIPLIER = 1;
#include "attention.glsl"
#include "args.glsl"
#include "codes.glsl"
#include "trellis.glsl"
#include "row.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    F16 scales;
    F32 out_; // [rows, COLS]
    Step step_;
    float factor;
    uint max_rows;
};

const uint CODE_BF16 = 4, CODE_F32 = 5;

// Word `i` of a step. The words of a step lie in pieces of 16 bytes (of 8 where a step has no
// more), beside the pieces of its seven neighbours.
uint word_of(uint64_t row, uint step_, uint steps, uint words, uint i) {
    const uint piece = words % 4 == 0 ? 4 : 2, block = step_ / 8 * 8, lane = step_ % 8,
        width = min(8, steps - block);
    return U32(row
        + uint64_t(4 * (block * words + (i / piece * width + lane) * piece + i % piece))).v[0];
}

float trellis_value(uint token, uint col) {
    const uint tiles = COLS / 16, tile = col / 16;
    const uint64_t row = codes + uint64_t(token / 16) * tiles * (TILE_WORDS * 4);
    const uint end = token % 16 * ROW_BITS + (col % 16 / 2 + 1) * STEP, at = (end - 1) / 32,
        part = end % 32;
    uint state = word_of(row, tile, tiles, TILE_WORDS, at);
    if (part != 0) {
        state >>= 32 - part;
        if (part < STATE_BITS)
            state |=
                word_of(row, tile, tiles, TILE_WORDS, at == 0 ? TILE_WORDS - 1 : at - 1) << part;
    }
    return float(weight_of(word_of_state(state & STATE_MASK), col % 2));
}

float value(uint token, uint col) {
    const uint groups = GROUP == 0 ? 1 : COLS / GROUP;
    if (CODE == CODE_F32) return F32(codes + uint64_t(token) * (COLS * 4) + uint64_t(col * 4)).v[0];
    if (CODE == CODE_BF16)
        return uintBitsToFloat(uint(U16(codes + uint64_t(token) * (COLS * 2)
            + uint64_t(col * 2)).v[0]) << 16);
    if (CODE == CODE_TRELLIS) {
        precise float y = trellis_value(token, col) * float(scales.v[token]);
        return y;
    }
    const uint steps = (COLS + W - 1) / W, words = W * BITS / 32, in_step = col % W;
    const uint64_t row = codes + uint64_t(token) * steps * words * 4;
    const uint per = 4 * PER_WORD; // columns of a word
    const uint word = word_of(row, col / W, steps, words, in_step / per), at = in_step % per;
    const int code = four(word, at / 4) >> (at % 4 * 8);
    if (CODE == CODE_I8A)
        return fma(float((code << 24 >> 24) + 128), float(scales.v[2 * token]),
            float(scales.v[2 * token + 1]));
    const int q = CODE == CODE_I8 ? code << 24 >> 24 : DOUBLE * (code & 0xff) - OFFSET;
    const uint64_t of_row = uint64_t(scales) + uint64_t(token) * (groups * 2);
    precise float y =
        float(q) * (float(F16(of_row + uint64_t(GROUP == 0 ? 0 : col / GROUP * 2)).v[0]) * UNIT);
    return y;
}

void main() {
    if (gl_WorkGroupID.x >= step_.rows - step_.first) return;
    const uint r = step_.first + gl_WorkGroupID.x, token = step_.v[STEP_TOKENS * max_rows + r];
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
