"""Computes the cost of a compiled kernel: its instructions in issue slots of a SIMD32, by loop."""

import collections
import re

# Issue slots (cycles of one SIMD32) of a wave of 32, by the cost table of RADV's own compiler for
# RDNA; every other vector instruction is 1, and so is a pair that issues together (VOPD).
SLOTS = [
    (re.compile(pattern), slots)
    for pattern, slots in (
        (r"v_s?wmm\w*_iu4", 16),
        (r"v_s?wmm", 32),
        (r"v_mul_(lo_u32|hi_[iu]32)|v_mad_[iu]64_[iu]32", 4),
        (r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_", 4),
        (r"v_\w*_[iub]64|v_lshl_add_u64", 2),
        (r"v_\w*_f64", 16),
    )
]
OPCODE = re.compile(r"(?:^|[\s)])((?:v|s|ds|global|buffer|scratch|flat)_[a-z]\w*)")
LOADED = re.compile(r"load_(?:dword(x\d)?|u?(byte|short)|s(byte|short))")

STORES_DONE = "stores done"  # what RDNA2 and 3 call s_waitcnt_vscnt 0 and RDNA4 s_wait_storecnt 0
WAITS = {
    "s_waitcnt_vscnt": "imm:0",
    "s_wait_storecnt": "imm:0",
    "s_wait_storecnt_dscnt": "storecnt(0)",
}
COUNTS = "global_atomic_add"  # a workgroup that another one may wait for


class Loop:
    """A run of blocks, or a whole kernel: counts of its instructions."""

    def __init__(self, blocks, wave):
        self.slots = self.dot4 = self.wmma = self.loaded = self.shared = 0
        self.kinds = collections.Counter()
        for op in (op for block in blocks for op in block):
            self.kinds[op] += 1
            if op.startswith("v_"):
                slots = next((n for pattern, n in SLOTS if pattern.match(op)), 1)
                self.slots += slots * (1 if "wmm" in op else wave // 32)
                self.dot4 += op.startswith("v_dot4")
                self.wmma += "wmm" in op
            elif op.startswith("ds_"):
                self.shared += 1
            elif m := LOADED.search(op):
                self.loaded += (
                    4 * int((m[1] or "x1")[1:]) if "dword" in m[0] else 2 if "short" in m[0] else 1
                )


class Kernel:
    """The instruction listing of a kernel by ACO, Mesa's compiler."""

    def __init__(self, listing, wave):
        self.blocks, numbers, jumps = [], {}, []
        body = listing.rsplit("After lowering to hw instructions:", 1)[-1]
        for line in body.splitlines():
            if m := re.match(r"BB(\d+)", line):
                numbers[int(m[1])] = len(self.blocks)
                self.blocks.append([])
            elif "clk)" in line and self.blocks and (m := OPCODE.search(line.split("clk)", 1)[1])):
                done = m[1] in WAITS and WAITS[m[1]] in line
                self.blocks[-1].append(STORES_DONE if done else m[1])
                if m[1].startswith(("s_cbranch", "s_branch")) and (
                    to := re.search(r"BB(\d+)", line)
                ):
                    jumps.append((len(self.blocks) - 1, int(to[1])))
        self.all = Loop(self.blocks, wave)
        # The part that only the last counted workgroup runs.
        counts = [i for i, block in enumerate(self.blocks) if COUNTS in block]
        self.finish = Loop(self.blocks[counts[0] + 1 :] if counts else [], wave)
        ends = {}
        for block, to in jumps:
            start = numbers.get(to, len(self.blocks))
            if start <= block:
                ends[start] = max(ends.get(start, 0), block)
        loops = [
            (start, end, Loop(self.blocks[start : end + 1], wave)) for start, end in ends.items()
        ]
        # The outer one of nested loops is the main loop, because its work outside of the inner
        # loop, such as decoding, counts too.
        products = lambda loop: loop[2].dot4 + loop[2].wmma
        start, end, main = max(
            loops, key=lambda loop: (products(loop), loop[1] - loop[0]), default=(0, 0, None)
        )
        self.main = main if main and main.dot4 + main.wmma else None
        inside = [
            loop for loop in loops if start <= loop[0] and loop[1] <= end and loop[2] is not main
        ]
        inner = max(inside, key=products, default=None)
        self.inner = inner[2] if inner and products(inner) else None

    def releases(self):
        """Returns whether stores are waited for before the barrier that precedes each atomic
        addition. Otherwise a workgroup would be counted before stores of its other waves are
        done."""
        ops = [op for block in self.blocks for op in block]
        for at, op in enumerate(ops):
            if op == COUNTS:
                before = ops[:at]
                while before and not before.pop().startswith("s_barrier"):
                    pass
                stores = [
                    op for op in before if op.startswith("global_store") or op == STORES_DONE
                ]
                if stores and stores[-1] != STORES_DONE:
                    return False
        return True
