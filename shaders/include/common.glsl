// Shared by all kernels: typed views of device memory, the step buffer, and float operations of a
// fixed order.
//
// Buffers are reached by address (push constants hold 64-bit addresses), so recorded commands never
// change. Floats that reach a result are `precise`: no driver may fuse or reorder them. A row gives
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
// Floats that one workgroup of a dispatch writes and another one reads.
layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedF32 {
    float v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) coherent buffer SharedF32x4 {
    vec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer F16 { float16_t v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer U16 { uint16_t v[]; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer I8 { int8_t v[]; };

// The step buffer; see crates/base/src/compute/step.rs. Seven arrays of `max_rows` words follow the
// header, then the page tables.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Step {
    uint rows;       // of the trees
    uint trees;      // each of a sequence of its own
    uint n_selected; // rows whose logits are wanted
    uint n_path;     // rows to commit
    uint first;      // first live row
    uint chain;      // 1: each row's parent is the row before it, or it has none
    uint n_best;     // of a row's largest logits, where lists of them are wanted
    uint usable;     // tokens that may be picked
    uint v[];
};
const uint STEP_TOKENS = 0, STEP_POSITIONS = 1, STEP_PARENTS = 2, STEP_SELECTED = 3, STEP_PATH = 4,
    STEP_ROOTS = 5, STEP_SEQUENCES = 6;
// The token of an image's row is this and the last row of its image.
#define FIRST_PLACE (1u << 24)
const uint NO_PARENT = 0xffffffffu;

// Positions of a page of keys and values.
const uint PAGE = 256;

// Bits of the magnitude of a float. Infinity is above all numbers, and NaN above infinity. Only
// integers compare such floats alike on all drivers.
uint magnitude(float v) { return floatBitsToUint(v) & 0x7fffffffu; }
const uint INFINITE = 0x7f800000u;
bool is_finite(float v) { return magnitude(v) < INFINITE; }
float not_a_number() { return uintBitsToFloat(0x7fc00000u); }

// Size of floats that become integers with a common factor, see `Scale` in tensor/math.rs. The only
// place that divides by a maximum.
struct Scale {
    float max;      // 0, a number from 1e-30 on, or NaN
    bool has_codes; // else all codes are 0, and a step is 0 or NaN
};

// The scale of floats whose largest magnitude has these bits.
Scale scale_of(uint most) {
    if (most >= INFINITE) return Scale(not_a_number(), false);
    const bool has_codes = most >= floatBitsToUint(1e-30);
    return Scale(has_codes ? uintBitsToFloat(most) : 0.0, has_codes);
}

// The value of code 1, if the largest float has the code `top`.
float step_of(Scale scale, float top) {
    precise float y = scale.max / top;
    return scale.has_codes ? y : scale.max;
}

// Factors from a float to its code, for several codes of the largest float.
vec4 inverses_of(Scale scale, vec4 tops) {
    precise vec4 y = tops / scale.max;
    return scale.has_codes ? y : vec4(0.0);
}
float inverse_of(Scale scale, float top) {
    precise float y = top / scale.max;
    return scale.has_codes ? y : 0.0;
}

// 1 / sqrt(mean) of a mean of squares; NaN where they overflowed, see `math::inv_rms`.
float inverse_root(float mean) { return is_finite(mean) ? 1.0 / sqrt(mean) : not_a_number(); }

// e^x to about one unit in the last place (Cephes' polynomial), as `math::exp` does it.
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
    return magnitude(x) > INFINITE ? x : y; // clamp() may lose a NaN
}

// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), computed as x / (1 + e^-2u).
float gelu_tanh(float x) {
    precise float u = 0.797884560802865 * fma(0.044715 * x * x, x, x);
    precise float y = x / (1.0 + exp_(-2.0 * u));
    return y;
}

// Row of the residual stream that work item `i` of a row set stands for, and how many there are.
// `selected` counts the rows whose logits are wanted; otherwise the live rows.
uint live_rows(Step s, bool selected) { return selected ? s.n_selected : s.rows - s.first; }
uint live_row(Step s, bool selected, uint i) { return selected ? i : s.first + i; }
