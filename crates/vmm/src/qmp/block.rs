//! Disks in QMP: the arguments of `blockdev-add` and `blockdev-reopen`.

use serde::Serialize;

/// A command of QMP's `blockdev-add`: a raw image in a file or on a block device.
///
/// QEMU reads its control socket byte by byte, each in a turn of its main loop: what is QEMU's default is left out, and so is the
/// node of driver "raw" that could stand on top of this one.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockNode {
    /// "file" or "host_device".
    pub driver: &'static str,
    /// Its name.
    pub node_name: String,
    /// Its path.
    pub filename: String,
    /// It cannot be written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// "unmap" if freed blocks are returned to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<&'static str>,
}

/// A disk as a device sees it, on top of the node that has its content.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TopNode {
    /// Always "raw".
    pub driver: &'static str,
    /// Its name.
    pub node_name: &'static str,
    /// The node with the content.
    pub file: String,
    /// As in [`BlockNode`].
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// As in [`BlockNode`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discard: Option<&'static str>,
}

/// A command of QMP's `blockdev-add`: a disk that is served by NBD.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct NbdNode {
    /// Always "nbd".
    pub driver: &'static str,
    /// Its name.
    pub node_name: String,
    /// Its server.
    pub server: UnixServer,
}

/// The server of an NBD disk.
#[derive(Debug, Clone, Serialize)]
pub struct UnixServer {
    /// Always "unix".
    pub r#type: &'static str,
    /// Path of its socket.
    pub path: String,
}
