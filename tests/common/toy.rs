//! A model made of a hash. Its logits are a pure function of the token path, and it asserts every
//! rule of the engine trait.

#![allow(dead_code)]

use std::cell::Cell;

use anyhow::{Result, bail};
use gemma::compute::Reports;
use gemma::engine::{
    Assistant, Cached, Engine, EngineInfo, EngineReport, Input, Output, PageCopy, Prefix, Rows,
    Scores, TokenTree,
};
use gemma::kv::PAGE;
use gemma::tensor::Token;

/// The model. Its engines hold the state.
#[derive(Clone, Debug)]
pub struct Toy {
    pub seed: u64,
    pub vocab: usize,
    pub context: usize,
    pub max_rows: usize,
    /// Number of last tokens that determine the logits. A small number makes the text repeat
    /// itself.
    pub order: usize,
    /// Spread of the logits.
    pub spread: f32,
    /// Distance of the logits from those of a model with another seed: 0 is the target itself, 1 is
    /// unrelated to it.
    pub error: f32,
    /// Number of tokens that can be truncated.
    pub slack: usize,
    /// Passes run in the background, and are unfinished for this many polls.
    pub busy_polls: Option<usize>,
    /// Context size that it reports.
    pub reach: Option<usize>,
}

struct ToyEngine {
    toy: Toy,
    info: EngineInfo,
    texts: Vec<Text>,
    /// Rows in scratch, including those of trees that were dropped.
    rows: usize,
    begun: Option<Scores>,
    looks: Cell<usize>,
}

#[derive(Default)]
struct Text {
    committed: Vec<Token>,
    furthest: usize,
    last: TokenTree,
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Returns a number in [0, 1).
pub fn unit(x: u64) -> f64 {
    (mix(x.wrapping_add(0x9E37_79B9_7F4A_7C15)) >> 11) as f64 / (1u64 << 53) as f64
}

impl Toy {
    pub fn new(seed: u64) -> Self {
        Toy {
            seed,
            vocab: 40,
            context: 4096,
            max_rows: 32,
            order: 2,
            spread: 2.5,
            error: 0.0,
            slack: usize::MAX,
            busy_polls: None,
            reach: None,
        }
    }

    pub fn engine(&self) -> Box<dyn Engine> {
        self.engine_for(1)
    }

    pub fn engine_for(&self, sequences: usize) -> Box<dyn Engine> {
        let texts = (0..sequences).map(|_| Text::default()).collect();
        let info = EngineInfo {
            sequences,
            max_rows: self.max_rows,
            image_rows: self.max_rows,
            images: None,
            vocab: self.vocab,
            reach: self.reach,
            columns: None,
            most_rows: 1,
            paged: Vec::new(),
        };
        let (toy, looks) = (self.clone(), Cell::new(0));
        Box::new(ToyEngine { toy, info, texts, rows: 0, begun: None, looks })
    }

    fn logits(&self, path: &[Token], out: &mut Vec<f32>) {
        let recent = &path[path.len().saturating_sub(self.order)..];
        let state = recent
            .iter()
            .fold(self.seed, |h, &t| mix(h ^ (t as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93)));
        let heavy = |x: u64| -(-unit(x).max(1e-12).ln()).ln() as f32;
        out.extend((0..self.vocab as u64).map(|token| {
            let own = heavy(state ^ token << 32);
            let wrong = heavy(state ^ token << 32 ^ 0xABCD);
            self.spread * (own * (1.0 - self.error) + wrong * self.error)
        }));
    }
}

impl ToyEngine {
    fn evaluate(&mut self, input: &Input<'_>, out: &mut Vec<f32>) {
        let Input { sequence, tree, first, rows, .. } = *input;
        let text = &mut self.texts[sequence];
        assert!(first <= tree.len() && !tree.is_empty(), "{} rows from {first}", tree.len());
        assert_eq!(tree.tokens.len(), tree.parent.len());
        assert_eq!(tree.parent[0], None);
        for node in 1..tree.len() {
            let parent = tree.parent[node].expect("only the root has no parent");
            assert!((parent as usize) < node, "parents come first");
        }
        assert!(
            tree.tokens.iter().all(|&t| (t as usize) < self.toy.vocab),
            "tokens of the vocabulary"
        );
        if first > 0 {
            assert_eq!(first, text.last.len(), "the whole last tree comes first");
            assert!(
                tree.tokens.starts_with(&text.last.tokens)
                    && tree.parent.starts_with(&text.last.parent)
            );
        }
        let deepest = tree.depths().into_iter().max().unwrap() as usize;
        assert!(text.committed.len() + deepest < self.toy.context, "positions of the context");
        let nodes = match rows {
            Rows::None => 0..0,
            Rows::Last => tree.len().max(first + 1) - 1..tree.len(),
            Rows::All => first..tree.len(),
        };
        for node in nodes {
            let mut path = text.committed.clone();
            path.push(tree.tokens[0]);
            path.extend(tree.path(node as u32));
            self.toy.logits(&path, out);
        }
        text.last.clone_from(tree);
    }
}

impl Engine for ToyEngine {
    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn cached(&self, sequence: usize) -> Cached<'_> {
        let tokens = &self.texts[sequence].committed;
        Cached { tokens, room: self.toy.context - tokens.len(), free_pages: usize::MAX }
    }

