//! Differences between the two runtimes that are meant, each with its reason.

/// What two runtimes answered, or came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What was compared, such as `answer of Pause`.
    pub what: String,
    /// Of runc.
    pub runc: String,
    /// Of the daemon.
    pub ours: String,
}

impl Difference {
    /// Returns whether both are of one kind: of two sequences that show it, the shorter is the better.
    pub fn is_like(&self, other: &Self) -> bool {
        self.what == other.what && (!self.what.starts_with("answer") || self == other)
    }
}

/// A difference that is meant.
pub struct Known {
    /// As in [`Difference`]; `*` at the end stands for anything.
    what: &'static str,
    runc: &'static str,
    ours: &'static str,
    /// Why it is meant.
    pub why: &'static str,
    /// Whether the two sides go different ways from there on, so that nothing later can be compared.
    pub ends: bool,
}

/// All of them.
pub const KNOWN: &[Known] = &[
    Known {
        what: "answer of Create",
        runc: "ok",
        ours: "FailedPrecondition",
        why: "an exec is added to a container that runs, not to one that is only created; CRI asks for no other",
        ends: true,
    },
    Known { what: "answer of *", runc: "Unknown", ours: "NotFound", why: WITH_A_CODE, ends: false },
    Known { what: "answer of *", runc: "Unknown", ours: "FailedPrecondition", why: WITH_A_CODE, ends: false },
    Known { what: "answer of *", runc: "Unknown", ours: "InvalidArgument", why: WITH_A_CODE, ends: false },
];

const WITH_A_CODE: &str =
    "runc's shim has no code for most errors; the daemon has, and containerd acts on it";

/// Events that the daemon does not publish, and why.
pub const UNPUBLISHED: &[(&str, &str)] = &[
    ("TaskExecAdded", "an exec is told of when it starts; CRI reads neither"),
    ("TaskPaused", "CRI does not read it, and the state of a task tells it"),
    ("TaskResumed", "as that"),
];

fn is_of(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => text == pattern,
    }
}

/// Returns the place in [`KNOWN`] of what explains a difference.
pub fn explains(difference: &Difference) -> Option<usize> {
    KNOWN.iter().position(|known| {
        is_of(known.what, &difference.what)
            && is_of(known.runc, &difference.runc)
            && is_of(known.ours, &difference.ours)
    })
}

/// What is not compared of a file that a container sees, by how the word begins, and why.
pub const UNSEEN: &[(&str, &str)] = &[(
    "links=",
    "an overlay counts the names that a file had in its layer, an image made of all layers those that are left",
)];

/// Why access(2) to what is mounted read-only is not compared.
pub const READ_ONLY: &str = "the host refuses the write; the guest's kernel does not know before";
