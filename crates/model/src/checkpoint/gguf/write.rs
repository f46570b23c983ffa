//! Builds the header of a GGUF file, including the tensors without a source. The data of the other
//! tensors follows in their order, each padded to the alignment.

use super::container::{ALIGNMENT, MAGIC, VERSION};
use super::types;
use gemma_base::tensor::Code;

/// Metadata in file order, and the tensors that depend on it.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    count: u64,
    bytes: Vec<u8>,
    /// f32 vectors without a source tensor. They come before the other tensors.
    vectors: Vec<(String, Vec<f32>)>,
}

impl Keys {
    fn put(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        push_text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    pub fn u32(&mut self, key: &str, value: u32) {
        self.put(key, 4, &value.to_le_bytes());
    }

    pub fn i32(&mut self, key: &str, value: i32) {
        self.put(key, 5, &value.to_le_bytes());
    }

    pub fn f32(&mut self, key: &str, value: f32) {
        self.put(key, 6, &value.to_le_bytes());
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.put(key, 7, &[value.into()]);
    }

    pub fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        push_text(&mut bytes, value);
        self.put(key, 8, &bytes);
    }

    pub fn texts<T: AsRef<str>>(&mut self, key: &str, values: &[T]) {
        let mut bytes = list(8, values.len());
        values.iter().for_each(|v| push_text(&mut bytes, v.as_ref()));
        self.put(key, 9, &bytes);
    }

    pub fn f32s(&mut self, key: &str, values: &[f32]) {
        let mut bytes = list(6, values.len());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self.put(key, 9, &bytes);
    }

    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let mut bytes = list(5, values.len());
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self.put(key, 9, &bytes);
    }

    pub fn bools(&mut self, key: &str, values: &[bool]) {
        let mut bytes = list(7, values.len());
        bytes.extend(values.iter().map(|v| u8::from(*v)));
        self.put(key, 9, &bytes);
    }

    /// Adds an f32 tensor.
    pub fn vector(&mut self, name: &str, values: Vec<f32>) {
        self.vectors.push((name.into(), values));
    }
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn list(kind: u32, len: usize) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend((len as u64).to_le_bytes());
    bytes
}

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// A code with a GGUF type.
    pub code: Code,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Returns the bytes of the tensor's data, without padding.
    pub fn bytes(&self) -> u64 {
        let weights = self.shape.iter().product();
        self.code.spec().ggml.map_or(0, |ggml| ggml.bytes_of(weights)) as u64
    }

    /// Returns the number of zero bytes after the tensor's data.
    pub fn padding(&self) -> usize {
        (self.bytes().next_multiple_of(ALIGNMENT as u64) - self.bytes()) as usize
    }
}

/// Returns all bytes before the data of these tensors.
pub fn header(keys: &Keys, tensors: &[Tensor]) -> Vec<u8> {
    let vector = |(name, values): &(String, Vec<f32>)| Tensor {
        name: name.clone(),
        code: Code::F32,
        shape: vec![values.len()],
    };
    let vectors: Vec<Tensor> = keys.vectors.iter().map(vector).collect();
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend(((vectors.len() + tensors.len()) as u64).to_le_bytes());
    out.extend(keys.count.to_le_bytes());
    out.extend(&keys.bytes);
    let mut offset = 0u64;
    for tensor in vectors.iter().chain(tensors) {
        push_text(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
        out.extend(types::number(tensor.code).unwrap_or_default().to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes() + tensor.padding() as u64;
    }
    let align = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    align(&mut out);
    for (_, values) in &keys.vectors {
        out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        align(&mut out);
    }
    out
}
