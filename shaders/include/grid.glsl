// Octets of points on a grid, see crates/base/src/tensor/grid.rs. The grid is stored after the last
// row.

const uint INDEX_BITS = CODE == CODE_IQ2_XS || CODE == CODE_IQ3_S ? 9 : CODE == CODE_IQ2_S ? 10 : 8;
const uint INDICES = CODE == CODE_IQ3_XXS || CODE == CODE_IQ3_S ? 2 : 1;
const uint SIGN_BITS = CODE == CODE_IQ2_S || CODE == CODE_IQ3_S ? 8 : 7;
const uint OCTET_BITS = INDEX_BITS * INDICES + SIGN_BITS;

layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Words { uvec4 v[]; };

// Returns the integers of an octet as int8: first those of four columns, then the other four. The
// higher bits of `octet` belong to the next one.
uvec2 open_octet(uint64_t grid, uint octet) {
    const uint mask = (1u << INDEX_BITS) - 1;
    uvec2 four; // indices of the coordinates' values, then the values
    four.x = uint(U16(grid).v[octet & mask]);
    if (INDICES == 2) {
        four.y = uint(U16(grid).v[octet >> INDEX_BITS & mask]);
        four = (four | four << 8) & 0x00ff00ffu;
        four = (four | four << 4) & 0x0f0f0f0fu;
    } else {
        four = uvec2(four.x & 0xff, four.x >> 8);
        four = (four | four << 12) & 0x000f000fu;
        four = (four | four << 6) & 0x03030303u;
    }
    if (CODE == CODE_IQ3_S)
        four = four * 2 + 0x01010101u; // 1, 3 .. 15
    else if (CODE == CODE_IQ3_XXS)
        four = four * 8 + (four << 1 & four & four >> 1 & 0x02020202u) + 0x04040404u; // 4, 12 .. 62
    else
        four = four * 17 + (four >> 1 & 0x01010101u) + 0x08080808u; // 8, 25, 43
    uint signs = octet >> INDEX_BITS * INDICES;
    // The number of negative weights is even, so the last sign is a parity bit.
    if (SIGN_BITS == 7) signs = signs & 127 | bitCount(signs & 127) << 7;
    const uvec2 negative = uvec2(signs & 15, signs >> 4 & 15) * 0x00204081u & 0x01010101u;
    // No value is zero, so there is no carry between bytes.
    return (four ^ negative * 255) + negative;
}

// Returns 4 dwords of a row that start at bit `first`, which is a multiple of 4.
uvec4 dwords_from(uint64_t row, uint first) {
    const uvec4 v = Words(row + uint64_t(first / 32 * 4)).v[0];
    const uint skip = first % 32;
    return v >> skip | uvec4(v.yzw, 0) << 1 << (31 - skip);
}

// Returns octet i of a step from the dwords of the step.
uint octet_of(uvec4 dwords, uint i) {
    const uint at = i * OCTET_BITS / 32, skip = i * OCTET_BITS % 32;
    const uint low = dwords[at] >> skip;
    return skip + OCTET_BITS > 32 ? low | dwords[at + 1 & 3] << (32 - skip & 31) : low;
}
