use super::*;
use crate::draft::sources::model::{ModelRow, TextStart};
use crate::draft::{DraftContext, Proposal, Verified};
use gemma_model::engine::{Scores, TokenTree};
use gemma_model::sampler::{LOOKED_AT, Sampler, SamplerConfig};

fn propose(
    builder: &mut TreeBuilder,
    history: &[Token],
    nodes: usize,
    chain: bool,
    verified: Option<Verified<'_>>,
) -> Proposal {
    let sampler = Sampler::new(SamplerConfig::default()).unwrap().ban([9]);
    let (depth, vocab, sampler) = (nodes, 500, &sampler);
    let ctx = DraftContext {
        history,
        sampler,
        nodes,
        depth,
        vocab,
        chain,
        draft_steps: usize::MAX,
        rate: None,
        verified,
    };
    let mut out = Proposal::root(ctx.root());
    builder.propose(&mut [DraftRequest { text: 0, ctx, out: &mut out }], None).unwrap();
    assert!(out.len() <= nodes + 1);
    out
}

#[test]
fn a_repeated_passage_is_continued_as_a_chain() {
    let text: Vec<Token> = (20..60).chain([100]).chain(30..40).collect();
    let p = propose(&mut TreeBuilder::of_text(), &text, 8, true, None);
    assert_eq!(p.tree.tokens, [39, 40, 41, 42, 43, 44, 45, 46, 47]);
    assert!(p.chance.windows(2).all(|w| w[0] >= w[1]) && p.source[1] == "context");
    let tree = propose(&mut TreeBuilder::of_text(), &text, 8, false, None);
    assert!(tree.tree.walk(&(39..48).collect::<Vec<_>>()).len() > 4, "{tree:?}");
}

#[test]
fn several_continuations_become_branches_and_what_cannot_be_picked_is_left_out() {
    let text = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 4, 7, 1, 2, 9, 6, 1, 2, 777, 6, 1, 2];
    let p = propose(&mut TreeBuilder::of_text(), &text, 8, false, None);
    let (frequent, rare) = (p.tree.child(0, 4).unwrap(), p.tree.child(0, 3).unwrap());
    assert!(p.chance[frequent as usize] > p.chance[rare as usize]);
    assert!(!p.tree.tokens.iter().any(|t| [9, 777].contains(t)), "{p:?}");
}

#[test]
fn what_the_target_said_is_guessed_the_next_time() {
    let mut builder = TreeBuilder::of_text();
    assert!(propose(&mut builder, &[5, 6], 4, false, None).is_empty(), "nothing is known yet");
    let scores = Scores { best: vec![Some(vec![(7, 3.0), (8, 1.0)])], ..Scores::default() };
    let verified = Verified { position: 2, tree: &TokenTree::root(6), scores: &scores, first: 0 };
    let p = propose(&mut builder, &[5, 6, 40, 5, 6], 4, false, Some(verified));
    let seven = p.tree.child(0, 7).unwrap() as usize;
    assert!(
        p.chance[seven] > p.chance[p.tree.child(0, 8).unwrap() as usize]
            && p.source[seven] == "table",
        "{p:?}"
    );
}

#[test]
fn a_habit_of_the_text_is_learnt() {
    // No token follows 1 twice, so candidates after it lose credit.
    let mut builder = TreeBuilder::new(
        None,
        &[CandidateSource::Context],
        Mixing { rate: 0.05, ..Mixing::default() },
    );
    let mut history: Vec<Token> = Vec::new();
    let mut promised = Vec::new();
    for i in 0..80 {
        history.push(1);
        promised.push(propose(&mut builder, &history, 4, false, None).expected());
        history.push(100 + i);
        propose(&mut builder, &history, 4, false, None);
    }
    assert!(promised[79] < 0.5 * promised[1], "{promised:?}");
}

/// A draft model with the same logits after every node.
struct Monotone {
    logits: Vec<f32>,
    nodes: u32,
}

impl TreeModel for Monotone {
    fn reads_texts(&self) -> bool {
        true
    }

    fn begin(
        &mut self,
        texts: &[TextStart<'_>],
        _: &mut Option<&mut dyn Assistant>,
    ) -> Result<Vec<Start>> {
        Ok(vec![Start::Waits(0); texts.len()])
    }

    fn knows(&self, _: Token) -> bool {
        true
    }

    fn left(&self, _: usize, _: usize) -> usize {
        usize::MAX
    }

    fn rows_of(&self, _: Token) -> usize {
        1
    }

    fn room(&self) -> usize {
        usize::MAX
    }

    fn push(&mut self, _: usize, _: u32, _: Token) -> u32 {
        self.nodes += 1;
        self.nodes
    }

    fn evaluate(&mut self, _: &mut Option<&mut dyn Assistant>) -> Result<()> {
        Ok(())
    }

    fn row(&self, _: usize, _: usize) -> ModelRow<'_> {
        ModelRow::Logits { logits: &self.logits, columns: None }
    }

    fn work_done(&self) -> [u64; 2] {
        [0; 2]
    }
}

/// Drafts after `len` tokens. Returns the number of draft model nodes, and the number of tokens
/// that their penalties have read.
fn work_of_penalties(config: &SamplerConfig, len: usize) -> (usize, usize) {
    // Equal logits except for three tokens, in a row of vocabulary length.
    let mut logits = vec![0.0; 1000];
    logits[500..503].copy_from_slice(&[6.0, 7.0, 8.0]);
    let model = Box::new(Monotone { logits, nodes: 0 });
    let mut builder = TreeBuilder::mixed(Some(model), &[], Mixing::default());
    let history: Vec<Token> = (0..len as Token).map(|i| i % 400).collect();
    let mut sampler = Sampler::new(config.clone()).unwrap().answering(200);
    sampler.settle(&history);
    let before = LOOKED_AT.get();
    let ctx = DraftContext {
        history: &history,
        sampler: &sampler,
        nodes: 12,
        depth: 6,
        vocab: 1000,
        chain: false,
        draft_steps: usize::MAX,
        rate: None,
        verified: None,
    };
    let mut out = Proposal::root(ctx.root());
    builder.propose(&mut [DraftRequest { text: 0, ctx, out: &mut out }], None).unwrap();
    let rows = builder.trees[0].nodes.iter().filter(|node| node.row.is_some()).count();
    (rows, LOOKED_AT.get() - before)
}

#[test]
fn penalties_look_at_the_path_to_a_node_alone() {
    let base = SamplerConfig::default;
    for config in [
        SamplerConfig { presence_penalty: 1.5, ..base() },
        SamplerConfig { frequency_penalty: 0.5, ..base() },
        SamplerConfig { repeat_penalty: 1.2, ..base() },
        SamplerConfig { repeat_penalty: 1.2, repeat_last_n: 64, ..base() },
    ] {
        let (rows, looked_at) = work_of_penalties(&config, 100_000);
        assert_eq!((rows, looked_at), work_of_penalties(&config, 1_200), "{config:?}");
        // At most six tokens of a path enter the counts, and equally many leave a window.
        assert!(rows > 4 && looked_at > 0 && looked_at <= 12 * rows, "{looked_at}, {rows} rows");
    }
}
