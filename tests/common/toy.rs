//! A model made of a hash: logits are a pure function of the token path, and every rule of the
//! trait is asserted.

#![allow(dead_code)]

use std::cell::Cell;

use anyhow::{Result, bail};
use gemma::engine::{Engine, Memory, Rows, Scores, TokenTree};
use gemma::tensor::Token;

/// The model; its engines hold the state.
#[derive(Clone, Debug)]
pub struct Toy {
    pub seed: u64,
    pub vocab: usize,
    pub context: usize,
    pub max_rows: usize,
    /// Tokens of the path that matter; few make the text repeat itself.
    pub order: usize,
    /// Spread of the logits.
    pub spread: f32,
    /// How far logits are from those of a model of another seed: 0 is the target itself, 1 knows
    /// nothing of it.
    pub error: f32,
    /// Tokens that can be taken back.
    pub slack: usize,
    /// Works beside the caller, and is busy for as many looks at it.
    pub beside: Option<usize>,
    /// Positions that it says it sees.
    pub reach: Option<usize>,
}

struct ToyEngine {
    toy: Toy,
    committed: Vec<Token>,
    furthest: usize,
    last: TokenTree,
    begun: Option<(TokenTree, Rows)>,
    looks: Cell<usize>,
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A number in [0, 1).
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
            beside: None,
            reach: None,
        }
    }

    pub fn engine(&self) -> Box<dyn Engine> {
        let (committed, last, looks) = (Vec::new(), TokenTree::default(), Cell::new(0));
        Box::new(ToyEngine { toy: self.clone(), committed, furthest: 0, last, begun: None, looks })
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

/// Engines as the sequences of one.
pub struct Several {
    pub engines: Vec<Box<dyn Engine>>,
    current: usize,
}

impl Several {
    pub fn new(engines: Vec<Box<dyn Engine>>) -> Self {
        Several { engines, current: 0 }
    }

    fn own(&self) -> &dyn Engine {
        &*self.engines[self.current]
    }

    fn own_mut(&mut self) -> &mut dyn Engine {
        &mut *self.engines[self.current]
    }
}

impl Engine for Several {
    fn position(&self) -> usize {
        self.own().position()
    }

    fn context(&self) -> usize {
        self.own().context()
    }

    fn max_rows(&self) -> usize {
        self.own().max_rows()
    }

    fn vocab(&self) -> usize {
        self.own().vocab()
    }

    fn sequences(&self) -> usize {
        self.engines.len()
    }

    fn select(&mut self, sequence: usize) {
        self.current = sequence;
    }

    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.own_mut().forward(tree, rows, out)
    }

    fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()> {
        self.own_mut().forward_more(tree, first_new, rows, out)
    }

    fn forward_each(&mut self, trees: &[(usize, &TokenTree)], out: &mut Scores) -> Result<()> {
        let rows: usize = trees.iter().map(|(_, tree)| tree.len()).sum();
        assert!(rows <= self.max_rows(), "{rows} rows of all sequences");
        let (mut all, mut own) = (Vec::new(), Scores::default());
        for (sequence, tree) in trees {
            self.engines[*sequence].forward(tree, Rows::All, &mut own)?;
            all.append(&mut own.logits);
        }
        *out = Scores { vocab: self.vocab(), logits: all, ..Scores::default() };
        Ok(())
    }

    fn commit(&mut self, path: &[u32]) -> Result<()> {
        self.own_mut().commit(path)
    }

    fn commit_each(&mut self, paths: &[(usize, &[u32])]) -> Result<()> {
        paths.iter().try_for_each(|(sequence, path)| self.engines[*sequence].commit(path))
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        self.own_mut().truncate(position)
    }

    fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        self.own_mut().hidden(out)
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }

    fn describe(&self) -> String {
        "several toys".into()
    }
}

impl ToyEngine {
    fn pass(&mut self, tree: &TokenTree, first: usize, rows: Rows, out: &mut Scores) {
        assert!(self.begun.is_none(), "a pass that was begun is finished first");
        assert!(
            first < tree.len() && tree.len() <= self.toy.max_rows,
            "{} rows from {first}",
            tree.len()
        );
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
        let deepest = tree.depths().into_iter().max().unwrap() as usize;
        assert!(self.committed.len() + deepest < self.toy.context, "positions of the context");
        out.vocab = self.toy.vocab;
        out.logits.clear();
        let nodes = match rows {
            Rows::None => 0..0,
            Rows::Last => tree.len() - 1..tree.len(),
            Rows::All => first..tree.len(),
        };
        for node in nodes {
            let mut path = self.committed.clone();
            path.push(tree.tokens[0]);
            path.extend(tree.path(node as u32));
            self.toy.logits(&path, &mut out.logits);
        }
        self.last.clone_from(tree);
    }
}

impl Engine for ToyEngine {
    fn position(&self) -> usize {
        self.committed.len()
    }

    fn context(&self) -> usize {
        self.toy.context
    }

    fn reach(&self) -> Option<usize> {
        self.toy.reach
    }

    fn max_rows(&self) -> usize {
        self.toy.max_rows
    }

    fn vocab(&self) -> usize {
        self.toy.vocab
    }

    fn forward(&mut self, tree: &TokenTree, rows: Rows, out: &mut Scores) -> Result<()> {
        self.pass(tree, 0, rows, out);
        Ok(())
    }

    fn forward_more(
        &mut self,
        tree: &TokenTree,
        first_new: usize,
        rows: Rows,
        out: &mut Scores,
    ) -> Result<()> {
        assert_eq!(first_new, self.last.len(), "the whole last tree comes first");
        assert!(
            tree.tokens.starts_with(&self.last.tokens)
                && tree.parent.starts_with(&self.last.parent)
        );
        self.pass(tree, first_new, rows, out);
        Ok(())
    }

    fn begin(&mut self, tree: &TokenTree, rows: Rows) -> Result<bool> {
        assert!(self.begun.is_none(), "one pass at a time");
        self.begun = self.toy.beside.map(|_| (tree.clone(), rows));
        self.looks.set(0);
        Ok(self.begun.is_some())
    }

    fn finish(&mut self, out: &mut Scores) -> Result<()> {
        let (tree, rows) = self.begun.take().expect("a pass was begun");
        self.pass(&tree, 0, rows, out);
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.looks.set(self.looks.get() + 1);
        self.begun.is_some() && self.toy.beside.is_some_and(|looks| self.looks.get() <= looks)
    }

    fn commit(&mut self, path: &[u32]) -> Result<()> {
        assert!(self.begun.is_none(), "a pass that was begun is finished first");
        assert_eq!(path[0], 0, "a path begins at the root");
        assert!(
            path.windows(2).all(|w| self.last.parent[w[1] as usize] == Some(w[0])),
            "each the parent of the next"
        );
        self.committed.extend(path.iter().map(|&node| self.last.tokens[node as usize]));
        self.furthest = self.furthest.max(self.committed.len());
        self.last.clear();
        Ok(())
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        assert!(position <= self.committed.len() && self.begun.is_none());
        if position > 0 && self.furthest - position > self.toy.slack {
            bail!("the ring has turned");
        }
        self.committed.truncate(position);
        self.last.clear();
        if position == 0 {
            self.furthest = 0;
        }
        Ok(())
    }

    fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        Ok(())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }

    fn describe(&self) -> String {
        "toy".into()
    }
}
