"""Compares the kernels that RADV compiled with budgets.txt; see scripts/check/amd.sh."""

import argparse
import collections
import math
import os
import sys

import kernels
import radv

MODELLED = "phoenix"  # a Radeon 780M
CHIPS = [MODELLED, "gfx1151", "gfx1201", "navi21"]
HERE = os.path.dirname(os.path.abspath(__file__))
BUDGETS = os.path.join(HERE, "budgets.txt")
LAPTOP = os.path.join(HERE, "../../../docs/LAPTOP.md")
CACHE_KB = 32  # of instructions
HEAD = f"""\
# Budgets of kernels on AMD GPUs, on the worst of {", ".join(CHIPS)}:
# scripts/check/amd.sh enforces it. Columns:
#   what    linear layers by their weights' format, other kernels by their file in shaders/
#   rows    of the pass; 0: while a model is loaded
#   slots   cycles of a SIMD32 that a wave of 32 spends in the main loop, per weight and lane, for
#           all rows of the pass; of integer and trellis codes
#   target  what the design of the kernels wants of the slots, where that is less; not enforced
#   VGPRs, spills (registers), KB (code): the target is no spills, and {CACHE_KB} KB, as much as the
#           instruction cache holds
#   by      what multiplies: dot4, or wmma where the GPU has it for int8 and dot4 elsewhere
# `scripts/check/amd.sh --update` lowers what became better, adds what is new and drops what is
# gone. It raises nothing: a budget that has to grow is edited by hand, with a reason in the commit.
"""
# Tolerance for changes without meaning: this part for slots and code, an allocation step for
# registers.
SLACK, STEP = 0.03, 8
# Limit of the time of a pass's products, relative to the time of its memory, by rows: at first no
# longer, then a little longer. One row has to stay within it at 1.6 of 2.7 GHz too.
PARTS = {1: 1.6 / 2.7, 2: 1, 4: 1, 8: 1.05, 16: 1.1}
TRELLIS_PARTS = {**PARTS, 16: 1.3}
SHOWN = 40  # complaints
SHARED_KB = 32  # of shared memory: what AMD's driver for Windows offers a workgroup
PROMPT_SPEED = 150  # tokens/s, of rows of prefill, over the 25.6e9 weights of 27B's layers
LAYER_WEIGHTS = 25.6e9


class Figures:
    """The highest costs of several kernels."""

    def __init__(self):
        self.most, self.worst = {}, {}
        self.by = collections.defaultdict(set)  # chip: what multiplies

    def take(self, call):
        self.note("VGPRs", call.registers(), call)
        self.note("spills", call.spills(), call)
        self.note("KB", call.code(), call)
        self.note("shared", call.shared(), call)
        if call.slots() is not None:
            self.note("slots", call.slots(), call)
            self.note(
                "bits", 8 * call.bytes / sum(rows * cols for _, rows, cols in call.matrices), call
            )
        self.by[call.chip].add(call.by())

    def note(self, what, value, call):
        if value >= self.most.get(what, 0):
            self.most[what] = value
            self.worst[what] = f"{call.chip}: {call.shader} " + " ".join(
                f"{i}={v}" for i, v in call.constants
            )

    def budget(self):
        """Returns budgets for these costs: {column: limit}."""
        slots = self.most.get("slots")
        return {
            "slots": None if slots is None else math.ceil(slots * (1 + SLACK) * 100) / 100,
            "VGPRs": math.ceil(self.most["VGPRs"] / STEP) * STEP,
            "spills": self.most["spills"],
            "KB": math.ceil(self.most["KB"] * (1 + SLACK)),
        }

    def target(self, rows, trellis):
        """Returns the slots that the design aims at, if they are fewer than the actual ones."""
        if "slots" not in self.most:
            return None
        speed = kernels.SIMDS * kernels.CLOCK * kernels.LANES
        part = (TRELLIS_PARTS if trellis else PARTS).get(rows)
        if part:
            target = part * self.most["bits"] / 8 / kernels.BANDWIDTH * speed
        else:
            target = rows / PROMPT_SPEED * speed / LAYER_WEIGHTS
        return target if target < self.most["slots"] else None

    def multiplies(self, matrix_chips):
        """Returns wmma if every chip that has it uses it, dot4 if all use one or the other, or
        -."""
        if matrix_chips and all(
            used == ({"wmma"} if chip in matrix_chips else {"dot4"})
            for chip, used in self.by.items()
        ):
            return "wmma"
        return "dot4" if all(used <= {"dot4", "wmma"} for used in self.by.values()) else "-"


