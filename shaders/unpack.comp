// Converts blocks of GGUF files to the formats of the kernels, with the same bits as
// src/tensor/ggml.rs and repack.comp. Q4_0 and Q8_0 become codes and scales, one block an
// invocation. The other formats become bf16, eight weights an invocation; f16 becomes f32, one
// weight an invocation.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 4) const uint KIND = 2; // ggml's number of the type

layout(push_constant, scalar) uniform Push {
    U16 from;    // rows of blocks
    uint64_t to; // the same rows: codes, or floats
    U16 scales;  // of the same rows
    uint count;  // invocations
    uint steps;  // blocks of a row
};

const uint F16_ = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13,
    Q6_K = 14;
const bool K = KIND == Q4_K || KIND == Q5_K || KIND == Q6_K;
const uint WEIGHTS = K ? 256 : 32;
const uint BYTES = KIND == Q4_0 ? 18 : KIND == Q4_1 ? 20 : KIND == Q5_0 ? 22 : KIND == Q5_1 ? 24
    : KIND == Q8_0 ? 34 : KIND == Q4_K ? 144 : KIND == Q5_K ? 176 : 210;

// All blocks begin at even bytes.
uint half_of(uint at) { return uint(from.v[at / 2]); }
uint word_of(uint at) { return half_of(at) | half_of(at + 2) << 16; }
uint byte_of(uint at) { return half_of(at) >> (at % 2 * 8) & 0xff; }

// f16 to f32 by hand: devices may flush subnormal numbers to 0.
uint f32_bits(uint h) {
    const uint sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 0) return sign | floatBitsToUint(float(fraction) * 5.9604644775390625e-8);
    if (exponent == 31)
        return sign | 0x7f800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0);
    return sign | (exponent + 112) << 23 | fraction << 13;
}

float float_of(uint at) { return uintBitsToFloat(f32_bits(half_of(at))); }

// Rounds to the nearest bf16, to the even one of two equally near.
uint bf16_bits(float x) {
    const uint bits = floatBitsToUint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// 32 weights of 4 bits, with a fifth in the word at `high`.
uint small(uint low, uint high, uint j) {
    const uint q = byte_of(low + j % 16) >> (j / 16 * 4) & 15;
    return KIND == Q5_0 || KIND == Q5_1 ? q | (word_of(high) >> j & 1) << 4 : q;
}

// 6 bits of scale and of minimum of a group, from 12 packed bytes.
uvec2 packed_scales(uint at, uint group) {
    if (group < 4) return uvec2(byte_of(at + group) & 63, byte_of(at + group + 4) & 63);
    const uint both = byte_of(at + group + 4);
    return uvec2(both & 15 | byte_of(at + group - 4) >> 6 << 4,
        both >> 4 | byte_of(at + group) >> 6 << 4);
}

// Weight `j` of the block at byte `at`.
float value(uint at, uint j) {
    if (KIND == Q4_1 || KIND == Q5_1) {
        const uint low = KIND == Q4_1 ? 4 : 8;
        precise float product = float(small(at + low, at + 4, j)) * float_of(at);
        precise float y = product + float_of(at + 2);
        return y;
    }
    if (KIND == Q5_0) {
        precise float y = float(int(small(at + 6, at + 2, j)) - 16) * float_of(at);
        return y;
    }
    if (KIND == Q6_K) {
        const uint i = j / 16, part = j / 128, quarter = j / 32 % 4, k = j % 32;
        const int8_t s = int8_t(byte_of(at + 192 + i));
        precise float scale = float_of(at + 208) * float(int(s));
        const uint low =
            byte_of(at + 64 * part + 32 * (quarter % 2) + k) >> (4 * (quarter / 2)) & 15;
        const uint high = byte_of(at + 128 + 32 * part + k) >> (2 * quarter) & 3;
        precise float y = scale * float(int(low | high << 4) - 32);
        return y;
    }
    const uint group = j / 32;
    const uvec2 packed = packed_scales(at + 4, group);
    precise float scale = float_of(at) * float(packed.x);
    precise float least = float_of(at + 2) * float(packed.y);
    const uint low = at + (KIND == Q4_K ? 16 : 48) + group / 2 * 32 + j % 32;
    uint q = byte_of(low) >> (group % 2 * 4) & 15;
    if (KIND == Q5_K) q |= (byte_of(at + 16 + j % 32) >> group & 1) << 4;
    precise float product = scale * float(q);
    precise float y = product - least;
    return y;
}

void main() {
    const uint index =
        gl_GlobalInvocationID.y * (gl_NumWorkGroups.x * 256) + gl_GlobalInvocationID.x;
    if (index >= count) return;
    if (KIND == F16_) {
        U32(to).v[index] = f32_bits(uint(from.v[index]));
        return;
    }
    if (KIND == Q4_0) {
        // A byte holds columns j and j + 16. A word of the kernels holds 0..3 in its low nibbles
        // and 4..7 in its high ones, signed.
        const uint at = index * BYTES;
        const uint a = word_of(at + 2), b = word_of(at + 6), c = word_of(at + 10),
            d = word_of(at + 14), low = 0x0f0f0f0fu;
        const uvec4 codes = uvec4(a & low | (b & low) << 4, c & low | (d & low) << 4,
            a >> 4 & low | b & ~low, c >> 4 & low | d & ~low);
        U32x4(to).v[index] = codes ^ 0x88888888u;
        scales.v[index] = from.v[at / 2];
        return;
    }
    if (KIND == Q8_0) {
        const uint at = index * BYTES, row = index / steps, step_ = index % steps;
        const uint first = step_ / 8 * 8, lane = step_ - first, width = min(8, steps - first);
        [[unroll]] for (uint piece = 0; piece < 2; piece++) {
            const uint q = at + 2 + 16 * piece;
            const uvec4 codes = uvec4(word_of(q), word_of(q + 4), word_of(q + 8), word_of(q + 12));
            U32x4(to).v[(row * steps + first) * 2 + piece * width + lane] = codes;
        }
        scales.v[index] = from.v[at / 2];
        return;
    }
    const uint at = index * 8 / WEIGHTS * BYTES, j = index * 8 % WEIGHTS;
    uint w[4];
    [[unroll]] for (uint i = 0; i < 4; i++)
        w[i] = bf16_bits(value(at, j + 2 * i)) | bf16_bits(value(at, j + 2 * i + 1)) << 16;
    U32x4(to).v[index] = uvec4(w[0], w[1], w[2], w[3]);
}
