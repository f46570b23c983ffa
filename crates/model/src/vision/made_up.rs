//! Random towers of real sizes, so that a tower can be timed without its weights.

use anyhow::Result;
use gemma_base::util::files::write_whole;
use half::bf16;
use serde_json::{Value, json};
use std::path::Path;

/// Shape of a SigLIP with the projector of Gemma 3.
#[derive(Clone, Copy, Debug)]
pub struct SigLipSize {
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub hidden: usize,
    /// Side of a picture and of a patch, in pixels.
    pub image: usize,
    pub patch: usize,
    pub tokens: usize,
    /// Channels of a soft token.
    pub embedding: usize,
}

impl SigLipSize {
    /// So400m with the projector of Gemma 3 27B: 0.42 G weights.
    pub const SO400M: SigLipSize = SigLipSize {
        layers: 27,
        width: 1152,
        heads: 16,
        hidden: 4304,
        image: 896,
        patch: 14,
        tokens: 256,
        embedding: 5376,
    };

    /// Returns the name and the shape of each tensor.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let SigLipSize { layers, width, hidden, image, patch, embedding, .. } = *self;
        let mut list = Vec::new();
        let mut add = |name: String, shape: &[usize]| list.push((name, shape.to_vec()));
        let projector = "multi_modal_projector";
        add(format!("{projector}.mm_input_projection_weight"), &[width, embedding]);
        add(format!("{projector}.mm_soft_emb_norm.weight"), &[width]);
        let tower = "vision_tower.vision_model";
        let positions = (image / patch).pow(2);
        add(format!("{tower}.embeddings.patch_embedding.weight"), &[width, 3, patch, patch]);
        add(format!("{tower}.embeddings.patch_embedding.bias"), &[width]);
        add(format!("{tower}.embeddings.position_embedding.weight"), &[positions, width]);
        let mut pair = |name: String, shape: &[usize]| {
            add(format!("{tower}.{name}.weight"), shape);
            add(format!("{tower}.{name}.bias"), &shape[..1]);
        };
        pair("post_layernorm".to_owned(), &[width]);
        for i in 0..layers {
            let layer = format!("encoder.layers.{i}");
            for norm in ["layer_norm1", "layer_norm2"] {
                pair(format!("{layer}.{norm}"), &[width]);
            }
            for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                pair(format!("{layer}.self_attn.{part}"), &[width, width]);
            }
            pair(format!("{layer}.mlp.fc1"), &[hidden, width]);
            pair(format!("{layer}.mlp.fc2"), &[width, hidden]);
        }
        list
    }

    fn config(&self) -> Value {
        json!({
            "model_type": "gemma3",
            "mm_tokens_per_image": self.tokens,
            "vision_config": {
                "hidden_size": self.width,
                "intermediate_size": self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "image_size": self.image,
                "patch_size": self.patch,
                "layer_norm_eps": 1e-6,
            },
        })
    }
}

/// Writes a tower of random bf16 weights to an empty directory, for [`super::Vision::open`]. The
/// weights of one size are always the same.
///
/// # Errors
/// If the files cannot be written.
pub fn write_siglip(directory: &Path, size: SigLipSize) -> Result<()> {
    write_whole(&directory.join("config.json"), size.config().to_string().as_bytes())?;
    let (tensors, mut end) = (size.tensors(), 0);
    let mut header = serde_json::Map::new();
    for (name, shape) in &tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = Vec::with_capacity(8 + header.len() + end);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header.as_bytes());
    let mut state = 1u64;
    for (name, shape) in &tensors {
        let count: usize = shape.iter().product();
        // Factors of norms are near 1, and sums of products keep the magnitude of their terms.
        let is_factor = shape.len() == 1 && name.contains("norm") && name.ends_with("weight");
        let terms = count / shape[0];
        let spread = if terms == 1 { 0.1 } else { (terms as f32).sqrt().recip() };
        let centre = if is_factor { 1.0 } else { 0.0 };
        for _ in 0..count {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let value = centre + spread * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0);
            bytes.extend(bf16::from_f32(value).to_le_bytes());
        }
    }
    Ok(write_whole(&directory.join("model.safetensors"), &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::super::{Picture, Vision};
    use super::*;

    #[test]
    fn a_made_up_tower_makes_numbers() {
        let size = SigLipSize {
            layers: 2,
            width: 24,
            heads: 2,
            hidden: 40,
            image: 32,
            patch: 4,
            tokens: 16,
            embedding: 20,
        };
        let directory = tempfile::tempdir().unwrap();
        write_siglip(directory.path(), size).unwrap();
        let vision = Vision::open(directory.path()).unwrap();
        let rgb = (0..9 * 7 * 3).map(|i| (i * 41) as u8).collect();
        let picture = Picture { width: 9, height: 7, rgb, flattened: false };
        let image = vision.prepare_picture(&picture, None).unwrap();
        let soft = vision.encode(&image, 1).unwrap();
        assert_eq!((soft.len(), vision.width()), (16 * 20, 20));
        let most = soft.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        assert!((0.1..10.0).contains(&most), "{most}");
    }
}
