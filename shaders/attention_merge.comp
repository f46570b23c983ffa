// Joins a row's page partials in page order: a workgroup a (query head, row), a thread a channel.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 2) const uint HEAD_DIM = 128;

layout(push_constant, scalar) uniform Push {
    F32 partials; // [live row, n_heads, slots, HEAD_DIM + 2]
    F32 out_;     // [rows, n_heads, HEAD_DIM]
    Step step_;
    uint n_heads;
    uint window;
    uint max_rows;
    uint slots;
};

void main() {
    const uint i = gl_WorkGroupID.y, head = gl_WorkGroupID.x, d = gl_LocalInvocationID.x;
    if (i >= step_.rows - step_.first || d >= HEAD_DIM) return;
    const uint row = step_.first + i;
    const uint position = step_.v[STEP_POSITIONS * max_rows + row];
    const uint pages = position / PAGE - first_visible(position, window) / PAGE + 1;
    const uint at = (i * n_heads + head) * slots;
    Running run = Running(0.0, 0.0);
    float o = 0.0;
    for (uint page = 0; page < pages; page++) {
        const uint p = (at + page) * (HEAD_DIM + 2);
        const Running now = Running(partials.v[p + HEAD_DIM], partials.v[p + HEAD_DIM + 1]);
        if (page == 0) {
            run = now;
            o = partials.v[p + d];
        } else {
            float fa, fb;
            run = join(run, now, fa, fb);
            o = join_output(o, partials.v[p + d], fa, fb);
        }
    }
    precise float y = o / run.l;
    out_.v[(row * n_heads + head) * HEAD_DIM + d] = y;
}
