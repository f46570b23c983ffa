use super::*;
use crate::draft::{DraftContext, Proposal, Verified};
use crate::engine::{Scores, TokenTree};
use crate::sampler::{Sampler, SamplerConfig};

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
    let scores = Scores { best: vec![vec![(7, 3.0), (8, 1.0)]], ..Scores::default() };
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
    // No token follows 1 twice, so candidates after it get less and less credit.
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
