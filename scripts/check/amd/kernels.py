"""The program's kernels as compiled by RADV, and the modelled time of a pass."""

import collections
import concurrent.futures
import json
import math
import os
import subprocess

import isa
import radv

# A Radeon 780M: 12 compute units of two SIMD32, and the speed of reading weights from DDR5-5600.
SIMDS, CLOCK, BANDWIDTH = 24, 2.7e9, 75e9
# A laptop under load: a lower clock, and the part of the slots that is filled.
SLOW_CLOCK, FILLED = 2.2e9, 0.6
LANES = 32
# Draft steps of a round, and the rows of the commands that score the drafted tokens and their root:
# their number is rounded up to a power of two.
DRAFTED, ROUND_ROWS = 4, 8
# Part of a pass's products that a modelled time may leave out.
SMALL_PART = 0.01


def multiply_adds(shader):
    """Returns the products of weights and activations that a lane computes with one dot4 in the
    main loop of `shader`, or with the same number of int8 products of a matrix instruction."""
    # A dot4 of linear_trellis sums the four nibbles of a weight times its activation.
    return 1 if shader == "linear_trellis" else 4


def inner_turns(shader, constants):
    """Returns the iterations of the inner loop of `shader` in each iteration of its main loop, if
    it has an inner loop."""
    return 1


