//! Placement of keys and values: pages of 256 positions, and rings of pages for sliding-window
//! layers. [`pool`] counts the owners of each page.

pub mod pool;

pub use pool::{PageList, PagePool};

/// Positions in one page.
pub const PAGE: usize = 256;

/// Tokens that can always be rolled back, however far the ring has advanced.
pub const SLACK: usize = 256;

/// The pages of a sequence in one layer.
///
/// A global layer keeps all pages; a sliding-window layer reuses them as a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Most pages that a sequence holds at once.
    pub count: usize,
    /// Positions that a query sees, including its own; `None` for all.
    pub window: Option<usize>,
}

impl Pages {
    /// Returns the pages that a layer needs for `context` positions if a pass writes up to `rows`.
    pub fn for_layer(context: usize, rows: usize, window: Option<usize>) -> Self {
        let all = context.div_ceil(PAGE);
        let count = match window {
            Some(w) => all.min((w + SLACK + rows).div_ceil(PAGE) + 1),
            None => all,
        };
        Pages { count: count.max(1), window }
    }

    /// Returns the page-table entry that holds a sequence's nth page.
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

/// First pages of a row that another device attends, in a layer without a window.
///
/// Their number depends only on the row's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadedPages {
    /// Distance in positions between a row and the end of its last sealed page: the most rows of a
    /// pass. A page is then sealed in every pass that can contain the row, regardless of how the
    /// prompt was cut and what was drafted.
    pub lag: usize,
    /// Offloaded pages per 256 sealed pages.
    pub share: usize,
}

impl OffloadedPages {
    /// Returns the number of leading pages that are offloaded for a row at this position.
    #[inline(always)]
    pub fn count(self, position: usize) -> usize {
        position.saturating_sub(self.lag) / PAGE * self.share / 256
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offloaded pages of a position are committed, whichever row of a pass it is.
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
