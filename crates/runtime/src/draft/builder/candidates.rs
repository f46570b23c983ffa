//! Collects the candidates of all sources for one node of the tree, with their features.

use anyhow::Result;

use crate::draft::mix::Candidates;
use crate::draft::sources::model::ModelRow;
use crate::draft::sources::{
    CandidateSource, ContextClass, FEATURES, FLOOR, FeatureRow, FreeSources, MISS, MODEL, NOISE,
    NodeContext, Opinion, bounded_log, model,
};
use gemma_base::tensor::Token;
use gemma_model::sampler::{Mask, Sampler, Tempered};

/// Number of candidates from the draft model.
const FROM_MODEL: usize = 12;

impl<'a> ModelRow<'a> {
    /// Returns the logit of a token, if the row has one.
    fn logit(&self, token: Token) -> Option<f32> {
        match self {
            ModelRow::Logits { logits, columns } => {
                let column = columns.map_or(Some(token as usize), |c| c.column(token))?;
                logits.get(column).copied()
            }
            ModelRow::Best(best) => best.iter().find(|c| c.0 == token).map(|c| c.1),
        }
    }

    /// Returns the row with forbidden tokens at minus infinity; `None` if no allowed token is left.
    fn masked(self, mask: Option<&Mask>, buffers: &'a mut Masked) -> Option<ModelRow<'a>> {
        let Some(mask) = mask else { return Some(self) };
        match self {
            ModelRow::Logits { logits, columns } => {
                let token = |column| columns.map_or(column as Token, |c| c.token(column));
                mask.apply(logits, token, &mut buffers.logits);
                let is_known = buffers.logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
                is_known.then_some(ModelRow::Logits { logits: &buffers.logits, columns })
            }
            ModelRow::Best(best) => {
                buffers.best.clear();
                buffers.best.extend(best.iter().filter(|c| mask.allows(c.0)));
                (!buffers.best.is_empty()).then_some(ModelRow::Best(&buffers.best))
            }
        }
    }

    /// Computes the most likely tokens under the target's sampling settings, as the target's ids.
    /// Returns false if the row has no finite numbers; the draft model then has no opinion.
    fn temper(&self, sampler: &Sampler, context: &[Token], out: &mut Tempered) -> bool {
        let (logits, columns) = match *self {
            ModelRow::Best(best) => return sampler.temper_best(best, context, out).is_ok(),
            ModelRow::Logits { logits, columns } => (logits, columns),
        };
        let Some(columns) = columns else {
            let (column_of, token_of) = (|token| Some(token as usize), |column| column as Token);
            return sampler.temper(logits, context, column_of, token_of, out).is_ok();
        };
        let (column_of, token_of) = (|token| columns.column(token), |column| columns.token(column));
        let is_done = sampler.temper(logits, context, column_of, token_of, out).is_ok();
        if is_done {
            out.list.iter_mut().for_each(|c| c.0 = columns.token(c.0 as usize));
        }
        is_done
    }
}

/// Buffers for rows without forbidden tokens.
#[derive(Default)]
struct Masked {
    logits: Vec<f32>,
    best: Vec<(Token, f32)>,
}

/// The target's grammar mask and sampler.
#[derive(Clone, Copy)]
pub struct TargetRules<'a> {
    pub sampler: &'a Sampler,
    /// Tokens that a grammar allows here.
    pub mask: Option<&'a Mask>,
    /// First id that is unknown to the target.
    pub vocab: usize,
    /// Whether candidates are ranked with the target's sampling noise.
    pub noise: bool,
}

impl TargetRules<'_> {
    fn noise(&self, position: usize, token: Token) -> f32 {
        if self.noise { self.sampler.noise(position, token) } else { 0.0 }
    }

    fn allow(&self, token: Token) -> bool {
        (token as usize) < self.vocab
            && self.sampler.allows(token)
            && self.mask.is_none_or(|mask| mask.allows(token))
    }
}

/// Collects the candidates of a node. Its buffers are reused.
#[derive(Default)]
pub struct CandidateCollector {
    opinions: [Opinion; FEATURES],
    tempered: Tempered,
    ranked: Vec<(Token, f32)>,
    masked: Masked,
}

impl CandidateCollector {
    /// Returns the candidates after a node. `row` has the draft model's logits if the node was in
    /// its last batch. `context` is the text up to the node, if the sampler reads it.
    pub fn candidates(
        &mut self,
        free: &FreeSources,
        row: Option<ModelRow<'_>>,
        rules: TargetRules<'_>,
        node: NodeContext,
        context: &[Token],
    ) -> Result<Candidates> {
        let Self { opinions, tempered, ranked, masked } = self;
        let mut class = free.opine(node, opinions);
        let row = row.and_then(|row| row.masked(rules.mask, masked));
        let row = row.filter(|row| row.temper(rules.sampler, context, tempered));
        ranked.clear();
        if row.is_some() {
            let best = tempered.list.first().map(|c| c.1.exp());
            class.set(CandidateSource::Model, model::class(best));
            rank(&tempered.list, rules, node.position, ranked);
        }
        let mut tokens: Vec<Token> = Vec::with_capacity(24);
        for &(token, _) in ranked.iter().chain(opinions.iter().flat_map(|o| &o.list)) {
            if !tokens.contains(&token) && rules.allow(token) {
                tokens.push(token);
            }
        }
        let noise = |token| rules.noise(node.position, token);
        Ok(with_features(tokens, opinions, row.map(|row| (row, &*tempered)), noise, class))
    }
}

/// Lists the draft model's allowed tokens that are most likely with the target's noise.
fn rank(
    list: &[(Token, f32)],
    rules: TargetRules<'_>,
    position: usize,
    out: &mut Vec<(Token, f32)>,
) {
    let allowed = list.iter().filter(|c| rules.allow(c.0));
    out.extend(allowed.map(|&(token, p)| (token, p + rules.noise(position, token))));
    let order = |a: &(Token, f32), b: &(Token, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if out.len() > FROM_MODEL {
        out.select_nth_unstable_by(FROM_MODEL, order);
        out.truncate(FROM_MODEL);
    }
    out.sort_unstable_by(order);
}

/// Adds the features of each candidate and of "none of these".
fn with_features(
    tokens: Vec<Token>,
    opinions: &[Opinion; FEATURES],
    model: Option<(ModelRow<'_>, &Tempered)>,
    noise: impl Fn(Token) -> f32,
    class: ContextClass,
) -> Candidates {
    let mut features: Vec<FeatureRow> = Vec::with_capacity(tokens.len() + 1);
    let mut rest = 1.0;
    for &token in &tokens {
        let mut candidate = opinions.each_ref().map(|opinion| opinion.of_token(token));
        if let Some((row, tempered)) = model {
            let listed = tempered.list.iter().find(|c| c.0 == token).map(|c| c.1);
            let p = listed.or_else(|| row.logit(token).map(|logit| tempered.log_prob(logit)));
            candidate[MODEL] = p.unwrap_or(FLOOR).max(FLOOR);
            rest -= p.map_or(0.0, f32::exp);
        }
        candidate[NOISE] = noise(token);
        features.push(candidate);
    }
    let mut none = opinions.each_ref().map(Opinion::of_rest);
    none[MODEL] = model.map_or(0.0, |_| bounded_log(rest));
    none[MISS] = 1.0;
    features.push(none);
    Candidates { class, tokens, features }
}
