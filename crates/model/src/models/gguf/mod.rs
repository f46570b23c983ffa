//! GGUF files as llama.cpp writes them. Only this folder knows the keys and tensor names that its
//! architectures share.
//!
//! [`present`] makes a GGUF file look like a Hugging Face directory: configuration, tensor names,
//! norms without the 1 that converters add, tokenizer and template.
//! Source: ggml-org/llama.cpp, convert_hf_to_gguf.py and gguf-py/gguf/constants.py.

pub mod export;
mod vocab;

pub use vocab::repairs;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::gguf::{Make, Metadata, Presentation, Value};
use crate::models::{Role, architecture};
use anyhow::Result;
use gemma_base::error::Fault;
use serde_json::json;

const CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";

/// Keys of single tokens, with the defaults of Gemma's files.
pub const BOS: (&str, u32) = ("tokenizer.ggml.bos_token_id", 2);
const EOS: (&str, u32) = ("tokenizer.ggml.eos_token_id", 1);
const EOT: (&str, u32) = ("tokenizer.ggml.eot_token_id", 106);
pub const PAD: (&str, u32) = ("tokenizer.ggml.padding_token_id", 0);
const UNK: (&str, u32) = ("tokenizer.ggml.unknown_token_id", 3);

/// Turn-end tokens of Gemma 3 and Gemma 4. Both have the same id.
const TURN_ENDS: [&str; 2] = ["<end_of_turn>", "<turn|>"];
/// Gemma 4 writes this token after its calls, then waits for the results.
const TOOL_RESPONSE: (u32, &str) = (50, "<|tool_response>");

/// Sampling defaults: name in `generation_config.json`, and GGUF key.
const SAMPLING: [(&str, &str); 5] = [
    ("temperature", "general.sampling.temp"),
    ("top_k", "general.sampling.top_k"),
    ("top_p", "general.sampling.top_p"),
    ("min_p", "general.sampling.min_p"),
    ("repetition_penalty", "general.sampling.penalty_repeat"),
];

/// Returns a tensor's name in a GGUF file.
pub fn tensor_name(role: Role, layer: usize) -> String {
    let part = |name: &str| format!("blk.{layer}.{name}");
    let layer_tensor = |name: &str| part(&format!("{name}.weight"));
    match role {
        Role::Embed => "token_embd.weight".into(),
        Role::FinalNorm => "output_norm.weight".into(),
        Role::Head => "output.weight".into(),
        Role::Q => layer_tensor("attn_q"),
        Role::K => layer_tensor("attn_k"),
        Role::V => layer_tensor("attn_v"),
        Role::O => layer_tensor("attn_output"),
        Role::Gate => layer_tensor("ffn_gate"),
        Role::Up => layer_tensor("ffn_up"),
        Role::Down => layer_tensor("ffn_down"),
        Role::InputNorm => layer_tensor("attn_norm"),
        Role::PostAttnNorm => layer_tensor("post_attention_norm"),
        Role::PreFfnNorm => layer_tensor("ffn_norm"),
        Role::PostFfnNorm => layer_tensor("post_ffw_norm"),
        Role::QNorm => layer_tensor("attn_q_norm"),
        Role::KNorm => layer_tensor("attn_k_norm"),
        Role::LayerScale => layer_tensor("layer_output_scale"),
        Role::PreProjection => "nextn.pre_projection.weight".into(),
        Role::PostProjection => "nextn.post_projection.weight".into(),
        Role::Router => layer_tensor("ffn_gate_inp"),
        Role::RouterScale => part("ffn_gate_inp.scale"),
        Role::ExpertFactors => part("ffn_down_exps.scale"),
        Role::PreExpertNorm => layer_tensor("pre_ffw_norm_2"),
        Role::ExpertGateUp => layer_tensor("ffn_gate_up_exps"),
        Role::ExpertGate => layer_tensor("ffn_gate_exps"),
        Role::ExpertUp => layer_tensor("ffn_up_exps"),
        Role::ExpertDown => layer_tensor("ffn_down_exps"),
        Role::PostSharedNorm => layer_tensor("post_ffw_norm_1"),
        Role::PostExpertNorm => layer_tensor("post_ffw_norm_2"),
    }
}

/// Returns the role and layer of a tensor; `None` for an unknown name.
fn role_of(name: &str) -> Option<(Role, usize)> {
    // The older naming scheme of assistants.
    let name = &name.replacen("mtp.", "nextn.", 1);
    let layer = match name.strip_prefix("blk.") {
        Some(rest) => rest.split_once('.')?.0.parse().ok()?,
        None => 0,
    };
    let mut roles = Role::ALL.into_iter().map(|role| (role, layer));
    roles.find(|(role, layer)| tensor_name(*role, *layer) == *name)
}

/// A GGUF file before its presentation as a Hugging Face directory.
pub struct GgufModel<'a> {
    pub metadata: &'a Metadata,
    checkpoint: &'a Checkpoint,
}

impl GgufModel<'_> {
    pub fn has(&self, role: Role, layer: usize) -> bool {
        self.checkpoint.lookup(&tensor_name(role, layer)).is_some()
    }

    pub fn has_tensor(&self, name: &str) -> bool {
        self.checkpoint.lookup(name).is_some()
    }

    /// Returns the number of rows of the embedding table.
    pub fn vocab(&self) -> Option<usize> {
        self.checkpoint.lookup(&tensor_name(Role::Embed, 0))?.shape.first().copied()
    }

    /// Returns the values of an unquantised tensor.
    pub fn floats(&self, name: &str) -> Option<Vec<f32>> {
        self.checkpoint.tensor(name)?.to_f32().ok()
    }
}

