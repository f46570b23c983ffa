// Common to all kernels: typed views of device memory, the step buffer, and float operations in a
// fixed order.
//
// Buffers are accessed by 64-bit addresses in push constants, so recorded commands never change.
// Floats that affect a result are `precise`, so that no driver fuses or reorders them. A row has
// the same bits for any number of rows in a dispatch.

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_EXT_control_flow_attributes : require

layout(buffer_reference, scalar, buffer_reference_align = 4) buffer F32 { float v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer I32 { int v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer U32 { uint v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer U32x2 { uvec2 v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer U32x4 { uvec4 v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer F32x4 { vec4 v[]; };
// Floats that one workgroup of a dispatch writes and another one of it reads.
layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedF32 {
    float v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) coherent buffer SharedF32x4 {
    vec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer F16 { float16_t v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer U16 { uint16_t v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer I8 { int8_t v[]; };

// The step buffer, see crates/base/src/compute/step.rs. After the header it has seven arrays of
// `max_rows` words, then the page tables.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Step {
    uint rows;       // of all trees
    uint trees;      // one per sequence
    uint n_selected; // rows with requested logits
    uint n_path;     // rows to commit
    uint first;      // first live row
    uint chain;      // 1: the parent of each row is the row before it, or none
    uint n_best;     // logits in each list of the largest ones
    uint usable;     // tokens that may be chosen
    uint v[];
};
const uint STEP_TOKENS = 0, STEP_POSITIONS = 1, STEP_PARENTS = 2, STEP_SELECTED = 3, STEP_PATH = 4,
    STEP_ROOTS = 5, STEP_SEQUENCES = 6;
// The token of an image's row is this plus the last row of its image.
#define FIRST_PLACE (1u << 24)
const uint NO_PARENT = 0xffffffffu;

// Positions in a page of keys and values.
const uint PAGE = 256;

// Bits of a float's magnitude. Infinity is above all numbers, and NaN above infinity. Such floats
// compare alike on all drivers only as integers.
uint magnitude(float v) { return floatBitsToUint(v) & 0x7fffffffu; }
const uint INFINITE = 0x7f800000u;
bool is_finite(float v) { return magnitude(v) < INFINITE; }
float not_a_number() { return uintBitsToFloat(0x7fc00000u); }

// Scale of floats that are rounded to integers with a common factor, see `Scale` in tensor/math.rs.
// Only this code divides by a maximum.
struct Scale {
    float max;      // 0, a number of at least 1e-30, or NaN
    bool has_codes; // otherwise all codes are 0 and the step is 0 or NaN
};

// Returns the scale of floats from the bits `most` of their largest magnitude.
Scale scale_of(uint most) {
    if (most >= INFINITE) return Scale(not_a_number(), false);
    const bool has_codes = most >= floatBitsToUint(1e-30);
    return Scale(has_codes ? uintBitsToFloat(most) : 0.0, has_codes);
}

// Returns the value of code 1 if the largest float has the code `top`.
float step_of(Scale scale, float top) {
    precise float y = scale.max / top;
    return scale.has_codes ? y : scale.max;
}

// Factors from floats to codes, for several possible codes of the largest float.
vec4 inverses_of(Scale scale, vec4 tops) {
    precise vec4 y = tops / scale.max;
    return scale.has_codes ? y : vec4(0.0);
}
float inverse_of(Scale scale, float top) {
    precise float y = top / scale.max;
    return scale.has_codes ? y : 0.0;
}

// 1 / sqrt(mean) for a mean of squares. NaN if the squares overflowed, see `math::inv_rms`.
float inverse_root(float mean) { return is_finite(mean) ? 1.0 / sqrt(mean) : not_a_number(); }

// e^x to about one unit in the last place (Cephes' polynomial), with the bits of `math::exp`.
float exp_(float x) {
    precise float n = roundEven(clamp(x, -87.0, 88.0) * 1.44269504088896340736);
    precise float r = fma(n, -0.693359375, clamp(x, -87.0, 88.0));
    r = fma(n, 2.12194440e-4, r);
    precise float p = 1.9875691500e-4;
    p = fma(p, r, 1.3981999507e-3);
    p = fma(p, r, 8.3334519073e-3);
    p = fma(p, r, 4.1665795894e-2);
    p = fma(p, r, 1.6666665459e-1);
    p = fma(p, r, 5.0000001201e-1);
    precise float y = fma(p, r * r, r + 1.0);
    y = y * uintBitsToFloat(uint(int(n) + 127) << 23);
    return magnitude(x) > INFINITE ? x : y; // clamp() does not always keep a NaN
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), computed as x / (1 + e^-2u).
float gelu_tanh(float x) {
    precise float u = 0.797884560802865 * fma(0.044715 * x * x, x, x);
    precise float y = x / (1.0 + exp_(-2.0 * u));
    return y;
}

// Number of rows in a row set, and row of the residual stream for work item `i`. The set `selected`
// has the rows with requested logits. The other set has the live rows.
uint live_rows(Step s, bool selected) { return selected ? s.n_selected : s.rows - s.first; }
uint live_row(Step s, bool selected, uint i) { return selected ? i : s.first + i; }
