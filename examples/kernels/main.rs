//! Lists the kernels that GPUs would get: for Gemma 3 27B in every recipe and format, for Gemma 4
//! with its assistant, and for passes of every number of rows.
//!
//! `kernels < DEVICES` reads a JSON list of devices and prints a JSON object for each call of a
//! pass. `scripts/check/amd.sh` compiles these calls for AMD's GPUs.

mod listing;

use anyhow::{Context, Result};
use gemma::compute::KvFormat;
use gemma::kv::PAGE;
use gemma::models::Weights;
use gemma::models::forward::{self, ForwardOptions, SparePages};
use gemma::quant::Recipe;
use gemma::quant::recipe::BUILT_IN;
use gemma::runtime::model::shapes::{MadeUpFormats, Shape};
use gemma::tensor::Format;
use gemma::tensor::block::BLOCKS;
use gemma::vulkan::{Bucket, DeviceInfo};
use listing::{ListedCall, Listing, device_info};
use serde_json::{Value, json};
use std::io::{Write, stdin, stdout};

/// Weight formats that are listed separately.
const FORMATS: [&str; 18] = [
    "bf16",
    "i8-row",
    "i8-g32",
    "i8a-row",
    "i4-row+h128",
    "i4-g32",
    "i4-g128",
    "i2-row+h128",
    "i2-g32+h128",
    "i2-g128+h128",
    "t2-row+h128",
    "t2.5-row+h128",
    "t3-row+h128",
    "t4-row+h128",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
];
/// Models of Gemma 4, and the recipes of their files.
const GEMMA_4: [(Shape, &str); 6] = [
    (Shape::Dense31, "q4_0"),
    (Shape::Dense31, "10gb"),
    (Shape::Mixture26, "q4_0"),
    (Shape::Mixture26, "26b-9gb"),
    (Shape::Dense12, "q4_0"),
    (Shape::Dense12, "10gb"),
];
/// Numbers of rows of passes that decode and verify.
const ROWS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Numbers of nodes of an assistant's draft steps.
const NODES: [usize; 3] = [1, 4, 8];
/// Lengths of the text in positions. The choice of attention kernels depends on them too.
const CONTEXTS: [usize; 2] = [512, 8192];

fn main() -> Result<()> {
    let devices: Vec<Value> =
        serde_json::from_reader(stdin()).context("the devices, a JSON list")?;
    let loaded = BUILT_IN.iter().map(|(name, _)| Ok((*name, Recipe::load(name)?)));
    let loaded = loaded.collect::<Result<Vec<_>>>()?;
    let dense = loaded.into_iter().filter(|(_, recipe)| !recipe.is_for_mixtures());
    let recipes = dense.map(|(name, _)| Ok((name, MadeUpFormats::of_recipe(name))));
    let formats = FORMATS.into_iter().map(|name| -> Result<_> {
        let of_file = BLOCKS.iter().find(|block| block.name == name && block.code.is_stored());
        let format = match of_file.and_then(|block| Format::of_file(block.code)) {
            Some(format) => Some(format),
            None => Some(name.parse::<Format>()?),
        };
        Ok((name, MadeUpFormats { weights: format, ..MadeUpFormats::default() }))
    });
    for device in &devices {
        let (info, _) = device_info(device)?;
        for call in Listing::beside_passes() {
            print(device, &info, "loading", 0, json!({}), call)?;
        }
    }
    for model in recipes.chain(formats) {
        let (name, formats) = model?;
        let weights = Shape::B27.weights(&formats)?;
        for device in &devices {
            list(device, name, &weights, KvFormat::F16)?;
            if name == "i4-g32" {
                list(device, name, &weights, KvFormat::Q8)?;
            }
        }
    }
    for (shape, recipe) in GEMMA_4 {
        let formats = MadeUpFormats::of_recipe(recipe);
        let weights = shape.weights(&formats)?.assisted_by(shape.assistant(&formats)?);
        for device in &devices {
            list(device, &format!("{}, {recipe}", shape.name()), &weights, KvFormat::F16)?;
        }
    }
    Ok(())
}

/// Lists the calls of all passes over a model.
fn list(device: &Value, model: &str, weights: &Weights, kv: KvFormat) -> Result<()> {
    let (info, shapes) = device_info(device)?;
    let listing = Listing::new(&info, &shapes);
    let max_rows = info.max_rows();
    let context = CONTEXTS[CONTEXTS.len() - 1];
    let plans = forward::load(
        weights,
        &mut listing.executor(),
        ForwardOptions { context, kv, max_rows, sequences: 1, spare: SparePages::default() },
    )?;
    let verify = plans.pass_with_best.unwrap_or(plans.pass);
    let draft = plans.assistant.as_ref().map(|model| model.pass_with_best.unwrap_or(model.pass));
    for positions in CONTEXTS {
        let pages = positions.div_ceil(PAGE);
        let scored = |rows| Bucket::holding(rows, rows, 0, pages, false);
        let passes = ROWS.map(|rows| ("verify", verify, scored(rows)));
        let drafts = draft.map(|plan| NODES.map(|nodes| ("draft", plan, scored(nodes))));
        let more = [
            ("prefill", plans.pass_without_logits, Bucket::holding(max_rows, 0, 0, pages, false)),
            ("batch", verify, Bucket::holding(8, 8, 0, pages, true)),
            ("commit", plans.commit, Bucket::holding(0, 0, 8, pages, false)),
        ];
        for (pass, plan, bucket) in
            passes.into_iter().chain(more).chain(drafts.into_iter().flatten())
        {
            for call in listing.calls(plan, bucket)? {
                let place =
                    json!({"model": model, "kv": format!("{kv:?}"), "positions": positions});
                print(device, &info, pass, bucket.rows.max(bucket.path), place, call)?;
            }
        }
    }
    Ok(())
}

/// Prints a call of a pass. `place` names the model and the position in a text.
fn print(
    device: &Value,
    info: &DeviceInfo,
    pass: &str,
    rows: usize,
    place: Value,
    call: ListedCall,
) -> Result<()> {
    let matrices =
        call.matrices.iter().map(|(format, rows, cols)| json!([format.to_string(), rows, cols]));
    let mut line = json!({
        "chip": device["chip"], "pass": pass, "rows": rows, "shader": call.shader,
        "constants": call.constants,
        "subgroup": if info.asks_subgroup { info.subgroup } else { 0 }, "label": call.label,
        "matrices": matrices.collect::<Vec<Value>>(), "experts": call.experts,
        "groups": call.groups,
        "work": call.work, "bytes": call.bytes,
        "count": call.count,
    });
    if let (Some(line), Value::Object(place)) = (line.as_object_mut(), place) {
        line.extend(place);
    }
    Ok(writeln!(stdout(), "{line}")?)
}
