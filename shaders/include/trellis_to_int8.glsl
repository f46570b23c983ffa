// Converts trellis codes to the int8 operands of linear_matrix.glsl. A lane has some rows of a
// tile.

const uint LANE_ROWS = 4;
const uint LANE_WORDS = LANE_ROWS * ROW_BITS / 32;
const uint AT_ONCE = LANE_WORDS % 4 == 0 ? 4 : LANE_WORDS % 2 == 0 ? 2 : 1;
const uint TASKS = 16 / LANE_ROWS;                     // per tile
const uint CHUNK_TILES = CHUNK / 16;                   // in a row of the chunk
const uint LANE_TASKS = TRELLIS ? (CHUNK_TILES * TASKS + SG - 1) / SG : 1;

struct Tiles { uint word[LANE_TASKS][LANE_WORDS + 1]; };

// Returns the tile in the chunk and the group of rows of task k of this lane.
uvec2 task_of(uint k) {
    const uint i = k * SG + gl_SubgroupInvocationID;
    return uvec2(i % CHUNK_TILES, i / CHUNK_TILES);
}

void fetch_tiles(LinearArgs a, uint n0, uint chunk, out Tiles tiles) {
    [[unroll]] for (uint k = 0; k < LANE_TASKS; k++) {
        const uvec2 task = task_of(k);
        const uint tile = min(chunk * CHUNK_TILES + task.x, a.steps - 1), block = tile / 8 * 8;
        const uint width = min(8, a.steps - block);
        // After the last row of tiles, the last one is decoded again.
        const uint tile_row = min(n0, a.n - 1) / 16;
        const uint64_t base = a.matrix.codes + uint64_t(tile_row) * a.steps * (4 * TILE_WORDS);
        const uint first = block * TILE_WORDS + tile % 8 * 4; // first word of the tile
        const uint word = min(task.y, TASKS - 1) * LANE_WORDS;
        const uint before = word == 0 ? TILE_WORDS - 1 : word - 1;
        const uint last = first + before / 4 * 4 * width + before % 4;
        tiles.word[k][0] = U32(base + uint64_t(4 * last)).v[0];
        [[unroll]] for (uint i = 0; i < LANE_WORDS; i += AT_ONCE) {
            const uint next = first + (word + i) / 4 * 4 * width + (word + i) % 4;
            const uint64_t at = base + uint64_t(4 * next);
            if (AT_ONCE == 4) {
                const uvec4 v = U32x4(at).v[0];
                [[unroll]] for (uint e = 0; e < 4; e++) tiles.word[k][1 + i + e] = v[e];
            } else if (AT_ONCE == 2) {
                const uvec2 v = U32x2(at).v[0];
                tiles.word[k][1 + i] = v.x, tiles.word[k][2 + i] = v.y;
            } else {
                tiles.word[k][1 + i] = U32(at).v[0];
            }
        }
    }
}

// Word of the state that ends `end` bits after the start of the lane's first word.
uint word_at(Tiles tiles, uint k, uint end) {
    const uint at = (end + 31) / 32, part = end % 32;
    uint state = tiles.word[k][at];
    if (part >= STATE_BITS) state = state >> (32 - part);
    else if (part > 0) state = state >> (32 - part) | tiles.word[k][at - 1] << part;
    return word_of_state(state & STATE_MASK);
}

void unpack_tiles(Tiles tiles) {
    [[unroll]] for (uint k = 0; k < LANE_TASKS; k++) {
        const uvec2 task = task_of(k);
        if (task.y >= TASKS) continue;
        [[unroll]] for (uint r = 0; r < LANE_ROWS; r++) {
            uvec4 columns;
            [[unroll]] for (uint e = 0; e < 4; e++) {
                const uint a = word_at(tiles, k, r * ROW_BITS + (2 * e + 1) * STEP);
                const uint b = word_at(tiles, k, r * ROW_BITS + (2 * e + 2) * STEP);
                columns[e] = pack32(i8vec4(weight_of(a, 0), weight_of(a, 1), weight_of(b, 0),
                    weight_of(b, 1)));
            }
            put(task.y * LANE_ROWS + r, task.x, columns);
        }
    }
}

// Value of a row from its integer sum.
float tile_result(int sum, float sx, uint64_t side, uint n) {
    precise float product = float(sum) * sx;
    precise float y = product * float(F16(side).v[n]);
    return y;
}
