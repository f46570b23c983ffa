//! Metadata of a GGUF file, by key.

use std::collections::BTreeMap;

/// A value. Integers and floats of all widths are merged; integers are clamped to i64.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// Integers, or booleans as 0 and 1.
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
}

/// Keys and values; keys are unique.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    /// Inserts a value. Returns false and does nothing if the key exists.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        let new = !self.0.contains_key(&key);
        if new {
            self.0.insert(key, value);
        }
        new
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Returns a text. `None` if the key is missing or has another type; so do the functions below.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn texts(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Texts(list) => Some(list),
            _ => None,
        }
    }

    pub fn floats(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::Floats(list) => Some(list),
            _ => None,
        }
    }

    pub fn ints(&self, key: &str) -> Option<&[i64]> {
        match self.get(key)? {
            Value::Ints(list) => Some(list),
            _ => None,
        }
    }

    pub fn int(&self, key: &str) -> Option<i64> {
        match self.get(key)? {
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }

    /// Returns a float, or an integer converted to one.
    pub fn float(&self, key: &str) -> Option<f64> {
        match self.get(key)? {
            Value::Float(v) => Some(*v),
            Value::Int(n) => Some(*n as f64),
            _ => None,
        }
    }

    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }
}
