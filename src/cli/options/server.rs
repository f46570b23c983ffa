//! Options of commands that ask a running server.

use crate::cli::io::server_client::{ServerAddress, ServerClient};
use clap::Args;

/// The server to ask.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Server")]
pub struct ServerOptions {
    /// Address of the server: http://HOST:PORT, or unix:PATH
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    pub url: ServerAddress,
    /// Key that the server asks for
    ///
    /// Other users of this machine can see a command line. Set GEMMA_API_KEY instead to hide the
    /// key.
    #[arg(long, value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

impl ServerOptions {
    pub fn client(&self) -> ServerClient<'_> {
        ServerClient { address: &self.url, key: self.api_key.as_deref() }
    }
}
