//! A request that shows whether containerd's requests about pods reach this daemon.

/// The ID of a pod that never exists. A verbose `Status` of it identifies the daemon.
pub const CHECKED_POD: &str = "sandboxer-check";

/// The key of this daemon's version in the information of that response.
pub const ANSWERED_BY: &str = "io.sandboxer.version";
