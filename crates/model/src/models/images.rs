//! Images in histories.
//!
//! An image is identified by a digest of its pixels. In a history it is a run of placeholder
//! numbers from [`FIRST_PLACE`] upwards, one per soft token. The registry assigns these numbers
//! once per digest: the same image gives the same history, and two images never share a number.
//! Soft tokens are kept while a text holds the image, and afterwards within a memory limit.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use gemma_base::error::{Fault, Kind};
use gemma_base::tensor::{FIRST_PLACE, Token, is_place};

/// SHA-256 of everything that determines an image's soft tokens: its pixels, its size, and the
/// model's token budget.
pub type ImageDigest = [u8; 32];

/// Most digests with remembered placeholders. The least recently used one is forgotten first; if
/// the image returns, it gets new numbers.
const MOST_NAMES: usize = 1 << 16;

/// An image with its soft tokens. A text holds the images in its history.
pub struct Image {
    digest: ImageDigest,
    places: Range<Token>,
    /// f32 `[places, dim]`
    soft: Box<[f32]>,
}

impl Image {
    /// Returns the image's placeholders in a history, in order.
    pub fn places(&self) -> Range<Token> {
        self.places.clone()
    }

    /// Returns the number of its placeholders.
    pub fn rows(&self) -> usize {
        self.places.len()
    }

    pub fn digest(&self) -> &ImageDigest {
        &self.digest
    }

    /// Returns the soft tokens from index `n`: f32 `[rows - n, dim]`.
    pub fn soft_from(&self, n: usize) -> &[f32] {
        &self.soft[n * (self.soft.len() / self.rows())..]
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({:?})", self.places)
    }
}

/// Placeholders of a digest.
struct Named {
    places: Range<Token>,
    /// `None` after it was dropped.
    image: Option<Arc<Image>>,
    /// Time of the last use.
    used: u64,
}

#[derive(Default)]
struct Registry {
    named: HashMap<ImageDigest, Named>,
    /// Digest by first placeholder.
    digests: BTreeMap<Token, ImageDigest>,
    /// Number of placeholders assigned so far, with a gap of one between images.
    given: u32,
    now: u64,
    /// Bytes of all soft tokens.
    bytes: usize,
}

/// The images of one model.
pub struct Images {
    /// Channels of a soft token, equal to those of the model's embeddings.
    dim: usize,
    most_rows: usize,
    most_bytes: usize,
    registry: Mutex<Registry>,
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Images(up to {} rows of {})", self.most_rows, self.dim)
    }
}

impl Images {
    /// Creates an empty registry for images of at most `most_rows` soft tokens of `dim` channels.
    /// Soft tokens of images that no text holds use at most `most_bytes`.
    pub fn new(dim: usize, most_rows: usize, most_bytes: usize) -> Images {
        Images { dim, most_rows, most_bytes, registry: Mutex::default() }
    }

