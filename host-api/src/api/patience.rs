//! How long a request's body is waited for.
//!
//! A caller that stops half way holds a connection, a task and perhaps a transfer in a guest. As long as bytes come, any
//! body may take as long as it likes.

use super::App;
use crate::error::{Code, Problem};
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::{Stream, StreamExt};
use std::error::Error;
use std::time::Duration;
use tokio::time::timeout;

/// No byte of a body came for this long.
#[derive(Debug, thiserror::Error)]
#[error("no byte of the request's body came for {} s", .0.as_secs())]
struct Stalled(Duration);

/// Puts a limit on the silence between any two pieces of each request's body.
pub async fn limit(State(daemon): State<App>, request: Request, next: Next) -> Response {
    let request = request
        .map(|body| if body.is_end_stream() { body } else { Body::from_stream(patient(body, daemon.stall)) });
    next.run(request).await
}

/// The time runs only while a piece is waited for: however long the one before it takes to be dealt with is no fault of
/// the caller's.
fn patient(body: Body, stall: Duration) -> impl Stream<Item = Result<Bytes, axum::BoxError>> {
    futures_util::stream::unfold(
        Some(body.into_data_stream()),
        move |rest: Option<BodyDataStream>| async move {
            let mut rest = rest?;
            match timeout(stall, rest.next()).await {
                Ok(piece) => Some((piece?.map_err(axum::BoxError::from), Some(rest))),
                Err(_) => Some((Err(Stalled(stall).into()), None)),
            }
        },
    )
}

/// The problem to answer with, if this is why a body could not be read.
pub fn stalled(cause: &axum::Error) -> Option<Problem> {
    let mut next: Option<&(dyn Error + 'static)> = Some(cause);
    while let Some(error) = next {
        if let Some(stalled) = error.downcast_ref::<Stalled>() {
            return Some(Problem::new(Code::RequestTimeout, format!("{stalled}; nothing came of it")));
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep;

    const STALL: Duration = Duration::from_secs(60);

    /// Pieces, each this many seconds after the one before.
    fn body(pauses: &'static [u64]) -> Body {
        Body::from_stream(futures_util::stream::iter(pauses).then(|pause| async move {
            sleep(Duration::from_secs(*pause)).await;
            Ok::<_, std::io::Error>(Bytes::from_static(b"x"))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_may_take_for_ever_as_long_as_bytes_come() {
        let read = Body::from_stream(patient(body(&[59; 1000]), STALL));
        assert_eq!(axum::body::to_bytes(read, usize::MAX).await.unwrap().len(), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_is_given_up_and_the_reason_is_found() {
        let read = Body::from_stream(patient(body(&[1, 61, 1]), STALL));
        let broken = axum::body::to_bytes(read, usize::MAX).await.unwrap_err();
        assert_eq!(stalled(&broken).unwrap().code, Code::RequestTimeout);
        assert!(stalled(&axum::Error::new(std::io::Error::other("gone"))).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_a_piece_takes_to_be_dealt_with_does_not_count() {
        let mut pieces = std::pin::pin!(patient(body(&[1, 1, 1]), STALL));
        while let Some(piece) = pieces.next().await {
            assert!(piece.is_ok());
            sleep(Duration::from_secs(600)).await;
        }
    }
}
