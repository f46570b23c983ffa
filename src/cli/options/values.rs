//! Spellings of values.

use crate::quant::recipe::parse_size;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::model::shapes::Shape;
use crate::runtime::options::{DraftAhead, Kv};
use clap::ValueEnum;
use clap::builder::PossibleValue;

/// Parses a size of memory; 0 is a size too.
pub fn memory(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        _ => parse_size(text).map_err(|e| e.to_string()),
    }
}

impl ValueEnum for Kv {
    fn value_variants<'a>() -> &'a [Kv] {
        &[Kv::Auto, Kv::F16, Kv::F32, Kv::Q8]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Kv::Auto => "auto",
            Kv::F16 => "f16",
            Kv::F32 => "f32",
            Kv::Q8 => "q8",
        }))
    }
}

impl ValueEnum for DeviceLock {
    fn value_variants<'a>() -> &'a [DeviceLock] {
        &[DeviceLock::Wait, DeviceLock::Fail, DeviceLock::Off]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            DeviceLock::Wait => PossibleValue::new("wait").help("Wait until the other one ends"),
            DeviceLock::Fail => PossibleValue::new("fail").help("Exit with code 4"),
            DeviceLock::Off => PossibleValue::new("off").help("Run both"),
        })
    }
}

impl ValueEnum for DraftAhead {
    fn value_variants<'a>() -> &'a [DraftAhead] {
        &[DraftAhead::Auto, DraftAhead::On, DraftAhead::Off]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            DraftAhead::Auto => "auto",
            DraftAhead::On => "on",
            DraftAhead::Off => "off",
        }))
    }
}

impl ValueEnum for Shape {
    fn value_variants<'a>() -> &'a [Shape] {
        &Shape::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}
