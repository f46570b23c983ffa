// Page tables: which page of the cache has the nth 256 positions of a sequence.

const uint STEP_TABLES = 7; // arrays of the step before the tables

// Index of a sequence's table in the words of the step. `table` is the start of the layer's tables.
uint table_of(uint max_rows, uint table, uint sequence, uint pages) {
    return STEP_TABLES * max_rows + table + sequence * pages;
}
