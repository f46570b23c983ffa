// Page tables: the page of a cache that holds the nth 256 positions of a sequence.

const uint STEP_TABLES = 7; // arrays of the step in front of the tables

// Place of a sequence's table among the words of the step. A layer's tables begin at `table`.
uint table_of(uint max_rows, uint table, uint sequence, uint pages) {
    return STEP_TABLES * max_rows + table + sequence * pages;
}
