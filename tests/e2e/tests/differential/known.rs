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
    Known { what: "answer of *", runc: "Unknown", ours: "NotFound", why: WITH_A_CODE, ends: false },
    Known { what: "answer of *", runc: "Unknown", ours: "FailedPrecondition", why: WITH_A_CODE, ends: false },
    Known { what: "answer of *", runc: "Unknown", ours: "InvalidArgument", why: WITH_A_CODE, ends: false },
    Known {
        what: "answer of Kill",
        runc: "FailedPrecondition",
        ours: "InvalidArgument",
        why: "of a signal that does not exist for an exec that is not started, runc reports the second, the daemon the first",
        ends: false,
    },
    Known {
        what: "what is left",
        runc: "a control group in *",
        ours: "",
        why: "runc leaves the control group of a container whose creation was given up",
        ends: false,
    },
];

const WITH_A_CODE: &str =
    "runc's shim has no code for most errors; the daemon has, and containerd acts on it";

fn is_of(pattern: &str, text: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => text == pattern,
    }
}

/// Returns what explains a difference.
pub fn explains(difference: &Difference) -> Option<&'static Known> {
    KNOWN.iter().find(|known| {
        is_of(known.what, &difference.what)
            && is_of(known.runc, &difference.runc)
            && is_of(known.ours, &difference.ours)
    })
}

/// Why link counts are not compared of an image with hard links below another layer.
pub const LINKS: &str = "an overlay counts the names that a file has in its own layer, an image made of all layers those \
                         that the layers above have left";

/// Why runc lists names of which there is nothing.
pub const GHOSTS: &str = "an overlay lists a whiteout in a directory that no lower layer has, though nothing of that name can be opened";

/// Why times of directories are not compared in an image's volumes.
pub const COPIED: &str =
    "containerd leaves a directory that it copied into a volume the time of the copy, the daemon the image's";
