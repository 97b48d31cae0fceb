//! Why a request failed: typed inside the agent, across its worker processes and towards the host.

use std::error::Error;

use sandboxer_base::chain;
use serde::{Deserialize, Serialize};

/// Longest message a failure carries, bytes. Texts of a container's making end up in here.
const MAX_MESSAGE: usize = 8 << 10;

/// What kind of failure, in the terms of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// No such container, process or disk.
    NotFound,
    /// The identifier is taken by something else.
    AlreadyExists,
    /// The request can never succeed.
    InvalidArgument,
    /// The request comes at the wrong time.
    FailedPrecondition,
    /// Something that had to appear did not.
    DeadlineExceeded,
    /// The kernel or the runtime declined.
    Internal,
}

/// A failure with its whole chain of causes as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What kind.
    pub kind: Kind,
    /// Lower-case, cause after cause, separated by `: `.
    pub message: String,
}

impl Failure {
    /// Returns a failure with these words; over-long ones are cut.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MAX_MESSAGE {
            let end = (0..=MAX_MESSAGE).rev().find(|&at| message.is_char_boundary(at)).unwrap_or(0);
            message.truncate(end);
            message.push('…');
        }
        Self { kind, message }
    }

    /// No such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }

    /// Returns a request that can never succeed.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, message)
    }

    /// Returns a request at the wrong time.
    pub fn precondition(message: impl Into<String>) -> Self {
        Self::new(Kind::FailedPrecondition, message)
    }

    /// `attempt` failed because of `error`.
    pub fn caused(kind: Kind, attempt: impl Into<String>, error: &dyn Error) -> Self {
        Self::new(kind, format!("{}: {}", attempt.into(), chain(error)))
    }
}

/// For `map_err`: `attempt` failed for a reason of the kernel's or the runtime's.
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
