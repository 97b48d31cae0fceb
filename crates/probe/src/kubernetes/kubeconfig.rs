//! A kubeconfig: the API server and the user.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

/// Maximum size of a kubeconfig and of each file that it names, bytes.
const LONGEST: u64 = 1 << 20;

/// Why a kubeconfig cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is no YAML or JSON of a kubeconfig.
    #[error("{path} is no kubeconfig")]
    Shape {
        /// Path of the file.
        path: PathBuf,
        /// The parser's error.
        source: serde_yaml_ng::Error,
    },
    /// The kubeconfig refers to a name that it does not define.
    #[error("{path} has no {what} '{name}'")]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// "context", "cluster" or "user".
        what: &'static str,
        /// The undefined name.
        name: String,
    },
    /// The kubeconfig requires something that the probe does not support.
    #[error("{path}: {why}")]
    Unsupported {
        /// Path of the file.
        path: PathBuf,
        /// What is unsupported, and what to do.
        why: String,
    },
}

/// Access to an API server as a user.
#[derive(Clone, PartialEq, Eq)]
pub struct Access {
    /// URL of the server, such as `https://192.0.2.1:6443`.
    pub server: String,
    /// Name in the server's certificate, if it differs from the URL's host.
    pub server_name: Option<String>,
    /// PEM certificates that sign the server's certificate.
    pub authority: Option<Vec<u8>>,
    /// PEM certificate and key of the user.
    pub certificate: Option<(Vec<u8>, Vec<u8>)>,
    /// Bearer token of the user.
    pub token: Option<String>,
    /// Namespace of the context; "default" if it names none.
    pub namespace: String,
}

/// Hides all secrets.
impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("server", &self.server).finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    current_context: String,
    #[serde(default)]
    contexts: Vec<NamedContext>,
    #[serde(default)]
    clusters: Vec<NamedCluster>,
    #[serde(default)]
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize)]
struct Context {
    cluster: String,
    #[serde(default)]
    user: String,
    namespace: Option<String>,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cluster {
    server: String,
    tls_server_name: Option<String>,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    #[serde(default)]
    insecure_skip_tls_verify: bool,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    exec: Option<serde_yaml_ng::Value>,
    auth_provider: Option<serde_yaml_ng::Value>,
    username: Option<String>,
}

impl Access {
    /// Reads a kubeconfig. Without `context`, uses its current context. Paths in it are relative to its directory.
    pub fn read(path: &Path, context: Option<&str>) -> Result<Self, KubeconfigError> {
        let text = bounded(path)?;
        let file: File = serde_yaml_ng::from_slice(&text)
            .map_err(|source| KubeconfigError::Shape { path: path.to_owned(), source })?;
        let reader = Reader { path };
        let name = context.unwrap_or(&file.current_context);
        let context = file.contexts.iter().find(|named| named.name == name);
        let context = &context.ok_or_else(|| reader.missing("context", name))?.context;
        let cluster = file.clusters.iter().find(|named| named.name == context.cluster);
        let cluster = &cluster.ok_or_else(|| reader.missing("cluster", &context.cluster))?.cluster;
        let none = User::default();
        let user = match file.users.iter().find(|named| named.name == context.user) {
            Some(user) => &user.user,
            None if context.user.is_empty() => &none,
            None => return Err(reader.missing("user", &context.user)),
        };
        reader.access(cluster, user, context.namespace.clone())
    }
}

struct Reader<'a> {
    path: &'a Path,
}

