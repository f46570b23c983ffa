//! Connections: accepts them, limits their number and time, and closes them at the end.

use super::super::access::ListenHost;
use super::super::metrics::ServerMetrics;
use super::super::pool::{Client, Peer, PoolShare, SharedPool};
use super::Routers;
#[cfg(unix)]
use crate::os::sockets;
use futures_util::future::join_all;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio_io_timeout::TimeoutStream;

/// Limit of connections. One client may have half of them; more are closed.
const MOST: usize = 4096;
/// Limit of a request's head in bytes, and of its lines.
const HEAD: usize = 64 * 1024;
const HEADERS: usize = 100;
/// Pause when the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);
/// Time that connections have to close after the last answer.
const FAREWELL: Duration = Duration::from_secs(2);

/// Connections that the system queues before they are accepted.
const BACKLOG: u32 = 1024;
/// Bytes that the system buffers for a client that does not read.
const SEND_BUFFER: u32 = 128 * 1024;

/// A listening socket.
enum AnyListener {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(tokio::net::UnixListener),
}

/// All sockets of a server.
pub struct Listeners {
    sockets: Vec<AnyListener>,
    /// Address that is shown to clients.
    pub url: String,
    /// Path of a socket that is removed at the end.
    path: Option<PathBuf>,
}

impl Drop for Listeners {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Listeners {
    /// Listens at a host.
    pub fn bind(host: &ListenHost, port: u16) -> io::Result<Listeners> {
        let (address, others) = match host {
            ListenHost::Unix(path) => return Listeners::bind_path(path),
            ListenHost::Address(address) => (*address, None),
            ListenHost::Localhost => {
                (IpAddr::V4(Ipv4Addr::LOCALHOST), Some(IpAddr::V6(Ipv6Addr::LOCALHOST)))
            }
        };
        let first = bind(SocketAddr::new(address, port))?;
        let own = first.local_addr()?;
        let mut sockets = vec![AnyListener::Tcp(first)];
        // Some machines have no IPv6.
        let other = others.and_then(|other| bind(SocketAddr::new(other, own.port())).ok());
        sockets.extend(other.map(AnyListener::Tcp));
        let url = match host {
            ListenHost::Localhost => format!("http://localhost:{}", own.port()),
            _ => format!("http://{own}"),
        };
        Ok(Listeners { sockets, url, path: None })
    }

    #[cfg(unix)]
    fn bind_path(path: &std::path::Path) -> io::Result<Listeners> {
        let listener = tokio::net::UnixListener::from_std(sockets::listen(path)?)?;
        let (sockets, url) =
            (vec![AnyListener::Unix(listener)], format!("unix:{}", path.display()));
        Ok(Listeners { sockets, url, path: Some(path.to_owned()) })
    }

    #[cfg(not(unix))]
    fn bind_path(path: &std::path::Path) -> io::Result<Listeners> {
        Err(crate::os::sockets::listen(path).expect_err("this system has no unix sockets"))
    }
}

/// Listens at an address.
fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A killed server can be started again at once.
    socket.set_reuseaddr(true)?;
    // Accepted connections inherit this size.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Stage of the server's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerStage {
    Open,
    /// New connections are refused, and running answers continue.
    Closing,
    /// All answers have ended.
    Over,
}

/// Rules that all connections of a server share.
#[derive(Clone)]
pub struct ConnectionRules {
    pub routers: Routers,
    /// Time that a client has to send a head, and to read what is sent.
    pub patience: Duration,
    pub metrics: Arc<ServerMetrics>,
}

/// Serves connections until the stage changes. Returns once all are closed.
pub async fn serve(
    mut listeners: Listeners,
    rules: ConnectionRules,
    mut stage: watch::Receiver<ServerStage>,
) {
    let (places, graceful) = (SharedPool::new(MOST), GracefulShutdown::new());
    let sockets = std::mem::take(&mut listeners.sockets);
    let accept = |socket| accept(socket, &rules, &places, &graceful, stage.clone());
    join_all(sockets.into_iter().map(accept)).await;
    drop(listeners);
    let over = async {
        let _ = stage.wait_for(|stage| *stage == ServerStage::Over).await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        _ = graceful.shutdown() => {}
        _ = over => {}
    }
}

/// Accepts the connections of a socket until the stage changes.
async fn accept(
    socket: AnyListener,
    rules: &ConnectionRules,
    places: &Arc<SharedPool>,
    graceful: &GracefulShutdown,
    mut stage: watch::Receiver<ServerStage>,
) {
    // A client at its limit gets no further connection.
    let place = |address| places.try_take(Client::at(address), 1);
    loop {
        let closing = stage.wait_for(|stage| *stage >= ServerStage::Closing);
        match &socket {
            AnyListener::Tcp(listener) => {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = closing => break,
                };
                let Ok((stream, peer)) = accepted else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                let Some(place) = place(peer.ip()) else { continue };
                // Sends each token at once.
                let _ = stream.set_nodelay(true);
                talk(stream, peer.ip(), place, rules, graceful);
            }
            #[cfg(unix)]
            AnyListener::Unix(listener) => {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    _ = closing => break,
                };
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                let peer = IpAddr::V4(Ipv4Addr::LOCALHOST);
                let Some(place) = place(peer) else { continue };
                talk(stream, peer, place, rules, graceful);
            }
        }
    }
}

/// Serves a connection in its own task.
fn talk(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    peer: IpAddr,
    place: PoolShare,
    rules: &ConnectionRules,
    graceful: &GracefulShutdown,
) {
    let ConnectionRules { routers, patience, metrics } = rules.clone();
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(patience));
    let service = service_fn(move |mut request: hyper::Request<_>| {
        request.extensions_mut().insert(Peer(peer));
        let router = routers.choose(request.headers()).clone();
        TowerToHyperService::new(router).call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience)
        .max_buf_size(HEAD)
        .max_headers(HEADERS)
        .serve_connection(TokioIo::new(Box::pin(stream)), service);
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        metrics.connections.add(1);
        // A client's protocol error or disconnection is not a failure of the server.
        let _ = connection.await;
        metrics.connections.sub(1);
        drop(place);
    });
}
