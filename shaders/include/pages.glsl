// Merges page partials of attention into rows. Needs args.glsl, attention.glsl and row.glsl.

// Partials are [live row, heads, slots, head_dim + 2]: channels, then the largest score and the sum
// of exponentials. `row_partials` returns the address of a row's partials, and `head_partials` the
// offset in bytes of the partials of a column's head.
uint64_t row_partials(RowArgs a, uint index, uint cols, uint head_dim) {
    return uint64_t(a.x) + uint64_t(index) * (cols / head_dim * a.slots * (head_dim + 2) * 4);
}
uint head_partials(RowArgs a, uint col, uint head_dim) {
    return col / head_dim * (a.slots * (head_dim + 2) * 4);
}

// Merges the page partials of a block of attention's live row `index`, in page order.
void join_pages(RowArgs a, uint index, uint block, uint cols, uint head_dim, out float v[PER]) {
    const uint AHEAD = 4; // pages that are loaded at the same time
    const uint position = a.step_.v[STEP_POSITIONS * a.max_rows + a.step_.first + index];
    const uint pages = position / PAGE - first_visible(position, a.window) / PAGE + 1;
    const uint col = min(column(block), cols - PER), head = head_partials(a, col, head_dim);
    const uint64_t row = row_partials(a, index, cols, head_dim);
    Running run = Running(0.0, 0.0);
    for (uint page0 = 0; page0 < pages; page0 += AHEAD) {
        Running ml[AHEAD];
        float o[AHEAD][PER];
        [[unroll]] for (uint k = 0; k < AHEAD; k++) {
            const uint64_t from = row + uint64_t(min(page0 + k, pages - 1) * ((head_dim + 2) * 4));
            SharedF32 totals = SharedF32(from + head_dim * 4 + uint64_t(head));
            SharedF32 channels = SharedF32(from + uint64_t(head + col % head_dim * 4));
            ml[k] = Running(totals.v[0], totals.v[1]);
            [[unroll]] for (uint i = 0; i < PER; i++) o[k][i] = channels.v[i];
        }
        [[unroll]] for (uint k = 0; k < AHEAD; k++) {
            if (page0 + k >= pages) break;
            if (page0 + k == 0) {
                run = ml[0];
                [[unroll]] for (uint i = 0; i < PER; i++) v[i] = o[0][i];
            } else {
                float fa, fb;
                run = join(run, ml[k], fa, fb);
                [[unroll]] for (uint i = 0; i < PER; i++) v[i] = join_output(v[i], o[k][i], fa, fb);
            }
        }
    }
    [[unroll]] for (uint i = 0; i < PER; i++) {
        precise float y = v[i] / run.l;
        v[i] = column(block) < cols ? y : 0.0;
    }
}

// Stores a merged block in place of its first page's channels. Another workgroup reads it there.
void store_joined(RowArgs a, uint index, uint block, uint cols, uint head_dim, float v[PER]) {
    const uint col = column(block), at = head_partials(a, col, head_dim) + col % head_dim * 4;
    SharedF32 to = SharedF32(row_partials(a, index, cols, head_dim) + uint64_t(at));
    [[unroll]] for (uint i = 0; i < PER; i++) to.v[i] = v[i];
}
void load_joined(RowArgs a, uint index, uint block, uint cols, uint head_dim, out float v[PER]) {
    const uint col = column(block), at = head_partials(a, col, head_dim) + col % head_dim * 4;
    SharedF32 from = SharedF32(row_partials(a, index, cols, head_dim) + uint64_t(at));
    [[unroll]] for (uint i = 0; i < PER; i++) v[i] = from.v[i];
}
