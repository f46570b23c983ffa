//! Where a position's keys and values live: pages of 256 positions, rings for sliding-window
//! layers, what may be truncated.

/// Positions in one page.
pub const PAGE: usize = 256;

/// Tokens that can always be taken back, however far the ring has turned.
pub const SLACK: usize = 256;

/// The pages of one layer. A global layer keeps them all; a sliding-window layer reuses a ring of
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Physical pages.
    pub count: usize,
    /// Positions a query can see, itself included; `None` sees all.
    pub window: Option<usize>,
}

impl Pages {
    /// The pages that a layer needs for `context` positions when up to `rows` are written at once.
    pub fn for_layer(context: usize, rows: usize, window: Option<usize>) -> Self {
        let all = context.div_ceil(PAGE);
        let count = match window {
            Some(w) => all.min((w + SLACK + rows).div_ceil(PAGE) + 1),
            None => all,
        };
        Pages { count: count.max(1), window }
    }

    /// Physical page of a logical one.
    #[inline(always)]
    pub fn physical(self, page: usize) -> usize {
        page % self.count
    }

    /// First position that a query at `position` sees.
    #[inline(always)]
    pub fn first_visible(self, position: usize) -> usize {
        match self.window {
            Some(w) => (position + 1).saturating_sub(w),
            None => 0,
        }
    }

    /// Whether every key that a query at `position` would see is still in the ring after `written`
    /// positions were written.
    pub fn can_return_to(self, position: usize, written: usize) -> bool {
        if position == 0 || written == 0 {
            return true;
        }
        let newest = (written - 1) / PAGE;
        self.first_visible(position) / PAGE + self.count > newest
    }
}

/// Pages of a layer without a window that another device attends: for each row the first few, a
/// number that its position alone decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedPages {
    /// A row's page counts as sealed when it ends so many positions before the row: the most rows
    /// of a pass. So it is sealed in every pass that the row can be part of, however the prompt was
    /// cut and whatever was drafted.
    pub lag: usize,
    /// Of 256 sealed pages, so many are offloaded.
    pub share: usize,
}

impl OffloadedPages {
    /// How many of the first pages of a row at this position are offloaded.
    #[inline(always)]
    pub fn count(self, position: usize) -> usize {
        position.saturating_sub(self.lag) / PAGE * self.share / 256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_always_returns_within_its_slack() {
        for window in [1, 16, 255, 256, 257, 1024] {
            let pages = Pages::for_layer(100_000, 32, Some(window));
            for written in 1..5000usize {
                for back in [0, 1, 31, SLACK] {
                    assert!(
                        pages.can_return_to(written.saturating_sub(back), written),
                        "window {window}, {written} - {back}"
                    );
                }
            }
            assert!(!pages.can_return_to(4000, 40_000));
        }
    }

    /// Whatever row of a pass stands at a position, its offloaded pages are committed.
    #[test]
    fn offloaded_pages_are_sealed_in_every_pass() {
        for (lag, share) in [(16, 256), (128, 256), (512, 256), (128, 100), (128, 0)] {
            let offloaded = OffloadedPages { lag, share };
            for position in 0..5000 {
                let pages = offloaded.count(position);
                assert!((0..lag).all(|depth| pages == 0 || pages * PAGE <= position - depth));
                assert!(
                    pages <= offloaded.count(position + 1)
                        && pages * 256 <= position / PAGE * share
                );
            }
            assert_eq!(offloaded.count(PAGE + lag - 1), 0);
            assert_eq!(offloaded.count(PAGE + lag), share / 256);
        }
    }

    #[test]
    fn global_layers_return_anywhere() {
        let pages = Pages::for_layer(1000, 32, None);
        assert_eq!(pages.count, 4);
        assert!((0..=1000).all(|p| pages.can_return_to(p, 1000)));
        assert_eq!(pages.first_visible(700), 0);
    }
}