def gather(compiled):
    """Returns {(what, rows): Figures}, and faults that do not depend on the budget."""
    found, wrong = collections.defaultdict(Figures), set()
    for calls, _, _ in compiled.values():
        for call in calls:
            formats = sorted({name.split("+")[0] for name, _, _ in call.matrices})
            layer = "experts " if call.experts else "linear "
            what = layer + "+".join(formats) if formats else call.shader
            found[what, call.rows].take(call)
            if problem := call.contradiction():
                wrong.add(f"{what}, {call.rows} rows: {problem}")
            if not call.kernel.releases():
                wrong.add(
                    f"{call.chip}: {call.shader} {call.constants}: "
                    "counts a workgroup before its stores are done"
                )
    return found, sorted(wrong)


def read_budgets():
    """Returns {(what, rows): {column: budget}}."""
    table = {}
    number = lambda text: None if text == "-" else float(text)
    with open(BUDGETS) as f:
        for line in f:
            if line.strip() and not line.startswith("#"):
                *what, rows, slots, target, registers, spills, code, by = line.split()
                table[" ".join(what), int(rows)] = {
                    "slots": number(slots),
                    "target": number(target),
                    "VGPRs": int(registers),
                    "spills": int(spills),
                    "KB": int(code),
                    "by": by,
                }
    return table


def update(found, matrix_chips):
    old, lines = read_budgets(), [HEAD]
    show = lambda value: "-" if value is None else f"{value:.2f}"
    lines.append(
        f"# {'what':<20}{'rows':>6}{'slots':>9}{'target':>9}"
        f"{'VGPRs':>7}{'spills':>8}{'KB':>5}  by\n"
    )
    for (what, rows), figures in sorted(found.items()):
        new = {**figures.budget(), "by": figures.multiplies(matrix_chips)}
        if before := old.get((what, rows)):
            for name in ("slots", "VGPRs", "spills", "KB"):
                new[name] = min(
                    (v for v in (before[name], new[name]) if v is not None), default=None
                )
            new["target"] = before["target"]
            new["by"] = "wmma" if "wmma" in (before["by"], new["by"]) else before["by"]
        else:
            new["target"] = (
                None
                if what.startswith("experts ")
                else figures.target(rows, what.startswith("linear t"))
            )
        lines.append(
            f"{what:<22}{rows:>6}{show(new['slots']):>9}{show(new['target']):>9}"
            f"{new['VGPRs']:>7}{new['spills']:>8}{new['KB']:>5}  {new['by']}\n"
        )
    with open(BUDGETS, "w") as f:
        f.writelines(lines)


def violations(found, matrix_chips):
    """Lists costs that exceed their budgets."""
    table, bad = read_budgets(), []
    for key, figures in sorted(found.items()):
        what = f"{key[0]}, {key[1]} rows"
        budget = table.get(key)
        if not budget:
            bad.append(
                f"{what}: has no budget; scripts/check/amd.sh --update adds what it costs now"
            )
            continue
        for name in ("slots", "VGPRs", "spills", "KB"):
            has, most = figures.most.get(name), budget[name]
            if has is not None and most is not None and has > most:
                bad.append(f"{what}: {has:.4g} {name}, budget {most:g} ({figures.worst[name]})")
        if figures.most["shared"] > SHARED_KB:
            bad.append(
                f"{what}: {figures.most['shared']:.4g} KB of shared memory, most {SHARED_KB} "
                f"({figures.worst['shared']})"
            )
        if budget["slots"] is not None and "slots" not in figures.most:
            bad.append(f"{what}: no loop with products of int8 is found any more")
        by = figures.multiplies(matrix_chips)
        if by != budget["by"] and (budget["by"], by) != ("dot4", "wmma"):
            bad.append(f"{what}: multiplies by {by}, not by {budget['by']}")
    bad += [
        f"{what}, {rows} rows: has a budget, but no pass; scripts/check/amd.sh --update drops it"
        for what, rows in sorted(table.keys() - found.keys())
    ]
    return bad


