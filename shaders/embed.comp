// One row of the embedding table a workgroup, as the floats that the model means, times a scale.
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
layout(constant_id = 10) const uint WEIGHTS = 2;
layout(constant_id = 11) const uint MULTIPLIER = 1;
#include "codes.glsl"
#include "trellis.glsl"

layout(push_constant, scalar) uniform Push {
    uint64_t codes;
    F16 scales;
    F32 out_; // [rows, COLS]
    Step step_;
    float factor;
    uint max_rows;
};

const uint CODE_BF16 = 4, CODE_F32 = 5, CODE_TRELLIS = 6;
const uint PER = 128 / SG;

// Word `i` of a step that lies in 16-byte pieces (8-byte ones where it has no more) beside those of its seven neighbours.
uint word_of(uint64_t row, uint step_, uint steps, uint words, uint i) {
    const uint piece = words % 4 == 0 ? 4 : 2, block = step_ / 8 * 8, lane = step_ % 8, width = min(8, steps - block);
    return U32(row).v[block * words + (i / piece * width + lane) * piece + i % piece];
}

float trellis_value(uint token, uint col) {
    const uint tiles = COLS / 16, tile = col / 16;
    const uint64_t row = codes + uint64_t(token / 16) * tiles * (TILE_WORDS * 4);
    const uint end = token % 16 * ROW_BITS + (col % 16 / WEIGHTS + 1) * STEP, at = (end - 1) / 32, part = end % 32;
    uint state = word_of(row, tile, tiles, TILE_WORDS, at);
    if (part != 0) {
        state >>= 32 - part;
        if (part < 12) state |= word_of(row, tile, tiles, TILE_WORDS, at == 0 ? TILE_WORDS - 1 : at - 1) << part;
    }
    return float(weight_of(state_bytes(state & 0xfff), col % WEIGHTS));
}

float value(uint token, uint col) {
    const uint groups = GROUP == 0 ? 1 : COLS / GROUP;
    if (CODE == CODE_F32) return F32(codes).v[token * COLS + col];
    if (CODE == CODE_BF16) return uintBitsToFloat(uint(U16(codes).v[token * COLS + col]) << 16);
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
        return fma(float((code << 24 >> 24) + 128), float(scales.v[2 * token]), float(scales.v[2 * token + 1]));
    const int q = CODE == CODE_I8 ? code << 24 >> 24 : DOUBLE * (code & 0xff) - OFFSET;
    precise float y = float(q) * (float(scales.v[token * groups + (GROUP == 0 ? 0 : col / GROUP)]) * UNIT);
    return y;
}

uint signs(uint word) {
    uint h = (word + 1) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x21f0aaadu;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

void main() {
    if (gl_WorkGroupID.x >= step_.rows - step_.first) return;
    const uint r = step_.first + gl_WorkGroupID.x, token = step_.v[STEP_TOKENS * max_rows + r];
    const uint lane = gl_SubgroupInvocationID;
    for (uint block = gl_SubgroupID; block * 128 < COLS; block += T / SG) {
        float v[PER];
        [[unroll]] for (uint i = 0; i < PER; i++) {
            const uint col = block * 128 + i * SG + lane;
            v[i] = col < COLS ? value(token, col) : 0.0;
        }
        if (HADAMARD) {
            [[unroll]] for (uint half_ = PER / 2; half_ > 0; half_ /= 2)
                [[unroll]] for (uint i = 0; i < PER; i++)
                    if ((i & half_) == 0) {
                        precise float a = v[i] + v[i + half_];
                        precise float b = v[i] - v[i + half_];
                        v[i] = a;
                        v[i + half_] = b;
                    }
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
                [[unroll]] for (uint i = 0; i < PER; i++) {
                    const float other = subgroupShuffleXor(v[i], d);
                    precise float a = (lane & d) == 0 ? v[i] + other : other - v[i];
                    v[i] = a;
                }
        }
        [[unroll]] for (uint i = 0; i < PER; i++) {
            const uint col = block * 128 + i * SG + lane;
            float a = v[i];
            if (HADAMARD) {
                precise float scaled = a * 0.08838834764831845;
                a = uintBitsToFloat(floatBitsToUint(scaled) ^ ((signs(col / 32) >> (col % 32) & 1) << 31));
            }
            precise float y = a * factor;
            if (col < COLS) out_.v[r * COLS + col] = y;
        }
    }
}
