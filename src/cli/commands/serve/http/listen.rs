//! Connections: accepted, limited in number and time, and closed at the end.

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio_io_timeout::TimeoutStream;

use super::super::pool::{Client, Peer, SharedPool};
use super::super::queue::RequestQueue;

/// Most connections at once. One client may have half of them; more are closed.
const MOST: usize = 4096;
/// Most bytes of a request's head, and most lines in it.
const HEAD: usize = 64 * 1024;
const HEADERS: usize = 100;
/// Pause if the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);
/// Time in which connections must close after the last answer.
const FAREWELL: Duration = Duration::from_secs(2);

/// Connections that the system keeps before they are accepted.
const BACKLOG: u32 = 1024;
/// Bytes that the system buffers for a client that does not read.
const SEND_BUFFER: u32 = 128 * 1024;

/// Listens at an address.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A server that was killed may be started again at once.
    socket.set_reuseaddr(true)?;
    // Connections have the same.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Stage of the server's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerStage {
    Open,
    /// New connections are refused; running answers continue.
    Closing,
    /// All answers have ended.
    Over,
}

/// Serves connections until the stage changes. Returns once all are closed.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    patience: Duration,
    queue: Arc<RequestQueue>,
    mut stage: watch::Receiver<ServerStage>,
) {
    let (places, graceful) = (SharedPool::new(MOST), GracefulShutdown::new());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stage.wait_for(|stage| *stage >= ServerStage::Closing) => break,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // A client with its full share gets no further connection.
        let Some(place) = places.try_take(Client::at(peer.ip()), 1) else { continue };
        // Each token is sent at once.
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(patience));
        let inner = TowerToHyperService::new(router.clone());
        let service = service_fn(move |mut request: hyper::Request<_>| {
            request.extensions_mut().insert(Peer(peer.ip()));
            inner.call(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .max_buf_size(HEAD)
            .max_headers(HEADERS)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = graceful.watch(connection);
        let queue = queue.clone();
        tokio::spawn(async move {
            queue.metrics.connections.add(1);
            // A client's protocol error or disconnection is no failure of the server.
            let _ = connection.await;
            queue.metrics.connections.sub(1);
            drop(place);
        });
    }
    drop(listener);
    let over = async {
        let _ = stage.wait_for(|stage| *stage == ServerStage::Over).await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        _ = graceful.shutdown() => {}
        _ = over => {}
    }
}
