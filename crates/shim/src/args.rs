//! The command line as containerd writes it: Go flags, one dash or two, then an action.

use std::path::PathBuf;

/// The program's name, which containerd derives from the runtime type.
pub const NAME: &str = "containerd-shim-sandboxer-v1";

/// The requested action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Print the runtime's description.
    Info,
    /// Clean up after a container.
    Delete,
    /// Serve a container: for containerd without a sandbox controller.
    Start,
    /// Print the OCI features, as JSON: for CRI-O.
    Features,
    /// Print the program's version.
    Version,
}

/// The command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Args {
    /// The requested action.
    pub action: Action,
    /// The container's containerd namespace.
    pub namespace: String,
    /// The container's ID; empty if the action needs none.
    pub id: String,
    /// The address of containerd's gRPC services; may be empty.
    pub address: String,
    /// The container's bundle; `None`: the working directory.
    pub bundle: Option<PathBuf>,
}

/// Why a command line is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// A flag belongs to a newer containerd, or is misspelt.
    #[error("unknown flag -{0}; containerd runs this program, for pods see sandboxer-cli")]
    UnknownFlag(String),
    /// A flag has no value.
    #[error("flag -{0} needs a value")]
    NoValue(String),
    /// The action is unknown.
    #[error("unknown action {0:?}: expected start or delete")]
    UnknownAction(String),
    /// The action is missing.
    #[error(
        "no action: expected -info, -v, start or delete; containerd runs this program, for pods see sandboxer-cli"
    )]
    NoAction,
    /// An action has no container.
    #[error("{0} needs -id")]
    NoId(&'static str),
}

impl Args {
    /// Parses the arguments after the program's name. As in Go, flags end at the first other argument, or
    /// after `--`.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, ArgsError> {
        let mut args = args.into_iter();
        let (mut namespace, mut id, mut address, mut bundle) =
            (String::new(), String::new(), String::new(), None);
        let mut requested = None;
        let mut word = None;
        while let Some(arg) = args.next() {
            if arg == "--" {
                word = args.next();
                break;
            }
            let Some(flag) =
                arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')).filter(|f| !f.is_empty())
            else {
                word = Some(arg);
                break;
            };
            let (name, mut given) = match flag.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (flag.to_owned(), None),
            };
            let mut value = || given.take().or_else(|| args.next()).ok_or(ArgsError::NoValue(name.clone()));
            match name.as_str() {
                "info" => requested = Some(Action::Info),
                "v" | "version" => requested = Some(Action::Version),
                // This is containerd's log level; this program has no log.
                "debug" => {}
                "namespace" => namespace = value()?,
                "id" => id = value()?,
                "bundle" => bundle = Some(PathBuf::from(value()?)).filter(|path| path.as_os_str() != ""),
                "address" => address = value()?,
                // These flags are for a shim that publishes events itself.
                "publish-binary" | "socket" => drop(value()?),
                _ => return Err(ArgsError::UnknownFlag(name)),
            }
        }
        let action = match (requested, word.as_deref()) {
            (Some(requested), _) => requested,
            (None, Some("delete")) if id.is_empty() => return Err(ArgsError::NoId("delete")),
            (None, Some("delete")) => Action::Delete,
            (None, Some("start")) if id.is_empty() => return Err(ArgsError::NoId("start")),
            (None, Some("start")) => Action::Start,
            (None, Some("features")) => Action::Features,
            (None, Some(other)) => return Err(ArgsError::UnknownAction(other.to_owned())),
            (None, None) => return Err(ArgsError::NoAction),
        };
        Ok(Self { action, namespace, id, address, bundle })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn containerds_own_command_line() {
        let line = "-namespace k8s.io -address /run/containerd/containerd.sock -publish-binary /usr/bin/containerd \
                    -id c1 -bundle /run/b/c1 -debug delete";
        let expected = Args {
            action: Action::Delete,
            namespace: "k8s.io".into(),
            id: "c1".into(),
            address: "/run/containerd/containerd.sock".into(),
            bundle: Some("/run/b/c1".into()),
        };
        assert_eq!(parse(line), Ok(expected));
    }

    #[test]
    fn flags_as_go_takes_them() {
        let args = parse("--namespace=a=b -id=c1 -- delete").unwrap();
        assert_eq!((args.namespace.as_str(), args.id.as_str(), args.action), ("a=b", "c1", Action::Delete));
        assert_eq!(parse("-info").unwrap().action, Action::Info);
        assert_eq!(parse("features").unwrap().action, Action::Features);
        assert_eq!(parse("-id delete delete").unwrap().id, "delete");
        // Arguments after the action belong to the action.
        assert_eq!(parse("-id c1 start -whatever").unwrap().action, Action::Start);
    }

    #[test]
    fn what_means_nothing_is_named() {
        assert_eq!(parse("-id"), Err(ArgsError::NoValue("id".into())));
        assert_eq!(parse("-colour red delete"), Err(ArgsError::UnknownFlag("colour".into())));
        assert_eq!(parse("-id c1 destroy"), Err(ArgsError::UnknownAction("destroy".into())));
        assert_eq!(parse("-namespace k8s.io delete"), Err(ArgsError::NoId("delete")));
        assert_eq!(parse("-namespace k8s.io start"), Err(ArgsError::NoId("start")));
        assert_eq!(parse(""), Err(ArgsError::NoAction));
    }
}
