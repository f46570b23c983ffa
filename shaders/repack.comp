// Converts codes from the stored layout to the layout that the kernels read. An invocation writes
// one word of the result. See crates/vulkan/src/lower/layout.rs.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 4) const uint CODE = 0; // as in codes.glsl; 6 trellis
#include "codes.glsl"

layout(push_constant, scalar) uniform Push {
    U32 from;       // rows [first, first + count), as stored
    U32 to;         // the same rows, packed
    U32 high;       // their high plane in the result
    uint words;     // total of the result
    uint low_words; // of these, in the low plane
    uint rows;      // count
    uint cols;      // per row
    uint steps;     // per row (trellis: tiles in a row of tiles)
    uint chunk;     // steps of a chunk
    uint step_words;
    uint high_words; // per step
};

// Returns the code of a column, with sign if the type is signed. The stored words of the row begin
// at `row`. Codes after the last column are operands with the value 0.
uint code_of(uint row, uint col) {
    if (col >= cols) return 0;
    const uint at = row + col * BITS / 32, shift = col * BITS % 32;
    uint code = from.v[at] >> shift;
    if (shift + BITS > 32) code |= from.v[at + 1] << (32 - shift);
    const bool flips = SIGNED || CODE == CODE_I8A;
    return (flips ? code ^ 1u << (BITS - 1) : code) & (1u << BITS) - 1;
}

// Word of a plane that begins with a column: `bits` bits of each code, `shift` are below them.
uint plane_word(uint row, uint col, uint bits, uint shift) {
    uint word = 0;
    for (uint i = 0; i < 32 / bits; i++) {
        const uint code = code_of(row, col + i) >> shift & (1u << bits) - 1;
        word |= code << (i % 4 * 8 + i / 4 * bits);
    }
    return word;
}

void main() {
    const uint index =
        gl_GlobalInvocationID.y * (gl_NumWorkGroups.x * 256) + gl_GlobalInvocationID.x;
    if (index >= words) return;
    if (CODE == CODE_TRELLIS) {
        const uint row_words = steps * step_words, in_row = index % row_words;
        const uint block = in_row / (8 * step_words) * 8, width = min(8, steps - block);
        const uint in_block = in_row - block * step_words, piece = step_words % 4 == 0 ? 4 : 2;
        const uint q = in_block / (width * piece), tile = block + in_block / piece % width;
        to.v[index] = from.v[
            index - in_row + tile * step_words + q * piece + in_block % piece];
        return;
    }
    const bool is_high = index >= low_words;
    const uint in_plane = is_high ? index - low_words : index;
    const uint of_step = is_high ? high_words : step_words;
    const uint piece = is_high ? of_step : of_step % 4 == 0 ? 4 : 2;
    // [row / 8, chunk, piece, step of the chunk, row % 8, word of the piece]
    uint rest = in_plane / piece;
    const uint eighth = rest % 8;
    rest /= 8;
    const uint in_chunk = rest % chunk;
    rest /= chunk;
    const uint nth = rest % (of_step / piece);
    rest /= of_step / piece;
    const uint chunks = (steps + chunk - 1) / chunk;
    const uint row = rest / chunks * 8 + eighth, s = rest % chunks * chunk + in_chunk;
    const uint word = s * of_step + nth * piece + in_plane % piece; // of the row
    const uint first = row * (cols * BITS / 32);                    // stored word
    uint packed = 0;
    if (row < rows && is_high) packed = plane_word(first, word * (4 * PER_HIGH), HIGH, LOW);
    else if (row < rows) packed = plane_word(first, word * (4 * PER_LOW), LOW, 0);
    if (is_high) high.v[in_plane] = packed;
    else to.v[in_plane] = packed;
}
