// Converts canonical codes to the layout that the kernels read. An invocation writes one word of
// the result. See src/vulkan/lower/layout.rs.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 4) const uint CODE = 0; // as in codes.glsl; 6 trellis
#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    U32 from;       // rows [first, first + count), canonical
    U32 to;         // the same rows, packed
    uint words;     // of the result, in all
    uint row_words; // of the result, in a row (trellis: in a row of tiles)
    uint step_words;
    uint from_bytes; // of a canonical row (trellis: of a row of tiles)
};

uint byte_at(uint64_t at) { return from.v[uint(at / 4)] >> (uint(at % 4) * 8) & 0xff; }

void main() {
    const uint index =
        gl_GlobalInvocationID.y * (gl_NumWorkGroups.x * 256) + gl_GlobalInvocationID.x;
    if (index >= words) return;
    const uint row = index / row_words, in_row = index % row_words;
    const uint steps = row_words / step_words, piece = step_words % 4 == 0 ? 4 : 2;
    const uint block = in_row / (8 * step_words) * 8, width = min(8, steps - block);
    const uint in_block = in_row - block * step_words;
    const uint q = in_block / (width * piece), lane = in_block / piece % width;
    // In the canonical row.
    const uint word = (block + lane) * step_words + q * piece + in_block % piece;
    const uint64_t base = uint64_t(row) * from_bytes;
    uint b[4];
    // Codes that fill up the last step have the value 0, both as operands (see codes.glsl) and in
    // i8a, whose codes change by 128.
    const uint fill = CODE == CODE_I8A ? 0x80 : (CODE == CODE_I4 ? 0x88 : 0);
    [[unroll]] for (uint i = 0; i < 4; i++)
        b[i] = word * 4 + i < from_bytes ? byte_at(base + word * 4 + i) : fill;
    uint w = b[0] | b[1] << 8 | b[2] << 16 | b[3] << 24;
    if (CODE == CODE_I8A) w ^= 0x80808080u;
    if (CODE == CODE_I4) {
        // Columns 0..7 in nibbles 0..7 become bytes (0 | 4 << 4), (1 | 5 << 4), ...
        const uint c = w;
        w = 0;
        [[unroll]] for (uint i = 0; i < 8; i++) w |= (c >> (4 * i) & 15) << (i % 4 * 8 + i / 4 * 4);
        w ^= 0x88888888u; // signed: code - 8
    }
    if (CODE == CODE_I2) {
        const uint c = w;
        w = 0;
        [[unroll]] for (uint i = 0; i < 16; i++) w |= (c >> (2 * i) & 3) << (i % 4 * 8 + i / 4 * 2);
    }
    to.v[index] = w;
}
