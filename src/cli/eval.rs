//! `gemma eval`: how likely a model finds a text, alone or against a reference.

use super::args::{AutoOr, ModelOptions, UiOptions};
use super::input::read_file;
use super::output::print;
use super::session;
use super::ui::{Ui, digits3, thousands};
use crate::error::Fault;
use crate::eval;
use crate::gemma::Special;
use crate::tensor::Token;
use anyhow::{Context, Result};
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct Eval {
    /// Text to evaluate, behind one BOS
    #[arg(long, value_name = "FILE", conflicts_with = "ids", required_unless_present = "ids")]
    pub text: Option<PathBuf>,
    /// Token ids to evaluate as they are: {"ids": [...]}
    #[arg(long, value_name = "FILE")]
    pub ids: Option<PathBuf>,
    /// Model to compare with: adds KL divergence, top-1 agreement and the ratio of perplexities
    #[arg(long, value_name = "PATH|ID")]
    pub reference: Option<String>,
    /// One JSON object with the figures of every token
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelOptions,
    #[command(flatten)]
    pub ui: UiOptions,
}

pub fn run(options: &Eval, ui: &Ui) -> Result<u8> {
    let model = session::open(options.model.model.as_deref(), ui)?;
    let ids = match (&options.ids, &options.text) {
        (Some(path), _) => read_ids(path)?,
        (None, Some(path)) => model.tokenizer(ui)?.encode_behind_bos(&read_file(path)?, Special::AsText, model.config().bos)?.0,
        (None, None) => unreachable!("clap asks for one of both"),
    };
    if ids.len() < 2 {
        return Err(Fault::usage("one token predicts nothing").help("give at least two").into());
    }
    let window = match options.model.run.ctx_size {
        AutoOr::N(n) => n.max(2),
        AutoOr::Auto => ids.len().min(model.config().max_position),
    };
    let pool = session::pool(&options.model.run)?;
    let mut engine = session::load(&model.weights, &model.name, &options.model.run, window, &pool, ui)?.engine;
    let bar = ui.bar("evaluating", ids.len() as u64);
    let mut progress = |done: usize| bar.set_position(done as u64);
    let (json, text) = match &options.reference {
        None => {
            let figures = eval::evaluate(engine.as_mut(), &ids, window, &mut progress)?;
            let text = format!(
                "{} tokens: mean NLL {:.4}, perplexity {}\n",
                thousands(figures.tokens as u64),
                figures.mean_nll,
                digits3(figures.perplexity)
            );
            (serde_json::to_value(&figures)?, text)
        }
        Some(name) => {
            let reference = session::open(Some(name), ui)?;
            let mut other = session::load(&reference.weights, &reference.name, &options.model.run, window, &pool, ui)?.engine;
            let c = eval::compare(engine.as_mut(), other.as_mut(), &ids, window, &mut progress)?;
            let text = format!(
                "{} tokens: KL divergence mean {:.5}, median {:.5}, 99 % {:.4}, max {:.3}; top-1 agreement {:.2} %; perplexity {} against {}, ratio {:.4}\n",
                thousands(c.figures.tokens as u64),
                c.kld.mean,
                c.kld.median,
                c.kld.p99,
                c.kld.max,
                100.0 * c.top1_agreement,
                digits3(c.figures.perplexity),
                digits3(c.reference.perplexity),
                c.ppl_ratio
            );
            let mut json = serde_json::to_value(&c.figures)?;
            let map = json.as_object_mut().context("figures are an object")?;
            map.insert("kld".into(), serde_json::to_value(c.kld)?);
            map.insert("top1_agreement".into(), c.top1_agreement.into());
            map.insert("ppl_ratio".into(), c.ppl_ratio.into());
            (json, text)
        }
    };
    bar.finish_and_clear();
    print(&if options.json { format!("{json}\n") } else { text })?;
    Ok(0)
}

/// The ids of `{"ids": [...]}`.
fn read_ids(path: &Path) -> Result<Vec<Token>> {
    #[derive(serde::Deserialize)]
    struct File {
        ids: Vec<Token>,
    }
    let bad = || Fault::model(format!("{} holds no token ids", path.display())).help(r#"expected {"ids": [2, 105, ...]}"#);
    let file: File = serde_json::from_str(&read_file(path)?).with_context(bad)?;
    Ok(file.ids)
}
