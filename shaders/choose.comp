// The experts of each row, a workgroup a row: those with the largest scores, of equal ones the
// first. The last workgroup sorts the slots of all rows by expert, see experts.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "last.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint T = 128;       // threads
layout(constant_id = 2) const uint EXPERTS = 128;
layout(constant_id = 3) const uint USED = 8;      // experts of a row
layout(constant_id = 4) const uint BLOCK = 1;     // most slots of a block

layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedU32 {
    uint v[];
};

layout(push_constant, scalar) uniform Push {
    F32 scores;         // [rows, experts]
    F32 factors;        // [experts]
    SharedU32 chosen;   // [rows, used], ascending in a row
    F32 weights;        // [rows, used]
    U32 choices;        // see experts.glsl
    uint64_t counts;
    Step step_;
    uint room;          // for blocks
    uint _gap;
};

shared float row_scores[EXPERTS];
shared uint ranks[EXPERTS]; // of scores, then slots of experts
shared uint best;

// Orders scores as integers: both zeros alike, NaN the largest.
uint order(float score) {
    const uint bits = floatBitsToUint(score);
    if (magnitude(score) > INFINITE) return 0xffffffffu;
    if (magnitude(score) == 0) return 1u << 31;
    return bits >> 31 != 0 ? ~bits : bits | 1u << 31;
}

// Writes the blocks of the slots of `rows` rows from row `first` on. All threads load what they may
// not need: Mesa's driver on the processor takes addresses from threads that do not.
void sort_slots(uint first, uint rows) {
    const uint from = first * USED, n = rows * USED;
    for (uint e0 = 0; e0 < EXPERTS; e0 += T) {
        const uint e = e0 + gl_LocalInvocationID.x;
        uint found = 0;
        for (uint i = 0; i < n; i++) found += uint(chosen.v[from + i] == e);
        if (e < EXPERTS) ranks[e] = found;
    }
    barrier();
    for (uint e0 = 0; e0 < EXPERTS; e0 += T) {
        const uint e = e0 + gl_LocalInvocationID.x, own = e < EXPERTS ? ranks[e] : 0;
        uint place = 0, block = 0;
        for (uint i = 0; i < EXPERTS; i++) {
            const uint before = i < e ? ranks[i] : 0;
            place += before;
            block += (before + BLOCK - 1) / BLOCK;
        }
        for (uint i = 0; i < own; i += BLOCK) {
            const uint at = 3 + 3 * block;
            choices.v[at] = e;
            choices.v[at + 1] = place + i;
            choices.v[at + 2] = min(BLOCK, own - i);
            block++;
        }
        if (e + 1 == EXPERTS) {
            choices.v[0] = block;
            choices.v[1] = EXPERTS;
            choices.v[2] = room;
        }
        const uint slots = 3 + 3 * room;
        for (uint i = 0; i < n; i++)
            if (chosen.v[from + i] == e) choices.v[slots + place++] = from + i;
    }
}

void main() {
    const uint live = live_rows(step_, false), first = live_row(step_, false, 0);
    if (gl_WorkGroupID.x >= live) return;
    const uint r = first + gl_WorkGroupID.x;
    for (uint e = gl_LocalInvocationID.x; e < EXPERTS; e += T)
        row_scores[e] = scores.v[r * EXPERTS + e];
    barrier();
    for (uint e = gl_LocalInvocationID.x; e < EXPERTS; e += T) {
        const uint own = order(row_scores[e]);
        uint rank = 0;
        for (uint i = 0; i < EXPERTS; i++) {
            const uint other = order(row_scores[i]);
            rank += uint(other > own || other == own && i < e);
        }
        ranks[e] = rank;
        if (rank == 0) best = e;
    }
    barrier();
    const float largest = row_scores[best];
    precise float sum = 0.0; // in ascending order
    for (uint i = 0; i < EXPERTS; i++)
        if (ranks[i] < USED) sum += exp_(row_scores[i] - largest);
    for (uint e = gl_LocalInvocationID.x; e < EXPERTS; e += T) {
        uint place = r * USED;
        for (uint i = 0; i < e; i++) place += uint(ranks[i] < USED);
        if (ranks[e] >= USED) continue;
        precise float weight = exp_(row_scores[e] - largest) / sum * factors.v[e];
        chosen.v[place] = e;
        weights.v[place] = weight;
    }
    if (is_last(counts, 0, live)) sort_slots(first, live);
}
