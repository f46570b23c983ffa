// Arguments of the kernels, as crates/vulkan/src/lower/ writes them.

// A matrix and where its product goes.
struct Matrix {
    uint64_t codes;
    uint64_t side; // [n, elements], see side.glsl; trellis: f16 [n]
    SharedF32 out_; // [rows, n]
};

struct LinearArgs {
    Matrix matrix;
    uint64_t x;    // i8 [rows, stride]
    F32 sx;        // [rows, groups]: a step has one or two, or the row has one
    I32 sums;      // [rows, groups]
    Step step_;
    uint n;        // matrix rows
    uint steps;    // of a matrix row
    uint stride;   // bytes from row to row of x, a multiple of 16
};

// Finds the matrix that has workgroup `group`, at `rows` matrix rows a workgroup. `more_n` holds
// the rows of the matrices beside `a.matrix`, 16 bits each. `a` becomes that of the matrix and
// `group` its own workgroup. Returns the number of the matrix.
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
    F32 add;    // [rows, cols]; 0: nothing to add
    F32 w_add;  // [cols]
    F32 w;      // [cols]
    F32 z;      // [rows, cols]; where only prepared activations are wanted, 0
    uint64_t values; // i8 or f32 [rows, stride]
    F32 scales; // [rows, groups]
    I32 sums;   // [rows, groups]
    Step step_;
    float eps;
    uint stride; // bytes of a row of values
    uint max_rows;
    uint window; // of attention whose partials are joined
    uint slots;  // pages of a row's partials
    float scale; // of the stream that something is added to
};

struct RopeArgs {
    F32 q;       // [rows, n_heads, head_dim]
    F32 k;       // [rows, n_kv, head_dim]
    F32 v;       // like k; in place where it is normed
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

// Epilogues are done by the last workgroups of a call. They hold the arguments of the call that is
// saved, and counters, which are 0 before and after.
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer RowEpilogue {
    RowArgs args;
    uint64_t counts;
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer RopeEpilogue {
    RopeArgs args;
    uint64_t counts;
};
