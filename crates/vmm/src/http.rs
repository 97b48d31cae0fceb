//! One call of a VMM's API: HTTP/1.1 on a Unix socket, bounded and with a time limit.
//!
//! Each call has its own connection, so an abandoned call cannot disturb another. The VMM runs a hostile guest: a
//! response larger than [`MAX_ANSWER`] is an error.

use std::{io, path::PathBuf, time::Duration};

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

/// Maximum size of a response's body, bytes.
const MAX_ANSWER: usize = 1 << 20;
/// Maximum number of characters kept of a refusal.
const MAX_REASON: usize = 400;

/// The reason why a call had no effect, or may have had none.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No process listens on the socket.
    #[error("cannot connect to {path:?}")]
    Connect {
        /// Path of the API's socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No response arrived in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The VMM refused the call.
    #[error("{reason}")]
    Refused {
        /// Status of the response.
        status: u16,
        /// The VMM's explanation, bounded.
        reason: String,
    },
    /// The response is not valid.
    #[error("{0}")]
    Malformed(String),
    /// The connection ended before the response did.
    #[error("connection ended before the answer")]
    Closed(#[source] hyper::Error),
}

/// A call of the API.
#[derive(Debug)]
pub struct Call<'a> {
    /// The HTTP method.
    pub method: Method,
    /// Path of the request, which begins with `/`.
    pub path: &'a str,
    /// The request's body, in JSON; may be empty.
    pub body: Bytes,
    /// Statuses that mean success.
    pub due: &'a [StatusCode],
}

impl Call<'_> {
    /// Sends the call on `stream`, within `limit`. Returns the body of the response; `reason` reads the body of a
    /// refusal.
    pub async fn send_on(
        self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        limit: Duration,
        reason: fn(&[u8]) -> String,
    ) -> Result<Bytes, ApiError> {
        let (due, path) = (self.due, self.path);
        let (status, answer) = tokio::time::timeout(limit, self.exchange(stream))
            .instrument(tracing::debug_span!("vmm_call", path))
            .await
            .map_err(|_| ApiError::Timeout(limit))??;
        match status {
            status if due.contains(&status) => Ok(answer),
            status if status.is_client_error() || status.is_server_error() => {
                Err(ApiError::Refused { status: status.as_u16(), reason: reason(&answer) })
            }
            status => Err(ApiError::Malformed(format!("status {status}, expected {}", due[0]))),
        }
    }

    async fn exchange(
        self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let request = Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(self.body))
            .map_err(|error| ApiError::Malformed(error.to_string()))?;
        let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(transport)?;
        // The connection ends with this call, whatever the other side does.
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let answer = requests.send_request(request).await.map_err(transport)?;
        let status = answer.status();
        let body =
            Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(|error| match error
                .downcast::<hyper::Error>(
            ) {
                Ok(error) => transport(*error),
                Err(error) if error.is::<LengthLimitError>() => {
                    ApiError::Malformed(format!("an answer longer than {MAX_ANSWER} bytes"))
                }
                Err(error) => ApiError::Malformed(error.to_string()),
            })?;
        Ok((status, body.to_bytes()))
    }
}

/// Returns the error of a connection that broke, or whose other side does not speak HTTP.
fn transport(error: hyper::Error) -> ApiError {
    match error.is_parse() {
        true => ApiError::Malformed(format!("not HTTP: {error}")),
        false => ApiError::Closed(error),
    }
}

/// Encodes the body of a call.
pub fn write(body: &impl Serialize) -> Result<Bytes, ApiError> {
    serde_json::to_vec(body).map(Bytes::from).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Decodes the body of a response.
pub fn read<A: DeserializeOwned>(answer: &[u8]) -> Result<A, ApiError> {
    serde_json::from_slice(answer).map_err(|error| ApiError::Malformed(error.to_string()))
}

/// Returns the text of a refusal as one line, bounded.
pub fn one_line(text: &str) -> String {
    text.trim_end().replace('\n', " ").chars().filter(|c| !c.is_control()).take(MAX_REASON).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_bounded() {
        assert_eq!(one_line("two\nlines\r\n"), "two lines");
        assert_eq!(one_line(&"x".repeat(5000)).len(), MAX_REASON);
    }
}
