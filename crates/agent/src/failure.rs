//! Errors of requests: typed inside the agent, between its worker processes and on the wire.

use std::error::Error;

use sandboxer_base::chain;
use serde::{Deserialize, Serialize};

/// Longest message of a failure, bytes. Containers can influence the text.
const MAX_MESSAGE: usize = 8 << 10;

/// The kind of a failure, as on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// No such container, process or disk.
    NotFound,
    /// The identifier is in use.
    AlreadyExists,
    /// The request can never succeed.
    InvalidArgument,
    /// The request is not possible in the current state.
    FailedPrecondition,
    /// A deadline expired.
    DeadlineExceeded,
    /// The kernel or the runtime returned an error.
    Internal,
}

/// A failure with its chain of causes as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The kind of the failure.
    pub kind: Kind,
    /// The message in lower case, cause after cause, separated by `: `.
    pub message: String,
}

impl Failure {
    /// Creates a failure with this message; a longer one is truncated.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MAX_MESSAGE {
            let end = (0..=MAX_MESSAGE).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
            message.truncate(end);
            message.push('…');
        }
        Self { kind, message }
    }

    /// Creates a [`Kind::NotFound`] failure.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }

    /// Creates a [`Kind::InvalidArgument`] failure.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, message)
    }

    /// Creates a [`Kind::FailedPrecondition`] failure.
    pub fn precondition(message: impl Into<String>) -> Self {
        Self::new(Kind::FailedPrecondition, message)
    }

    /// Creates a failure of `attempt` with `error` as its cause.
    pub fn caused(kind: Kind, attempt: impl Into<String>, error: &dyn Error) -> Self {
        Self::new(kind, format!("{}: {}", attempt.into(), chain(error)))
    }
}

/// Returns a closure for `map_err`, which says that `attempt` failed with an error of the kernel or the runtime.
pub fn internal<E: Error>(attempt: impl Into<String>) -> impl FnOnce(E) -> Failure {
    move |error| Failure::caused(Kind::Internal, attempt, &error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let failure = Failure::invalid("é".repeat(MAX_MESSAGE));
        assert!(failure.message.len() <= MAX_MESSAGE + '…'.len_utf8());
        assert!(failure.message.ends_with('…'));
    }
}
