//! Reference-counted pages, and the page lists of sequences.
//!
//! A pool holds the pages of all layers with the same page count: page 7 means page 7 of each of
//! these layers. Only the newest page of a list is written, and only while it has one owner. Full
//! pages are therefore shared without a copy. A page without owners is free.

use super::{PAGE, Pages};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Ids of the free pages; the last one is allocated next.
type Free = Arc<Mutex<Vec<u32>>>;

fn lock(free: &Free) -> MutexGuard<'_, Vec<u32>> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An owned page. Dropping the last owner returns it to its pool.
#[derive(Debug)]
struct OwnedPage {
    id: u32,
    free: Free,
}

impl Drop for OwnedPage {
    fn drop(&mut self) {
        lock(&self.free).push(self.id);
    }
}

/// All pages of a pool.
#[derive(Debug)]
pub struct PagePool {
    free: Free,
}

impl PagePool {
    pub fn new(pages: usize) -> PagePool {
        PagePool { free: Arc::new(Mutex::new((0..pages as u32).rev().collect())) }
    }

    /// Returns the number of free pages.
    pub fn free(&self) -> usize {
        lock(&self.free).len()
    }

    fn take(&self) -> Option<Arc<OwnedPage>> {
        let id = lock(&self.free).pop()?;
        Some(Arc::new(OwnedPage { id, free: self.free.clone() }))
    }
}

/// The pages of a sequence in the layers of one pool, in the order of their positions.
///
/// A sliding-window layer has dropped the oldest ones.
#[derive(Clone, Debug, Default)]
pub struct PageList {
    /// Index in the sequence of the first page that the list holds; older pages were dropped.
    first: usize,
    pages: VecDeque<Arc<OwnedPage>>,
}

impl PageList {
    /// Returns the pool's id of the sequence's nth page; `None` if the list does not hold it.
    pub fn page(&self, nth: usize) -> Option<u32> {
        self.pages.get(nth.checked_sub(self.first)?).map(|page| page.id)
    }

    /// Returns all pages of the list, as (index in the sequence, id in the pool).
    pub fn iter(&self) -> impl Iterator<Item = (usize, u32)> {
        self.pages.iter().enumerate().map(|(i, page)| (self.first + i, page.id))
    }

    /// Returns whether all pages belong to this pool.
    pub fn is_of(&self, pool: &PagePool) -> bool {
        self.pages.iter().all(|page| Arc::ptr_eq(&page.free, &pool.free))
    }

    fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// Allocates pages for all positions before `position`.
    ///
    /// Drops the oldest pages beyond `layer.count`. Reports (index, id) of each new page. Returns
    /// whether the pool had enough free pages.
    pub fn grow(
        &mut self,
        layer: Pages,
        pool: &PagePool,
        position: usize,
        taken: &mut dyn FnMut(usize, u32),
    ) -> bool {
        while self.end() * PAGE < position {
            if self.pages.len() == layer.count {
                self.pages.pop_front();
                self.first += 1;
            }
            let Some(page) = pool.take() else { return false };
            taken(self.end(), page.id);
            self.pages.push_back(page);
        }
        true
    }

    /// Allocates the sequence's nth page and returns its id; `None` if no page is free.
    ///
    /// If `nth` does not follow the last page, the new page replaces the whole list. Drops pages
    /// that no query after the new page sees.
    pub fn append(&mut self, nth: usize, layer: Pages, pool: &PagePool) -> Option<u32> {
        if nth != self.end() {
            *self = PageList { first: nth, pages: VecDeque::new() };
        }
        let first = layer.first_visible((nth + 1) * PAGE) / PAGE;
        while self.first < first && self.pages.pop_front().is_some() {
            self.first += 1;
        }
        let page = pool.take()?;
        let id = page.id;
        self.pages.push_back(page);
        Some(id)
    }

    /// Returns whether the list can be rolled back to `position` positions.
    ///
    /// It must hold every key that the next query sees. A page that would be rewritten from its
    /// middle must have no other owner.
    pub fn can_return_to(&self, layer: Pages, position: usize) -> bool {
        if position == 0 {
            return true;
        }
        let written = position / PAGE;
        let is_own =
            |page: &Arc<OwnedPage>| position.is_multiple_of(PAGE) || Arc::strong_count(page) == 1;
        self.first <= layer.first_visible(position) / PAGE
            && self.pages.get(written.saturating_sub(self.first)).is_none_or(is_own)
    }

    /// Drops the pages after the first `position` positions.
    pub fn truncate(&mut self, position: usize) {
        self.pages.truncate(position.div_ceil(PAGE).saturating_sub(self.first));
        if position == 0 {
            self.first = 0;
        }
    }

