// Rows of images. The including file defines `step_` and `max_rows`.

layout(constant_id = 13) const bool WHOLE = false; // a row of an image sees its whole image

// Word `i` of an array of the step. The arrays start after eight words.
uint of_step(uint array, uint i) {
    return U32(uint64_t(step_) + 32 + uint64_t(4 * (array * max_rows + i))).v[0];
}

// Returns the row with the ancestors that row `r` sees: itself, or the last row of its image.
uint end_of(uint r) {
    if (!WHOLE) return r;
    const uint token = of_step(STEP_TOKENS, r);
    return token >= FIRST_PLACE ? token - FIRST_PLACE : r;
}
