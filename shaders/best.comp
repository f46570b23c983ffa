// Lists the largest logits of a row on the device. Runs of 16 logits are dealt to 256 chunks in
// turn. Stage 0 finds the maximum of each chunk. Stage 1 takes the n-th largest maximum as a
// threshold, which at least n logits reach, and lists all logits that reach it. The host sorts the
// list. Chunks with a maximum below it are skipped.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint STAGE = 0;
layout(constant_id = 2) const uint MOST = 1024; // limit for the entries of a list

layout(push_constant, scalar) uniform Push {
    F32 logits; // [selected rows, vocab]
    F32 maxima; // [selected rows, 256]
    // [selected rows, 2 + 2 MOST]: count (NAN_SEEN: no list), unused, then pairs of token and
    // logit, not sorted.
    U32 lists;
    Step step_;
    uint vocab;
};

const uint NAN_SEEN = 0x80000000u;
const uint RUN = 16;

// Column of logit i of a chunk.
uint column(uint chunk, uint i) { return (i / RUN * 256 + chunk) * RUN + i % RUN; }

shared float largest[256];
shared float threshold;
shared uint nans;
shared uint larger;

void main() {
    const uint row = gl_WorkGroupID.y, chunk = gl_WorkGroupID.x, t = gl_LocalInvocationID.x;
    if (row >= step_.n_selected) return;
    const uint each = (step_.usable + 256 * RUN - 1) / (256 * RUN) * RUN;
    const uint at = row * vocab, list = row * (2 + 2 * MOST);
    const float LEAST = uintBitsToFloat(0xff800000u);
    if (STAGE == 0) {
        if (t == 0) nans = 0;
        barrier();
        float m = LEAST;
        for (uint k = t; k < each; k += 256) {
            const uint i = column(chunk, k);
            if (i >= step_.usable) break;
            const float v = logits.v[at + i];
            if (magnitude(v) > INFINITE) nans = 1;
            else m = max(m, v);
        }
        largest[t] = m;
        barrier();
        for (uint d = 128; d > 0; d /= 2) {
            if (t < d) largest[t] = max(largest[t], largest[t + d]);
            barrier();
        }
        // Infinity marks a chunk with a NaN. Stage 1 reports it in the count of the list.
        if (t == 0)
            maxima.v[row * 256 + chunk] = nans != 0 ? uintBitsToFloat(INFINITE) : largest[0];
        if (t == 0 && chunk == 0) lists.v[list] = 0;
        return;
    }
    const float mine = maxima.v[row * 256 + t];
    const uint n = min(step_.n_best, 256);
    largest[t] = mine;
    if (t == 0) larger = 0;
    barrier();
    if (mine > largest[chunk]) atomicAdd(larger, 1);
    if (floatBitsToUint(mine) == INFINITE) atomicOr(lists.v[list], NAN_SEEN);
    barrier();
    if (larger >= n) return;
    uint rank = 0;
    for (uint i = 0; i < 256; i++) rank += uint(largest[i] > mine || (largest[i] == mine && i < t));
    if (rank == n - 1) threshold = mine;
    barrier();
    for (uint k = t; k < each; k += 256) {
        const uint i = column(chunk, k);
        if (i >= step_.usable) break;
        const float v = logits.v[at + i];
        if (v >= threshold) {
            const uint place = atomicAdd(lists.v[list], 1);
            if ((place & ~NAN_SEEN) < MOST) {
                lists.v[list + 2 + 2 * (place & ~NAN_SEEN)] = i;
                lists.v[list + 3 + 2 * (place & ~NAN_SEEN)] = floatBitsToUint(v);
            }
        }
    }
}
