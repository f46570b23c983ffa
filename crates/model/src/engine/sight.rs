//! Rows of images in a pass: their soft tokens, and which rows they attend.

use super::{Input, PlannedEngine};
use crate::models::images::{Image, Images, Sight, forgotten};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::{FIRST_PLACE, Token, is_place};
use std::sync::Arc;

/// Soft tokens of an image, or of its last rows.
pub struct SoftRows {
    image: Arc<Image>,
    first: usize,
}

impl SoftRows {
    /// Returns the values, f32 `[rows, dim]`.
    pub fn values(&self) -> &[f32] {
        self.image.soft_from(self.first)
    }
}

/// The images of a pass.
#[derive(Default)]
pub struct PassImages {
    /// Tokens of all rows for the step buffer; `None` if they equal those of scratch.
    pub words: Option<Vec<u32>>,
    /// Runs of soft tokens, each with its first row.
    pub soft: Vec<(usize, SoftRows)>,
}

impl PlannedEngine {
    /// Finds the images among the rows of scratch from `first`. Fails for tokens outside the
    /// vocabulary, and for incomplete images.
    pub(super) fn see(&self, first: usize) -> Result<PassImages> {
        let (items, vocab) = (&self.scratch.tokens, self.info.vocab);
        if let Some(bad) = items[first..].iter().find(|t| **t as usize >= vocab && !is_place(**t)) {
            let what = format!("token {bad} is outside the vocabulary of {vocab}");
            return Err(Fault::model(what).into());
        }
        let (mut words, mut soft) = (items.clone(), Vec::new());
        let parents = self.scratch.step().parents;
        let mut row = first;
        while row < items.len() {
            if !is_place(items[row]) {
                // Text may only follow complete images.
                let parent = items.get(parents[row] as usize).filter(|item| is_place(**item));
                if let (Some(place), Sight::Sees(images)) = (parent, &self.sight) {
                    ends_image(images, *place)?;
                }
                row += 1;
                continue;
            }
            match &self.sight {
                Sight::Refuses => return Err(sees_none()),
                Sight::Blind(token) => {
                    words[row] = *token;
                    row += 1;
                }
                Sight::Sees(images) => {
                    let (image, index) = images.at(items[row]).ok_or_else(forgotten)?;
                    let end = row + image.rows() - index;
                    let goes_on = |at: usize| {
                        items[at] == items[at - 1] + 1 && parents[at] as usize == at - 1
                    };
                    let before = items.get(parents[row] as usize);
                    let begins = index == 0 || before.is_none_or(|item| *item + 1 == items[row]);
                    if end > items.len() || !begins || !(row + 1..end).all(goes_on) {
                        return Err(is_cut());
                    }
                    words[row..end].fill(FIRST_PLACE + end as u32 - 1);
                    soft.push((row, SoftRows { image, first: index }));
                    row = end;
                }
            }
        }
        Ok(PassImages { words: Some(words), soft })
    }

    /// Fails for a new tree that cuts an image at its root. Either the committed tokens end inside
    /// an image that the root does not continue, or the root is inside an image that they do not
    /// contain.
    pub(super) fn goes_on(&self, input: &Input<'_>) -> Result<()> {
        let Sight::Sees(images) = &self.sight else { return Ok(()) };
        let Some(&root) = input.tree.tokens.first().filter(|_| input.first == 0) else {
            return Ok(());
        };
        let last = self.sequences[input.sequence].tokens.last().copied();
        let last = last.filter(|item| is_place(*item));
        if last.is_some_and(|last| last + 1 == root) {
            return Ok(());
        }
        if let Some(last) = last {
            ends_image(images, last)?;
        }
        match Some(root).filter(|root| is_place(*root)).and_then(|root| images.at(root)) {
            Some((_, index)) if index > 0 => Err(is_cut()),
            _ => Ok(()),
        }
    }
}

/// Fails for an image placeholder that is not the last one of its image.
fn ends_image(images: &Images, place: Token) -> Result<()> {
    match images.is_last(place).ok_or_else(forgotten)? {
        true => Ok(()),
        false => Err(is_cut()),
    }
}

fn is_cut() -> anyhow::Error {
    Fault::usage("a pass has only part of an image")
        .help("pass all placeholders of an image in order")
        .into()
}

fn sees_none() -> anyhow::Error {
    Fault::usage("the text has an image, but the model was opened without images").into()
}
