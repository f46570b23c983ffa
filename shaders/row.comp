// Work on whole rows of the residual stream, one workgroup a row: `x += rmsnorm(add) (1 + w_add)`, `z = rmsnorm(x) (1 + w)`, then the
// Hadamard and the rounding to int8 that the next linear layer wants. Each part can be left out.
//
// A subgroup owns blocks of 128 columns, a lane every SG-th column of a block: the Hadamard is shuffles within the subgroup, and sums
// run in an order that the shape alone decides.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;
layout(constant_id = 2) const uint T = 512;       // threads
layout(constant_id = 3) const uint COLS = 128;
layout(constant_id = 4) const bool ADD = false;   // x += rmsnorm(add) (1 + w_add)
layout(constant_id = 5) const bool NORM = false;  // z = rmsnorm(x) (1 + w); without it z = x
layout(constant_id = 6) const bool SELECTED = false;
layout(constant_id = 7) const bool PREPARE = false;
layout(constant_id = 8) const bool HADAMARD = false;
layout(constant_id = 9) const bool INT8 = false;  // else the activations stay f32
layout(constant_id = 10) const uint GROUP = 0;    // columns that share a scale; 0: all
layout(constant_id = 11) const bool GLU = false;  // x = gelu_tanh(x) * add
layout(constant_id = 12) const uint MERGE = 0;    // channels of a head: x holds attention's page partials, to be joined; 0: it does not
layout(constant_id = 13) const bool FULL = false; // no subgroup has a block less than another, none is cut short

layout(push_constant, scalar) uniform Push {
    F32 x;      // [rows, COLS]
    F32 add;    // [rows, COLS]
    F32 w_add;  // [COLS]
    F32 w;      // [COLS]
    F32 z;      // [rows, COLS]; where only prepared activations are wanted, 0
    uint64_t values; // i8 or f32 [rows, stride]
    F32 scales; // [rows, groups]
    I32 sums;   // [rows, groups]
    Step step_;
    float eps;
    uint stride; // bytes of a row of values
    uint max_rows;
    uint window; // of attention whose partials are joined
    uint slots;  // pages of a row's partials
};

const uint PER = 128 / SG;                          // columns of a block that a lane has
const uint TEAMS = T / SG;
const uint BLOCKS = (COLS + 127) / 128;
const uint MINE = (BLOCKS + TEAMS - 1) / TEAMS;     // blocks of a subgroup
// Lanes and steps that share a group: GROUP columns are GROUP / SG steps of all lanes, or GROUP lanes of one step.
const uint SPAN = GROUP == 0 ? PER : (GROUP > SG ? GROUP / SG : 1);
const uint LANES = GROUP == 0 || GROUP > SG ? SG : GROUP;
const uint GROUPS = GROUP == 0 ? 1 : COLS / GROUP;

shared float parts[TEAMS];
shared int int_parts[TEAMS];

float reduce_sum(float v) {
    precise float s = v;
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    if (gl_SubgroupInvocationID == 0) parts[gl_SubgroupID] = s;
    barrier();
    precise float all = 0.0;
    [[unroll]] for (uint i = 0; i < TEAMS; i += SG)
        if (i + gl_SubgroupInvocationID < TEAMS) all = all + parts[i + gl_SubgroupInvocationID];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = all + subgroupShuffleXor(all, d);
    barrier();
    return all;
}

float reduce_max(float v) {
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) v = max(v, subgroupShuffleXor(v, d));
    if (gl_SubgroupInvocationID == 0) parts[gl_SubgroupID] = v;
    barrier();
    float all = 0.0;
    [[unroll]] for (uint i = 0; i < TEAMS; i += SG)
        if (i + gl_SubgroupInvocationID < TEAMS) all = max(all, parts[i + gl_SubgroupInvocationID]);
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all = max(all, subgroupShuffleXor(all, d));
    barrier();
    return all;
}

int reduce_int(int v) {
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) v += subgroupShuffleXor(v, d);
    if (gl_SubgroupInvocationID == 0) int_parts[gl_SubgroupID] = v;
    barrier();
    int all = 0;
    [[unroll]] for (uint i = 0; i < TEAMS; i += SG)
        if (i + gl_SubgroupInvocationID < TEAMS) all += int_parts[i + gl_SubgroupInvocationID];
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) all += subgroupShuffleXor(all, d);
    return all;
}

