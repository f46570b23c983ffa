// LayerNorm and RMSNorm of rows. 16 threads work on a row, one for each partial sum. The order of
// sums is that of crates/base/src/compute/cpu/dense.rs.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint LANES = 16, RUNS = 16, LINE = 32768; // workgroups along x
layout(local_size_x = 256) in;
layout(constant_id = 0) const bool CENTRED = false; // LayerNorm instead of RMSNorm
layout(constant_id = 1) const bool WEIGHTED = false;

layout(push_constant, scalar) uniform Push {
    F32 x;      // [runs, width]
    F32 out_;
    F32 weight; // [width]
    F32 bias;   // [width], for LayerNorm
    uint runs;
    uint width;
    float eps;
};

shared float part[RUNS * LANES];

// Sum of the partial sums of a row, added in halves.
float fold(uint first, uint t, float lane_sum) {
    barrier();
    part[t] = lane_sum;
    barrier();
    precise float lanes[LANES];
    [[unroll]] for (uint i = 0; i < LANES; i++) lanes[i] = part[first + i];
    [[unroll]] for (uint half_ = LANES / 2; half_ > 0; half_ /= 2)
        [[unroll]] for (uint i = 0; i < half_; i++) lanes[i] = lanes[i] + lanes[i + half_];
    return lanes[0];
}

void main() {
    const uint t = gl_LocalInvocationID.x, lane = t % LANES;
    const uint run = (gl_WorkGroupID.y * LINE + gl_WorkGroupID.x) * RUNS + t / LANES;
    const uint start = run * width, end = run < runs ? width : 0;
    precise float mean = 0.0;
    if (CENTRED) {
        for (uint i = lane; i < end; i += LANES) mean = mean + x.v[start + i];
        mean = fold(t - lane, t, mean) / float(width);
    }
    precise float squares = 0.0;
    for (uint i = lane; i < end; i += LANES) {
        precise float v = x.v[start + i];
        if (CENTRED) v = v - mean;
        squares = fma(v, v, squares);
    }
    precise float variance = fold(t - lane, t, squares) / float(width) + eps;
    precise float factor = 1.0 / sqrt(variance);
    for (uint i = lane; i < end; i += LANES) {
        precise float v = x.v[start + i];
        if (CENTRED) v = v - mean;
        v = v * factor;
        if (CENTRED) v = fma(v, weight.v[i], bias.v[i]);
        else if (WEIGHTED) v = v * weight.v[i];
        out_.v[start + i] = v;
    }
}