    fn begin(&mut self, inputs: &[Input<'_>], _: Output) -> Result<bool> {
        assert!(self.begun.is_none(), "a pass that was begun is finished first");
        if inputs.iter().all(|input| input.first == 0) {
            self.rows = 0;
        }
        let new: usize = inputs.iter().map(|input| input.tree.len() - input.first).sum();
        self.rows += new;
        assert!(new > 0 && self.rows <= self.toy.max_rows, "{new} rows of {}", self.rows);
        for (sequence, text) in self.texts.iter_mut().enumerate() {
            let named = inputs.iter().filter(|input| input.sequence == sequence);
            match named.collect::<Vec<_>>()[..] {
                [] => text.last.clear(),
                [_] => {}
                _ => panic!("two trees of one sequence"),
            }
        }
        let mut scores = Scores { vocab: self.toy.vocab, ..Scores::default() };
        inputs.iter().for_each(|input| self.evaluate(input, &mut scores.logits));
        self.begun = Some(scores);
        self.looks.set(0);
        Ok(self.toy.busy_polls.is_some())
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        *out = self.begun.take().expect("a pass was begun");
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.looks.set(self.looks.get() + 1);
        self.begun.is_some() && self.toy.busy_polls.is_some_and(|looks| self.looks.get() <= looks)
    }

    fn lend(&self, _: usize) -> Option<&[f32]> {
        None
    }

    fn commit(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        assert!(self.begun.is_none(), "a pass that was begun is finished first");
        for (sequence, path) in paths {
            let text = &mut self.texts[*sequence];
            assert_eq!(path[0], 0, "a path begins at the root");
            assert!(
                path.windows(2).all(|w| text.last.parent[w[1] as usize] == Some(w[0])),
                "each the parent of the next"
            );
            text.committed.extend(path.iter().map(|&node| text.last.tokens[node as usize]));
            text.furthest = text.furthest.max(text.committed.len());
            text.last.clear();
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: usize, position: usize) -> Result<()> {
        let text = &mut self.texts[sequence];
        assert!(position <= text.committed.len() && self.begun.is_none());
        if position > 0 && text.furthest - position > self.toy.slack {
            bail!("the ring has turned");
        }
        text.committed.truncate(position);
        text.last.clear();
        if position == 0 {
            text.furthest = 0;
        }
        Ok(())
    }

    fn retain(&mut self, sequence: usize, tokens: usize) -> Option<Prefix> {
        let text = &self.texts[sequence];
        let is_kept = tokens.is_multiple_of(PAGE) && text.furthest - tokens <= self.toy.slack;
        text.committed.get(..tokens).filter(|_| is_kept).map(Prefix::of_tokens)
    }

    fn resume(&mut self, sequence: usize, prefix: &Prefix, tokens: usize) -> Result<()> {
        assert!(tokens.is_multiple_of(PAGE) && tokens <= prefix.tokens().len());
        if self.toy.slack < usize::MAX && tokens < prefix.tokens().len() {
            bail!("the window is not kept");
        }
        let committed = prefix.tokens()[..tokens].to_vec();
        let text = &mut self.texts[sequence];
        *text = Text { furthest: committed.len(), committed, last: TokenTree::default() };
        Ok(())
    }

    fn copy_page(&mut self, _: &mut Prefix, _: usize, _: usize, _: PageCopy<'_>) -> Result<bool> {
        Ok(false)
    }

    fn report(&self) -> EngineReport {
        EngineReport { device: "toy".into(), ..EngineReport::default() }
    }

    fn assistant(&mut self) -> Option<&mut dyn Assistant> {
        None
    }

    fn device(&mut self) -> Option<&mut dyn Reports> {
        None
    }
}
