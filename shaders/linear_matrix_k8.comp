// Linear layers by matrix instructions that multiply 8 columns at a time, see linear_matrix.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#define PIECE uvec2
#define PIECE_BYTES 8
#define PUT(at, columns) stage[at] = columns.xy, stage[(at) + 1] = columns.zw
#include "linear_matrix.glsl"
