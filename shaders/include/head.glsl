// Addresses of keys and values of a kv head, in a page of the cache or in the step's scratch rows.
//
// No other file computes these addresses. A cache may have more elements than 32 bits can count,
// and GLSL indices are signed, so the address of a head has 64 bits. It is the same for all lanes,
// and each lane adds a 32-bit offset. On some devices such loads need no further instruction.
//
// kv.glsl must be included first.

struct Head {
    uint64_t keys;         // 16 bytes of each position, then the next 16 bytes of each position
    uint64_t key_scales;   // one scale of each position, then the next scale of each position
    uint64_t values;
    uint64_t value_scales; // like those of keys
    uint positions;        // distance between 16-byte parts of a key
    uint stride;           // bytes between values
};

// `from` and `all` count positions of pages times heads, or scratch rows times heads.
Head head_at(uint64_t keys, uint64_t values, uint64_t all, uint from, uint positions, uint stride,
    uint64_t first_value, uint head_dim) {
    Head h;
    const uint64_t scales =
        all * head_dim + uint64_t(from) * (head_dim / GROUP_OF(head_dim) * positions * 2);
    h.keys = keys + uint64_t(from) * (head_dim / KB * positions * 16);
    h.key_scales = keys + scales;
    h.values = values + first_value;
    h.value_scales = values + scales;
    h.positions = positions;
    h.stride = stride;
    return h;
}

// Returns a kv head in physical page `page` of a layer's cache.
Head head_of_page(uint64_t keys, uint64_t values, uint all_pages, uint n_kv, uint head_dim,
    uint head, uint page) {
    const uint from = page * n_kv + head, stride = head_dim / 4 * FOUR_BYTES;
    return head_at(keys, values, uint64_t(all_pages) * (n_kv * PAGE), from, PAGE, stride,
        uint64_t(from) * (PAGE * stride), head_dim);
}

// Returns a kv head in the scratch rows of a layer.
Head head_of_scratch(uint64_t keys, uint64_t values, uint max_rows, uint n_kv, uint head_dim,
    uint head) {
    const uint bytes = head_dim / 4 * FOUR_BYTES;
    return head_at(keys, values, uint64_t(max_rows) * n_kv, head, max_rows, n_kv * bytes,
        uint64_t(head * bytes), head_dim);
}

// Address of 16 bytes of the key of a position (or scratch row).
uint64_t key_at(Head h, uint c, uint position) {
    return h.keys + uint64_t(c * h.positions * 16) + uint64_t(position * 16);
}
uvec4 key_part(Head h, uint c, uint position) { return U32x4(key_at(h, c, position)).v[0]; }

// Addresses of the scale of a group of channels, in a key and in a value.
uint64_t key_scale_at(Head h, uint group, uint position) {
    return h.key_scales + uint64_t(group * h.positions * 2) + uint64_t(position * 2);
}
float key_scale(Head h, uint group, uint position) {
    return scale_from(key_scale_at(h, group, position));
}
uint64_t value_scale_at(Head h, uint group, uint position) {
    return h.value_scales + uint64_t((group * h.positions + position) * 2);
}

// Four channels of the value of a position (or scratch row), as stored.
uvec4 value_part(Head h, uint channel, uint position) {
    return raw_from(h.values + uint64_t(position * h.stride + channel * FOUR_BYTES));
}
