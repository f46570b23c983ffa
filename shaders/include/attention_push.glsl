// Push constants of attention.comp: AttentionPush in crates/vulkan/src/lower/attention.rs, then
// sizes of a head. The including file defines HEAD_DIM and KV, and includes kv.glsl.

layout(push_constant, scalar) uniform Push {
    F32 q;              // [rows, n_kv, SHARES, GQ, HEAD_DIM]
    // Shaped like q; for split pages [live row, n_kv, SHARES, GQ, slots, HEAD_DIM + 2]
    SharedF32 out_;
    U32x4 k;            // [all_pages, n_kv, HEAD_DIM / KB, PAGE, KB]
    uint64_t v;         // [all_pages, n_kv, PAGE, HEAD_DIM]
    U32x4 scratch_k;    // [n_kv, HEAD_DIM / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, HEAD_DIM]
    Step step_;
    float scale;
    uint n_kv;
    uint pages;         // entries of a sequence's page table
    uint all_pages;
    uint window;        // 0: none
    uint max_rows;
    uint slots;         // pages per row in the partials
    uint table;         // start of the layer's page tables among the tables of the step
    uint64_t epilogue;  // see join.glsl
};

layout(constant_id = 12) const uint SHARES = 1; // workgroups that share a kv head
#define SETS (n_kv * SHARES)                    // sets of GQ query heads
const uint KEYS = HEAD_DIM / KB;                // 16-byte parts of a key
const uint GROUP = GROUP_OF(HEAD_DIM);          // channels with one scale
const uint GROUPS = HEAD_DIM / GROUP;
const uint VALUE_BYTES = HEAD_DIM / 4 * FOUR_BYTES;
