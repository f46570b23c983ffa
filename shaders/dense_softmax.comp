// Softmax of rows of scores without the final factor of each row, one row per workgroup. The order
// of sums is that of `softmax` in crates/base/src/compute/cpu/dense.rs. The product with the values
// multiplies by the factors.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint THREADS = 128, LANES = 16, CHUNK = 2048;
layout(local_size_x = 128) in;

layout(push_constant, scalar) uniform Push {
    F32 x;       // [heads, rows, width]
    F32 factors; // [heads, rows]
    uint rows;
    uint width;
};

shared float part[CHUNK];
shared uint most[THREADS];

void main() {
    const uint t = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.y * rows + gl_WorkGroupID.x, start = row * width;
    float top = uintBitsToFloat(0xff7fffff); // the smallest finite number
    uint size = 0;
    for (uint i = t; i < width; i += THREADS) {
        const float v = x.v[start + i];
        top = v > top ? v : top;
        size = max(size, magnitude(v));
    }
    part[t] = top;
    most[t] = size;
    barrier();
    for (uint half_ = THREADS / 2; half_ > 0; half_ /= 2) {
        if (t < half_) {
            part[t] = part[t + half_] > part[t] ? part[t + half_] : part[t];
            most[t] = max(most[t], most[t + half_]);
        }
        barrier();
    }
    top = most[0] < INFINITE ? part[0] : not_a_number();
    precise float sum = 0.0; // sum of the columns of one lane
    for (uint from = 0; from < width; from += CHUNK) {
        const uint count = min(CHUNK, width - from);
        barrier();
        for (uint i = t; i < count; i += THREADS) {
            precise float less = x.v[start + from + i] - top;
            const float y = exp_(less);
            x.v[start + from + i] = y;
            part[i] = y;
        }
        barrier();
        if (t < LANES) for (uint i = t; i < count; i += LANES) sum = sum + part[i];
    }
    barrier();
    if (t < LANES) part[t] = sum;
    barrier();
    for (uint half_ = LANES / 2; half_ > 0; half_ /= 2) {
        if (t < half_) {
            precise float both = part[t] + part[t + half_];
            part[t] = both;
        }
        barrier();
    }
    if (t == 0) {
        precise float factor = 1.0 / part[0];
        factors.v[row] = factor;
    }
}
