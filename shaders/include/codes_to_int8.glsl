// Converts integer codes of one plane to the int8 operands of linear_matrix.glsl: 16 rows of a
// chunk, in pieces of 16 bytes.

const uint COLUMNS = 128 / BITS;                        // in a piece
const uint OF_STEP = W / COLUMNS;                       // pieces of a step
const uint STEPS = W < CHUNK ? CHUNK / W : 1;           // in a chunk
const uint OF_ROW = STEPS * OF_STEP;                    // pieces of a row in a chunk
const uint EACH = TRELLIS ? 1 : (R * OF_ROW + SG - 1) / SG; // pieces of a lane

struct Codes { uvec4 piece[EACH]; };

// Returns row, index in the step, and step in the chunk of piece k of this lane. Pieces of eight
// rows are contiguous.
uvec3 place_of(uint k) {
    const uint i = k * SG + gl_SubgroupInvocationID, in_row = i / 8 % OF_ROW;
    return uvec3(i / 8 / OF_ROW * 8 + i % 8, in_row / STEPS, in_row % STEPS);
}

void fetch_codes(LinearArgs a, uint n0, uint chunk, out Codes codes) {
    [[unroll]] for (uint k = 0; k < EACH; k++) {
        const uvec3 place = place_of(k);
        const uint row = min(n0 + place.x, a.n - 1), chunks = (a.steps + STEPS - 1) / STEPS;
        const uint at = ((row / 8 * chunks + chunk) * OF_ROW + place.y * STEPS + place.z) * 8
            + row % 8;
        codes.piece[k] = U32x4(a.matrix.codes + uint64_t(at) * 16).v[0];
    }
}

void unpack_codes(Codes codes) {
    [[unroll]] for (uint k = 0; k < EACH; k++) {
        const uvec3 place = place_of(k);
        if (place.x >= R) continue;
        [[unroll]] for (uint i = 0; i < COLUMNS / 16; i++) {
            uvec4 columns;
            [[unroll]] for (uint e = 0; e < 4; e++) {
                const uint fours = 4 * i + e;
                const uint word = codes.piece[k][fours / PER_LOW];
                columns[e] = int8_of(operand(word, fours % PER_LOW, 0, 0));
            }
            put(place.x, (place.z * W + place.y * COLUMNS) / 16 + i, columns);
        }
    }
}

// Value of a row that has one scale.
float int8_result(int sum, int xsum, float sx, uint64_t side, uint n) {
    // Converts the sum to the sum of operands that `row_result` of codes.glsl expects.
    return row_result(CODE == CODE_I2 ? (sum + OFFSET * xsum) / 2 : sum, xsum, sx, side, n);
}
