// Linear layers by matrix instructions of any shape that a device lists. Codes are converted to
// int8 once for up to NT tiles of NN rows of activations. Products of int8 are exact and are scaled
// once. The including file defines PIECE (a vector of 32-bit words) and PIECE_BYTES.
//
// A subgroup has 16 matrix rows. It unpacks a chunk of 128 columns of them into its part of shared
// memory and multiplies it by the same columns of the activations, also in shared memory. With few
// rows of activations, the subgroups of a workgroup have the same matrix rows but different chunks,
// and their sums are added at the end. With MANY, they have different matrix rows and process all
// chunks in step, so that the activations are loaded once for all of them.
//
// codes_to_int8.glsl and trellis_to_int8.glsl decode the codes. If groups of columns have scales, a
// chunk is one group and the sums have the bits of linear.glsl: a subgroup computes its parts in
// the order in which they are added. No element of a matrix is assumed to be in a certain lane:
// scales are matrices too, with equal rows or columns.

#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_EXT_integer_dot_product : require
#include "common.glsl"
#include "args.glsl"

layout(local_size_x_id = 0) in;
layout(constant_id = 1) const uint SG = 32;      // lanes of a subgroup
layout(constant_id = 2) const uint NT = 1;       // tiles of NN rows of activations
layout(constant_id = 4) const uint CODE = 1;     // see codes.glsl
layout(constant_id = 5) const uint W = 32;       // columns of a step
layout(constant_id = 6) const bool GROUPED = false;
layout(constant_id = 7) const bool MANY = false; // not with GROUPED
layout(constant_id = 8) const bool SELECTED = false;
layout(constant_id = 9) const uint T = 128;      // threads
layout(constant_id = 14) const uint MM = 16;     // the device's shape: MM x KK times KK x NN
layout(constant_id = 15) const uint NN = 8;
layout(constant_id = 16) const uint KK = 32;
layout(constant_id = 17) const uint STEP = 4;    // of a trellis, see trellis.glsl
layout(constant_id = 19) const uint MULTIPLIER = 1;
const uint SUBGROUPS = T / SG;

#include "codes.glsl"
#include "trellis.glsl"
#include "heads.glsl"

layout(push_constant, scalar) uniform Push {
    LinearArgs args;
    uint more_n;    // rows of the other matrices, 16 bits each; 0: none
    Matrix more[2];
    uint64_t epilogue;  // for HEADS
};

#define Weights coopmat<int8_t, gl_ScopeSubgroup, MM, KK, gl_MatrixUseA>
#define Activations coopmat<int8_t, gl_ScopeSubgroup, KK, NN, gl_MatrixUseB>
#define Product coopmat<int, gl_ScopeSubgroup, MM, NN, gl_MatrixUseAccumulator>
#define Sums coopmat<float, gl_ScopeSubgroup, MM, NN, gl_MatrixUseAccumulator>
#define BY_ROWS gl_CooperativeMatrixLayoutRowMajor
#define BY_COLUMNS gl_CooperativeMatrixLayoutColumnMajor

const uint CHUNK = 128;                   // columns that a subgroup unpacks at once
const uint R = 16, RT = R / MM;           // matrix rows of a subgroup, and tiles of them
const uint C = NT * NN;                   // rows of activations
const bool TRELLIS = CODE == CODE_TRELLIS;
// Pieces between rows in shared memory, 16 bytes more than a chunk to start in different banks.
const uint PITCH = (CHUNK + 16) / PIECE_BYTES, PLANE = R * PITCH;
const uint WORDS_OF_PIECE = PIECE_BYTES / 4;
const uint TILE = R * NN / WORDS_OF_PIECE; // pieces of the products of one tile
const uint AREA = PLANE > TILE ? PLANE : TILE;
const uint OWNERS = MANY ? 1 : SUBGROUPS;  // parts of shared memory with activations
const uint OWNER_THREADS = T / OWNERS;
shared PIECE stage[SUBGROUPS * AREA + OWNERS * C * PITCH];
const uint FACTORS = GROUPED ? R + C : 1;
// Scales of the current group: of the matrix rows, then of the activations.
shared float factors[SUBGROUPS * FACTORS];
const uint OWN = GROUPED ? PARTS / SUBGROUPS : 1; // parts of a subgroup
const uint LEVELS = OWN > 4 ? 3 : OWN > 2 ? 2 : 1;

// Orders shared memory among threads that share it: writes before the fence are visible after it,
// and reads before it precede later writes.
void fence() {
    if (MANY) barrier();
    else controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
                        gl_SemanticsAcquireRelease);
}

// Stores columns 16 i to 16 i + 15 of matrix row `row` of a chunk.
void put(uint row, uint i, uvec4 columns) {
    const uint at = gl_SubgroupID * AREA + row * PITCH + i * (16 / PIECE_BYTES);
    PUT(at, columns);
}

