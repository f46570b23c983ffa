//! Several sources, one tree: the nodes likeliest to be taken, whoever proposed them.

use anyhow::Result;

use super::{DraftContext, Drafter, Figures, Proposal};

pub struct Merge {
    sources: Vec<Box<dyn Drafter>>,
    guesses: Proposal,
}

impl Merge {
    pub fn new(sources: Vec<Box<dyn Drafter>>) -> Self {
        Merge { sources, guesses: Proposal::default() }
    }
}

impl Drafter for Merge {
    fn name(&self) -> &'static str {
        "merged"
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        for source in &mut self.sources {
            self.guesses.reset(ctx.root());
            source.propose(ctx, &mut self.guesses)?;
            out.absorb(&self.guesses);
        }
        if ctx.chain {
            out.keep_chain();
        }
        out.keep_best(ctx.nodes);
        Ok(())
    }

    fn meanwhile(&mut self, ctx: &DraftContext<'_>, proposal: &Proposal, more: &mut dyn FnMut() -> bool) -> Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.meanwhile(ctx, proposal, more))
    }

    fn figures(&self, out: &mut Figures) {
        self.sources.iter().for_each(|source| source.figures(out));
    }

    fn prepare(&mut self, history: &[crate::tensor::Token]) -> Result<()> {
        self.sources.iter_mut().try_for_each(|source| source.prepare(history))
    }

    fn reads_target(&self) -> bool {
        self.sources.iter().any(|source| source.reads_target())
    }

    fn save(&self) -> Result<()> {
        self.sources.iter().try_for_each(|source| source.save())
    }

    fn note(&self) -> Option<String> {
        let notes: Vec<String> = self.sources.iter().filter_map(|s| s.note()).collect();
        (!notes.is_empty()).then(|| notes.join("; "))
    }
}
