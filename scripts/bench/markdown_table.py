"""Markdown tables with columns that are aligned in plain text too."""


def show(rows, left=(0,)):
    """Prints rows of cells. The first row is the heading. `left` lists left-aligned columns."""
    columns = range(len(rows[0]))
    widths = [max(3, *(len(row[c]) for row in rows)) for c in columns]

    def line(cells):
        print("|" + "|".join(cells) + "|")

    def padded(row):
        return [row[c].ljust(widths[c]) if c in left else row[c].rjust(widths[c]) for c in columns]

    for i, row in enumerate(rows):
        line([f" {cell} " for cell in padded(row)])
        if i == 0:
            line(["-" * (widths[c] + 1) + ("-" if c in left else ":") for c in columns])
