// Attention's page partials joined into rows. Needs args.glsl, attention.glsl and row.glsl.

// Joins the page partials of a block of attention's live row `index`, in page order: x is [live row, heads, slots, head_dim + 2].
void join_pages(RowArgs a, uint index, uint block, uint cols, uint head_dim, out float v[PER]) {
    const uint AHEAD = 4; // pages whose loads are in flight together
    const uint position = a.step_.v[STEP_POSITIONS * a.max_rows + a.step_.first + index];
    const uint pages = position / PAGE - first_visible(position, a.window) / PAGE + 1;
    const uint col = min(column(block), cols - PER);
    const uint at = (index * (cols / head_dim) + col / head_dim) * a.slots * (head_dim + 2);
    SharedF32 partials = SharedF32(uint64_t(a.x));
    Running run = Running(0.0, 0.0);
    for (uint page0 = 0; page0 < pages; page0 += AHEAD) {
        Running ml[AHEAD];
        float o[AHEAD][PER];
        [[unroll]] for (uint k = 0; k < AHEAD; k++) {
            const uint from = at + min(page0 + k, pages - 1) * (head_dim + 2);
            ml[k] = Running(partials.v[from + head_dim], partials.v[from + head_dim + 1]);
            [[unroll]] for (uint i = 0; i < PER; i++) o[k][i] = partials.v[from + col % head_dim + i];
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
