// Keys and values of the kv head of a workgroup, in a page of the cache or in this step's scratch
// rows. All lanes share an address, to which each adds 32 bits of its own. On some devices loads of
// that form need no further instruction.
//
// The including file defines HEAD_DIM and KV and includes attention_push.glsl.

layout(constant_id = 12) const uint SHARES = 1;   // workgroups that share a kv head
#define SETS (n_kv * SHARES)                      // sets of GQ query heads
const uint KEYS = HEAD_DIM / KB;                  // 16-byte loads of a key
const uint GROUP = GROUP_OF(HEAD_DIM);            // channels of a scale
const uint GROUPS = HEAD_DIM / GROUP;
const uint VALUE_BYTES = HEAD_DIM / 4 * FOUR_BYTES;

struct Head {
    uint64_t keys;         // 16 bytes of each position, then the next 16 bytes of each
    uint64_t key_scales;   // one of each position, then the next of each
    uint64_t values;
    uint64_t value_scales; // like those of keys
    uint positions;        // from one 16 bytes of a key to the next
    uint stride;           // bytes from value to value
};

// `from` of all pages' positions times heads, or of all rows times heads.
Head head_at(uint64_t keys, uint64_t values, uint64_t all, uint from, uint positions, uint stride,
    uint64_t first_value) {
    Head h;
    const uint64_t scales = all * HEAD_DIM + uint64_t(from) * (GROUPS * positions * 2);
    h.keys = keys + uint64_t(from) * (KEYS * positions * 16);
    h.key_scales = keys + scales;
    h.values = values + first_value;
    h.value_scales = values + scales;
    h.positions = positions;
    h.stride = stride;
    return h;
}

// The head of a set of query heads, in physical page `page`.
Head head_of_page(uint set, uint page) {
    const uint from = page * n_kv + set / SHARES;
    const uint64_t all = uint64_t(all_pages) * (n_kv * PAGE),
        first_value = uint64_t(from) * (PAGE * VALUE_BYTES);
    return head_at(uint64_t(k), v, all, from, PAGE, VALUE_BYTES, first_value);
}

Head head_of_scratch(uint set) {
    const uint head = set / SHARES;
    const uint64_t all = uint64_t(max_rows) * n_kv, first_value = uint64_t(head * VALUE_BYTES);
    return head_at(uint64_t(scratch_k), scratch_v, all, head, max_rows, n_kv * VALUE_BYTES,
        first_value);
}

// 16 bytes of the key of a position (or scratch row), and their scale.
uvec4 key_part(Head h, uint c, uint position) {
    return U32x4(h.keys + uint64_t(c * h.positions * 16) + uint64_t(position * 16)).v[0];
}
float key_scale(Head h, uint c, uint position) {
    return scale_from(h.key_scales + uint64_t(c * KB / GROUP * h.positions * 2)
        + uint64_t(position * 2));
}
uint64_t value_scale_at(Head h, uint group, uint position) {
    return h.value_scales + uint64_t((group * h.positions + position) * 2);
}

// Four channels of the value of a position (or scratch row).
uvec4 value_part(Head h, uint channel, uint position) {
    return raw_from(h.values + uint64_t(position * h.stride + channel * FOUR_BYTES));
}