#include "codes_to_int8.glsl"
#include "trellis_to_int8.glsl"

// Pieces of activations and factors that a thread loads for a chunk.
const uint X_EACH = (C * (CHUNK / 16) + OWNER_THREADS - 1) / OWNER_THREADS;
const uint F_EACH = (FACTORS + SG - 1) / SG;
struct Chunk {
    Codes codes;
    Tiles tiles;
    uvec4 x[X_EACH];
    float factor[F_EACH];
};

// Returns the row and the group of 16 columns of this thread's piece k of a chunk's activations.
uvec2 x_place(uint k) {
    const uint i = k * OWNER_THREADS + (MANY ? gl_LocalInvocationID.x : gl_SubgroupInvocationID);
    return uvec2(i / (CHUNK / 16), i % (CHUNK / 16));
}

// Loads chunk c, for matrix rows from n0 on and rows of activations from m0 on. After the last row,
// the last row is loaded again.
void fetch(LinearArgs a, uint n0, uint m0, uint first, uint live, uint c, inout Chunk chunk) {
    if (TRELLIS) fetch_tiles(a, n0, c, chunk.tiles);
    else fetch_codes(a, n0, c, chunk.codes);
    [[unroll]] for (uint k = 0; k < X_EACH; k++) {
        const uvec2 place = x_place(k);
        const uint row = first + min(m0 + place.x, live - 1);
        const uint piece = min(c * (CHUNK / 16) + place.y, a.stride / 16 - 1);
        chunk.x[k] = U32x4(a.x + uint64_t(row * a.stride + piece * 16)).v[0];
    }
    if (!GROUPED) return;
    [[unroll]] for (uint k = 0; k < F_EACH; k++) {
        const uint i = k * SG + gl_SubgroupInvocationID;
        const uint row = min(n0 + i, a.n - 1), m = min(m0 + min(i, FACTORS - 1) - R, live - 1);
        // A chunk is one step, so the side has one scale of each of eight rows in turn.
        const uint at = (row / 8 * a.steps + c) * 8 + row % 8;
        if (i < R) chunk.factor[k] = float(F16(a.matrix.side).v[at]) * UNIT;
        else chunk.factor[k] = a.sx.v[(first + m) * a.steps + c] * PRODUCT_UNIT;
    }
}

void unpack(Chunk chunk, uint x0) {
    if (TRELLIS) unpack_tiles(chunk.tiles);
    else unpack_codes(chunk.codes);
    [[unroll]] for (uint k = 0; k < X_EACH; k++) {
        const uvec2 place = x_place(k);
        const uint at = x0 + place.x * PITCH + place.y * (16 / PIECE_BYTES);
        if (place.x < C) PUT(at, chunk.x[k]);
    }
    if (!GROUPED) return;
    [[unroll]] for (uint k = 0; k < F_EACH; k++) {
        const uint i = k * SG + gl_SubgroupInvocationID;
        if (i < FACTORS) factors[gl_SubgroupID * FACTORS + i] = chunk.factor[k];
    }
}

