// Finds the best paths through a trellis for tiles of weights. All costs are integers, so a path
// has the same states as in crates/base/src/tensor/viterbi, which also explains why costs fit in 16
// bits. A workgroup processes some tiles at a time, which share the entries read from the table. A
// thread processes four heads at a time.
//
// Only the least cost of each head is stored, not its state: finding the states again along one
// path takes less time than storing them for all.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_integer_dot_product : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#include "common.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 0) const uint T = 256;
layout(constant_id = 1) const uint N = 1;     // tiles per workgroup at a time
layout(constant_id = 17) const uint STEP = 4; // new bits of a state

const uint STEPS = 128;                 // states per tile
// States on each side of the point where the circle is closed.
const uint SEAM = 40;
const uint STATE_BITS = 16;
const uint HEADS = 1u << (STATE_BITS - STEP); // groups of states with the same successors
const uint HIGHS = 1u << STEP;                // states per head
const uint SETTLED = (STATE_BITS + STEP - 1) / STEP;
const int OFFSET = 30;                  // makes a state's integers positive
const uint FORBIDDEN = 0xffffu;
const uint NO_HEAD = 0xffffffffu;

layout(buffer_reference, scalar, buffer_reference_align = 8) coherent buffer Costs { uvec2 v[]; };

layout(push_constant, scalar) uniform Push {
    I8 targets;    // [tiles, STEPS, 2] in quarters
    // [2^16 / 4], for each state: its two integers plus OFFSET, then two digits of twice the sum of
    // their squares, with the weights 1 and 127
    U32x4 states;
    Costs costs;   // [workgroups, N, STEPS, HEADS / 4] least cost before a state, 16 bits
    U32 rows;      // [tiles, 16, 2] bits of each row, the low word first
    uint tiles;
};

shared uint16_t best[2][N][HEADS]; // least cost before a state, in alternation
shared uint least[3][N];           // least cost of all, in rotation
shared int weights[N][STEPS];      // factors of the four bytes of a state
shared int bases[N][STEPS];        // make the least possible cost 0
shared uint head_of[N];            // the head at both ends of the path
shared uint last[N];               // the last state of the path

uint tile_of(uint first, uint n) { return min(first + n, tiles - 1); }

uint costs_at(uint n, uint s) {
    return ((gl_WorkGroupID.x * N + n) * STEPS + s) * (HEADS / 4);
}

void load_targets(uint first) {
    for (uint i = gl_LocalInvocationID.x; i < N * STEPS; i += T) {
        const uint n = i / STEPS, s = i % STEPS, at = tile_of(first, n) * STEPS + s;
        const ivec2 q = ivec2(targets.v[2 * at], targets.v[2 * at + 1]);
        const ivec2 base = (q * q + 7) / 8 + OFFSET * q;
        weights[n][s] = int(uint(-q.x) & 0xffu | (uint(-q.y) & 0xffu) << 8 | 0x7f010000u);
        bases[n][s] = base.x + base.y;
    }
}

// Returns the least cost of a head's states, shifted left, plus the oldest bits of the cheapest
// state. Tries every `stride`-th state. A state is number `s` of a path with targets from `from`
// on. If costs are equal, the lowest state wins.
int cheapest_of(uint n, uint from, uint s, uint head, uint first, uint stride) {
    const int w = weights[n][(from + s) % STEPS];
    int least = 0x7fffffff;
    for (uint high = first; high < HIGHS; high += stride) {
        const uint state = high * HEADS + head, at = state >> STEP;
        const uint two = costs.v[costs_at(n, s) + at / 4][at / 2 % 2];
        const int before = int(two >> (16 * (at % 2)) & 0xffffu);
        const int own = dotPacked4x8EXT(int(states.v[state / 4][state % 4]), w);
        least = min(least, (before + own) << 8 | int(high));
    }
    return least;
}

uint state_of(int key, uint head) { return (uint(key) & 0xffu) * HEADS + head; }

// Returns the cheapest state of a head. All lanes of a subgroup search for it.
uint cheapest(uint n, uint from, uint s, uint head) {
    const int key =
        cheapest_of(n, from, s, head, gl_SubgroupInvocationID, gl_SubgroupSize);
    return state_of(subgroupMin(key), head);
}

