//! Unix domain sockets, which this program does not use on Windows.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "there are no unix sockets on Windows")
}

/// Returns an error.
pub fn connect(_: &Path, _: Duration) -> io::Result<impl Read + Write + use<>> {
    Err::<TcpStream, _>(refused())
}

/// Returns an error.
pub fn listen(_: &Path) -> io::Result<()> {
    Err(refused())
}
