//! The option that names a preset.

use clap::Args;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model and device")]
pub struct PresetOption {
    /// Take the options of [preset.NAME] in gemma.toml
    ///
    /// A preset may set any option of the command, such as model, system, temp or json-schema.
    /// Options on the command line take precedence.
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub preset: Option<String>,
}
