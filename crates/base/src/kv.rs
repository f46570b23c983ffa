//! Places of a position's keys and values: pages of 256 positions, and rings for sliding-window
//! layers. [`pool`] counts the holders of each page.

pub mod pool;

pub use pool::{PageList, PagePool};

/// Positions in one page.
pub const PAGE: usize = 256;

/// Tokens that can always be taken back, however far the ring has turned.
pub const SLACK: usize = 256;

/// The pages that a sequence has in one layer. A global layer keeps them all; a sliding-window
/// layer has the places of a ring for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Most pages that a sequence holds at a time.
    pub count: usize,
    /// Positions a query can see, itself included; `None` sees all.
    pub window: Option<usize>,
}

impl Pages {
    /// Returns the pages that a layer needs for `context` positions when up to `rows` are written
    /// at once.
    pub fn for_layer(context: usize, rows: usize, window: Option<usize>) -> Self {
        let all = context.div_ceil(PAGE);
        let count = match window {
            Some(w) => all.min((w + SLACK + rows).div_ceil(PAGE) + 1),
            None => all,
        };
        Pages { count: count.max(1), window }
    }

    /// Returns the entry of a sequence's page table that has its nth page.
    #[inline(always)]
    pub fn entry(self, page: usize) -> usize {
        page % self.count
    }

    /// Returns the first position that a query at `position` sees.
    #[inline(always)]
    pub fn first_visible(self, position: usize) -> usize {
        match self.window {
            Some(w) => (position + 1).saturating_sub(w),
            None => 0,
        }
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
    /// Offloaded pages of every 256 sealed ones.
    pub share: usize,
}

impl OffloadedPages {
    /// Returns how many of the first pages of a row at this position are offloaded.
    #[inline(always)]
    pub fn count(self, position: usize) -> usize {
        position.saturating_sub(self.lag) / PAGE * self.share / 256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The offloaded pages of a position are committed, whatever row of a pass it is.
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
    fn layers_without_a_window_see_everything() {
        let pages = Pages::for_layer(1000, 32, None);
        assert_eq!((pages.count, pages.first_visible(700)), (4, 0));
    }
}