    /// Returns the most soft tokens of an image.
    pub fn most_rows(&self) -> usize {
        self.most_rows
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Returns a stored image, so that its soft tokens need not be computed again.
    pub fn find(&self, digest: &ImageDigest) -> Option<Arc<Image>> {
        let mut registry = self.lock();
        registry.now += 1;
        let now = registry.now;
        let named = registry.named.get_mut(digest)?;
        named.used = now;
        named.image.clone()
    }

    /// Stores the soft tokens of an image, f32 `[rows, dim]`. Returns the existing image if there
    /// is one.
    ///
    /// Fails for a number of rows that the model does not support or that differs from an earlier
    /// one, and for non-finite values.
    pub fn insert(&self, digest: ImageDigest, soft: Vec<f32>) -> Result<Arc<Image>> {
        let rows = soft.len() / self.dim.max(1);
        let fits = (1..=self.most_rows).contains(&rows) && rows * self.dim == soft.len();
        if !fits {
            let (most, dim, len) = (self.most_rows, self.dim, soft.len());
            let what = format!("an image has {len} values, not 1 to {most} rows of {dim}");
            return Err(Fault::model(what).into());
        }
        if !soft.iter().all(|value| value.is_finite()) {
            return Err(Fault::model("an image's soft tokens are not finite").into());
        }
        let mut registry = self.lock();
        registry.now += 1;
        let now = registry.now;
        let known = registry.named.get(&digest).map(|named| named.places.clone());
        let places = match known {
            Some(places) => places,
            None => registry.give(rows)?,
        };
        if places.len() != rows {
            let what = format!("an image of {} soft tokens now has {rows}", places.len());
            return Err(Fault::model(what).into());
        }
        registry.digests.insert(places.start, digest);
        let named = registry.named.entry(digest).or_insert(Named {
            places: places.clone(),
            image: None,
            used: now,
        });
        named.used = now;
        let image = match &named.image {
            Some(image) => image.clone(),
            None => {
                let bytes = size_of_val(&soft[..]);
                let image = Arc::new(Image { digest, places, soft: soft.into() });
                named.image = Some(image.clone());
                registry.bytes += bytes;
                image
            }
        };
        registry.limit(self.most_bytes, &digest);
        Ok(image)
    }

    /// Returns the stored image of a placeholder, and the index of its soft token.
    pub fn at(&self, place: Token) -> Option<(Arc<Image>, usize)> {
        let registry = self.lock();
        let (named, index) = registry.at(place)?;
        Some((named.image.clone()?, index))
    }

    /// Returns a placeholder's identity across processes: the digest of its image and the index of
    /// its soft token.
    pub fn name(&self, place: Token) -> Option<(ImageDigest, usize)> {
        let registry = self.lock();
        let (_, index) = registry.at(place)?;
        let first = place - index as Token;
        Some((*registry.digests.get(&first)?, index))
    }

    /// Returns whether a placeholder is the last one of its image; `None` if it belongs to no
    /// image.
    pub fn is_last(&self, place: Token) -> Option<bool> {
        let registry = self.lock();
        let (named, index) = registry.at(place)?;
        Some(index + 1 == named.places.len())
    }

    /// Fails for a prompt that cuts an image, ends with an image, or contains an image that is not
    /// stored.
    pub fn check(&self, history: &[Token]) -> Result<()> {
        let mut rest = history;
        while let Some(&item) = rest.first() {
            if !is_place(item) {
                rest = &rest[1..];
                continue;
            }
            let (image, index) = self.at(item).ok_or_else(forgotten)?;
            let run = rest.iter().copied().zip(image.places());
            if index > 0 || run.take_while(|(item, place)| item == place).count() < image.rows() {
                return Err(Fault::usage("the prompt has only part of an image")
                    .help("give all placeholders of an image in order")
                    .into());
            }
            rest = &rest[image.rows()..];
            if rest.is_empty() {
                return Err(Fault::usage("the prompt ends with an image")
                    .help("let text follow the image")
                    .into());
            }
        }
        Ok(())
    }
}

/// How a model reads image placeholders.
#[derive(Clone, Debug, Default)]
pub enum Sight {
    /// It rejects them.
    #[default]
    Refuses,
    /// It reads each one as this token.
    Blind(Token),
    /// It reads the soft tokens of these images.
    Sees(Arc<Images>),
}

/// Returns the error for a placeholder of no stored image.
pub fn forgotten() -> anyhow::Error {
    Fault::usage("the text has an image that is not kept").help("send the image again").into()
}

impl Registry {
    fn at(&self, place: Token) -> Option<(&Named, usize)> {
        let (first, digest) = self.digests.range(..=place).next_back()?;
        let named = self.named.get(digest)?;
        named.places.contains(&place).then_some((named, (place - first) as usize))
    }

    /// Assigns placeholders. The number after them stays free, so that images are never adjacent.
    fn give(&mut self, rows: usize) -> Result<Range<Token>> {
        let all = (self.given as usize + rows + 1).try_into().ok();
        let Some(given) = all.filter(|given: &u32| *given < u32::MAX - FIRST_PLACE) else {
            let what = "this process has no numbers for more images";
            return Err(Fault::new(Kind::Memory, what).help("start it again").into());
        };
        let first = FIRST_PLACE + std::mem::replace(&mut self.given, given);
        Ok(first..first + rows as Token)
    }

