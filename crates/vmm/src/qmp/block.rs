//! Disks in QMP: the arguments of `blockdev-add` and `blockdev-reopen`.

use serde::Serialize;

/// The arguments of `blockdev-add` for a raw image in a file or on a block device.
///
/// QEMU reads its control socket byte by byte, each in a turn of its main loop. So QEMU's defaults are left out, and
/// so is the "raw" node that could stand on top of this one.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockNode {
    /// Driver of the node: "file" or "host_device".
    pub driver: &'static str,
    /// Name of the node.
    pub node_name: String,
    /// Path of the file or device.
    pub filename: String,
    /// Whether the disk cannot be written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Handling of discards: "unmap" if freed blocks are returned to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<&'static str>,
}

/// A disk as a device sees it, on top of the node that has its content.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TopNode {
    /// Driver of the node, always "raw".
    pub driver: &'static str,
    /// Name of the node.
    pub node_name: &'static str,
    /// Name of the node with the content.
    pub file: String,
    /// Whether the disk cannot be written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Handling of discards, as in [`BlockNode`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<&'static str>,
}

/// The arguments of `blockdev-add` for a disk that is served by NBD.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct NbdNode {
    /// Driver of the node, always "nbd".
    pub driver: &'static str,
    /// Name of the node.
    pub node_name: String,
    /// Address of the server.
    pub server: UnixServer,
}

/// The address of an NBD server.
#[derive(Debug, Clone, Serialize)]
pub struct UnixServer {
    /// Type of the address, always "unix".
    pub r#type: &'static str,
    /// Path of the server's socket.
    pub path: String,
}
