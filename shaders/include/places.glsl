// Rows of images. The including file defines `step_` and `max_rows`.

// The token of such a row is this and the last row of its image.
const uint FIRST_PLACE = 1 << 24;

layout(constant_id = 13) const bool WHOLE = false; // a row of an image sees all of its image

// The row whose ancestors row `r` sees: itself, or the last row of its image.
uint end_of(uint r) {
    if (!WHOLE) return r;
    const uint token = step_.v[STEP_TOKENS * max_rows + r];
    return token >= FIRST_PLACE ? token - FIRST_PLACE : r;
}

// Last position that row `r` sees.
uint last_of(uint r) { return step_.v[STEP_POSITIONS * max_rows + end_of(r)]; }
