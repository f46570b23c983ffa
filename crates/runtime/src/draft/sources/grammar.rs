//! Tokens forced by a grammar: candidates that are always right, and only cost rows of the target's
//! pass.

use crate::draft::drafter::DraftContext;
use crate::draft::proposal::Proposal;

/// The source's name in the statistics.
pub const NAME: &str = "grammar";

/// Adds the tokens that the sampler's rule forces after the history, as a chain.
pub fn chain(ctx: &DraftContext<'_>, out: &mut Proposal) {
    let (mut text, mut at) = (ctx.history.to_vec(), 0);
    let room = ctx.nodes.min(ctx.depth);
    while text.len() - ctx.history.len() < room && !ctx.sampler.is_slow() {
        // If the rule fails, the error is reported later, when the target's own token is picked.
        let Ok(Some(mask)) = ctx.sampler.mask(&text) else { return };
        let Some(token) = mask.only().filter(|_| !mask.ends()) else { return };
        at = out.add(at, token, 1.0, NAME);
        text.push(token);
    }
}

/// Returns the number of nodes that the target must accept.
pub fn count(out: &Proposal) -> usize {
    (1..out.len()).filter(|&node| is_sure(out, node)).count()
}

/// Returns whether the target must accept a node.
pub fn is_sure(out: &Proposal, node: usize) -> bool {
    out.chance[node] == 1.0 && out.source[node] == NAME
}

/// Returns the nodes of several proposals, most likely first. Each entry has the probability,
/// whether the target must accept the node, and the index of its proposal. Certain nodes come
/// before likely ones.
pub fn by_chance(all: &[&mut Proposal]) -> Vec<(f32, bool, usize)> {
    let mut order = Vec::new();
    for (index, proposal) in all.iter().enumerate() {
        let node = |node| (proposal.chance[node], is_sure(proposal, node), index);
        order.extend((1..proposal.len()).map(node));
    }
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    order
}