void main() {
    const uint live = live_rows(args.step_, SELECTED), m0 = gl_WorkGroupID.x * C;
    if (m0 > 0 && m0 >= live) return;
    const uint ROWS = MANY ? SUBGROUPS * R : R; // per workgroup
    LinearArgs a = args;
    uint block = gl_WorkGroupID.y, which = 0;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint blocks = (a.n + ROWS - 1) / ROWS, n = more_n >> (16 * i) & 0xffff;
        if (block < blocks || n == 0) break;
        block -= blocks;
        a.matrix = more[i];
        a.n = n;
        which = i + 1;
    }
    const uint n0 = block * ROWS + (MANY ? gl_SubgroupID * R : 0);
    const uint first = live_row(a.step_, SELECTED, 0);
    const uint cols = a.stride, chunks = (cols + CHUNK - 1) / CHUNK;
    const uint mine = gl_SubgroupID * AREA;
    const uint x0 = SUBGROUPS * AREA + (MANY ? 0 : gl_SubgroupID * (C * PITCH));

    Product sums[RT][NT];
    Sums parts[RT][NT], waiting[LEVELS][RT][NT];
    [[unroll]] for (uint t = 0; t < RT; t++)
        [[unroll]] for (uint n = 0; n < NT; n++) {
            sums[t][n] = Product(0);
            if (GROUPED) parts[t][n] = Sums(0.0);
        }

    Chunk chunk;
    const uint walk = GROUPED ? PARTS : OWNERS;
    [[unroll]] for (uint turn = 0; turn < OWN; turn++) {
        const uint part = (MANY ? 0 : gl_SubgroupID) * OWN + turn;
        fetch(a, n0, m0, first, live, min(part, chunks - 1), chunk);
        // All subgroups have the same number of rounds, because some drivers treat a subgroup's
        // barrier as one of the workgroup.
        const uint end = part + (chunks + walk - 1) / walk * walk;
        for (uint c = part; c < end; c += walk) {
            fence();
            unpack(chunk, x0);
            fence();
            // The next codes are loaded while these are multiplied. After the last codes, the last
            // ones are loaded again.
            fetch(a, n0, m0, first, live, min(c + walk, chunks - 1), chunk);
            [[unroll]] for (uint k = 0; k < CHUNK; k += KK) {
                if (c * CHUNK + k < cols) {
                    Weights w[RT];
                    [[unroll]] for (uint t = 0; t < RT; t++) {
                        const uint from = mine + t * MM * PITCH + k / PIECE_BYTES;
                        coopMatLoad(w[t], stage, from, PITCH, BY_ROWS);
                    }
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        Activations b;
                        const uint from = x0 + n * NN * PITCH + k / PIECE_BYTES;
                        coopMatLoad(b, stage, from, PITCH, BY_COLUMNS);
                        [[unroll]] for (uint t = 0; t < RT; t++)
                            sums[t][n] = coopMatMulAdd(w[t], b, sums[t][n]);
                    }
                }
            }
            if (GROUPED && c < chunks)
                [[unroll]] for (uint t = 0; t < RT; t++) {
                    Sums scale;
                    const uint own = gl_SubgroupID * FACTORS;
                    coopMatLoad(scale, factors, own + t * MM, 0, BY_COLUMNS);
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        Sums sx;
                        coopMatLoad(sx, factors, own + R + n * NN, 0, BY_ROWS);
                        const Sums whole = Sums(sums[t][n]);
                        [[unroll]] for (uint i = 0; i < whole.length(); i++) {
                            precise float product = whole[i] * sx[i];
                            precise float more_ = fma(product, scale[i], parts[t][n][i]);
                            parts[t][n][i] = more_;
                        }
                        sums[t][n] = Product(0);
                    }
                }
        }
        // Adds the part to the one that waits for it, or keeps it until the next part is done.
        if (GROUPED)
            [[unroll]] for (uint level = 0; level < LEVELS; level++)
                [[unroll]] for (uint t = 0; t < RT; t++)
                    [[unroll]] for (uint n = 0; n < NT; n++) {
                        if ((turn + 1) % (2 << level) == 0)
                            parts[t][n] = waiting[level][t][n] + parts[t][n];
                        else if ((turn + 1) % (1 << level) == 0)
                            waiting[level][t][n] = parts[t][n];
                    }
        if (GROUPED && turn + 1 < OWN)
            [[unroll]] for (uint t = 0; t < RT; t++)
                [[unroll]] for (uint n = 0; n < NT; n++) parts[t][n] = Sums(0.0);
    }

    // Adds the parts of the subgroups, one tile of activations at a time. A thread adds some of the
    // elements.
    const uint thread = MANY ? gl_SubgroupInvocationID : gl_LocalInvocationID.x;
    const uint threads = MANY ? SG : T;
    [[unroll]] for (uint n = 0; n < NT; n++) {
        barrier();
        [[unroll]] for (uint t = 0; t < RT; t++) {
            const uint to = mine + t * MM * NN / WORDS_OF_PIECE;
            if (GROUPED) coopMatStore(parts[t][n], stage, to, NN / WORDS_OF_PIECE, BY_ROWS);
            else coopMatStore(sums[t][n], stage, to, NN / WORDS_OF_PIECE, BY_ROWS);
        }
        barrier();
        [[unroll]] for (uint k = 0; k < R * NN; k += threads) {
            const uint i = k + thread, row = n0 + i / NN, m = m0 + n * NN + i % NN, r = first + m;
            if (i >= R * NN || row >= a.n || m >= live) continue;
            const uint from = (MANY ? mine : 0) + i / WORDS_OF_PIECE, word = i % WORDS_OF_PIECE;
            float y;
            if (GROUPED) {
                float v[SUBGROUPS];
                [[unroll]] for (uint q = 0; q < SUBGROUPS; q++)
                    v[q] = uintBitsToFloat(stage[q * AREA + from][word]);
                [[unroll]] for (uint d = 1; d < SUBGROUPS; d *= 2)
                    [[unroll]] for (uint q = 0; q < SUBGROUPS; q += 2 * d) {
                        precise float both = v[q] + v[q + d];
                        v[q] = both;
                    }
                y = v[0];
            } else {
                int sum = 0;
                [[unroll]] for (uint q = 0; q < OWNERS; q++)
                    sum += int(stage[q * AREA + from][word]);
                y = TRELLIS ? tile_result(sum, a.sx.v[r], a.matrix.side, row)
                            : int8_result(sum, a.sums.v[r], a.sx.v[r], a.matrix.side, row);
            }
            a.matrix.out_.v[r * a.n + row] = y;
        }
    }
    if (HEADS) finish_heads(epilogue, which, n0, R, m0, min(C, live - m0), first);
}
