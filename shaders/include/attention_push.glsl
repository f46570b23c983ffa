// Push constants of attention.comp: AttentionPush of src/vulkan/lower/kernels/others.rs. They need
// kv.glsl.

layout(push_constant, scalar) uniform Push {
    F32 q;              // [rows, n_kv, SHARES, GQ, HEAD_DIM]
    // Shaped like q; where pages are split, [live row, n_kv, SHARES, GQ, slots, HEAD_DIM + 2]
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
    uint slots;         // pages of a row's partials
    uint table;         // where the layer's page tables begin among those of the step
    uint64_t epilogue;  // see join.glsl
};
