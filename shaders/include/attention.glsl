// Softmax attention page by page. Pages are merged with the same arithmetic everywhere, see
// crates/base/src/compute/reference/attention.rs.

struct Running { float m; float l; };

// Merges the next page into a running (m, l). The outputs are merged with the factors fa and fb. A
// page with a score that is not finite makes them NaN.
Running join(Running a, Running page, out float fa, out float fb) {
    const float m = is_finite(a.m) && is_finite(page.m) ? max(a.m, page.m) : not_a_number();
    fa = exp_(a.m - m);
    fb = exp_(page.m - m);
    precise float l = fma(a.l, fa, page.l * fb);
    return Running(m, l);
}
float join_output(float a, float page, float fa, float fb) {
    precise float o = fma(a, fa, page * fb);
    return o;
}

// First position that a query at `position` sees. With window 0 it sees all positions.
uint first_visible(uint position, uint window) {
    return window == 0 || position + 1 <= window ? 0 : position + 1 - window;
}

// Returns sum + a.x b.x + a.y b.y + ..., added in this order.
float add_products(vec4 a, vec4 b, float sum) {
    precise float s = sum;
    [[unroll]] for (uint e = 0; e < 4; e++) s = fma(a[e], b[e], s);
    return s;
}

vec4 add_scaled(float e, vec4 value, vec4 sum) {
    precise vec4 s = fma(vec4(e), value, sum);
    return s;
}
