// Loads of attention.comp. They are issued while earlier ones are multiplied.

Head scratch_head(uint kv_head) {
    return head_of_scratch(uint64_t(scratch_k), scratch_v, max_rows, n_kv, HEAD_DIM, kv_head);
}
Head paged_head(uint kv_head, uint page) {
    return head_of_page(uint64_t(k), v, all_pages, n_kv, HEAD_DIM, kv_head, page);
}

// LOAD_KEYS loads N parts of the key at row AT, from C0 on. ADD_KEYS multiplies them by COUNT
// queries.
#define LOAD_KEYS(RAW, SCALES, H, AT, C0, N) \
    [[unroll]] for (uint c = 0; c < N; c++) { \
        RAW[c] = key_part(H, C0 + c, AT); \
        SCALES[c] = key_scale(H, (C0 + c) * KB / GROUP, AT); \
    }
#define ADD_KEYS(RAW, SCALES, C0, N, COUNT, QUERY, SCORE) \
    [[unroll]] for (uint c = 0; c < (N) * (KB / 4); c++) { \
        const vec4 key = four(RAW[c / (KB / 4)], c % (KB / 4), SCALES[c / (KB / 4)]); \
        [[unroll]] for (uint n = 0; n < COUNT; n++) \
            SCORE = add_products(QUERY[C0 * (KB / 4) + c], key, SCORE); \
    }

// Loads AHEAD turns of values from turn TURN on, or the last turn again after it. After the last
// visible position it loads that position: other rows may be NaN, and 0 times NaN is NaN.
#define LOAD_VALUES(RAW, TURN) \
    if (all_cached) { \
        const uint64_t from = paged.values + uint64_t(part * VALUE_BYTES + channel * FOUR_BYTES); \
        [[unroll]] for (uint u = 0; u < AHEAD; u++) \
            RAW[u] = \
                raw_from(from + uint64_t(min(TURN + u, TURNS - 1) * (PARTS * VALUE_BYTES))); \
    } else { \
        [[unroll]] for (uint u = 0; u < AHEAD; u++) { \
            const uint slot = min(TURN + u, TURNS - 1) * PARTS + part; \
            const uint at = min(page * PAGE + slot, highest); \
            const uint place = channel * FOUR_BYTES + \
                (at < base ? at % PAGE * VALUE_BYTES : (root + at - base) * scratch.stride); \
            RAW[u] = raw_from((at < base ? paged.values : scratch.values) + uint64_t(place)); \
        } \
    }
