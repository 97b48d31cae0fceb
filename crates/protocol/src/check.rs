//! A request that shows whether containerd's requests about pods reach this daemon.

/// Id of a pod that never exists. A verbose `Status` of it identifies the daemon.
pub const CHECKED_POD: &str = "sandboxer-check";

/// Key of this daemon's version in that answer's information.
pub const ANSWERED_BY: &str = "io.sandboxer.version";
