// Chooses the experts of each row, one row per workgroup: those with the largest scores, the first
// ones of equal scores. The last workgroup sorts the slots of all rows by expert, see experts.glsl.
// Four lanes work on one expert.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "last.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint T = 128;       // threads
layout(constant_id = 2) const uint EXPERTS = 128;
layout(constant_id = 3) const uint USED = 8;      // experts chosen per row
layout(constant_id = 4) const uint BLOCK = 1;     // limit for the slots of a block

layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer SharedU32 {
    uint v[];
};

layout(push_constant, scalar) uniform Push {
    F32 scores;         // [rows, experts]
    F32 factors;        // [experts]
    SharedU32 chosen;   // [rows, used], ascending in a row
    F32 weights;        // [rows, used]
    U32 choices;        // blocks and slots, see experts.glsl
    uint64_t counts;
    Step step_;
    uint room;          // number of blocks that fit
    uint _gap;
};

shared float row_scores[EXPERTS];
shared uint orders[EXPERTS];  // scores as integers; later the first place of each expert
shared uint found[EXPERTS];   // number of slots of each expert
shared uint by_rank[USED], ascending[USED]; // the chosen experts
const uint LANES = 4;

uint sum_of_lanes(uint v) {
    v += subgroupShuffleXor(v, 1);
    return v + subgroupShuffleXor(v, 2);
}

// Maps scores to integers with the same order. Both zeros are equal, and NaN is the largest.
uint order(float score) {
    const uint bits = floatBitsToUint(score);
    if (magnitude(score) > INFINITE) return 0xffffffffu;
    if (magnitude(score) == 0) return 1u << 31;
    return bits >> 31 != 0 ? ~bits : bits | 1u << 31;
}

// Writes the blocks of the slots of `rows` rows from row `first` on. The slots of an expert have no
// fixed order, because a product does not depend on the other slots of its block.
void sort_slots(uint first, uint rows) {
    const uint from = first * USED, n = rows * USED, thread = gl_LocalInvocationID.x,
        lane = thread % LANES;
    for (uint e = thread; e < EXPERTS; e += T) found[e] = 0;
    barrier();
    for (uint i = thread; i < n; i += T) atomicAdd(found[chosen.v[from + i]], 1);
    barrier();
    for (uint e0 = 0; e0 < EXPERTS; e0 += T / LANES) {
        const uint e = e0 + thread / LANES;
        uint place = 0, block = 0;
        for (uint i = lane; i < min(e, EXPERTS); i += LANES) {
            place += found[i];
            block += (found[i] + BLOCK - 1) / BLOCK;
        }
        place = sum_of_lanes(place);
        block = sum_of_lanes(block);
        if (e >= EXPERTS || lane > 0) continue;
        orders[e] = place;
        for (uint i = 0; i < found[e]; i += BLOCK) {
            const uint at = 3 + 3 * block;
            choices.v[at] = e;
            choices.v[at + 1] = place + i;
            choices.v[at + 2] = min(BLOCK, found[e] - i);
            block++;
        }
        if (e + 1 == EXPERTS) {
            choices.v[0] = block;
            choices.v[1] = EXPERTS;
            choices.v[2] = room;
        }
    }
    barrier();
    for (uint i = thread; i < n; i += T) {
        const uint place = atomicAdd(orders[chosen.v[from + i]], 1);
        choices.v[3 + 3 * room + place] = from + i;
    }
}

void main() {
    const uint live = live_rows(step_, false), first = live_row(step_, false, 0);
    if (gl_WorkGroupID.x >= live) return;
    const uint r = first + gl_WorkGroupID.x, thread = gl_LocalInvocationID.x,
        lane = thread % LANES;
    for (uint e = thread; e < EXPERTS; e += T) {
        const float score = scores.v[r * EXPERTS + e];
        row_scores[e] = score;
        orders[e] = order(score);
    }
    barrier();
    for (uint e0 = 0; e0 < EXPERTS; e0 += T / LANES) {
        const uint e = e0 + thread / LANES, own = orders[min(e, EXPERTS - 1)];
        uint rank = 0;
        for (uint i = lane; i < EXPERTS; i += LANES) {
            const uint other = orders[i];
            rank += uint(other > own || other == own && i < e);
        }
        rank = sum_of_lanes(rank);
        if (e < EXPERTS && rank < USED && lane == 0) by_rank[rank] = e;
    }
    barrier();
    if (thread < USED) {
        uint before = 0;
        for (uint i = 0; i < USED; i++) before += uint(by_rank[i] < by_rank[thread]);
        ascending[before] = by_rank[thread];
    }
    barrier();
    const float largest = row_scores[by_rank[0]];
    precise float sum = 0.0;
    for (uint i = 0; i < USED; i++) sum += exp_(row_scores[ascending[i]] - largest);
    if (thread < USED) {
        const uint e = ascending[thread];
        precise float weight = exp_(row_scores[e] - largest) / sum * factors.v[e];
        chosen.v[r * USED + thread] = e;
        weights.v[r * USED + thread] = weight;
    }
    if (is_last(counts, 0, live)) sort_slots(first, live);
}
