//! Images that histories name.
//!
//! An image is known by a digest of its pixels. In a history it is a run of numbers from
//! [`FIRST_PLACE`] on, its places, one for each row of soft tokens. The registry gives each digest
//! its places once: the same image is the same history again, and two images never share a number.
//! Soft tokens are kept while a text holds the image, and after that within a limit of memory.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use gemma_base::error::{Fault, Kind};
use gemma_base::tensor::{FIRST_PLACE, Token, is_place};

/// SHA-256 over all that an image's soft tokens follow from: its pixels, its size, the model's
/// budget of tokens.
pub type ImageDigest = [u8; 32];

/// Digests at most whose places are known. The one unused for longest is forgotten first, and gets
/// other places if it returns.
const MOST_NAMES: usize = 1 << 16;

/// An image with its soft tokens. A text holds the images that its history names.
pub struct Image {
    digest: ImageDigest,
    places: Range<Token>,
    /// f32 `[places, dim]`
    soft: Box<[f32]>,
}

impl Image {
    /// Returns the image's items of a history, in order.
    pub fn places(&self) -> Range<Token> {
        self.places.clone()
    }

    /// Returns the number of its places.
    pub fn rows(&self) -> usize {
        self.places.len()
    }

    pub fn digest(&self) -> &ImageDigest {
        &self.digest
    }

    /// Returns the soft tokens from the nth on: f32 `[rows - n, dim]`.
    pub fn soft_from(&self, n: usize) -> &[f32] {
        &self.soft[n * (self.soft.len() / self.rows())..]
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({:?})", self.places)
    }
}

/// Places of a digest.
struct Named {
    places: Range<Token>,
    /// `None` once it was dropped.
    image: Option<Arc<Image>>,
    /// When it was asked for last.
    used: u64,
}

#[derive(Default)]
struct Registry {
    named: HashMap<ImageDigest, Named>,
    /// By the first place.
    digests: BTreeMap<Token, ImageDigest>,
    /// Places given out so far, with one between any two images.
    given: u32,
    now: u64,
    /// Bytes of all soft tokens.
    bytes: usize,
}

/// The images of one model.
pub struct Images {
    /// Channels of a soft token: those of the model's embeddings.
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
    /// Makes an empty registry for soft tokens of `dim` channels. An image has at most `most_rows`
    /// of them. Soft tokens of images that no text holds take at most `most_bytes`.
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

    /// Returns an image that is kept. Nothing has to be computed for it.
    pub fn find(&self, digest: &ImageDigest) -> Option<Arc<Image>> {
        let mut registry = self.lock();
        registry.now += 1;
        let now = registry.now;
        let named = registry.named.get_mut(digest)?;
        named.used = now;
        named.image.clone()
    }

    /// Keeps the soft tokens of an image, f32 `[rows, dim]`. Returns the image that is kept already
    /// where there is one. Refuses a number of rows that the model does not take, or that is not
    /// the digest's, and values that are not finite.
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
            let what = format!("an image of {} soft tokens has {rows} now", places.len());
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

    /// Returns the image of a place that is kept, and which of its soft tokens the place is.
    pub fn at(&self, place: Token) -> Option<(Arc<Image>, usize)> {
        let registry = self.lock();
        let (named, index) = registry.at(place)?;
        Some((named.image.clone()?, index))
    }

    /// Returns what a place is in every process: the digest of its image and the number of the soft
    /// token.
    pub fn name(&self, place: Token) -> Option<(ImageDigest, usize)> {
        let registry = self.lock();
        let (_, index) = registry.at(place)?;
        let first = place - index as Token;
        Some((*registry.digests.get(&first)?, index))
    }

    /// Returns whether a place is the last one of its image; `None` for a place that no image has.
    pub fn is_last(&self, place: Token) -> Option<bool> {
        let registry = self.lock();
        let (named, index) = registry.at(place)?;
        Some(index + 1 == named.places.len())
    }

    /// Refuses a prompt in which an image is cut, at whose end no token follows an image, or with
    /// images that are not kept.
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
                return Err(Fault::usage("the prompt has a part of an image")
                    .help("give all places of an image in order")
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

/// The way in which a model reads places of images.
#[derive(Clone, Debug, Default)]
pub enum Sight {
    /// It refuses them.
    #[default]
    Refuses,
    /// It reads each as this token.
    Blind(Token),
    /// It reads the soft tokens of these.
    Sees(Arc<Images>),
}

/// Returns the error about a place that no image has.
pub fn forgotten() -> anyhow::Error {
    Fault::usage("the text has an image that is not kept").help("send the image again").into()
}

impl Registry {
    fn at(&self, place: Token) -> Option<(&Named, usize)> {
        let (first, digest) = self.digests.range(..=place).next_back()?;
        let named = self.named.get(digest)?;
        named.places.contains(&place).then_some((named, (place - first) as usize))
    }

    /// Gives out places. One number stays free after them, so that two images never touch.
    fn give(&mut self, rows: usize) -> Result<Range<Token>> {
        let all = (self.given as usize + rows + 1).try_into().ok();
        let Some(given) = all.filter(|given: &u32| *given < u32::MAX - FIRST_PLACE) else {
            let what = "this process has no numbers for more images";
            return Err(Fault::new(Kind::Memory, what).help("start it again").into());
        };
        let first = FIRST_PLACE + std::mem::replace(&mut self.given, given);
        Ok(first..first + rows as Token)
    }

    /// Drops soft tokens that no text holds until the rest takes at most `most_bytes`, and names
    /// beyond [`MOST_NAMES`]; those unused for longest first. `newest` stays.
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

/// Returns the end of the run of places that begins `items`, and 0 for a token.
pub fn run(items: &[Token]) -> usize {
    let Some(&first) = items.first().filter(|item| is_place(**item)) else { return 0 };
    (first..).zip(items).take_while(|(place, item)| place == *item).count()
}

/// Returns how many of these items a part of about `n` of them takes, so that no image is cut: the
/// part ends before an image that does not fit, unless the image begins it.
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
        // Room for two images of one row.
        let images = Images::new(2, 3, 16);
        let places = |n| images.insert(digest(n), vec![n as f32; 2]).unwrap().places();
        let (a, b) = (places(1), places(2));
        images.find(&digest(1)).unwrap();
        let held = images.insert(digest(3), vec![3.0; 2]).unwrap();
        assert!(images.find(&digest(2)).is_none() && images.at(b.start).is_none());
        assert_eq!(images.name(b.start), Some((digest(2), 0)), "the name outlives the values");
        // One that a text holds stays, whatever the limit.
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
        let behind = [&[1][..], &a[1..], &[3]].concat();
        for bad in [&cut[..], &behind, &whole[..8], &[FIRST_PLACE + 77, 1]] {
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