    /// Drops unused soft tokens until they use at most `most_bytes`, and digests beyond
    /// [`MOST_NAMES`], least recently used first. Keeps `newest`.
    fn limit(&mut self, most_bytes: usize, newest: &ImageDigest) {
        let is_free =
            |named: &Named| named.image.as_ref().is_none_or(|i| Arc::strong_count(i) == 1);
        while self.bytes > most_bytes {
            let kept = self.named.iter_mut().filter(|(digest, named)| {
                *digest != newest && named.image.is_some() && is_free(named)
            });
            let Some((_, oldest)) = kept.min_by_key(|(_, named)| named.used) else { break };
            let image = oldest.image.take();
            self.bytes -= image.map_or(0, |image| size_of_val(&image.soft[..]));
        }
        while self.named.len() > MOST_NAMES {
            let free =
                self.named.iter().filter(|(digest, named)| *digest != newest && is_free(named));
            let oldest = free.min_by_key(|(_, named)| named.used).map(|(digest, _)| *digest);
            let Some(named) = oldest.and_then(|digest| self.named.remove(&digest)) else { break };
            self.digests.remove(&named.places.start);
            self.bytes -= named.image.map_or(0, |image| size_of_val(&image.soft[..]));
        }
    }
}

/// Returns the length of the run of placeholders at the start of `items`; 0 if it starts with a
/// token.
pub fn run(items: &[Token]) -> usize {
    let Some(&first) = items.first().filter(|item| is_place(**item)) else { return 0 };
    (first..).zip(items).take_while(|(place, item)| place == *item).count()
}

/// Returns where to cut `items` near index `n` without cutting an image.
///
/// The part ends before an image that does not fit, unless that image is at its start.
pub fn whole(items: &[Token], n: usize) -> usize {
    let is_inside = |at: usize| items[at] > FIRST_PLACE && items[at] == items[at - 1] + 1;
    if n == 0 || n >= items.len() || !is_inside(n) {
        return n;
    }
    match (1..n).rev().find(|at| !is_inside(*at)) {
        Some(begin) => begin,
        None if is_place(items[0]) => run(items),
        None => n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> ImageDigest {
        [n; 32]
    }

    #[test]
    fn an_image_has_its_places_once_and_no_two_images_touch() {
        let images = Images::new(2, 3, 1 << 20);
        let a = images.insert(digest(1), vec![1.0; 6]).unwrap();
        let b = images.insert(digest(2), vec![1.0; 6]).unwrap();
        assert!(a.places().start >= FIRST_PLACE && a.places().end < b.places().start);
        assert_eq!((a.rows(), b.soft_from(1).len()), (3, 4));
        let again = images.find(&digest(1)).unwrap();
        assert!(Arc::ptr_eq(&again, &a));
        assert!(Arc::ptr_eq(&images.insert(digest(1), vec![5.0; 6]).unwrap(), &a));
        let place = b.places().start + 2;
        assert_eq!(images.at(place).map(|(image, i)| (*image.digest(), i)), Some((digest(2), 2)));
        assert_eq!(images.name(place), Some((digest(2), 2)));
        assert_eq!(images.name(b.places().end), None);
        assert_eq!(images.name(FIRST_PLACE - 1), None);
        for bad in [vec![], vec![1.0; 5], vec![1.0; 8], vec![f32::NAN; 2]] {
            assert!(images.insert(digest(9), bad).is_err());
        }
        assert!(images.insert(digest(1), vec![1.0; 4]).is_err(), "another number of rows");
    }

    #[test]
    fn soft_tokens_are_dropped_and_places_stay() {
        // The limit fits two images of one row.
        let images = Images::new(2, 3, 16);
        let places = |n| images.insert(digest(n), vec![n as f32; 2]).unwrap().places();
        let (a, b) = (places(1), places(2));
        images.find(&digest(1)).unwrap();
        let held = images.insert(digest(3), vec![3.0; 2]).unwrap();
        assert!(images.find(&digest(2)).is_none() && images.at(b.start).is_none());
        assert_eq!(images.name(b.start), Some((digest(2), 0)), "the name outlives the values");
        // An image that a text holds stays regardless of the limit.
        assert_eq!((places(2), places(1), places(4).len()), (b, a, 1));
        assert!(images.find(&digest(3)).is_some_and(|image| Arc::ptr_eq(&image, &held)));
    }

    #[test]
    fn a_prompt_has_whole_images_and_text_after_them() {
        let images = Images::new(1, 3, 1 << 20);
        let a: Vec<Token> = images.insert(digest(1), vec![1.0; 3]).unwrap().places().collect();
        let whole = [&[1, 2][..], &a, &a, &[3]].concat();
        images.check(&whole).unwrap();
        images.check(&[1, 2]).unwrap();
        let cut = [&[1][..], &a[..2], &[3]].concat();
        let cut_off = [&[1][..], &a[1..], &[3]].concat();
        for bad in [&cut[..], &cut_off, &whole[..8], &[FIRST_PLACE + 77, 1]] {
            assert!(images.check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn no_part_ends_inside_an_image() {
        let p = FIRST_PLACE;
        let items = [7, 8, p, p + 1, p + 2, 9, p + 4, p + 5, p, p + 1, p + 2];
        let ends: Vec<usize> = (0..=items.len()).map(|n| whole(&items, n)).collect();
        assert_eq!(ends, [0, 1, 2, 2, 2, 5, 6, 6, 8, 8, 8, 11]);
        assert_eq!((whole(&items[2..], 1), whole(&items[3..], 1), run(&items[8..])), (3, 2, 3));
    }
}
