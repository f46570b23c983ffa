//! The oracle (candle-core, f32).
