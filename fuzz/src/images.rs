//! Images, and towers that read them.

use super::gguf::{Words, made_up_gguf};
use super::made_up::{Cursor, edited, raw_or};
use super::{DIRECTORY, file};
use gemma::vision::resize::{Filter, resize};
use gemma::vision::{Picture, PictureLimits, Vision, picture};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const LIMITS: PictureLimits = PictureLimits { bytes: 1 << 16, pixels: 1 << 16 };

/// Decodes a JPEG, PNG or WebP file.
pub fn picture(data: &[u8]) {
    let measured = picture::measure(data, LIMITS);
    let Ok(read) = picture::decode(data, LIMITS) else { return };
    let (width, height) = measured.expect("a picture that is decoded has a size");
    // EXIF data may rotate it.
    assert!([(width, height), (height, width)].contains(&(read.width, read.height)));
    assert_eq!(read.rgb.len(), 3 * width * height);
    for filter in [Filter::Bilinear, Filter::Bicubic] {
        let resized = resize(&read.rgb, (read.width, read.height), (48, 96), filter);
        assert_eq!(resized.len(), 3 * 48 * 96);
    }
}

/// A family's golden checkpoint in its own directory, and its two configurations.
struct Golden {
    directory: PathBuf,
    config: Value,
    processor: Value,
}

static GOLDEN: LazyLock<Vec<Golden>> = LazyLock::new(|| {
    let of = |family: &&str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vision").join(family);
        let directory = DIRECTORY.join(family);
        fs::create_dir_all(&directory).expect("the directory has room");
        let weights = "model.safetensors";
        fs::copy(root.join(weights), directory.join(weights)).expect("the directory has room");
        let json = |name: &str| {
            serde_json::from_slice(&fs::read(root.join(name)).expect("it is committed")).unwrap()
        };
        let (config, processor) = (json("config.json"), json("preprocessor_config.json"));
        Golden { directory, config, processor }
    };
    ["gemma3", "gemma4", "gemma4-unified"].iter().map(of).collect()
});

/// Opens a tower with an edited configuration.
pub fn tower(data: &[u8]) {
    let mut cursor = Cursor::new(data);
    let Golden { directory, config, processor } = &GOLDEN[cursor.index(3)];
    let words = "hidden_size patch_size image_size num_attention_heads 0 1 3 4096 65536";
    let config = edited(&mut cursor, config, words);
    let processor = edited(&mut cursor, processor, "resample image_mean image_std 0 2 3 280");
    fs::write(directory.join("config.json"), config).expect("the directory has room");
    let name = "preprocessor_config.json";
    fs::write(directory.join(name), processor).expect("the directory has room");
    see(directory);
}

/// Opens an mmproj file that is well formed but may contain false values.
pub fn mmproj(data: &[u8]) {
    const WORDS: Words = Words {
        keys: &[
            "general.architecture",
            "general.alignment",
            "clip.projector_type",
            "clip.vision.projector_type",
            "clip.has_vision_encoder",
            "clip.vision.image_size",
            "clip.vision.patch_size",
            "clip.vision.embedding_length",
            "clip.vision.feed_forward_length",
            "clip.vision.block_count",
            "clip.vision.projection_dim",
            "clip.vision.attention.head_count",
            "clip.vision.attention.layer_norm_epsilon",
            "clip.vision.image_mean",
            "clip.vision.image_std",
            "clip.use_gelu",
        ],
        texts: &["clip", "gemma3", "gemma4v", "gemma4uv", "gemma4ua", "a", ""],
        tensors: &[
            "v.patch_embd.weight",
            "v.patch_embd.bias",
            "v.position_embd.weight",
            "v.post_ln.weight",
            "v.blk.0.attn_q.weight",
            "v.blk.0.ffn_up.weight",
            "v.blk.0.ffn_down.weight",
            "v.patch_norm.0.weight",
            "mm.input_projection.weight",
            "mm.soft_emb_norm.weight",
        ],
    };
    let bytes = raw_or(data, |cursor| made_up_gguf(cursor, &WORDS, None));
    see(&file("mmproj.gguf", &bytes));
}

/// Reads an image with a tower, if the tower can be opened.
fn see(path: &Path) {
    let Ok(vision) = Vision::open(path) else { return };
    let rgb = (0..3 * 9 * 7).map(|i| i as u8).collect();
    let picture = Picture { width: 9, height: 7, rgb, flattened: false };
    let Ok(prepared) = vision.prepare_picture(&picture, None) else { return };
    if let Ok(soft) = vision.encode(&prepared, 1) {
        assert_eq!(soft.len(), prepared.tokens() * vision.width());
        assert!(soft.iter().all(|value| value.is_finite()));
    }
}
