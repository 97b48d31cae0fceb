//! Requests to an API server: JSON over HTTP/1.1, with TLS unless the URL is `http://`, as for `kubectl proxy`.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::kubeconfig::Access;

/// Maximum size of a response, bytes.
const LONGEST: usize = 8 << 20;
/// Timeout of a request.
const LIMIT: Duration = Duration::from_secs(30);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The kubeconfig's URL or certificates cannot be used.
    #[error("cannot use the kubeconfig's {what}: {why}")]
    Access {
        /// Which part of the kubeconfig.
        what: &'static str,
        /// What is wrong with that part.
        why: String,
    },
    /// The server sent no response.
    #[error("{what}: no answer from {server}: {why}")]
    Unreachable {
        /// The request, as method and path.
        what: String,
        /// Address of the server.
        server: String,
        /// The reason, in one line.
        why: String,
    },
    /// The server refused the request.
    #[error("{what}: {status}: {message}")]
    Refused {
        /// The request, as method and path.
        what: String,
        /// HTTP status of the response.
        status: StatusCode,
        /// The server's message.
        message: String,
    },
}

impl ApiError {
    /// Returns whether the server reports that the object does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, ApiError::Refused { status: StatusCode::NOT_FOUND, .. })
    }
}

/// A client of an API server. Each request opens its own connection.
#[derive(Clone)]
pub struct Client {
    server: String,
    host: String,
    port: u16,
    prefix: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token: Option<String>,
}

impl Client {
    /// Creates a client without connecting.
    pub fn new(access: &Access) -> Result<Self, ApiError> {
        let bad = |what, why: String| ApiError::Access { what, why };
        let uri: Uri =
            access.server.parse().map_err(|error| bad("server", format!("{}: {error}", access.server)))?;
        let host = uri.host().ok_or_else(|| bad("server", format!("{} has no host", access.server)))?;
        let host = host.trim_matches(|c| c == '[' || c == ']').to_owned();
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad("server", format!("{} is neither https nor http", access.server))),
        };
        let tls = if secure { Some(tls(access, &host)?) } else { None };
        Ok(Self {
            server: access.server.clone(),
            port: uri.port_u16().unwrap_or(if secure { 443 } else { 80 }),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            host,
            tls,
            token: access.token.clone(),
        })
    }

    /// Sends a request and returns the JSON of the response.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ApiError> {
        let what = format!("{method} {path}");
        let unreachable =
            |why: String| ApiError::Unreachable { what: what.clone(), server: self.server.clone(), why };
        let answer = tokio::time::timeout(LIMIT, self.exchange(method, path, body)).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("none within {LIMIT:?}").into()));
        let (status, body) = answer.map_err(|error| unreachable(sandboxer_base::chain(&*error)))?;
        let value: Result<Value, _> = serde_json::from_slice(&body);
        if status.is_success() {
            return value.map_err(|error| unreachable(format!("its answer is no JSON: {error}")));
        }
        let message = value.ok().and_then(|status| Some(status.get("message")?.as_str()?.to_owned()));
        Err(ApiError::Refused {
            what,
            status,
            message: message.unwrap_or_else(|| "without a message".into()),
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Bytes), Box<dyn std::error::Error + Send + Sync>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, concat!("sandboxer-cli/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::new(Bytes::from(body)))?;
        let stream = TcpStream::connect((&*self.host, self.port)).await?;
        match &self.tls {
            Some((connector, name)) => send(connector.connect(name.clone(), stream).await?, request).await,
            None => send(stream, request).await,
        }
    }
}

async fn send<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes), Box<dyn std::error::Error + Send + Sync>> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let answer = async {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        Ok((status, Limited::new(answer.into_body(), LONGEST).collect().await?.to_bytes()))
    };
    let answer = answer.await;
    connection.abort();
    answer
}

fn tls(access: &Access, host: &str) -> Result<(TlsConnector, ServerName<'static>), ApiError> {
    let bad = |what, why: String| ApiError::Access { what, why };
    let authority = access.authority.as_ref().ok_or_else(|| {
        bad("certificate-authority", "it has none: the probe knows no certificates of this system".into())
    })?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority) {
        let certificate = certificate.map_err(|error| bad("certificate-authority", error.to_string()))?;
        roots.add(certificate).map_err(|error| bad("certificate-authority", error.to_string()))?;
    }
    let provider = Arc::new(crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| bad("TLS", error.to_string()))?
        .with_root_certificates(roots);
    let config = match &access.certificate {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>();
            let chain = chain.map_err(|error| bad("client-certificate", error.to_string()))?;
            let key =
                PrivateKeyDer::from_pem_slice(key).map_err(|error| bad("client-key", error.to_string()))?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| bad("client-certificate", error.to_string()))?
        }
    };
    let name = access.server_name.clone().unwrap_or_else(|| host.to_owned());
    let name = ServerName::try_from(name).map_err(|error| bad("server", error.to_string()))?;
    Ok((TlsConnector::from(Arc::new(config)), name))
}
