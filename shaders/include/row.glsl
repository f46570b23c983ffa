// Work on rows of activations in blocks of 128 columns. A subgroup has a block, and a lane PER
// adjacent columns of it. The order of sums depends only on the shape, not on the number of
// threads.
//
// The including file defines SG.

const uint PER = 128 / SG; // columns of a block in a lane

// Returns the first column of this lane in a block.
uint column(uint block) { return block * 128 + gl_SubgroupInvocationID * PER; }

// Rows of a length that lanes divide evenly are loaded in large pieces. Columns outside of the row
// are loaded and dropped, because unconditional loads are issued together. Rows of other lengths,
// which no model has, are loaded column by column.
//
// Data that the subgroup shares has one address, to which each lane adds a 32-bit offset. On some
// devices such loads and stores need no further instruction.
#define LOAD_BLOCK(NAME, FLOATS, FOURS) \
    void NAME(FLOATS from, uint row, uint block, uint cols, out float v[PER]) { \
        const uint64_t base = uint64_t(from) + uint64_t(row) * (4 * cols); \
        const uint col = column(block); \
        if (cols % PER != 0 || cols % 4 != 0) { \
            [[unroll]] for (uint i = 0; i < PER; i++) \
                v[i] = col + i < cols ? FLOATS(base + uint64_t(4 * (col + i))).v[0] : 0.0; \
            return; \
        } \
        const uint64_t at = base + uint64_t(4 * min(col, cols - PER)); \
        if (PER % 4 == 0) { \
            [[unroll]] for (uint i = 0; i < PER; i += 4) { \
                const vec4 four = FOURS(at).v[i / 4]; \
                v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w; \
            } \
        } else { \
            [[unroll]] for (uint i = 0; i < PER; i++) v[i] = FLOATS(at).v[i]; \
        } \
        if (col >= cols) [[unroll]] for (uint i = 0; i < PER; i++) v[i] = 0.0; \
    }
LOAD_BLOCK(load_block, F32, F32x4)
LOAD_BLOCK(load_shared_block, SharedF32, SharedF32x4)

void store_block(F32 to, uint row, uint block, uint cols, float v[PER]) {
    const uint col = column(block);
    const uint64_t at = uint64_t(to) + uint64_t(row) * (4 * cols) + uint64_t(4 * col);
    if (col >= cols) return;
    if (PER % 4 == 0 && cols % PER == 0 && cols % 4 == 0) {
        [[unroll]] for (uint i = 0; i < PER; i += 4)
            F32x4(at).v[i / 4] = vec4(v[i], v[i + 1], v[i + 2], v[i + 3]);
    } else {
        [[unroll]] for (uint i = 0; i < PER; i++)
            if (col + i < cols) F32(at).v[i] = v[i];
    }
}

// Returns the sum of squares of a block, in every lane.
float sum_squares(float v[PER]) {
    precise float s = 0.0;
    [[unroll]] for (uint i = 0; i < PER; i++) s = fma(v[i], v[i], s);
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2) s = s + subgroupShuffleXor(s, d);
    return s;
}

// v = (v + added inv w) scale
void add_scaled_block(inout float v[PER], float added[PER], float inv, float w[PER],
    float scale) {
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float scaled = added[i] * inv;
        precise float sum = fma(scaled, w[i], v[i]) * scale;
        v[i] = sum;
    }
}

// v inv w
void scale_block(inout float v[PER], float inv, float w[PER]) {
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float scaled = v[i] * inv;
        precise float y = scaled * w[i];
        v[i] = y;
    }
}

// Sign bits of 32 columns. A set bit negates its column; see tensor/hadamard.rs.
uint signs(uint word) {
    uint h = (word + 1) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x21f0aaadu;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

float with_sign(float v, uint col) {
    return uintBitsToFloat(floatBitsToUint(v) ^ ((signs(col / 32) >> (col % 32) & 1) << 31));
}

// Butterflies of a block: strides 64 ... PER between lanes, the others inside each lane.
void butterflies(inout float v[PER]) {
    const uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
        [[unroll]] for (uint i = 0; i < PER; i++) {
            const float other = subgroupShuffleXor(v[i], d);
            precise float a = (lane & d) == 0 ? v[i] + other : other - v[i];
            v[i] = a;
        }
    [[unroll]] for (uint half_ = PER / 2; half_ > 0; half_ /= 2)
        [[unroll]] for (uint i = 0; i < PER; i++)
            if ((i & half_) == 0) {
                precise float a = v[i] + v[i + half_];
                precise float b = v[i] - v[i + half_];
                v[i] = a;
                v[i + half_] = b;
            }
}

const float INV_SQRT_128 = 0.08838835; // hadamard::SCALE

// Hadamard transform of a block: signs, then butterflies.
void hadamard(inout float v[PER], uint block) {
    [[unroll]] for (uint i = 0; i < PER; i++) v[i] = with_sign(v[i], column(block) + i);
    butterflies(v);
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float a = v[i] * INV_SQRT_128;
        v[i] = a;
    }
}

