//! Reads the same tower from all kinds of files: names of several transformers versions, and mmproj
//! files, including damaged ones.

use super::*;
use crate::checkpoint::gguf::write::{Keys, Tensor, header};
use crate::checkpoint::{Checkpoint, Dtype};
use gemma_base::error::fault_of;
use gemma_base::tensor::Code;
use half::{bf16, f16};
use safetensors::tensor::TensorView as Stored;
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor of a golden checkpoint.
#[derive(Clone, Debug)]
struct Values {
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// Reads the tensors of a tower by name, without the prefix of the whole model.
fn tower(family: &str) -> BTreeMap<String, Values> {
    let checkpoint = Checkpoint::open(&golden(family)).unwrap();
    let own = checkpoint.tensors().filter(|(name, _)| !name.contains("language_model"));
    own.map(|(name, view)| {
        let name = name.trim_start_matches("model.").to_owned();
        (name, Values { shape: view.shape.to_vec(), values: view.to_f32().unwrap() })
    })
    .collect()
}

/// Writes a Hugging Face directory with these tensors in f32 and the configuration of `family`.
fn directory(family: &str, tensors: &BTreeMap<String, Values>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "preprocessor_config.json"] {
        std::fs::copy(golden(family).join(file), dir.path().join(file)).unwrap();
    }
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let bytes = tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect();
            (name.clone(), tensor.shape.clone(), bytes)
        })
        .collect();
    let views = data.iter().map(|(name, shape, bytes)| {
        (name.as_str(), Stored::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// Returns the soft tokens of both golden pictures.
fn soft(path: &Path, family: &str) -> Vec<Vec<f32>> {
    let vision = Vision::open(path).unwrap();
    let Golden { images } = read(&format!("{family}/golden.json"));
    let soft = |image: &Image| {
        let [width, height] = image.size;
        let budget = (family != "gemma3").then_some(70);
        let picture = picture(width, height, image.seed);
        vision.encode(&vision.prepare_picture(&picture, budget).unwrap(), 2).unwrap()
    };
    images.iter().map(soft).collect()
}

#[test]
fn all_spellings_of_names_are_read() {
    let spellings = [
        ("gemma3", "vision_tower.", "model.vision_tower.vision_model."),
        ("gemma3", "vision_tower.", "vision_tower.vision_model."),
        ("gemma3", "multi_modal_projector.", "model.multi_modal_projector."),
        ("gemma4", "vision_tower.", "model.vision_tower."),
        ("gemma4-unified", "embed_vision.", "model.embed_vision."),
        ("gemma4-unified", "vision_embedder.", "model.vision_embedder."),
    ];
    for (family, old, new) in spellings {
        let tensors = tower(family).into_iter().map(|(name, t)| (name.replacen(old, new, 1), t));
        let dir = directory(family, &tensors.collect());
        assert!(soft(dir.path(), family) == soft(&golden(family), family), "{new}");
    }
}

/// Differences between older and current mmproj files.
#[derive(Clone, Copy, Default)]
struct Older {
    /// The names of the two feed-forward matrices are swapped.
    is_swapped: bool,
    /// Norms of patches are numbered from 0.
    is_zero_based: bool,
}

/// Returns a tensor's name in a mmproj file.
fn gguf_name(family: &str, name: &str, older: Older) -> String {
    let (up, down) = if older.is_swapped { ("ffn_down", "ffn_up") } else { ("ffn_up", "ffn_down") };
    let first = usize::from(!older.is_zero_based);
    let norm = |i: usize| format!("v.patch_norm.{}", i + first);
    let (norm1, norm2, norm3) = (norm(0), norm(1), norm(2));
    let embed = if family == "gemma4" { "v.position_embd.weight" } else { "v.position_embd" };
    let parts = [
        ("vision_tower.embeddings.patch_embedding", "v.patch_embd"),
        ("vision_tower.embeddings.position_embedding", "v.position_embd"),
        ("vision_tower.patch_embedder.input_proj", "v.patch_embd"),
        ("vision_tower.patch_embedder.position_embedding_table", embed),
        ("vision_tower.post_layernorm", "v.post_ln"),
        ("vision_tower.std_", "v.std_"),
        ("vision_tower.encoder.layers.", "v.blk."),
        ("layer_norm1", "ln1"),
        ("layer_norm2", "ln2"),
        ("input_layernorm", "ln1"),
        ("post_attention_layernorm", "attn_post_norm"),
        ("pre_feedforward_layernorm", "ln2"),
        ("post_feedforward_layernorm", "ffn_post_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.out_proj", "attn_out"),
        ("self_attn.o_proj", "attn_out"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.fc1", up),
        ("mlp.fc2", down),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        (".linear.weight", ".weight"),
        ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
        ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
        ("embed_vision.embedding_projection", "mm.input_projection"),
        ("vision_embedder.patch_ln1", &norm1),
        ("vision_embedder.patch_ln2", &norm2),
        ("vision_embedder.pos_norm", &norm3),
        ("vision_embedder.patch_dense", "v.patch_embd"),
        ("vision_embedder.pos_embedding", "v.position_embd.weight"),
    ];
    parts.iter().fold(name.to_owned(), |name, (old, new)| name.replace(old, new))
}

/// Reorders columns of patches of `side` pixels from pixel by pixel to channel by channel.
fn by_channel(values: &[f32], side: usize) -> Vec<f32> {
    let pixels = side * side;
    let row = |row: &[f32]| -> Vec<f32> {
        (0..3 * pixels).map(|i| row[i % pixels * 3 + i / pixels]).collect()
    };
    values.chunks_exact(3 * pixels).flat_map(row).collect()
}

/// Converts a tensor as llama.cpp's converter does.
fn converted(name: &str, tensor: &Values) -> Values {
    let Values { mut shape, mut values } = tensor.clone();
    if name.ends_with("input_proj.weight") {
        values = by_channel(&values, 4);
        shape = vec![shape[0], 3, 4, 4];
    } else if name.contains("patch_dense.weight") || name.contains("patch_ln1") {
        values = by_channel(&values, 12);
    } else if name.ends_with("pos_embedding") {
        let (n, width) = (shape[0], shape[2]);
        let entry = |axis: usize, i: usize| values[(i * 2 + axis) * width..][..width].to_vec();
        let all = (0..2).flat_map(|axis| (0..n).map(move |i| (axis, i)));
        values = all.flat_map(|(axis, i)| entry(axis, i)).collect();
        shape = vec![2, n, width];
    } else if name.ends_with("soft_emb_norm.weight") {
        values.iter_mut().for_each(|v| *v += 1.0);
    } else if shape.is_empty() {
        shape = vec![1];
    }
    Values { shape, values }
}

fn encode(values: &[f32], code: Code) -> Vec<u8> {
    match code {
        Code::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Code::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Code::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => values
            .chunks_exact(32)
            .flat_map(|block| {
                let bytes = block.iter().map(|v| (v / STEP).round() as i8 as u8);
                f16::from_f32(STEP).to_le_bytes().into_iter().chain(bytes).collect::<Vec<u8>>()
            })
            .collect(),
    }
}

/// Step of all Q8_0 blocks here.
const STEP: f32 = 1.0 / 64.0;

fn keys(family: &str) -> Keys {
    let mut keys = Keys::default();
    let vision = |name: &str| format!("clip.vision.{name}");
    keys.text("general.architecture", "clip");
    keys.bool("clip.has_vision_encoder", true);
    let sizes: &[(&str, u32)] = match family {
        "gemma3" => &[
            ("image_size", 96),
            ("patch_size", 6),
            ("embedding_length", 24),
            ("feed_forward_length", 40),
            ("block_count", 3),
            ("attention.head_count", 2),
            ("projection_dim", 32),
        ],
        "gemma4" => &[
            ("image_size", 224),
            ("patch_size", 4),
            ("embedding_length", 32),
            ("feed_forward_length", 40),
            ("block_count", 2),
            ("attention.head_count", 2),
            ("projection_dim", 32),
        ],
        _ => &[
            ("patch_size", 4),
            ("embedding_length", 32),
            ("feed_forward_length", 0),
            ("block_count", 0),
            ("attention.head_count", 0),
            ("projection_dim", 32),
        ],
    };
    sizes.iter().for_each(|(name, n)| keys.u32(&vision(name), *n));
    keys.f32(&vision("attention.layer_norm_epsilon"), 1e-6);
    let centre = if family == "gemma3" { 0.5 } else { 0.0 };
    keys.f32s(&vision("image_mean"), &[centre; 3]);
    keys.f32s(&vision("image_std"), &[if family == "gemma3" { 0.5 } else { 1.0 }; 3]);
    match family {
        "gemma3" => keys.text("clip.projector_type", "gemma3"),
        "gemma4" => keys.text("clip.vision.projector_type", "gemma4v"),
        _ => keys.text("clip.vision.projector_type", "gemma4uv"),
    }
    keys
}

/// Returns the bytes of a mmproj file. Matrices have the type `code` if it supports their width.
fn mmproj(family: &str, tensors: &BTreeMap<String, Values>, code: Code, older: Older) -> Vec<u8> {
    let of = |(name, tensor): (&String, &Values)| {
        let Values { shape, values } = converted(name, tensor);
        let is_matrix = shape.len() == 2 && !name.contains("position");
        let fits = code != Code::I8 || shape.last().is_some_and(|n| n % 32 == 0);
        let code = if is_matrix && fits { code } else { Code::F32 };
        (Tensor { name: gguf_name(family, name, older), code, shape }, encode(&values, code))
    };
    let made: Vec<(Tensor, Vec<u8>)> = tensors.iter().map(of).collect();
    let list: Vec<Tensor> = made.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut file = header(&keys(family), &list);
    for (tensor, bytes) in made {
        file.extend(bytes);
        file.resize(file.len() + tensor.padding(), 0);
    }
    file
}

fn write(dir: &Path, bytes: &[u8]) -> PathBuf {
    let path = dir.join("mmproj-test.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn mmproj_files_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let older = Older { is_swapped: true, is_zero_based: true };
    for family in FAMILIES {
        let (tensors, want) = (tower(family), soft(&golden(family), family));
        for (code, older) in [(Code::Bf16, Older::default()), (Code::F32, older)] {
            let path = write(dir.path(), &mmproj(family, &tensors, code, older));
            assert!(soft(&path, family) == want, "{family} {code:?}");
        }
    }
}

#[test]
fn blocks_and_halves_are_what_they_stand_for() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let mut tensors = tower(family);
        // All these values are exact in f16 and in Q8_0.
        for tensor in tensors.values_mut().filter(|tensor| tensor.shape.len() == 2) {
            tensor.values.iter_mut().for_each(|v| *v = (*v / STEP).round() * STEP);
        }
        let want = soft(directory(family, &tensors).path(), family);
        for code in [Code::F16, Code::I8] {
            let path = write(dir.path(), &mmproj(family, &tensors, code, Older::default()));
            assert!(soft(&path, family) == want, "{family} {code:?}");
        }
    }
}

#[test]
fn other_files_are_refused_with_what_to_get() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |keys: Keys, tensors: &[Tensor]| {
        let mut bytes = header(&keys, tensors);
        bytes.resize(bytes.len() + 4096, 0);
        let error = Vision::open(&write(dir.path(), &bytes)).unwrap_err();
        let fault = fault_of(&error).expect("a fault");
        assert!(fault.help.is_some(), "{fault}");
        fault.what.clone()
    };
    let kind = |architecture: &str, projector: &str| {
        let mut keys = Keys::default();
        keys.text("general.architecture", architecture);
        keys.text("clip.projector_type", projector);
        keys
    };
    let some = Tensor { name: "v.x".into(), code: Code::F32, shape: vec![4] };
    let some = std::slice::from_ref(&some);
    assert!(refusal(kind("gemma3", ""), some).ends_with("its files hold no vision tower"));
    assert!(refusal(kind("clip", "qwen2vl_merger"), some).contains("qwen2vl_merger"));
    let patch = Tensor { name: "v.patch_embd.weight".into(), ..some[0].clone() };
    assert!(refusal(kind("clip", "gemma3"), &[patch]).contains("patch_size"));
    for family in FAMILIES {
        assert!(refusal(keys(family), some).contains("vision tower"), "{family}");
    }
}

/// Opens a hostile file and encodes an image if that succeeds. It must do no harm.
fn try_all(path: &Path) -> Option<String> {
    let picture = picture(30, 20, 1);
    let run = || -> Result<()> {
        let vision = Vision::open(path)?;
        let prepared = vision.prepare_picture(&picture, None)?;
        // Encoding with an absurdly large model would take too long.
        if vision.work(prepared.fit()) < 1 << 28 {
            vision.encode(&prepared, 1)?;
        }
        Ok(())
    };
    let error = run().err()?;
    Some(fault_of(&error).map_or_else(|| format!("no fault: {error:#}"), |f| f.what.clone()))
}

#[test]
fn damaged_mmproj_files_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    for family in FAMILIES {
        let bytes = mmproj(family, &tower(family), Code::F32, Older::default());
        let data = bytes.len() - tower(family).values().map(|t| 4 * t.values.len()).sum::<usize>();
        let header = data.min(bytes.len());
        assert_eq!(try_all(&write(dir.path(), &bytes)), None, "{family}");
        let mut failed = 0;
        for cut in (0..60).map(|i| i * i * bytes.len() / 3600) {
            let error = try_all(&write(dir.path(), &bytes[..cut]));
            let error = error.unwrap_or_else(|| panic!("{family}: {cut} bytes are enough"));
            assert!(!error.starts_with("no fault"), "{family}, {cut} bytes: {error}");
        }
        let mut state = 12345u64;
        for _ in 0..400 {
            let mut damaged = bytes.clone();
            for _ in 0..2 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = (state >> 33) as usize % header;
                damaged[at] ^= 1 << (state >> 29 & 7);
            }
            let error = try_all(&write(dir.path(), &damaged));
            assert!(
                !error.as_ref().is_some_and(|e| e.starts_with("no fault")),
                "{family}: {error:?}"
            );
            failed += usize::from(error.is_some());
        }
        assert!(failed > 100, "{family}: only {failed} of 400 are refused");
    }
}
