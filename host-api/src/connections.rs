//! Connections to callers: accepted, served, and told to end.
//!
//! What must never happen here: a connection that costs something for as long as its caller likes and carries nothing.
//! How long a request's head is waited for is bounded here, its body where bodies are read.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::pin::pin;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// After a failed accept (descriptors have run out, say) the listener waits this long before it tries again.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until `stop`, and then until every request that was begun by then has its answer.
pub async fn serve(listener: TcpListener, router: Router, head: Duration, stop: impl Future<Output = ()>) {
    let stopping = watch::Sender::new(());
    let mut stop = pin!(stop);
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    open.spawn(attend(stream, router.clone(), head, stopping.subscribe()));
                }
                Err(cause) => {
                    tracing::warn!(%cause, "a connection could not be accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            Some(_) = open.join_next() => {}
        }
    }
    drop(listener);
    stopping.send_replace(());
    while open.join_next().await.is_some() {}
}

async fn attend(stream: TcpStream, router: Router, head: Duration, mut stopping: watch::Receiver<()>) {
    // Answers are small, and each is waited for.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .with_upgrades();
    let mut connection = pin!(connection);
    tokio::select! {
        served = connection.as_mut() => return ended(served),
        _ = stopping.changed() => connection.as_mut().graceful_shutdown(),
    }
    ended(connection.await);
}

/// A caller that goes, or says nothing, is no news.
fn ended(served: hyper::Result<()>) {
    if let Err(cause) = served {
        tracing::debug!(%cause, "a connection broke off");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;

    struct Server {
        stop: oneshot::Sender<()>,
        stream: TcpStream,
        served: tokio::task::JoinHandle<()>,
    }

    async fn server(head: Duration) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let router = Router::new().route("/", get(|| async { "here" }));
        let served = tokio::spawn(serve(listener, router, head, async move {
            let _ = stopped.await;
        }));
        Server { stop, stream, served }
    }

    async fn answer(stream: &mut TcpStream) -> String {
        let mut text = String::new();
        while !text.ends_with("here") {
            let mut bytes = [0; 1024];
            let got = stream.read(&mut bytes).await.unwrap();
            assert_ne!(got, 0, "the connection ended after {text:?}");
            text.push_str(std::str::from_utf8(&bytes[..got]).unwrap());
        }
        text
    }

    #[tokio::test]
    async fn a_head_that_never_ends_ends_the_connection() {
        let mut server = server(Duration::from_millis(50)).await;
        server.stream.write_all(b"GET / HTTP/1.1\r\nHost: ").await.unwrap();
        let mut rest = Vec::new();
        // Returns because the server hangs up; how it says so does not matter.
        let _ = server.stream.read_to_end(&mut rest).await;
        assert!(!String::from_utf8_lossy(&rest).contains("here"));
    }

    #[tokio::test]
    async fn a_connection_serves_one_request_after_the_other_and_ends_when_told() {
        let mut server = server(Duration::from_secs(3600)).await;
        for _ in 0..2 {
            server.stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            assert!(answer(&mut server.stream).await.starts_with("HTTP/1.1 200"));
        }
        server.stop.send(()).unwrap();
        server.served.await.unwrap();
        assert_eq!(server.stream.read(&mut [0; 1]).await.unwrap(), 0, "an idle connection is closed");
    }
}
