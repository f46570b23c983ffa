// Soft cap of logits in place: cap tanh(x / cap). See `math::soft_cap`.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant, scalar) uniform Push {
    F32 logits; // [selected rows, vocab]
    Step step_;
    uint vocab;
    float cap;
};

void main() {
    const uint row = gl_WorkGroupID.y, i = gl_GlobalInvocationID.x;
    if (row >= step_.n_selected || i >= vocab) return;
    const uint at = row * vocab + i;
    const float logit = logits.v[at];
    precise float x = 2.0 * (logit / cap);
    precise float y = cap * (1.0 - 2.0 / (1.0 + exp_(x)));
    logits.v[at] = is_finite(logit) ? y : not_a_number();
}