impl Reader<'_> {
    fn access(
        &self,
        cluster: &Cluster,
        user: &User,
        namespace: Option<String>,
    ) -> Result<Access, KubeconfigError> {
        if cluster.insecure_skip_tls_verify {
            return Err(
                self.unsupported("insecure-skip-tls-verify: name the server's certificate-authority instead")
            );
        }
        if user.exec.is_some() || user.auth_provider.is_some() {
            return Err(self.unsupported(
                "the user's credentials come from a plugin, which the probe does not run: use a token, as of \
                 `kubectl create token`, or a client certificate",
            ));
        }
        if user.username.is_some() {
            return Err(self
                .unsupported("API servers take no passwords any more: use a token or a client certificate"));
        }
        let certificate = self.data(&user.client_certificate_data, &user.client_certificate)?;
        let key = self.data(&user.client_key_data, &user.client_key)?;
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                return Err(
                    self.unsupported("the user has a client certificate without a key, or a key without one")
                );
            }
        };
        let of_file = |path: &PathBuf| {
            Ok::<_, KubeconfigError>(String::from_utf8_lossy(&bounded(&self.beside(path))?).trim().to_owned())
        };
        Ok(Access {
            server: cluster.server.trim_end_matches('/').to_owned(),
            server_name: cluster.tls_server_name.clone(),
            authority: self.data(&cluster.certificate_authority_data, &cluster.certificate_authority)?,
            certificate,
            token: match &user.token_file {
                Some(path) if user.token.is_none() => Some(of_file(path)?),
                _ => user.token.clone(),
            },
            namespace: namespace.filter(|name| !name.is_empty()).unwrap_or_else(|| "default".into()),
        })
    }

    /// Returns data that the kubeconfig contains in base64, or in a file that it names.
    fn data(
        &self,
        inside: &Option<String>,
        file: &Option<PathBuf>,
    ) -> Result<Option<Vec<u8>>, KubeconfigError> {
        match (inside, file) {
            (Some(text), _) => {
                let decoded = STANDARD.decode(text.trim());
                decoded.map(Some).map_err(|error| self.unsupported(&format!("invalid base64: {error}")))
            }
            (None, Some(path)) => bounded(&self.beside(path)).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn beside(&self, path: &Path) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }

    fn missing(&self, what: &'static str, name: &str) -> KubeconfigError {
        KubeconfigError::Missing { path: self.path.to_owned(), what, name: name.to_owned() }
    }

    fn unsupported(&self, why: &str) -> KubeconfigError {
        KubeconfigError::Unsupported { path: self.path.to_owned(), why: why.to_owned() }
    }
}

fn bounded(path: &Path) -> Result<Vec<u8>, KubeconfigError> {
    let named = |source| KubeconfigError::Read { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(named)?.len() > LONGEST {
        return Err(named(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it has more than 1 MiB")));
    }
    std::fs::read(path).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "\
apiVersion: v1
kind: Config
current-context: here
contexts:
- {name: here, context: {cluster: c, user: u, namespace: bench}}
- {name: elsewhere, context: {cluster: c, user: plugin}}
- {name: broken, context: {cluster: none, user: u}}
- {name: open, context: {cluster: insecure, user: u}}
clusters:
- {name: c, cluster: {server: 'https://192.0.2.1:6443/', certificate-authority: ca.pem}}
- {name: insecure, cluster: {server: 'https://192.0.2.1', insecure-skip-tls-verify: true}}
users:
- {name: u, user: {client-certificate-data: Y2VydA==, client-key-data: a2V5, tokenFile: token}}
- {name: plugin, user: {exec: {command: some-plugin}}}
";

    fn read(context: Option<&str>) -> Result<Access, String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config"), CONFIG).unwrap();
        std::fs::write(dir.path().join("ca.pem"), "authority").unwrap();
        std::fs::write(dir.path().join("token"), "secret\n").unwrap();
        Access::read(&dir.path().join("config"), context).map_err(|error| error.to_string())
    }

    #[test]
    fn files_and_data_are_read_and_no_secret_is_shown() {
        let access = read(None).unwrap();
        assert_eq!((&*access.server, &*access.namespace), ("https://192.0.2.1:6443", "bench"));
        assert_eq!(access.authority.as_deref(), Some(&b"authority"[..]));
        assert_eq!(access.certificate, Some((b"cert".to_vec(), b"key".to_vec())));
        assert_eq!(access.token.as_deref(), Some("secret"));
        assert!(!format!("{access:?}").contains("secret"));
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        assert!(read(Some("nowhere")).unwrap_err().contains("no context 'nowhere'"));
        assert!(read(Some("broken")).unwrap_err().contains("no cluster 'none'"));
        assert!(read(Some("elsewhere")).unwrap_err().contains("kubectl create token"));
        assert!(read(Some("open")).unwrap_err().contains("insecure-skip-tls-verify"));
        assert!(Access::read(Path::new("/no/such"), None).unwrap_err().to_string().contains("/no/such"));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "clusters: 7").unwrap();
        assert!(matches!(Access::read(file.path(), None), Err(KubeconfigError::Shape { .. })));
    }
}
