use super::*;
use crate::sampler::{Sampler, SamplerConfig};
use crate::tensor::Token;

/// Proposes the chain 1, 1, 1, ... with a constant chance per token.
struct Ones(f32);

impl Drafter for Ones {
    fn name(&self) -> &'static str {
        "ones"
    }

    fn propose(&mut self, ctx: &DraftContext<'_>, out: &mut Proposal) -> Result<()> {
        (0..ctx.nodes.min(ctx.depth) as u32).for_each(|node| {
            out.add(node, 1, self.0, "ones");
        });
        Ok(())
    }
}

fn paced(chance: f32, points: &[(usize, f32)], options: DraftOptions) -> Paced {
    Paced::new(Box::new(Ones(chance)), CostCurve::new(points), options, false)
}

/// Nodes proposed after `history`.
fn size(drafter: &mut Paced, history: &[Token]) -> usize {
    let sampler = Sampler::new(SamplerConfig::default()).unwrap();
    let ctx = DraftContext {
        history,
        sampler: &sampler,
        nodes: 100,
        depth: 100,
        vocab: 9,
        chain: false,
        pace: None,
        last_pass: None,
        verified: None,
    };
    let mut out = Proposal::root(ctx.root());
    drafter.propose(&ctx, &mut out).unwrap();
    out.len() - 1
}

#[test]
fn the_size_follows_cost_and_chance() {
    let flat = [(1, 1.0), (32, 1.0)];
    let steep = [(1, 1.0), (32, 32.0)];
    let knee = [(1, 1.0), (8, 1.0), (9, 2.0), (32, 5.0)];
    let auto = DraftOptions::default();
    assert_eq!(size(&mut paced(0.9, &flat, auto), &[5]), 22); // all that was asked for
    assert_eq!(size(&mut paced(0.9, &steep, auto), &[5]), 0);
    assert_eq!(size(&mut paced(0.7, &knee, auto), &[5]), 7);
    let fixed = DraftOptions { tree: TreeSize::Nodes(5), tokens: None };
    assert_eq!(size(&mut paced(0.1, &steep, fixed), &[5]), 5);
    let chain = DraftOptions { tree: TreeSize::Chain, tokens: Some(3) };
    assert_eq!(size(&mut paced(0.1, &steep, chain), &[5]), 3);
    let short = DraftOptions { tree: TreeSize::Auto, tokens: Some(2) };
    assert_eq!(size(&mut paced(0.9, &flat, short), &[5]), 2);
}

#[test]
fn drafting_rests_when_it_does_not_pay_and_is_tried_again() {
    // Claims 0.9, is never right, and eight rows cost one and a half: losses end it, and trust
    // sinks.
    let mut drafter = paced(0.9, &[(1, 1.0), (8, 1.5), (32, 4.0)], DraftOptions::default());
    let mut history = vec![5];
    let sizes: Vec<usize> = (0..1000)
        .map(|_| {
            let size = size(&mut drafter, &history);
            history.push(2);
            size
        })
        .collect();
    assert!(sizes[0] > 0);
    let curve = CostCurve::new(&[(1, 1.0), (8, 1.5), (32, 4.0)]);
    let lost: f32 = sizes.iter().map(|&nodes| curve.cost(nodes + 1) - 1.0).sum();
    assert!(lost < 0.025 * 1000.0, "{lost} passes of 1000 were lost");
    let rested = sizes.iter().position(|&s| s == 0).unwrap();
    assert!(sizes[rested..].iter().any(|&s| s > 0), "tried again");
    let mut figures = Figures::default();
    drafter.figures(&mut figures);
    assert!(
        figures.realised == figures.rounds as f64 && figures.predicted > 1.2 * figures.realised,
        "{figures:?}"
    );
    assert_eq!(figures.plain_seconds, 999.0);
}

#[test]
fn options_are_read_from_words() {
    assert_eq!("auto".parse::<TreeSize>().unwrap(), TreeSize::Auto);
    assert_eq!("chain".parse::<TreeSize>().unwrap(), TreeSize::Chain);
    assert_eq!("12".parse::<TreeSize>().unwrap(), TreeSize::Nodes(12));
    assert!("0".parse::<TreeSize>().is_err() && "tree".parse::<TreeSize>().is_err());
}
