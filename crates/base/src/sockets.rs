//! File names of the daemon's sockets in its run directory.

/// The socket of containerd's sandbox controller, gRPC.
pub const CONTROLLER: &str = "controller.sock";
/// The socket of containerd's task service, ttrpc.
pub const TASK: &str = "task.sock";
/// The socket of the admin service, gRPC.
pub const ADMIN: &str = "admin.sock";