// Computes the least costs before each of `steps` states, for targets from `from` on. With heads,
// only paths that begin with the tile's head are allowed.
void find_costs(uint from, uint steps, bool with_heads) {
    const uint t = gl_LocalInvocationID.x;
    for (uint i = t; i < N * HEADS / 4; i += T) {
        const uint n = i / (HEADS / 4), h = i % (HEADS / 4) * 4;
        uvec4 cost = uvec4(0);
        if (with_heads)
            cost = mix(uvec4(FORBIDDEN), cost, equal(h + uvec4(0, 1, 2, 3), uvec4(head_of[n])));
        [[unroll]] for (uint k = 0; k < 4; k++) best[0][n][h + k] = uint16_t(cost[k]);
        costs.v[costs_at(n, 0) + h / 4] = uvec2(cost.x | cost.y << 16, cost.z | cost.w << 16);
    }
    for (uint i = t; i < 3 * N; i += T) least[i / N][i % N] = i < N ? 0 : FORBIDDEN;
    barrier();
    for (uint s = 0; s < steps; s++) {
        const uint now = s % 2, at = (from + s) % STEPS;
        int w[N], base[N];
        uint lowest[N];
        [[unroll]] for (uint n = 0; n < N; n++) {
            w[n] = weights[n][at];
            base[n] = bases[n][at] - int(s < SETTLED ? 0 : least[s % 3][n]);
            lowest[n] = FORBIDDEN;
        }
        if (t < N) least[(s + 2) % 3][t] = FORBIDDEN;
        for (uint h = 4 * t; h < HEADS; h += 4 * T) {
            ivec4 cost[N];
            [[unroll]] for (uint n = 0; n < N; n++) cost[n] = ivec4(FORBIDDEN);
            for (uint high = 0; high < HIGHS; high++) {
                const uint state = high * HEADS + h;
                const ivec4 words = ivec4(states.v[state / 4]);
                [[unroll]] for (uint n = 0; n < N; n++) {
                    const int before = int(best[now][n][state >> STEP]) + base[n];
                    [[unroll]] for (uint k = 0; k < 4; k++)
                        cost[n][k] = min(cost[n][k], dotPacked4x8EXT(words[k], w[n]) + before);
                }
            }
            [[unroll]] for (uint n = 0; n < N; n++) {
                const uvec4 c = uvec4(cost[n]);
                [[unroll]] for (uint k = 0; k < 4; k++) best[1 - now][n][h + k] = uint16_t(c[k]);
                costs.v[costs_at(n, s + 1) + h / 4] = uvec2(c.x | c.y << 16, c.z | c.w << 16);
                lowest[n] = min(lowest[n], min(min(c.x, c.y), min(c.z, c.w)));
            }
        }
        [[unroll]] for (uint n = 0; n < N; n++) {
            const uint of_all = subgroupMin(lowest[n]);
            if (subgroupElect()) atomicMin(least[(s + 1) % 3][n], of_all);
        }
        barrier();
    }
    memoryBarrierBuffer();
    barrier();
}

// Finds the head in the middle of the best path over the seam.
void find_heads() {
    const uint steps = 2 * SEAM, from = STEPS - SEAM;
    find_costs(from, steps, false);
    if (gl_LocalInvocationID.x < N) last[gl_LocalInvocationID.x] = 0xffffffffu;
    barrier();
    for (uint i = gl_LocalInvocationID.x; i < N * HEADS; i += T) {
        const uint n = i / HEADS, head = i % HEADS;
        if (uint(best[steps % 2][n][head]) == least[steps % 3][n])
            atomicMin(last[n], state_of(cheapest_of(n, from, steps - 1, head, 0, 1), head));
    }
    barrier();
    for (uint n = gl_SubgroupID; n < N; n += gl_NumSubgroups) {
        uint state = last[n];
        for (uint s = steps - 1; s >= SEAM; s--) state = cheapest(n, from, s - 1, state >> STEP);
        if (subgroupElect()) head_of[n] = state & (HEADS - 1);
    }
    barrier();
}

void main() {
    for (uint first = gl_WorkGroupID.x * N; first < tiles; first += gl_NumWorkGroups.x * N) {
        load_targets(first);
        barrier();
        find_heads();
        find_costs(0, STEPS - 1, true);
        for (uint n = gl_SubgroupID; n < N; n += gl_NumSubgroups) {
            uint state = cheapest(n, 0, STEPS - 1, head_of[n]);
            for (uint row = 16; row-- > 0;) {
                uint64_t bits = 0;
                for (uint i = 0; i < 8; i++) {
                    bits |= uint64_t(state & (HIGHS - 1)) << (STEP * i);
                    const uint s = row * 8 + 7 - i;
                    if (s > 0) state = cheapest(n, 0, s - 1, state >> STEP);
                }
                if (subgroupElect() && first + n < tiles) {
                    const uint at = ((first + n) * 16 + row) * 2;
                    rows.v[at] = uint(bits);
                    rows.v[at + 1] = uint(bits >> 32);
                }
            }
        }
        barrier();
    }
}
