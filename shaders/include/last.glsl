// The last of several workgroups to finish does the work that needs the results of all of them.
// That work takes no dispatch of its own and no waiting.
//
// No workgroup waits for another, so a device may run them in any order. barrier() orders shared
// memory only: each invocation itself releases its writes to memory before its workgroup is
// counted.

#ifndef LAST_GLSL
#define LAST_GLSL

#extension GL_KHR_memory_scope_semantics : require

shared uint before_me;

// Whether this workgroup is the last of `parties` to call this for `unit`. The last one sees the
// others' writes to memory.
bool is_last(uint64_t counts, uint unit, uint parties) {
    memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsRelease);
    barrier();
    if (gl_LocalInvocationIndex == 0) {
        before_me = atomicAdd(U32(counts).v[unit], 1u, gl_ScopeDevice, gl_StorageSemanticsBuffer,
            gl_SemanticsAcquireRelease);
        // For the next dispatch.
        if (before_me + 1 == parties) U32(counts).v[unit] = 0;
    }
    barrier();
    if (before_me + 1 != parties) return false;
    memoryBarrier(gl_ScopeDevice, gl_StorageSemanticsBuffer, gl_SemanticsAcquire);
    return true;
}

#endif
