//! Parsers of option values.

use crate::quant::recipe::parse_size;
use crate::runtime::devices::lock::DeviceLock;
use crate::runtime::model::shapes::Shape;
use crate::runtime::options::{DraftAhead, Kv};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Parses a size of memory, in bytes. Accepts 0.
pub fn memory(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        _ => parse_size(text).map_err(|e| e.to_string()),
    }
}

/// Returns a parser for the names of `values`.
fn named<T: Clone + Send + Sync + 'static>(
    values: Vec<(PossibleValue, T)>,
) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    PossibleValuesParser::new(names).map(move |text| {
        let is = |(name, _): &&(PossibleValue, T)| name.get_name() == text;
        values.iter().find(is).expect("the names are those of the values").1.clone()
    })
}

pub fn kv() -> impl TypedValueParser<Value = Kv> {
    let values = [("auto", Kv::Auto), ("f16", Kv::F16), ("f32", Kv::F32), ("q8", Kv::Q8)];
    named(values.map(|(name, kv)| (PossibleValue::new(name), kv)).into())
}

pub fn device_lock() -> impl TypedValueParser<Value = DeviceLock> {
    let values = [
        ("wait", "Wait until the other one ends", DeviceLock::Wait),
        ("fail", "Exit with code 4", DeviceLock::Fail),
        ("off", "Run both", DeviceLock::Off),
    ];
    named(values.map(|(name, help, lock)| (PossibleValue::new(name).help(help), lock)).into())
}

pub fn draft_ahead() -> impl TypedValueParser<Value = DraftAhead> {
    let values = [("auto", DraftAhead::Auto), ("on", DraftAhead::On), ("off", DraftAhead::Off)];
    named(values.map(|(name, when)| (PossibleValue::new(name), when)).into())
}

pub fn shape() -> impl TypedValueParser<Value = Shape> {
    named(Shape::ALL.map(|shape| (PossibleValue::new(shape.name()), shape)).into())
}
