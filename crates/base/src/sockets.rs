//! File names of the daemon's sockets in its run directory.

/// containerd's sandbox controller, gRPC.
pub const CONTROLLER: &str = "controller.sock";
/// containerd's task service, ttrpc.
pub const TASK: &str = "task.sock";
/// The admin service, gRPC.
pub const ADMIN: &str = "admin.sock";
