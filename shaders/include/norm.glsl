// The last workgroup of a linear layer adds its output to the residual stream, normalises the sum
// and prepares it for the next linear layer, as row.comp does.
//
// The including file defines SG and SUBGROUPS (subgroups in a workgroup). The layer must have one
// matrix, and its workgroups must process all rows of activations.

#include "last.glsl"

layout(constant_id = 20) const bool NORM = false;
layout(constant_id = 21) const uint DIM = 128;            // columns of the stream
layout(constant_id = 22) const bool NEXT_PREPARE = false; // otherwise only the norm is stored
layout(constant_id = 23) const bool NEXT_HADAMARD = false;
layout(constant_id = 24) const bool NEXT_INT8 = false;
layout(constant_id = 25) const uint NEXT_GROUP = 0;       // columns with one scale; 0: all

const uint TEAMS = SUBGROUPS, FIRST = 0;
const uint DIM_BLOCKS = (DIM + 127) / 128;
const uint EACH = (DIM_BLOCKS + TEAMS - 1) / TEAMS;

shared float row_parts[NORM ? (DIM_BLOCKS > TEAMS ? DIM_BLOCKS : TEAMS) : 1];
shared int row_sums[NORM ? TEAMS : 1];

#include "row.glsl"
#include "whole_row.glsl"

// Called after this workgroup, one of `parties`, has stored its matrix rows for all `live` rows.
void finish_norm(uint64_t epilogue_, uint parties, uint first, uint live) {
    RowEpilogue epilogue = RowEpilogue(epilogue_);
    RowArgs a = epilogue.args;
    if (!is_last(epilogue.counts, 0, parties)) return;
    for (uint r = first; r < first + live; r++) {
        float v[EACH][PER];
        norm_row(a, r, DIM, false, v);
        if (uint64_t(a.z) != 0) store_row(a.z, r, DIM, v);
        if (NEXT_PREPARE) prepare_row(a, v, r, DIM, NEXT_HADAMARD, NEXT_INT8, NEXT_GROUP);
    }
}