/// Returns an integer, if the key exists.
pub fn whole(metadata: &Metadata, key: &str) -> Result<Option<i64>, String> {
    match metadata.get(key) {
        None => Ok(None),
        Some(Value::Int(n)) => Ok(Some(*n)),
        Some(_) => Err(format!("`{key}` is not a whole number")),
    }
}

/// Returns the shortest decimal that rounds to the same f32.
pub fn decimal(value: f64) -> f64 {
    (value as f32).to_string().parse().unwrap_or(value)
}

/// Presents a GGUF checkpoint as a Hugging Face directory; returns any other checkpoint unchanged.
pub fn present(checkpoint: Checkpoint) -> Result<Checkpoint> {
    let Some(metadata) = checkpoint.unpresented() else { return Ok(checkpoint) };
    let shown = checkpoint.name();
    let name = metadata.text("general.architecture");
    let architecture = match name.and_then(architecture::of_gguf) {
        Some(architecture) => architecture,
        None if name == Some("clip") => {
            return Err(Fault::model(format!("{shown} holds only a vision tower"))
                .help("give the file of the language model: its name does not contain `mmproj`")
                .into());
        }
        None => {
            let name = name.unwrap_or("of no stated architecture");
            let what = format!("{shown}: {}", architecture::unknown(name));
            return Err(Fault::model(what).help(architecture::known()).into());
        }
    };
    let file = GgufModel { metadata, checkpoint: &checkpoint };
    let config = architecture.gguf_config(&file).map_err(|what| {
        Fault::model(format!("{shown}: {what}"))
            .help("the file was made wrongly: fetch or convert the model again")
    })?;
    let mut files: Vec<(&'static str, Make)> = vec![
        ("generation_config.json", generation_config),
        ("tokenizer_config.json", tokenizer_config),
    ];
    let mut notes = Vec::new();
    if vocab::is_there(metadata) {
        files.push(("tokenizer.json", vocab::tokenizer_json));
    }
    if metadata.bool(ADD_BOS) == Some(false) {
        notes.push(
            "the file asks for prompts without BOS; prompts begin with it anyway, \
             because the model was trained with it"
                .into(),
        );
    }
    let rename = |name: &str| {
        role_of(name).map(|(role, layer)| crate::models::weights::standard_name(role, layer))
    };
    let norm = |name: &str| {
        architecture.norm_base() == 1.0 && role_of(name).is_some_and(|(role, _)| role.is_norm())
    };
    checkpoint.present(Presentation { config, rename: &rename, plus_one: &norm, files, notes })
}

/// Returns the tokens that end a text: those of the file, and Gemma's that the vocabulary contains.
///
/// If the file only lists the end of a turn, the end of text is added.
pub fn eos(metadata: &Metadata) -> Vec<i64> {
    let tokens = metadata.texts(vocab::TOKENS).unwrap_or_default();
    let mut eos = vec![metadata.int(EOS.0).unwrap_or(EOS.1 as i64)];
    eos.extend(metadata.int(EOT.0));
    let ends = [(EOS.1, "<eos>"), (TOOL_RESPONSE.0, TOOL_RESPONSE.1)];
    let ends = ends.into_iter().chain(TURN_ENDS.map(|piece| (EOT.1, piece)));
    let is_there = |(id, piece): &(u32, &str)| tokens.get(*id as usize).is_some_and(|t| t == piece);
    eos.extend(ends.filter(is_there).map(|(id, _)| id as i64));
    eos.sort();
    eos.dedup();
    eos
}

fn generation_config(metadata: &Metadata) -> Result<Vec<u8>> {
    let mut json = json!({
        "bos_token_id": metadata.int(BOS.0).unwrap_or(BOS.1.into()),
        "do_sample": true,
        "eos_token_id": eos(metadata),
        "pad_token_id": metadata.int(PAD.0).unwrap_or(PAD.1.into()),
    });
    for (name, key) in SAMPLING {
        match metadata.int(key) {
            Some(n) => json[name] = n.into(),
            // Written as the shortest decimal that rounds to the same f32.
            None => {
                if let Some(v) = metadata.float(key) {
                    json[name] = (v as f32).to_string().parse().unwrap_or(v).into();
                }
            }
        }
    }
    Ok(serde_json::to_vec_pretty(&json)?)
}

fn tokenizer_config(metadata: &Metadata) -> Result<Vec<u8>> {
    let token = |(key, default): (&str, u32)| {
        let id = metadata.int(key).unwrap_or(default.into());
        metadata.texts(vocab::TOKENS).and_then(|t| t.get(usize::try_from(id).ok()?)).cloned()
    };
    let json = json!({
        "add_bos_token": true,
        "add_eos_token": false,
        "bos_token": token(BOS).unwrap_or("<bos>".into()),
        "chat_template": metadata.text(CHAT_TEMPLATE),
        "eos_token": token(EOS).unwrap_or("<eos>".into()),
        "pad_token": token(PAD).unwrap_or("<pad>".into()),
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": token(UNK).unwrap_or("<unk>".into()),
    });
    Ok(serde_json::to_vec_pretty(&json)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_roles() {
        for role in Role::ALL.into_iter().filter(|role| role.is_layer()) {
            assert_eq!(role_of(&tensor_name(role, 41)), Some((role, 41)));
        }
        assert_eq!(role_of("token_embd.weight"), Some((Role::Embed, 0)));
        for name in [
            "blk.x.attn_q.weight",
            "blk.1.attn_q.bias",
            "blk.01.attn_q.weight",
            "rope_freqs.weight",
            "",
        ] {
            assert_eq!(role_of(name), None, "{name}");
        }
    }
}
