// The last of several workgroups does the work that needs the results of all of them. This work
// needs no separate dispatch and no waiting.
//
// No workgroup waits for another one, so a device may run them in any order. barrier() only orders
// shared memory, so each invocation must release its own writes to memory before its workgroup is
// counted.

#ifndef LAST_GLSL
#define LAST_GLSL

#extension GL_KHR_memory_scope_semantics : require

shared uint before_me;

// Returns whether this workgroup is the last of `parties` that call this for `unit`. The last one
// sees the others' writes to memory.
bool is_last(uint64_t counts, uint unit, uint parties) {
    memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsRelease);
    barrier();
    if (gl_LocalInvocationIndex == 0) {
        before_me = atomicAdd(U32(counts).v[unit], 1u, gl_ScopeDevice, gl_StorageSemanticsBuffer,
            gl_SemanticsAcquireRelease);
        // Resets the counter for the next dispatch.
        if (before_me + 1 == parties) U32(counts).v[unit] = 0;
    }
    barrier();
    if (before_me + 1 != parties) return false;
    memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsAcquire);
    return true;
}

#endif
