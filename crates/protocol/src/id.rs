//! Identifiers that arrive from outside and become parts of paths.

use std::{borrow::Borrow, fmt, str::FromStr, sync::Arc};

use serde::{Deserialize, Serialize};

/// The longest identifier accepted, bytes. containerd's own limit is 76.
pub const MAX_LEN: usize = 128;

/// Why a string is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// The string is empty.
    #[error("identifier is empty")]
    Empty,
    /// The string is longer than [`MAX_LEN`].
    #[error("identifier has {0} bytes, at most {MAX_LEN} are accepted")]
    TooLong(usize),
    /// A character of the string could leave a directory or confuse a log.
    #[error(
        "identifier {0:?} has a character other than letters, digits, '-', '_' and '.', or starts with one of the last three"
    )]
    Character(String),
}

/// An identifier that is safe as one component of a path: letters and digits first,
/// then also `-`, `_` and `.`; at most [`MAX_LEN`] bytes. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Id(Arc<str>);

/// The identifier of a pod's sandbox, chosen by containerd.
pub type SandboxId = Id;
/// The identifier of a container, chosen by containerd.
pub type ContainerId = Id;
/// The identifier of an additional process in a container, chosen by containerd.
pub type ExecId = Id;

impl Id {
    /// Returns the identifier as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Id {
    type Err = InvalidId;

    fn from_str(text: &str) -> Result<Self, InvalidId> {
        if text.is_empty() {
            return Err(InvalidId::Empty);
        }
        if text.len() > MAX_LEN {
            return Err(InvalidId::TooLong(text.len()));
        }
        let first_is_plain = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        let rest_is_safe = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if first_is_plain && rest_is_safe {
            Ok(Self(text.into()))
        } else {
            Err(InvalidId::Character(text.to_owned()))
        }
    }
}

impl TryFrom<String> for Id {
    type Error = InvalidId;

    fn try_from(text: String) -> Result<Self, InvalidId> {
        text.parse()
    }
}

impl From<Id> for String {
    fn from(id: Id) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl Borrow<str> for Id {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<std::path::Path> for Id {
    fn as_ref(&self) -> &std::path::Path {
        self.as_str().as_ref()
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_accepted_id_is_one_plain_path_component(text in ".{0,140}") {
            if let Ok(id) = text.parse::<Id>() {
                let path = std::path::Path::new(id.as_str());
                prop_assert_eq!(path.components().count(), 1);
                prop_assert!(path.is_relative() && path.file_name().is_some());
                prop_assert!(id.as_str().len() <= MAX_LEN);
            }
        }
    }

    #[test]
    fn ids_that_leave_their_directory_are_refused() {
        for bad in ["", "..", ".", "../x", "a/b", "a\0b", "-rf", ".hidden", "a b"] {
            assert!(bad.parse::<Id>().is_err(), "{bad:?} was accepted");
        }
        assert!("3f2a-web_0.1".parse::<Id>().is_ok());
    }
}
