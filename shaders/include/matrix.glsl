// Matrix instructions of 16 x 8 x 32 with elements in known lanes.
//
// A lane has four elements of a product of 16 x 8: in rows lane / 4 and lane / 4 + 8, the columns
// 2 (lane % 4) and the next one.

#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#include "common.glsl"
#include "args.glsl"

#define Weights coopmat<int8_t, gl_ScopeSubgroup, 16, 32, gl_MatrixUseA>
#define Activations coopmat<int8_t, gl_ScopeSubgroup, 32, 8, gl_MatrixUseB>
#define Product coopmat<int, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>

// A float with an integer in its last bits. Products start with it, and their difference from it is
// the exact sum: 128 * 127 * 128 < 2^22.
const float MAGIC = 12582912.0; // 1.5 * 2^23

// Orders shared memory among the lanes of a subgroup: writes before the fence are visible after it,
// and reads before it precede later writes.
void subgroup_fence() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
        gl_SemanticsAcquireRelease);
}
