//! The part of a prompt that a draft model reads, and when it reads it.

use crate::{invariance, toy};
use gemma::draft::{DraftModel, DraftRequest, Drafter, NoDraft, TreeBuilder, TreeModel};
use gemma::engine::{Assistant, EngineExt, Timeline};
use gemma::sampler::SamplerConfig;
use invariance::{Case, run};
use std::time::Duration;
use toy::Toy;

/// A draft model with a short context reads the end of a prompt of any length, and its drafts are
/// as good.
#[test]
fn a_draft_of_short_sight_reads_the_end_of_a_prompt_alone() {
    let target = Toy { context: 3000, max_rows: 64, ..Toy::new(31) };
    let draft = Toy { context: 60, max_rows: 32, reach: Some(16), ..target.clone() };
    let mut lm = DraftModel::new(draft.engine());
    let history: Vec<u32> = (0..2000).map(|i| i * i % 37).collect();
    lm.read_ahead(0, &history, &mut || false).unwrap();
    assert_eq!(lm.engine().position(0), 0, "told not to");
    for (end, read) in [(1000, 8), (1010, 8), (1011, 9), (2000, 8), (400, 8), (3, 3), (10, 10)] {
        lm.read_ahead(0, &history[..end], &mut || true).unwrap();
        assert_eq!(lm.engine().position(0), read, "{end} tokens");
        assert_eq!(lm.left(0, end), 60 - read);
    }
    // Far beyond its context the draft model still drafts the target's tokens, because the logits
    // of both models depend only on the last two tokens.
    let case = Case { max_tokens: 300, ..Case::new(&history[..500], SamplerConfig::default()) };
    let mut drafter = TreeBuilder::of_model(draft.engine());
    let (text, stats) = run(&mut Timeline::new(target.engine()), &mut drafter, &case);
    let (plain, _) = run(&mut Timeline::new(target.engine()), &mut NoDraft, &case);
    assert_eq!(text, plain);
    assert!(stats.passes * 3 < stats.tokens && drafter.note().is_none(), "{stats:?}");
}

/// A prompt is read as far back as there is time for, and at least its last 32 tokens.
#[test]
fn a_prompt_is_read_within_a_time() {
    let draft = Toy { context: 3000, max_rows: 32, reach: Some(512), ..Toy::new(31) };
    let mut model = DraftModel::new(draft.engine());
    let history: Vec<u32> = (0..2000).map(|i| i * i % 37).collect();
    for (end, most, read) in [
        (1000, Duration::ZERO, 32),
        (1500, Duration::from_secs(100), 256),
        (2000, Duration::ZERO, 32),
        (900, Duration::MAX, 256),
    ] {
        model.read_within(0, &history[..end], most).unwrap();
        assert_eq!(model.engine().position(0), read, "{end} tokens in {most:?}");
    }
}

/// The draft model reads a prompt while the target's device does.
#[test]
fn a_prompt_is_read_beside_the_target() {
    /// Lengths of the histories read before the target was done, and after.
    #[derive(Default)]
    struct Reader {
        during: Vec<usize>,
        looks: usize,
        after: usize,
    }
    impl Drafter for Reader {
        fn read_ahead(
            &mut self,
            _: usize,
            history: &[u32],
            more: &mut dyn FnMut() -> bool,
        ) -> anyhow::Result<()> {
            self.during.push(history.len());
            while more() {
                self.looks += 1;
            }
            Ok(())
        }
        fn prepare(&mut self, _: usize, history: &[u32], _: Duration) -> anyhow::Result<()> {
            self.after = history.len();
            Ok(())
        }
        fn propose(
            &mut self,
            _: &mut [DraftRequest<'_>],
            _: Option<&mut dyn Assistant>,
        ) -> anyhow::Result<usize> {
            Ok(0)
        }
    }
    let case = Case { max_tokens: 5, ..Case::new(&[7; 81], SamplerConfig::default()) };
    let mut texts = Vec::new();
    for (busy_polls, chunks, looks) in [(None, 0, 0), (Some(4), 3, 12)] {
        let mut reader = Reader::default();
        let target = Toy { busy_polls, ..Toy::new(32) };
        texts.push(run(&mut Timeline::new(target.engine()), &mut reader, &case).0);
        assert_eq!((reader.during, reader.looks, reader.after), (vec![80; chunks], looks, 80));
    }
    assert_eq!(texts[0], texts[1]);
}