// 1 / sqrt(mean square + eps) of the whole row.
float inv_rms(float v[MINE][PER]) {
    precise float s = 0.0;
    [[unroll]] for (uint b = 0; b < MINE; b++)
        [[unroll]] for (uint i = 0; i < PER; i++) s = fma(v[b][i], v[b][i], s);
    precise float mean = reduce_sum(s) / float(COLS) + eps;
    return 1.0 / sqrt(mean);
}

// A bit for each of 32 columns: minus where it is set; see tensor/hadamard.rs.
uint signs(uint word) {
    uint h = (word + 1) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x21f0aaadu;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

// Signs, then the butterflies of one block: strides 64 ... SG within a lane, the rest between lanes.
void hadamard(inout float v[PER], uint block) {
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < PER; i++) {
        const uint col = block * 128 + i * SG + lane;
        v[i] = uintBitsToFloat(floatBitsToUint(v[i]) ^ ((signs(col / 32) >> (col % 32) & 1) << 31));
    }
    [[unroll]] for (uint half_ = PER / 2; half_ > 0; half_ /= 2)
        [[unroll]] for (uint i = 0; i < PER; i++)
            if ((i & half_) == 0) {
                precise float a = v[i] + v[i + half_];
                precise float b = v[i] - v[i + half_];
                v[i] = a;
                v[i + half_] = b;
            }
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
        [[unroll]] for (uint i = 0; i < PER; i++) {
            const float other = subgroupShuffleXor(v[i], d);
            precise float a = (lane & d) == 0 ? v[i] + other : other - v[i];
            v[i] = a;
        }
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float a = v[i] * 0.08838834764831845;
        v[i] = a;
    }
}

// Joins the page partials of a row's attention, in page order: x is [live row, COLS / MERGE, slots, MERGE + 2].
void merge_pages(out float v[MINE][PER]) {
    const uint r = gl_WorkGroupID.x;
    const uint position = step_.v[STEP_POSITIONS * max_rows + step_.first + r];
    const uint pages = position / PAGE - first_visible(position, window) / PAGE + 1;
    [[unroll]] for (uint b = 0; b < MINE; b++)
        [[unroll]] for (uint i = 0; i < PER; i++) {
            const uint col = (gl_SubgroupID + b * TEAMS) * 128 + i * SG + gl_SubgroupInvocationID;
            v[b][i] = 0.0;
            if (!FULL && col >= COLS) continue;
            uint at = (r * (COLS / MERGE) + col / MERGE) * slots * (MERGE + 2);
            Running run = Running(x.v[at + MERGE], x.v[at + MERGE + 1]);
            float o = x.v[at + col % MERGE];
            for (uint page = 1; page < pages; page++) {
                at += MERGE + 2;
                float fa, fb;
                run = join(run, Running(x.v[at + MERGE], x.v[at + MERGE + 1]), fa, fb);
                o = join_output(o, x.v[at + col % MERGE], fa, fb);
            }
            precise float y = o / run.l;
            v[b][i] = y;
        }
}