// Bits of the largest magnitude in this lane's part of a block.
uint largest(float v[PER]) {
    uint most = 0;
    [[unroll]] for (uint i = 0; i < PER; i++) most = max(most, magnitude(v[i]));
    return most;
}

const uint TRIED = 8; // candidates for the scale of a group

// Rounds a block of row `r` to int8. `group` columns share a scale, and the scales and sums of the
// groups are stored. With one scale for the row (group 0), `row_max` has the bits of the row's
// largest magnitude. Returns the sum of this lane's integers.
int round_block(RowArgs a, float v[PER], uint r, uint block, uint cols, uint group, uint row_max) {
    const uint col = column(block), lanes = group / PER; // in a group
    uint most = group == 0 ? row_max : largest(v);
    if (group != 0)
        [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
            if (d < lanes) most = max(most, subgroupShuffleXor(most, d));
    const Scale scale = scale_of(most);
    // The largest value becomes 127, or in a group the best of TRIED numbers, see
    // reference/rows.rs.
    float top = 127.0, least = 3.4e38;
    if (group != 0)
        [[dont_unroll]] for (uint k = 0; k < TRIED; k += 4) {
            const vec4 numbers = vec4(127.0, 126.0, 125.0, 124.0) - float(k);
            vec4 errors = vec4(0.0);
            const vec4 inv = inverses_of(scale, numbers);
            [[unroll]] for (uint i = 0; i < PER; i++) {
                precise vec4 scaled = v[i] * inv;
                precise vec4 off = roundEven(scaled) - scaled;
                errors = fma(off, off, errors);
            }
            [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
                if (d < lanes) errors += subgroupShuffleXor(errors, d);
            errors /= numbers * numbers;
            [[unroll]] for (uint e = 0; e < 4; e++)
                if (errors[e] < least) {
                    least = errors[e];
                    top = numbers[e];
                }
        }
    const float inv = inverse_of(scale, top);
    int q[PER], sum = 0, squares = 0;
    float products = 0.0;
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float scaled = v[i] * inv;
        q[i] = scale.has_codes ? int(clamp(roundEven(scaled), -127.0, 127.0)) : 0;
        sum += q[i];
        squares += q[i] * q[i];
        products = fma(float(q[i]), scaled, products);
    }
    if (col < cols) {
        const uint64_t at = a.values + uint64_t(r) * a.stride + uint64_t(col);
        if (PER % 4 == 0) {
            [[unroll]] for (uint i = 0; i < PER; i += 4)
                U32(at).v[i / 4] = (q[i] & 0xff) | (q[i + 1] & 0xff) << 8 | (q[i + 2] & 0xff) << 16
                    | q[i + 3] << 24;
        } else {
            [[unroll]] for (uint i = 0; i < PER; i++) I8(at).v[i] = int8_t(q[i]);
        }
    }
    if (group == 0) return sum;
    [[unroll]] for (uint d = SG / 2; d > 0; d /= 2)
        if (d < lanes) {
            sum += subgroupShuffleXor(sum, d);
            squares += subgroupShuffleXor(squares, d);
            products += subgroupShuffleXor(products, d);
        }
    if (col % group == 0 && col < cols) {
        // The scale that fits the codes best by least squares.
        precise float fitted = step_of(scale, top) * (products / float(squares));
        const uint64_t of_row = uint64_t(r) * (4 * (cols / group)),
            at = uint64_t(4 * (col / group));
        F32(uint64_t(a.scales) + of_row + at).v[0] = scale.has_codes ? fitted : scale.max;
        I32(uint64_t(a.sums) + of_row + at).v[0] = sum;
    }
    return 0;
}

// Prepares a block of row `r` for the next linear layer, if scales are per group or the layer reads
// floats. If `z` is set, the block is also stored unchanged. After the Hadamard transform, it is
// stored as int8 or floats in the place that the layer reads.
void finish_block(RowArgs a, inout float v[PER], uint r, uint block, uint cols, bool hadamard_,
    bool int8, uint group) {
    if (uint64_t(a.z) != 0) store_block(a.z, r, block, cols, v);
    if (hadamard_) hadamard(v, block);
    if (int8) round_block(a, v, r, block, cols, group, 0);
    else if (a.values != 0) store_block(F32(a.values), r, block, cols, v);
}
