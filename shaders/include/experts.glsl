// Rows of a linear layer. With EXPERTS, the layer multiplies each slot (an expert that a row chose)
// by the matrix of its expert, and a workgroup has slots of one expert.

layout(constant_id = 29) const bool EXPERTS = false;

// Slots sorted by expert, as choose.comp writes them. A block has slots of one expert only.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Choices {
    uint blocks;
    uint experts;
    uint room;    // number of blocks that fit
    uint v[];     // [room, 3]: expert, first place, places; then the slots by place
};

uint own_expert = 0, all_experts = 1, row_slots = 1;
uint64_t slots_at = 0;

// Sets the rows of activations of this workgroup: at most `most` from m0 on, counted in the `live`
// rows from `first` on. With EXPERTS, rows are places, `more[0].codes` has the choices, and
// `more_n` has the slots per row of activations and the workgroups per block, 16 bits each. Returns
// whether there are any.
bool take_rows(LinearArgs a, bool selected, uint most, uint more_n, Matrix more[2],
    out uint first, out uint m0, out uint live) {
    if (!EXPERTS) {
        live = live_rows(a.step_, selected);
        first = live_row(a.step_, selected, 0);
        m0 = gl_WorkGroupID.x * most;
        return m0 == 0 || m0 < live;
    }
    Choices choices = Choices(more[0].codes);
    const uint share = more_n >> 16, block = gl_WorkGroupID.x / share;
    first = 0, live = 0, m0 = gl_WorkGroupID.x % share * most;
    if (block >= choices.blocks) return false;
    own_expert = choices.v[3 * block];
    first = choices.v[3 * block + 1];
    live = choices.v[3 * block + 2];
    all_experts = choices.experts;
    row_slots = more_n & 0xffff;
    slots_at = more[0].codes + uint64_t(4 * (3 + 3 * choices.room));
    return m0 < live;
}

// Rows where the products and the activations of row or place `i` are stored.
uint output_row(uint i) { return EXPERTS ? U32(slots_at).v[i] : i; }
uint input_row(uint i) { return EXPERTS ? U32(slots_at).v[i] / row_slots : i; }

// Index of row `row` of an n-row matrix in the matrices of all experts, and their number of rows.
uint matrix_row(uint n, uint row) { return EXPERTS ? own_expert * n + row : row; }
uint matrix_rows(uint n) { return EXPERTS ? all_experts * n : n; }