void main() {
    const uint lane = gl_SubgroupInvocationID, team = gl_SubgroupID;
    const uint live = live_rows(step_, SELECTED);
    if (gl_WorkGroupID.x >= live) return;
    const uint r = live_row(step_, SELECTED, gl_WorkGroupID.x);
    // A norm of selected rows gathers them; what is prepared afterwards is numbered like its output.
    const uint from = SELECTED && NORM ? step_.v[STEP_SELECTED * max_rows + r] : r;

    float v[MINE][PER];
    if (MERGE == 0) {
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                v[b][i] = FULL || col < COLS ? x.v[from * COLS + col] : 0.0;
            }
    } else {
        merge_pages(v);
    }
    float weights[NORM ? MINE : 1][PER];
    if (NORM)
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                weights[b][i] = FULL || col < COLS ? w.v[col] : 0.0;
            }
    if (ADD) {
        float a[MINE][PER], add_weights[GLU ? 1 : MINE][PER];
        if (!GLU)
            [[unroll]] for (uint b = 0; b < MINE; b++)
                [[unroll]] for (uint i = 0; i < PER; i++) {
                    const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                    add_weights[b][i] = FULL || col < COLS ? w_add.v[col] : 0.0;
                }
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                a[b][i] = FULL || col < COLS ? add.v[from * COLS + col] : 0.0;
            }
        if (GLU) {
            [[unroll]] for (uint b = 0; b < MINE; b++)
                [[unroll]] for (uint i = 0; i < PER; i++) v[b][i] = gelu_tanh(v[b][i]) * a[b][i];
        } else {
            const float inv = inv_rms(a);
            [[unroll]] for (uint b = 0; b < MINE; b++)
                [[unroll]] for (uint i = 0; i < PER; i++) {
                    const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                    if (FULL || col < COLS) {
                        precise float scaled = a[b][i] * inv;
                        precise float sum = fma(scaled, 1.0 + add_weights[b][i], v[b][i]);
                        v[b][i] = sum;
                        if (!SELECTED) x.v[from * COLS + col] = sum;
                    }
                }
        }
    }
    if (NORM) {
        const float inv = inv_rms(v);
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                if (FULL || col < COLS) {
                    precise float scaled = v[b][i] * inv;
                    precise float y = scaled * (1.0 + weights[b][i]);
                    v[b][i] = y;
                }
            }
    }
    if (uint64_t(z) != 0)
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                if (FULL || col < COLS) z.v[r * COLS + col] = v[b][i];
            }
    if (!PREPARE) return;

    if (HADAMARD)
        [[unroll]] for (uint b = 0; b < MINE; b++) hadamard(v[b], team + b * TEAMS);
    if (!INT8) {
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) {
                const uint col = (team + b * TEAMS) * 128 + i * SG + lane;
                if (FULL || col < COLS) F32(values).v[r * (stride / 4) + col] = v[b][i];
            }
        return;
    }

    float row_max = 0.0;
    if (GROUP == 0) {
        [[unroll]] for (uint b = 0; b < MINE; b++)
            [[unroll]] for (uint i = 0; i < PER; i++) row_max = max(row_max, abs(v[b][i]));
        row_max = reduce_max(row_max);
    }
    int row_sum = 0;
    [[unroll]] for (uint b = 0; b < MINE; b++)
        [[unroll]] for (uint i0 = 0; i0 < PER; i0 += SPAN) {
            float most = row_max;
            if (GROUP != 0) {
                [[unroll]] for (uint i = i0; i < i0 + SPAN; i++) most = max(most, abs(v[b][i]));
                [[unroll]] for (uint d = LANES / 2; d > 0; d /= 2) most = max(most, subgroupShuffleXor(most, d));
            }
            precise float inv = most == 0.0 ? 0.0 : 127.0 / most;
            int sum = 0;
            const uint first = (team + b * TEAMS) * 128 + i0 * SG + lane;
            [[unroll]] for (uint i = i0; i < i0 + SPAN; i++) {
                const uint col = first + (i - i0) * SG;
                precise float scaled = v[b][i] * inv;
                const int q = int(clamp(roundEven(scaled), -127.0, 127.0));
                if (FULL || col < COLS) I8(values).v[r * stride + col] = int8_t(q);
                sum += q;
            }
            if (GROUP == 0) {
                row_sum += sum;
                continue;
            }
            [[unroll]] for (uint d = LANES / 2; d > 0; d /= 2) sum += subgroupShuffleXor(sum, d);
            if (lane % LANES == 0 && (FULL || first < COLS)) {
                precise float scale = most / 127.0;
                scales.v[r * GROUPS + first / GROUP] = scale;
                sums.v[r * GROUPS + first / GROUP] = sum;
            }
        }
    if (GROUP == 0) {
        row_sum = reduce_int(row_sum);
        if (gl_LocalInvocationID.x == 0) {
            precise float scale = row_max / 127.0;
            scales.v[r] = scale;
            sums.v[r] = row_sum;
        }
    }
}
