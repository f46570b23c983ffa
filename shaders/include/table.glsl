// Page tables: which page of a cache has the nth 256 positions of a sequence.

const uint STEP_TABLES = 7; // arrays of the step in front of the tables

// Where among the step's words the table of a sequence begins; a layer's tables begin at `table`.
uint table_of(uint max_rows, uint table, uint sequence, uint pages) {
    return STEP_TABLES * max_rows + table + sequence * pages;
}
