// The best path through a trellis for tiles of weights. All costs are integers, so the path has the
// same states as that of src/tensor/viterbi.rs. A workgroup takes one tile after the other. A
// thread takes four paths at a time, whose newest bits are consecutive numbers.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint T = 256;
layout(constant_id = 17) const uint STEP = 4; // new bits of a state
layout(constant_id = 19) const uint MULTIPLIER = 1;

#include "trellis.glsl"

const uint STEPS = 128;                      // states of a tile
const uint SEAM = 40;                        // on either side of where the circle is closed
const uint STATES = 1u << STATE_BITS;
const uint HEADS = STATES >> STEP;           // of states that continue alike
const uint HIGHS = 1u << STEP;               // states of a head
const uint SETTLED = (STATE_BITS + STEP - 1) / STEP;
const uint FORBIDDEN = 0xffffu;
const uint NO_HEAD = 0xffffffffu;

layout(buffer_reference, scalar, buffer_reference_align = 4) coherent buffer Trace { uint v[]; };

layout(push_constant, scalar) uniform Push {
    I8 targets;  // [tiles, 256] in quarters
    // [workgroups, STEPS, HEADS] the oldest bits of the best state of each head, a byte each
    Trace trace;
    U32 rows;    // [tiles, 16, 2] bits of each row, the low word first
    uint tiles;
};

shared uint16_t best[2][HEADS]; // least cost of the states that continue alike, by turns
shared uint least[3];           // of all, by turns
shared uint last;               // the state in which the path ends

// Cost of a state's two weights for these targets. See `Target` in src/tensor/viterbi.rs.
uint cost_of(uint state, ivec2 q, int base) {
    const uint word = word_of_state(state);
    const int x = weight_of(word, 0) + TRELLIS_OFFSET, y = weight_of(word, 1) + TRELLIS_OFFSET;
    return uint(base + x * (2 * x - 4 * TRELLIS_OFFSET - q.x)
        + y * (2 * y - 4 * TRELLIS_OFFSET - q.y));
}

ivec2 targets_at(uint tile, uint at) {
    const uint i = tile * 256 + at % STEPS * 2;
    return ivec2(int(targets.v[i]), int(targets.v[i + 1]));
}

// Constant that makes the least possible cost 0.
int base_of(ivec2 q) {
    const ivec2 own = (q * q + 7) / 8 + TRELLIS_OFFSET * q;
    return own.x + own.y + 4 * TRELLIS_OFFSET * TRELLIS_OFFSET;
}

// The last state of the best path over `steps` states from target `first` on; with a head, of the
// best one that begins behind it and ends with it.
uint find_path(uint tile, uint first, uint steps, uint head, uint trace_at) {
    const uint t = gl_LocalInvocationID.x;
    for (uint h = t; h < HEADS; h += T)
        best[0][h] = uint16_t(head == NO_HEAD || head == h ? 0 : FORBIDDEN);
    if (t < 3) least[t] = t == 0 ? 0 : FORBIDDEN;
    barrier();
    for (uint s = 0; s + 1 < steps; s++) {
        const ivec2 q = targets_at(tile, first + s);
        const int base = base_of(q);
        const uint floor_ = s < SETTLED ? 0 : least[s % 3];
        if (t == 0) least[(s + 2) % 3] = FORBIDDEN;
        uint lowest = FORBIDDEN;
        for (uint h = 4 * t; h < HEADS; h += 4 * T) {
            // A cost and the oldest bits, which decide where costs are equal
            uvec4 keys = uvec4(0xffffffffu);
            for (uint high = 0; high < HIGHS; high++) {
                const uint state = high * HEADS + h;
                const uint before = uint(best[s % 2][state >> STEP]);
                const uint less = before - min(before, floor_);
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    const uint cost = min(less + cost_of(state + i, q, base), FORBIDDEN);
                    keys[i] = min(keys[i], cost << 8 | high);
                }
            }
            [[unroll]] for (uint i = 0; i < 4; i++) {
                best[(s + 1) % 2][h + i] = uint16_t(keys[i] >> 8);
                lowest = min(lowest, keys[i] >> 8);
            }
            const uvec4 high = keys & 0xffu;
            trace.v[trace_at + ((s + 1) * HEADS + h) / 4] =
                high.x | high.y << 8 | high.z << 16 | high.w << 24;
        }
        lowest = subgroupMin(lowest);
        if (subgroupElect()) atomicMin(least[(s + 1) % 3], lowest);
        barrier();
    }
    // The cheapest end. Among equal costs, the lowest state wins.
    const uint s = steps - 1;
    const ivec2 q = targets_at(tile, first + s);
    const int base = base_of(q);
    const uint stride = head == NO_HEAD ? 1 : HEADS, from = head == NO_HEAD ? 0 : head;
    if (t == 0) least[0] = last = 0xffffffffu;
    barrier();
    uint lowest = 0xffffffffu;
    for (uint state = from + t * stride; state < STATES; state += T * stride) {
        lowest = min(lowest, uint(best[s % 2][state >> STEP]) + cost_of(state, q, base));
    }
    lowest = subgroupMin(lowest);
    if (subgroupElect()) atomicMin(least[0], lowest);
    barrier();
    lowest = least[0];
    for (uint state = from + t * stride; state < STATES; state += T * stride) {
        if (uint(best[s % 2][state >> STEP]) + cost_of(state, q, base) == lowest) {
            atomicMin(last, state);
            break;
        }
    }
    memoryBarrierBuffer();
    barrier();
    return last;
}

// The state before `state`, which is the s-th of a path.
uint state_before(uint state, uint s, uint trace_at) {
    const uint head = state >> STEP, at = s * HEADS + head;
    const uint high = trace.v[trace_at + at / 4] >> (8 * (at % 4)) & 0xffu;
    return high << (STATE_BITS - STEP) | head;
}

void main() {
    const uint trace_at = gl_WorkGroupID.x * STEPS * HEADS / 4;
    for (uint tile = gl_WorkGroupID.x; tile < tiles; tile += gl_NumWorkGroups.x) {
        uint state = find_path(tile, STEPS - SEAM, 2 * SEAM, NO_HEAD, trace_at);
        for (uint s = 2 * SEAM - 1; s >= SEAM; s--) state = state_before(state, s, trace_at);
        barrier();
        state = find_path(tile, 0, STEPS, state & (HEADS - 1), trace_at);
        if (gl_LocalInvocationID.x == 0) {
            for (uint row = 16; row-- > 0;) {
                uint64_t bits = 0;
                [[unroll]] for (uint i = 0; i < 8; i++) {
                    bits |= uint64_t(state & (HIGHS - 1)) << (STEP * i);
                    const uint s = row * 8 + 7 - i;
                    if (s > 0) state = state_before(state, s, trace_at);
                }
                rows.v[(tile * 16 + row) * 2] = uint(bits);
                rows.v[(tile * 16 + row) * 2 + 1] = uint(bits >> 32);
            }
        }
        barrier();
    }
}
