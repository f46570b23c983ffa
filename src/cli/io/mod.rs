//! Input and output of the commands: prompts and text files, results, messages, signals.

pub mod bias;
pub mod crash;
pub mod destination;
pub mod format;
pub mod image_file;
pub mod input;
pub mod output;
pub mod pictures;
pub mod prompt;
pub mod record;
pub mod server_client;
pub mod signals;
pub mod stats;
pub mod table;
pub mod text_file;
pub mod ui;
pub mod wrap;