def laptop_page(table):
    """Returns the lines of the page, and its lines with this table."""
    with open(LAPTOP) as f:
        lines = f.read().splitlines()
    inside = [i for i, line in enumerate(lines) if line.startswith("|")]
    new = lines[: inside[0]] + table + lines[inside[-1] + 1 :]
    return lines, new


def print_slots(found):
    """Prints a line for each format of linear layers."""
    linear = {key: figures for key, figures in found.items() if "slots" in figures.most}
    rows = sorted({r for _, r in linear})
    print("| weights | " + " | ".join(f"{r} rows" if r > 1 else "1 row" for r in rows) + " |")
    print("|---" + "|---:" * len(rows) + "|")
    for name in sorted({what for what, _ in linear}):
        cells = [linear.get((name, r)) for r in rows]
        cells = [
            "-" if not f else f"{f.most['slots']:.2f}" + " spills" * bool(f.most["spills"])
            for f in cells
        ]
        print(f"| {name.removeprefix('linear ')} | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--driver", required=True, help="libvulkan_radeon.so")
    parser.add_argument("--spirv", required=True, help="folder of compiled shaders")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("lister", help="the built examples/kernels")
    options = parser.parse_args()
    chips = [MODELLED] if options.model else CHIPS
    compiled = kernels.compiled(options.driver, chips, options.lister, options.spirv)
    table = kernels.model_table(compiled[MODELLED][0])
    if options.model:
        print("\n".join(table))
        return 0
    print(", ".join(f"{count} pipelines for {chip}" for chip, (_, count, _) in compiled.items()))
    found, wrong = gather(compiled)
    matrix_chips = {
        chip for chip, (_, _, description) in compiled.items() if description["int8_matrices"]
    }
    if options.update:
        update(found, matrix_chips)
        _, new = laptop_page(table)
        with open(LAPTOP, "w") as f:
            f.write("\n".join(new) + "\n")
    print("\nSlots per weight and lane, the worst of " + ", ".join(CHIPS) + ":")
    print_slots(found)
    print("\nModelled passes on a Radeon 780M; nothing was measured, see docs/LAPTOP.md:")
    print("\n".join(table))
    bad = wrong + violations(found, matrix_chips)
    old, new = laptop_page(table)
    if old != new:
        bad.append("docs/LAPTOP.md: differs from this; scripts/check/amd.sh --update writes it")
    if bad:
        print(
            "\nerror: what AMD's compiler makes of the kernels is beyond "
            f"scripts/check/amd/budgets.txt in {len(bad)} places:",
            file=sys.stderr,
        )
        print("\n".join("  " + line for line in bad[:SHOWN]), file=sys.stderr)
        if len(bad) > SHOWN:
            print(f"  and {len(bad) - SHOWN} more", file=sys.stderr)
        print(
            "help: make the kernel cheaper, or edit its budget and say why in the commit",
            file=sys.stderr,
        )
        return 1
    budgets = read_budgets().values()
    late = sum(
        budget["target"] is not None and budget["slots"] > budget["target"] for budget in budgets
    )
    large = sum(budget["spills"] > 0 or budget["KB"] > CACHE_KB for budget in budgets)
    print(
        f"\nEvery kernel is within its budget. Of {len(budgets)} budgets {late} are above the "
        f"target of slots, {large} allow spills or more code than the instruction cache holds."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except radv.RadvError as e:
        sys.exit(f"error: {e}")
