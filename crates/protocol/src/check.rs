//! How whoever checks a node learns whether containerd's questions about pods come to this daemon.

/// The id of a pod that there never is. A verbose `Status` of it says who answers: so whoever checks a node learns whether
/// containerd's questions about pods come here.
pub const CHECKED_POD: &str = "sandboxer-check";

/// What that answer's information has this daemon's version under.
pub const ANSWERED_BY: &str = "io.sandboxer.version";
