// Rows of a linear layer. Where EXPERTS is set, the layer multiplies each slot (a place in the
// choices of a row) with the matrix of its expert, and a workgroup takes slots of one expert.

layout(constant_id = 29) const bool EXPERTS = false;

// Slots by expert, as choose.comp leaves them. No block has slots of two experts.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer Choices {
    uint blocks;
    uint experts;
    uint room;    // for blocks
    uint v[];     // [room, 3]: expert, first place, places; then the slots by place
};

uint own_expert = 0, all_experts = 1, row_slots = 1;
uint64_t slots_at = 0;

// The rows of activations that this workgroup takes, `most` at most: from m0 on, of the `live` rows
// from `first` on. With EXPERTS these are places, `more[0].codes` has the choices, and `more_n` the
// slots that share a row of activations and the workgroups that share a block, 16 bits each.
// Returns whether there are any.
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

// Where row or place `i` of the activations is read, and where its products go.
uint output_row(uint i) { return EXPERTS ? U32(slots_at).v[i] : i; }
uint input_row(uint i) { return EXPERTS ? U32(slots_at).v[i] / row_slots : i; }

// Row `row` of a matrix of n rows, among those of all experts, and how many these are.
uint matrix_row(uint n, uint row) { return EXPERTS ? own_expert * n + row : row; }
uint matrix_rows(uint n) { return EXPERTS ? all_experts * n : n; }
