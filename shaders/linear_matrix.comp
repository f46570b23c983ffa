// Linear layers by matrix instructions, see linear_matrix.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#define PIECE uvec4
#define PIECE_BYTES 16
#define PUT(at, columns) stage[at] = columns
#include "linear_matrix.glsl"
