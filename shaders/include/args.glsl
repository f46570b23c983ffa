// Arguments of the kernels, in the layout that crates/vulkan/src/lower/ writes.

// A matrix and the buffer of its product.
struct Matrix {
    uint64_t codes;
    uint64_t side; // see side.glsl; for rows with one scale f16 [n], for i8a f16 [n, 2]
    SharedF32 out_; // [rows, n]
};

struct LinearArgs {
    Matrix matrix;
    uint64_t x;    // i8 [rows, stride]
    F32 sx;        // [rows, groups], with one or two groups per step, or one for the row
    I32 sums;      // [rows, groups], sums of x
    Step step_;
    uint n;        // matrix rows
    uint steps;    // in a matrix row
    uint stride;   // bytes between rows of x, a multiple of 16
};

// Finds the matrix of workgroup `group`, if each workgroup computes `rows` matrix rows. `more_n`
// has the rows of the other matrices, 16 bits each. Sets `a` to that matrix and `group` to the
// index among its workgroups. Returns the index of the matrix.
uint take_matrix(inout LinearArgs a, inout uint group, uint rows, uint more_n, Matrix more[2]) {
    uint which = 0;
    [[unroll]] for (uint i = 0; i < 2; i++) {
        const uint groups = (a.n + rows - 1) / rows, n = more_n >> (16 * i) & 0xffff;
        if (group < groups || n == 0) break;
        group -= groups;
        a.matrix = more[i];
        a.n = n;
        which = i + 1;
    }
    return which;
}

struct RowArgs {
    F32 x;      // [rows, cols]
    F32 add;    // [rows, cols]; 0: nothing is added
    F32 w_add;  // [cols]
    F32 w;      // [cols]
    F32 z;      // [rows, cols]; 0 if only prepared activations are stored
    uint64_t values; // i8 or f32 [rows, stride]
    F32 scales; // [rows, groups]
    I32 sums;   // [rows, groups]
    Step step_;
    float eps;
    uint stride; // bytes between rows of values
    uint max_rows;
    uint window; // of the attention with these partials
    uint slots;  // pages per row in the partials
    float scale; // of the stream after the addition
};

struct RopeArgs {
    F32 q;       // [rows, n_heads, head_dim]
    F32 k;       // [rows, n_kv, head_dim]
    F32 v;       // like k; written in place if it is normed
    F32 q_norm;  // [head_dim]
    F32 k_norm;
    F32 table;   // [max_rows, 2, head_dim / 2]
    uint64_t scratch_k; // [n_kv, head_dim / KB, max_rows, KB]
    uint64_t scratch_v; // [max_rows, n_kv, head_dim]
    Step step_;
    float eps;
    uint n_heads;
    uint n_kv;
    uint max_rows;
};

// The last workgroups of a call do the work of the call after it, its epilogue. An epilogue has the
// arguments of that call, and counters, which are 0 before and after.
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer RowEpilogue {
    RowArgs args;
    uint64_t counts;
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer RopeEpilogue {
    RopeArgs args;
    uint64_t counts;
};
