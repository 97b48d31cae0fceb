//! Port-forward of one port over a WebSocket (`v4.channel.k8s.io`): channel 0 carries the bytes, channel 1 what
//! went wrong; each begins with the port's number, two bytes, little-endian.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

/// A forwarded connection.
pub struct Forward {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// Received bytes, the port's number first.
    channels: [Vec<u8>; 2],
}

impl Forward {
    /// Opens the URL that PortForward returned.
    pub async fn open(url: &str) -> Result<Self> {
        let mut request = url.replacen("http://", "ws://", 1).into_client_request()?;
        request.headers_mut().insert("Sec-WebSocket-Protocol", "v4.channel.k8s.io".parse()?);
        let (socket, _) = connect_async(request).await.with_context(|| format!("cannot open {url}"))?;
        Ok(Self { socket, channels: Default::default() })
    }

    /// Sends `bytes`.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let message = [&[0], bytes].concat();
        Ok(self.socket.send(Message::Binary(message.into())).await?)
    }

    /// Reads until `enough` accepts the data and errors so far, or until the other side closes.
    pub async fn until(&mut self, enough: impl Fn(&[u8], &[u8]) -> bool, limit: Duration) -> Result<()> {
        let read = async {
            while !enough(self.data(), self.error()) {
                match self.socket.next().await {
                    Some(Ok(Message::Binary(message))) => match message.split_first() {
                        Some((&channel, bytes)) if channel < 2 => {
                            self.channels[usize::from(channel)].extend_from_slice(bytes);
                        }
                        _ => bail!("a message of an unknown channel"),
                    },
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Ok(()),
                }
            }
            Ok(())
        };
        match timeout(limit, read).await {
            Ok(read) => read,
            Err(_) => bail!("not enough within {limit:?}: {} bytes", self.data().len()),
        }
    }

    /// Returns the data.
    pub fn data(&self) -> &[u8] {
        self.channels[0].get(2..).unwrap_or_default()
    }

    /// Returns the errors.
    pub fn error(&self) -> &[u8] {
        self.channels[1].get(2..).unwrap_or_default()
    }
}
