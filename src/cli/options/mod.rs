//! Options that several commands share. `settled` converts them to the options of a session.

mod chat;
mod drafting;
mod formats;
mod grammar;
mod images;
mod input;
mod model;
mod preset;
mod prompt_cache;
mod sampling;
mod server;
mod source;
mod ui;
mod values;

pub use chat::{ChatOptions, TemplateArgs, Think, ThinkOptions};
pub use drafting::DraftArgs;
pub use formats::FormatArgs;
pub use grammar::GrammarOptions;
pub use images::{ImageOptions, SightArgs};
pub use input::{InputOptions, SpecialPolicy};
pub use model::{ModelArgs, RunArgs};
pub use preset::PresetOption;
pub use prompt_cache::{PromptCacheArgs, finish_prompts};
pub use sampling::{Resolved, SamplingOptions};
pub use server::ServerOptions;
pub use source::Origin;
pub use ui::{Colour, OnTerminal, UiOptions};
pub use values::{memory, shape};
