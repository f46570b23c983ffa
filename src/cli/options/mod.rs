//! Options that several commands share, as they are typed; `settled` makes of them what a session
//! takes.

mod chat;
mod drafting;
mod formats;
mod grammar;
mod input;
mod model;
mod sampling;
mod source;
mod ui;
mod values;

pub use chat::ChatOptions;
pub use drafting::DraftArgs;
pub use formats::FormatArgs;
pub use grammar::GrammarOptions;
pub use input::{InputOptions, SpecialPolicy};
pub use model::{ModelArgs, RunArgs};
pub use sampling::{Resolved, SamplingOptions};
pub use source::Source;
pub use ui::{Colour, OnTerminal, UiOptions};
pub use values::memory;
