// Elementwise operations of image towers. A thread computes one value, or one rotated pair.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const uint LINE = 32768; // workgroups along x
const uint ADD = 0, MULTIPLY = 1, SCALE = 2, STANDARDIZE = 3, ROTATE = 4, POOL = 5;
layout(local_size_x = 256) in;
layout(constant_id = 0) const uint KIND = 0;

layout(push_constant, scalar) uniform Push {
    F32 x;        // [rows, width]; in place, except for pooling
    F32 y;        // [rows, width], a bias [width], or angles [position, half / 2, 2]
    F32 z;        // factors [width], or the pooled values [tokens, width]
    uint count;   // threads
    uint width;
    uint columns; // of the image's grid, or of the grid of pooling squares
    uint side;    // of a pooling square, or values in half a head
    float factor;
};

void rotate(uint i) {
    const uint pairs = side / 2, row = i / (width / 2), rest = i % (width / 2);
    const uint part = rest / pairs, pair = rest % pairs;
    const uint position = part % 2 == 0 ? row % columns : row / columns;
    const uint angle = (position * pairs + pair) * 2;
    const float sine = y.v[angle], cosine = y.v[angle + 1];
    const uint at = row * width + part * side + pair;
    const float a = x.v[at], b = x.v[at + pairs];
    precise float first = a * cosine - b * sine;
    precise float second = b * cosine + a * sine;
    x.v[at] = first;
    x.v[at + pairs] = second;
}

void pool(uint i) {
    const uint token = i / width, left = token % columns * side, top = token / columns * side;
    precise float sum = 0.0;
    for (uint down = 0; down < side; down++)
        for (uint across = 0; across < side; across++)
            sum = sum + x.v[((top + down) * columns * side + left + across) * width + i % width];
    sum = sum * factor;
    z.v[i] = sum;
}

void main() {
    const uint i = (gl_WorkGroupID.y * LINE + gl_WorkGroupID.x) * 256 + gl_LocalInvocationID.x;
    if (i >= count) return;
    if (KIND == ROTATE) {
        rotate(i);
        return;
    }
    if (KIND == POOL) {
        pool(i);
        return;
    }
    precise float v = x.v[i];
    if (KIND == ADD) v = v + y.v[i];
    if (KIND == MULTIPLY) v = v * y.v[i];
    if (KIND == SCALE) v = v * factor;
    if (KIND == STANDARDIZE) v = (v - y.v[i % width]) * z.v[i % width];
    x.v[i] = v;
}
