//! Differences between the two runtimes that are meant, each with its reason.

/// What two runtimes answered, or came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What was compared, such as `answer of Pause`.
    pub what: String,
    pub runc: String,
    pub ours: String,
}

impl Difference {
    /// Returns whether both are of one kind: of two sequences that show it, the shorter is the better.
    pub fn is_like(&self, other: &Self) -> bool {
        self.what == other.what && (["events", "output"].contains(&self.what.as_str()) || self == other)
    }
}

/// A difference that is meant. Each is one pair of words: what is not in the list is a difference.
pub struct Known {
    /// As in [`Difference`].
    what: &'static str,
    /// As there; `*` at the end stands for whatever follows, and for no answer.
    runc: &'static str,
    /// As `runc`.
    ours: &'static str,
    /// Why it is meant.
    pub why: &'static str,
    /// Whether the two sides go different ways from there on, so that nothing later can be compared.
    pub ends: bool,
}

/// An answer for which runc's shim has no code: it has made a sentence of what is wrong.
const fn coded(what: &'static str, ours: &'static str, why: &'static str) -> Known {
    Known { what, runc: "Unknown", ours, why, ends: false }
}

/// All of them. containerd and its clients act on NotFound (it is gone) and on AlreadyExists; of the other codes a client
/// sees the sentence alone.
pub const KNOWN: &[Known] = &[
    coded("answer of Create", "NotFound", STOPPED),
    coded("answer of Create", "FailedPrecondition", PAUSED),
    coded("answer of Create", "InvalidArgument", PROGRAM),
    coded("answer of CreateTwice", "InvalidArgument", PROGRAM),
    coded("answer of CreateTwice", "FailedPrecondition", PROGRAM),
    coded("answer of Start", "NotFound", STOPPED),
    coded("answer of Start", "FailedPrecondition", STATE),
    coded("answer of Start", "InvalidArgument", PROGRAM),
    coded(
        "answer of Kill",
        "InvalidArgument",
        "no kernel has such a signal: runc's program says so, and its shim tells no code",
    ),
    coded(
        "answer of Delete",
        "FailedPrecondition",
        "a process that runs cannot be deleted: runc's shim has no code for it",
    ),
    coded("answer of Resize", "NotFound", STOPPED),
    coded("answer of Pause", "NotFound", STOPPED),
    coded("answer of Pause", "FailedPrecondition", STATE),
    coded("answer of Resume", "NotFound", STOPPED),
    coded("answer of Resume", "FailedPrecondition", STATE),
    coded("answer of Update", "NotFound", STOPPED),
    coded("answer of Update", "FailedPrecondition", LIMIT),
    coded("answer of Update", "InvalidArgument", LIMIT),
    coded("answer of Metrics", "NotFound", STOPPED),
    coded("answer of CriStart", "InvalidArgument", PROGRAM),
    coded("answer of CriStart", "FailedPrecondition", PROGRAM),
    coded("answer of CriExec", "InvalidArgument", PROGRAM),
    coded("answer of CriExec", "FailedPrecondition", PROGRAM),
    Known {
        what: "answer of Kill",
        runc: "FailedPrecondition",
        ours: "InvalidArgument",
        why: "of a signal that does not exist for an exec that is not started, runc reports the second, the daemon the first",
        ends: false,
    },
    Known {
        what: "state of a container after RestartContainerd",
        runc: "NotFound*",
        ours: "stopped*",
        why: "a containerd that starts takes a task without processes for one that was never made, and forgets its exit: of \
              an ended container runc's shim returns no process, the daemon the first until it is deleted",
        ends: true,
    },
    Known {
        what: "state of an exec after Start",
        runc: "created*",
        ours: "stopped 128, Wait 128",
        why: UNSTARTED,
        ends: true,
    },
    Known {
        what: "state of an exec after Start",
        runc: "paused, Wait 0",
        ours: "paused, Wait 128",
        why: UNSTARTED,
        ends: true,
    },
    Known {
        what: "what is left",
        runc: "*",
        ours: "",
        why: "runc leaves the control group of a container whose creation was given up, containerd a bundle now and then",
        ends: false,
    },
];

const UNSTARTED: &str = "an exec that could not be started: for runc's shim it is still to be started, or has ended well, for the \
                         daemon it has failed";
const STOPPED: &str =
    "the process has ended: the daemon says that it is gone, runc's shim `cannot … a stopped process`";
const PAUSED: &str = "the container is paused: runc's shim says `cannot exec in a paused state` and no code";
const STATE: &str =
    "the process is in another state than the request needs: runc's shim has only a sentence for it";
const PROGRAM: &str = "the program is no file of the image: runc says so, and its shim has no code";
const LIMIT: &str =
    "the kernel takes no such limit: runc quotes the kernel, the daemon says whose fault it is";

/// Returns what explains a difference.
pub fn explains(difference: &Difference) -> Option<&'static Known> {
    KNOWN.iter().find(|known| {
        let is = |side: &str, known: &str| match known.strip_suffix('*') {
            Some(start) => side.starts_with(start),
            None => side == known,
        };
        known.what == difference.what && is(&difference.runc, known.runc) && is(&difference.ours, known.ours)
    })
}

/// Why link counts are not compared of an image with hard links below another layer.
pub const LINKS: &str = "an overlay counts the names that a file has in its own layer, an image made of all layers those \
                         that the layers above have left";

/// Why runc lists names of which there is nothing.
pub const GHOSTS: &str = "an overlay lists a whiteout in a directory that no lower layer has, though nothing of that name can be opened";

/// Why times of directories are not compared in images with volumes.
pub const COPIED: &str =
    "containerd leaves a directory that it copied into a volume the time of the copy, the daemon the image's";

/// Why runc may hide the pod's own files.
pub const BENEATH: &str = "containerd mounts an image's volume after the pod's own files, and a link of the image may lead it \
                           to their directory";

/// Why users' attributes of directories are not compared in read-only containers.
pub const IN_MEMORY: &str = "what is made for the mounts of a read-only container is in the guest's memory, where Linux 6.1 has no \
                             attributes of users";
