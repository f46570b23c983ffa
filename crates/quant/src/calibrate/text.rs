//! The calibration text, as tokens in windows of equal length.

use super::BATCH;
use anyhow::{Result, ensure};
use gemma_base::tensor::Token;
use std::ops::Range;

/// Chats, documentation and code, written for this project, with control tokens as in Gemma's
/// turns.
pub const BUILT_IN: &str = include_str!("../../../../quant/calibration.txt");

/// Windows of tokens that each begin with BOS.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationText {
    /// `[windows, window]`
    pub tokens: Vec<Token>,
    pub window: usize,
}

impl CalibrationText {
    /// Cuts a long run of tokens into at most `windows` windows that are spread evenly over it. A
    /// short run makes one short window.
    pub fn cut(
        run: &[Token],
        bos: Token,
        window: usize,
        windows: usize,
    ) -> Result<CalibrationText> {
        ensure!(
            run.len() >= 2 && window >= 2 && windows > 0,
            "a text of {} tokens is too short to calibrate with",
            run.len()
        );
        let body = (window - 1).min(run.len());
        let n = windows.min(run.len() / body);
        let start = |i: usize| if n == 1 { 0 } else { i * (run.len() - body) / (n - 1) };
        let piece =
            |i: usize| std::iter::once(bos).chain(run[start(i)..start(i) + body].iter().copied());
        Ok(CalibrationText { tokens: (0..n).flat_map(piece).collect(), window: body + 1 })
    }

    /// Iterates over token ranges of about [`BATCH`] tokens that consist of whole windows.
    pub(super) fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (step, len) = ((BATCH / self.window).max(1) * self.window, self.tokens.len());
        (0..len).step_by(step).map(move |start| start..len.min(start + step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_begin_with_bos_and_cover_both_ends() {
        let run: Vec<Token> = (100..200).collect();
        let text = CalibrationText::cut(&run, 2, 11, 4).unwrap();
        assert_eq!((text.window, text.tokens.len()), (11, 44));
        for window in text.tokens.chunks(11) {
            assert!(window[0] == 2 && window[1..].windows(2).all(|w| w[1] == w[0] + 1));
        }
        assert_eq!((text.tokens[1], text.tokens[43]), (100, 199));
        let short = CalibrationText::cut(&run[..5], 2, 64, 9).unwrap();
        assert_eq!((short.window, short.tokens.len()), (6, 6));
        assert!(CalibrationText::cut(&run[..1], 2, 64, 9).is_err());
        assert_eq!(CalibrationText::cut(&run, 2, 11, 400).unwrap().tokens.len(), 110);
    }
}
