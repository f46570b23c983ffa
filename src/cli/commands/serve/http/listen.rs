//! Connections: taken in, bounded in number and time, and let go of at the end.

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

/// Connections at once, of which a client has half; more of them are closed.
const MOST: usize = 4096;
/// Bytes of a request's head, and the lines in it.
const HEAD: usize = 64 * 1024;
const HEADERS: usize = 100;
/// How long to wait where the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(50);
/// How long connections may take to go once all answers are given.
const FAREWELL: Duration = Duration::from_secs(2);

/// Waiting connections that the system keeps.
const BACKLOG: u32 = 1024;
/// Bytes that the system keeps for a client that does not read.
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

/// How far the server has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServerStage {
    Open,
    /// Nobody is let in any more; answers that were begun go on.
    Closing,
    /// There are no more answers.
    Over,
}

/// Serves connections until the stage says otherwise; returns once they are gone.
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
        // A client that has its share already is not let in.
        let Some(place) = places.try_take(Client::at(peer.ip()), 1) else { continue };
        // Each token goes out by itself.
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
            // A client that sends nonsense or goes away is no failure of the server.
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
