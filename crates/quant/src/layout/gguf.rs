//! GGUF output: one file, which llama.cpp reads too, for formats that it can store without
//! rounding.
//!
//! int4 and int8 codes become Q4_0 and Q8_0 if their group is a multiple of 32. The scale of the
//! group is repeated in each block. Floats are copied. The architecture's constant is added to
//! norms, because llama.cpp expects the final factors.

use super::{StoredTensor, TargetFormat};
use anyhow::Result;
use gemma_base::error::Fault;
use gemma_base::tensor::{Code, Format, GgmlType, Group};
use gemma_model::checkpoint::Dtype;
use gemma_model::checkpoint::gguf::types;
use gemma_model::checkpoint::gguf::write::{Keys, Tensor, header as container};
use gemma_model::models::gguf::tensor_name;
use gemma_model::models::{Role, TensorSpec};

/// Name of the file in the staging directory.
pub const FILE: &str = "model.gguf";

/// Returns the code of a tensor in the file, or an error if no GGUF type can store it.
pub fn code(name: &str, role: Role, target: TargetFormat, cols: usize) -> Result<Code> {
    let refuse = || {
        let what = format!("{name} as {target} cannot be written to a GGUF file");
        let help = "GGUF takes i4 and i8 in rows or groups, f32, f16, bf16, and norms as floats: \
            use --recipe int4";
        Err(Fault::usage(what).help(help).into())
    };
    // llama.cpp stores routers as floats in all files.
    if !role.is_matrix() || role == Role::Router {
        return if target.is_packed() { refuse() } else { Ok(Code::F32) };
    }
    let format = match target {
        TargetFormat::AsIs(Dtype::F16) => return Ok(Code::F16),
        TargetFormat::AsIs(Dtype::BF16) | TargetFormat::Format(Format::BF16) => {
            return Ok(Code::Bf16);
        }
        TargetFormat::AsIs(Dtype::F32) | TargetFormat::Format(Format::F32) => return Ok(Code::F32),
        TargetFormat::AsIs(_) => return refuse(),
        TargetFormat::Format(format) => format,
    };
    let ggml = format.code.spec().ggml.filter(|t| t.split.is_some_and(|s| s.close.is_some()));
    let Some(GgmlType { weights, .. }) = ggml else { return refuse() };
    let cut = match format.group {
        Group::Row => true,
        Group::Cols(group) => {
            usize::from(group).is_multiple_of(weights) && cols.is_multiple_of(group.into())
        }
    };
    if cut && cols.is_multiple_of(weights) && !format.hadamard { Ok(format.code) } else { refuse() }
}

/// Returns a tensor as the file stores it, with its padding.
pub fn part(spec: &TensorSpec, code: Code) -> StoredTensor {
    let tensor = tensor(spec, code);
    let bytes = tensor.bytes() + tensor.padding() as u64;
    StoredTensor {
        name: tensor.name,
        dtype: types::dtype(code).unwrap_or(Dtype::U8),
        shape: tensor.shape,
        bytes,
    }
}

/// Returns the entry of a tensor in the file's header.
pub fn tensor(spec: &TensorSpec, code: Code) -> Tensor {
    Tensor { name: tensor_name(spec.role, spec.layer), code, shape: spec.shape() }
}

/// Returns everything before the data of these tensors.
pub fn header(keys: &Keys, tensors: &[(TensorSpec, Code)]) -> Vec<u8> {
    let mut keys = keys.clone();
    let weights = |name: &str| {
        let is_of = |code: Code| code.spec().ggml.is_some_and(|ggml| ggml.name == name);
        let matrices = tensors.iter().filter(|(spec, code)| is_of(*code) && spec.is_matrix());
        matrices.map(|(spec, _)| spec.size()).sum::<usize>()
    };
    // The key has the type of most of the weights, as in files of llama.cpp.
    let mostly = [("F32", 0), ("F16", 1), ("Q4_0", 2), ("Q8_0", 7), ("BF16", 32)];
    keys.u32(
        "general.file_type",
        mostly.into_iter().max_by_key(|(name, _)| weights(name)).map_or(0, |m| m.1),
    );
    // Version of the block layouts since May 2023.
    keys.u32("general.quantization_version", 2);
    let tensors: Vec<Tensor> = tensors.iter().map(|(spec, code)| tensor(spec, *code)).collect();
    container(&keys, &tensors)
}
