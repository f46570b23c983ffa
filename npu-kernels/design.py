#!/usr/bin/env python3
"""The array of flash_partial for NPU1 in IRON (mlir-aie): 16 cores, one kv head each.

    python3 design.py HEAD_DIM > flash_partial.mlir

A column has two shim channels in and two out. Each is connected to a pair of cores through the
memory tile. Its objects consist of one 8 KB object for each core. A core reads a header, the
queries, then the number of tiles in the header, and writes one result. It repeats this forever, so
one array works for every context length and row count. The host does not use this runtime sequence:
it writes its own instruction streams.

This project has never compiled the file, because that needs mlir-aie and Peano, and a device to run
it. The names of IRON's API are those in mlir-aie's examples at the time of writing.
"""

import sys

import numpy as np
from aie.extras.dialects import arith
from aie.iron import Buffer, Kernel, ObjectFifo, Program, Runtime, Worker
from aie.iron.controlflow import range_
from aie.iron.device import NPU1, Tile
from aie.iron.placers import SequentialPlacer
from aie.ir import IndexType

COLUMNS, PAIRS_A_COLUMN, PAIR = 4, 2, 2
OBJECT = 8192  # bytes; the same as in flash_partial.h
STACK = 4096  # Peano's default of 1 KB would overflow into buffers


def result_bytes(head_dim):
    return (4096 + 2 * 32 + 16) * 4 if head_dim in (128, 256) else None


def state_bytes(head_dim):
    """Returns sizeof(flash::State<head_dim>).

    The state has the queries, then maxima, sums and limits in 4x4 blocks, then four words.
    """
    blocks = 4096 // head_dim // 4
    return (OBJECT + 3 * blocks * 64 + 16 + 31) // 32 * 32


def design(head_dim):
    def array(n, dtype):
        return np.ndarray[(n,), np.dtype[dtype]]

    # All objects have the type of words. Only the kernel interprets them.
    words = array(OBJECT // 4, np.int32)
    pair_words = array(PAIR * OBJECT // 4, np.int32)
    result = array(result_bytes(head_dim) // 4, np.int32)
    pair_result = array(PAIR * result_bytes(head_dim) // 4, np.int32)
    state_type = array(state_bytes(head_dim) // 4, np.int32)
    count_type = array(1, np.int32)
    name = f"flash_partial_{head_dim}.o"
    begin = Kernel("flash_begin", name, [words, state_type, count_type])
    query = Kernel("flash_query", name, [words, state_type, result])
    tile = Kernel("flash_tile", name, [words, state_type, result])
    end = Kernel("flash_end", name, [state_type, result])

    def core(fifo_in, fifo_out, state, count, begin, query, tile, end):
        begin(fifo_in.acquire(1), state, count)
        fifo_in.release(1)
        out = fifo_out.acquire(1)
        query(fifo_in.acquire(1), state, out)
        fifo_in.release(1)
        tiles = arith.index_cast(count[0], to=IndexType.get())
        for _ in range_(tiles):
            tile(fifo_in.acquire(1), state, out)
            fifo_in.release(1)
        end(state, out)
        fifo_out.release(1)

    workers, fifos_in, fifos_out = [], [], []
    for column in range(COLUMNS):
        for pair in range(PAIRS_A_COLUMN):
            label = f"{column}_{pair}"
            fifo_in = ObjectFifo(pair_words, name=f"in_{label}", depth=2)
            fifo_out = ObjectFifo(pair_result, name=f"out_{label}", depth=1)
            offsets_in = [i * OBJECT // 4 for i in range(PAIR)]
            offsets_out = [i * result_bytes(head_dim) // 4 for i in range(PAIR)]
            memory = Tile(column, 1)
            parts_in = fifo_in.cons().split(
                offsets_in,
                obj_types=[words] * PAIR,
                names=[f"in_{label}_{i}" for i in range(PAIR)],
                placement=memory,
            )
            parts_out = fifo_out.prod().join(
                offsets_out,
                obj_types=[result] * PAIR,
                depths=[1] * PAIR,
                names=[f"out_{label}_{i}" for i in range(PAIR)],
                placement=memory,
            )
            for i in range(PAIR):
                # Rows 2 to 5 are cores. The first pair has rows 2 and 3.
                place = Tile(column, 2 + PAIR * pair + i)
                state = Buffer(state_type, name=f"state_{label}_{i}")
                count = Buffer(count_type, name=f"count_{label}_{i}")
                arguments = [
                    parts_in[i].cons(),
                    parts_out[i].prod(),
                    state,
                    count,
                    begin,
                    query,
                    tile,
                    end,
                ]
                workers.append(Worker(core, arguments, placement=place, stack_size=STACK))
            fifos_in.append(fifo_in)
            fifos_out.append(fifo_out)

    # IRON needs a runtime sequence that uses every fifo, to route its shim channels. The stream of
    # this sequence is never used.
    runtime = Runtime()
    pairs = COLUMNS * PAIRS_A_COLUMN
    queries = array(pairs * 2 * PAIR * OBJECT // 4, np.int32)
    results = array(pairs * PAIR * result_bytes(head_dim) // 4, np.int32)
    with runtime.sequence(queries, results) as (q, r):
        runtime.start(*workers)
        for i, (fifo_in, fifo_out) in enumerate(zip(fifos_in, fifos_out)):
            shim = Tile(i // PAIRS_A_COLUMN, 0)
            runtime.fill(fifo_in.prod(), q, placement=shim)
            runtime.drain(fifo_out.cons(), r, placement=shim, wait=True)
    return Program(NPU1(), runtime).resolve_program(SequentialPlacer())


if __name__ == "__main__":
    print(design(int(sys.argv[1])))
