// Storage formats of keys and values: KvFormat in crates/base/src/compute/plan.rs. The including
// file defines the constant KV.

// KV_Q8: int8 codes, then f16 scales, one for each group of channels
const uint KV_F32 = 0, KV_F16 = 1, KV_Q8 = 2;

// Adjacent channels of a key, which have 16 bytes.
const uint KB = KV == KV_F32 ? 4 : KV == KV_F16 ? 8 : 16;

// Channels that share a scale.
#define GROUP_OF(head_dim) ((head_dim) % 32 == 0 ? 32 : 16)

// Bytes of four channels.
const uint FOUR_BYTES = 64 / KB;

// Returns the scale at an address, or 1 for formats without scales.
float scale_from(uint64_t at) { return KV == KV_Q8 ? float(F16(at).v[0]) : 1.0; }

vec4 decode(uint codes, float scale) {
    precise vec4 v = vec4(unpack8(int(codes))) * scale;
    return v;
}

// Returns channels 4 part ... 4 part + 3 of the KB channels in 16 bytes.
vec4 four(uvec4 w, uint part, float scale) {
    if (KV == KV_F32) return uintBitsToFloat(w);
    if (KV == KV_F16)
        return vec4(unpackHalf2x16(w[2 * (part % 2)]), unpackHalf2x16(w[2 * (part % 2) + 1]));
    return decode(w[part], scale);
}

// Four channels as stored, in the first words.
uvec4 raw_from(uint64_t at) {
    if (KV == KV_F32) return U32x4(at).v[0];
    return KV == KV_Q8 ? uvec4(U32(at).v[0], 0, 0, 0) : uvec4(U32x2(at).v[0], 0, 0);
}

// The values of four stored channels.
vec4 four_of(uvec4 raw, float scale) { return four(raw, 0, scale); }
