//! Every form of checkpoint gives the same weights. Every hostile file is refused with a reason,
//! and none causes a crash.

use crate::common;
use common::{Form, TinyModel};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::models::{Config, Role, TensorSpec, Weights};
use gemma::os::files::Stamp;
use sha2::{Digest, Sha256};
use std::path::Path;

fn open(dir: &Path) -> anyhow::Result<Weights> {
    Weights::open(Checkpoint::open(dir)?)
}

/// Returns all weights as bits, and the configuration without fields that only record its spelling.
fn everything(weights: &Weights) -> (Config, Vec<Vec<u32>>) {
    let values = weights.tensors().iter().map(|&TensorSpec { role, layer, .. }| {
        let values = match role.is_matrix() {
            true => weights.matrix(role, layer).unwrap().dequantize(),
            false => weights.vector(role, layer).unwrap(),
        };
        values.into_iter().map(f32::to_bits).collect()
    });
    (weights.config().clone(), values.collect())
}

#[test]
fn all_forms_dtypes_and_shardings_give_equal_weights() {
    let model = TinyModel::tiny(1);
    let dir = tempfile::tempdir().unwrap();
    let mut first = None;
    for form in Form::ALL {
        for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
            for shards in [1, 3] {
                let path = dir.path().join(format!("{form:?}-{dtype}-{shards}"));
                model.write(&path, form, dtype, shards);
                let weights = open(&path).unwrap();
                let got = everything(&weights);
                assert_eq!(
                    got,
                    *first.get_or_insert_with(|| got.clone()),
                    "{form:?} {dtype} {shards}"
                );
            }
        }
    }
    let (config, values) = first.unwrap();
    assert_eq!(config.global_layers(), [2]);
    let (local, global) = (config.layers[0].rope, config.layers[2].rope);
    assert_eq!((global.factor, local.factor), (8.0, 1.0));
    assert_eq!((global.theta, local.theta), (1e6, 1e4));
    assert_eq!(config.eos, [1, 106]);
    assert_eq!(values[0].len(), 160 * 128);
    assert_eq!(f32::from_bits(values[0][7]), model.tensors[0].2[7]);
}

/// The error of a file that became shorter contains its name and a remedy. On Windows a mapped file
/// cannot shrink.
#[cfg(unix)]
#[test]
fn weights_that_shrink_after_they_were_opened_are_an_invalid_model() {
    use gemma::error::{Kind, fault_of};
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(2).write(dir.path(), Form::TextV4, Dtype::BF16, 1);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = dir.path().join("model.safetensors");
    std::fs::File::options().write(true).open(&file).unwrap().set_len(4096).unwrap();
    let name = checkpoint.stored()[0].name.clone();
    for error in [
        checkpoint.fingerprint().unwrap_err(),
        checkpoint.read_through().unwrap_err(),
        checkpoint.read(&name, 0..8192, &mut Vec::new()).unwrap_err(),
    ] {
        let fault = fault_of(&error).unwrap_or_else(|| panic!("{error:#}"));
        assert_eq!(fault.kind, Kind::Model);
        assert!(fault.what.contains(file.to_str().unwrap()) && fault.help.is_some(), "{fault:?}");
    }
}

/// Hashes that identify the model for the prompt cache, measured times and the quantiser's journal.
#[test]
fn a_model_is_another_after_any_change() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::tiny(2).write(dir.path(), Form::TextV4, Dtype::F32, 1);
    let weights = dir.path().join("model.safetensors");
    let identity = || {
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let stamp = Stamp::of_file(&std::fs::File::open(&weights).unwrap()).unwrap();
        assert_eq!(checkpoint.stamps().unwrap(), [stamp]);
        let digest = checkpoint.digest("model.safetensors").unwrap().unwrap();
        (checkpoint.fingerprint().unwrap(), digest)
    };
    let mut seen = vec![identity()];
    let mut bytes = std::fs::read(&weights).unwrap();
    assert!(bytes.len() > 64 * 4096, "pieces do not overlap");
    // The first piece is in the header, which cannot change unnoticed. The last one is the end of
    // the file.
    for piece in [20, 40, 63] {
        let at = (bytes.len() - 4096) * piece / 63 + 4095;
        bytes[at] ^= 1;
        std::fs::write(&weights, &bytes).unwrap();
        seen.push(identity());
    }
    for (i, a) in seen.iter().enumerate() {
        assert!(seen[..i].iter().all(|b| a.0 != b.0 && a.1 != b.1), "{i}");
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let config = std::fs::read(dir.path().join("config.json")).unwrap();
    assert_eq!(checkpoint.digest("config.json").unwrap(), Some(Sha256::digest(config).into()));
    assert_eq!(checkpoint.digest("none.json").unwrap(), None);
}

#[test]
fn synthetic_weights_depend_on_their_seed_alone() {
    let config = Config::from_json(&TinyModel::tiny(1).config(Form::TextV4)).unwrap();
    let make = |seed| {
        Weights::synthetic(
            config.clone(),
            |role| if role == Role::Embed { "i8-row" } else { "i4-g32" }.parse().unwrap(),
            seed,
        )
    };
    let (a, b, c) = (everything(&make(5)), everything(&make(5)), everything(&make(6)));
    assert_eq!(a, b);
    assert_ne!(a.1, c.1);
    assert_ne!(a.1[2], a.1[15], "layers differ");
}
