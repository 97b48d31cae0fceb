//! Exec and attach with live streams, as kubectl has them: a WebSocket with numbered channels
//! (`v4.channel.k8s.io`): 0 stdin, 1 stdout, 2 stderr, 3 the result as JSON, 4 terminal size as JSON.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

/// An open exec or attach.
pub struct Session {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// All of stdout so far.
    pub stdout: String,
    /// All of stderr so far.
    pub stderr: String,
    result: Option<String>,
}

impl Session {
    /// Opens the URL that Exec or Attach returned.
    pub async fn open(url: &str) -> Result<Self> {
        let mut request = url.replacen("http://", "ws://", 1).into_client_request()?;
        request.headers_mut().insert("Sec-WebSocket-Protocol", "v4.channel.k8s.io".parse()?);
        let (socket, _) = connect_async(request).await.with_context(|| format!("cannot open {url}"))?;
        Ok(Self { socket, stdout: String::new(), stderr: String::new(), result: None })
    }

    /// Writes to stdin.
    pub async fn write(&mut self, text: &str) -> Result<()> {
        self.send(0, text).await
    }

    /// Sets the terminal's size.
    pub async fn resize(&mut self, columns: u16, rows: u16) -> Result<()> {
        self.send(4, &format!(r#"{{"Width":{columns},"Height":{rows}}}"#)).await
    }

    async fn send(&mut self, channel: u8, text: &str) -> Result<()> {
        let mut message = vec![channel];
        message.extend_from_slice(text.as_bytes());
        Ok(self.socket.send(Message::Binary(message.into())).await?)
    }

    /// Reads until stdout contains `needle`.
    pub async fn until(&mut self, needle: &str, limit: Duration) -> Result<()> {
        let read = async {
            while !self.stdout.contains(needle) {
                if !self.read().await? {
                    bail!(
                        "the stream ended before '{needle}'; stdout: {:?}, stderr: {:?}",
                        self.stdout,
                        self.stderr
                    );
                }
            }
            Ok(())
        };
        match timeout(limit, read).await {
            Ok(done) => done,
            Err(_) => bail!("no '{needle}' within {limit:?}; stdout: {:?}", self.stdout),
        }
    }

    /// Reads to the end and returns the result channel's JSON.
    pub async fn end(mut self, limit: Duration) -> Result<(String, String, String)> {
        let read = async {
            while self.read().await? {}
            Ok::<_, anyhow::Error>(())
        };
        timeout(limit, read).await.context("the stream did not end")??;
        Ok((self.stdout, self.stderr, self.result.unwrap_or_default()))
    }

    async fn read(&mut self) -> Result<bool> {
        match self.socket.next().await {
            None | Some(Ok(Message::Close(_))) => Ok(false),
            Some(Ok(Message::Binary(data))) => {
                let text = String::from_utf8_lossy(data.get(1..).unwrap_or_default());
                match data.first() {
                    Some(1) => self.stdout += &text,
                    Some(2) => self.stderr += &text,
                    Some(3) if !text.is_empty() => self.result = Some(text.into_owned()),
                    _ => {}
                }
                Ok(true)
            }
            Some(Ok(_)) => Ok(true),
            Some(Err(error)) => Err(error.into()),
        }
    }
}