    /// Returns the pages with which another sequence can continue after `position` positions.
    ///
    /// `position` is a whole number of pages. These are all pages before it, or those that a window
    /// still sees. Returns `None` if some were dropped.
    pub fn beginning(&self, layer: Pages, position: usize) -> Option<PageList> {
        if position == 0 {
            return Some(PageList::default());
        }
        let end = position / PAGE;
        let first = (layer.first_visible(position) / PAGE).min(end);
        if !position.is_multiple_of(PAGE) || first < self.first || end > self.end() {
            return None;
        }
        let pages = self.pages.range(first - self.first..end - self.first).cloned().collect();
        Some(PageList { first, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::super::SLACK;
    use super::*;

    fn grown(layer: Pages, pool: &PagePool, position: usize) -> PageList {
        let mut list = PageList::default();
        assert!(list.grow(layer, pool, position, &mut |_, _| {}));
        list
    }

    #[test]
    fn a_ring_always_returns_within_its_slack() {
        for window in [1, 16, 255, 256, 257, 1024] {
            let layer = Pages::for_layer(100_000, 32, Some(window));
            let pool = PagePool::new(layer.count);
            let mut list = PageList::default();
            for written in 1..5000usize {
                assert!(list.grow(layer, &pool, written, &mut |_, _| {}));
                for back in [0, 1, 31, SLACK] {
                    assert!(
                        list.can_return_to(layer, written.saturating_sub(back)),
                        "window {window}, {written} - {back}"
                    );
                }
            }
            assert!(list.grow(layer, &pool, 40_000, &mut |_, _| {}));
            assert!(!list.can_return_to(layer, 4000));
            assert!(list.can_return_to(layer, 0));
        }
    }

    #[test]
    fn global_layers_return_anywhere() {
        let layer = Pages::for_layer(1000, 32, None);
        let list = grown(layer, &PagePool::new(layer.count), 1000);
        assert!((0..=1000).all(|position| list.can_return_to(layer, position)));
    }

    #[test]
    fn pages_go_back_when_nobody_holds_them() {
        let layer = Pages::for_layer(2000, 32, None);
        let pool = PagePool::new(8);
        let mut list = grown(layer, &pool, 3 * PAGE + 1);
        assert_eq!(pool.free(), 4);
        let kept = list.beginning(layer, 2 * PAGE).unwrap();
        assert_eq!(kept.iter().collect::<Vec<_>>(), [(0, 0), (1, 1)]);
        assert!(kept.is_of(&pool) && !kept.is_of(&PagePool::new(8)));
        drop(list);
        assert_eq!(pool.free(), 6, "two still have an owner");
        list = kept.clone();
        // A shared page is never written: the next page is a new one.
        let mut taken = Vec::new();
        assert!(list.grow(layer, &pool, 2 * PAGE + 1, &mut |nth, id| taken.push((nth, id))));
        assert!(taken.len() == 1 && taken[0].0 == 2 && ![0, 1].contains(&taken[0].1), "{taken:?}");
        assert!(list.can_return_to(layer, 2 * PAGE) && list.can_return_to(layer, PAGE));
        assert!(!list.can_return_to(layer, 2 * PAGE - 1) && !list.can_return_to(layer, 7));
        drop(kept);
        assert!(list.can_return_to(layer, 7), "it has no other owner");
        list.truncate(7);
        assert_eq!((pool.free(), list.page(0), list.page(1)), (7, Some(0), None));
        let others = grown(layer, &pool, 7 * PAGE);
        assert!(!list.grow(layer, &pool, 2 * PAGE, &mut |_, _| {}), "there are eight");
        list.truncate(0);
        drop(others);
        assert_eq!(pool.free(), 8);
    }

    #[test]
    fn appended_pages_are_those_that_a_window_sees() {
        let layer = Pages::for_layer(100_000, 32, Some(300));
        let pool = PagePool::new(3);
        let mut list = PageList::default();
        let held = |list: &PageList| list.iter().map(|(nth, _)| nth).collect::<Vec<_>>();
        for (nth, want) in [(5, &[5][..]), (6, &[5, 6]), (7, &[6, 7]), (9, &[9]), (3, &[3])] {
            assert!(list.append(nth, layer, &pool).is_some());
            assert_eq!((&held(&list)[..], pool.free()), (want, 3 - want.len()), "{nth}");
        }
        let all = grown(layer, &pool, 2 * PAGE);
        assert!(list.append(4, layer, &pool).is_none(), "no page is free");
        assert!(held(&list) == [3] && held(&all) == [0, 1]);
    }

    #[test]
    fn a_window_needs_its_last_pages_alone() {
        let layer = Pages::for_layer(100_000, 32, Some(300));
        let pool = PagePool::new(20);
        let list = grown(layer, &pool, 9 * PAGE + 5);
        let kept = list.beginning(layer, 9 * PAGE).unwrap();
        let held: Vec<usize> = kept.iter().map(|(nth, _)| nth).collect();
        assert_eq!(held, [7, 8]);
        assert!(kept.can_return_to(layer, 9 * PAGE) && !kept.can_return_to(layer, 8 * PAGE));
        let same: Vec<_> = held.iter().map(|nth| list.page(*nth)).collect();
        assert_eq!(same, held.iter().map(|nth| kept.page(*nth)).collect::<Vec<_>>());
        assert!(list.beginning(layer, 9 * PAGE + 5).is_none(), "no whole page");
        assert!(list.beginning(layer, PAGE).is_none(), "given up");
        assert!(list.beginning(layer, 11 * PAGE).is_none(), "not there yet");
        assert!(list.beginning(layer, 0).is_some_and(|none| none.iter().count() == 0));
    }
}