class Call:
    """A compiled kernel call of a pass, from the list of `examples/kernels`."""

    def __init__(self, line, kernel, statistics):
        self.__dict__.update(line)
        self.kernel, self.statistics = kernel, statistics
        self.weights = "+".join(sorted({name for name, _, _ in self.matrices}))
        self.threads = dict(map(tuple, self.constants)).get(0, LANES)
        # Matrices are cut into workgroups by rows of activations first.
        self.block = max(1, self.rows // self.groups[0])

    def stat(self, name):
        return int(self.statistics.get(name, 0))

    def registers(self):
        return self.stat("VGPRs")

    def spills(self):
        return self.stat("Spilled VGPRs") + self.stat("Spilled SGPRs")

    def code(self):
        """Returns the size of the code in KB."""
        return self.stat("Code size") / 1024

    def shared(self):
        """Returns the shared memory in KB."""
        return self.stat("LDS size") / 1024

    def turn(self, of):
        """Returns the value of `of` for one iteration of the main loop."""
        inner = self.kernel.inner
        more = (inner_turns(self.shader, self.constants) - 1) * of(inner) if inner else 0
        return of(self.kernel.main) + more

    def products(self):
        """Returns multiply-adds per lane and iteration of the main loop; 0 if unknown."""
        if not (self.matrices and self.kernel.main):
            return 0
        each = multiply_adds(self.shader)
        if self.kernel.main.wmma:
            return self.turn(lambda loop: each * loop.wmma * 16 * 16 * 4 / LANES)
        # linear_matrix sums the nibbles of each trellis weight with a dot4, once for all rows.
        if self.shader == "linear_matrix" and self.weights.startswith("t"):
            each *= self.block / (self.block + 4)
        return self.turn(lambda loop: each * loop.dot4)

    def by(self):
        main = self.kernel.main
        return "-" if not (self.matrices and main) else "wmma" if main.wmma else "dot4"

    def slots(self):
        """Returns the main loop's slots per weight and lane, for all rows of the pass."""
        return (
            self.turn(lambda loop: loop.slots) / self.products() * self.rows
            if self.products()
            else None
        )

    def contradiction(self):
        """Returns an error if the count of products is wrong. A loop without shared memory cannot
        multiply more weights than it loads."""
        # Experts have blocks of any size.
        if self.by() != "dot4" or self.kernel.main.shared or self.experts:
            return None
        weights, loaded = self.products() / self.block, self.turn(lambda loop: loop.loaded)
        bits = 8 * self.bytes / sum(rows * cols for _, rows, cols in self.matrices)
        if weights * int(bits) / 8 > loaded:
            return (
                f"{weights:.0f} weights a turn, but {loaded} bytes loaded: "
                "see multiply_adds() in scripts/check/amd/kernels.py"
            )
        return None

    def finishers(self):
        """Returns the number of a linear layer's workgroups that continue with the next operation:
        the last one per head, or the last of all. See crates/vulkan/src/lower/finish.rs."""
        constants = dict(map(tuple, self.constants))
        rows = sum(rows for _, rows, _ in self.matrices)
        return self.groups[0] * (rows // constants[12] if constants.get(11) else 1)

    def valu(self):
        """Returns the slots of all waves: the code outside of the main loop once, and the
        iterations that the products need. Kernels of other operations run everything once."""
        of_group = max(1, self.threads // LANES)
        waves = math.prod(self.groups) * of_group
        if not self.products():
            return waves * self.kernel.all.slots
        turns = math.ceil(self.work / LANES / waves / self.products())
        finish = self.kernel.finish.slots
        once = self.kernel.all.slots - self.kernel.main.slots - finish
        return (
            waves * (once + turns * self.turn(lambda loop: loop.slots))
            + self.finishers() * of_group * finish
        )


def driver_processes(driver, chips):
    """Returns {chip: (process, its description)}."""
    processes = {chip: radv.start(driver, chip) for chip in chips}
    found = {}
    for chip, process in processes.items():
        line = process.stdout.readline()
        if not line:
            raise radv.RadvError(f"{driver} cannot serve as {chip}")
        found[chip] = process, json.loads(line)
    return found


def listing(command, descriptions):
    """Runs the program's lister on these devices."""
    out = subprocess.run(
        command, input=json.dumps(descriptions), stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [json.loads(line) for line in out.splitlines()]


def compiled(driver, chips, command, spirv):
    """Returns {chip: ([Call], number of pipelines, description)}. Each pipeline is compiled
    once."""
    processes = driver_processes(driver, chips)
    lines = collections.defaultdict(list)
    for line in listing(command, [description for _, description in processes.values()]):
        lines[line["chip"]].append(line)

    def one(chip):
        process, description = processes[chip]
        made, calls = {}, []
        for line in lines[chip]:
            key = line["shader"], json.dumps(line["constants"]), line["subgroup"]
            if key not in made:
                job = {
                    "path": os.path.join(spirv, line["shader"] + ".spv"),
                    **{k: line[k] for k in ("constants", "subgroup")},
                }
                print(json.dumps(job), file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if not answer:
                    raise radv.RadvError(f"{chip}: {key[0]} {key[1]} is not compiled")
                answer = json.loads(answer)
                made[key] = (
                    isa.Kernel(answer["listing"], line["subgroup"] or 64),
                    answer["statistics"],
                )
            calls.append(Call(line, *made[key]))
        process.stdin.close()
        process.wait()
        return calls, len(made), description

    with concurrent.futures.ThreadPoolExecutor(len(chips)) as pool:
        return dict(zip(chips, pool.map(one, chips)))


def passes(calls, kinds):
    """Returns {model: {rows: [Call]}} for the passes of these kinds at one depth."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for call in calls:
        if getattr(call, "pass") in kinds and (call.kv, call.positions) == ("F16", 512):
            found[call.model][call.rows].append(call)
    return found


def memory_time(calls):
    """Returns the seconds for reading the weights of a pass."""
    return sum(call.bytes * call.count for call in calls) / BANDWIDTH


def slots_of(calls):
    """Returns the slots of a pass on each SIMD32, without attention."""
    return sum(c.valu() * c.count for c in calls if c.shader != "attention") / SIMDS


def pass_times(by_rows):
    """Returns {rows: seconds}. With more rows, a mixture reads more experts."""
    return {
        rows: max(memory_time(calls), slots_of(calls) / CLOCK) for rows, calls in by_rows.items()
    }


def row_of(cells):
    return "| " + " | ".join(cells) + " |"


def model_table(calls):
    """Returns the tables of docs/LAPTOP.md, from calls for a Radeon 780M. A model has no line if
    products are not counted for more than a small part of it, such as a mixture's router."""
    lines = [
        "| weights | GB | ms, 1 row | of it VALU | c(4) | c(8) | c(16) | c(32) "
        "| prefill tok/s | at 2.2 GHz, 60 % |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    times = {}
    for model, by_rows in passes(calls, ("verify", "prefill")).items():
        linear = [call for found in by_rows.values() for call in found if call.matrices]
        uncounted = sum(call.work * call.count for call in linear if not call.products())
        if uncounted > SMALL_PART * sum(call.work * call.count for call in linear):
            continue
        memory, time = memory_time(by_rows[1]), pass_times(by_rows)
        times[model] = time
        prompt = max(by_rows)
        slow = max(memory, slots_of(by_rows[prompt]) / SLOW_CLOCK / FILLED)
        cells = [
            f"`{model}`",
            f"{memory * BANDWIDTH / 1e9:.1f}",
            f"{time[1] * 1e3:.0f}",
            f"{slots_of(by_rows[1]) / CLOCK * 1e3:.0f}",
        ]
        cells += [f"{time[rows] / time[1]:.2f}" for rows in (4, 8, 16, 32)]
        cells += [f"{prompt / time[prompt]:.0f}", f"{prompt / slow:.0f}"]
        lines.append(row_of(cells))
    return lines + [""] + round_table(passes(calls, ("draft",)), times)


def round_table(drafts, times):
    """Returns the table of draft steps and rounds. `times` has the passes of the targets."""
    lines = [
        "| with its assistant | GB | ms, 1 node | of it VALU | ms, 8 nodes | dispatches "
        "| step | round |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model, by_nodes in drafts.items():
        step, plain = pass_times(by_nodes), times[model][1]
        cells = [
            f"`{model}`",
            f"{memory_time(by_nodes[1]) * BANDWIDTH / 1e9:.2f}",
            f"{step[1] * 1e3:.1f}",
            f"{slots_of(by_nodes[1]) / CLOCK * 1e3:.1f}",
            f"{step[8] * 1e3:.1f}",
            f"{sum(call.count for call in by_nodes[1])}",
            f"{step[1] / plain:.3f}",
            f"{(DRAFTED * step[1] + times[model][ROUND_ROWS]) / plain:.2f}",
        ]
        lines.append(row_of(cells))
    return lines
