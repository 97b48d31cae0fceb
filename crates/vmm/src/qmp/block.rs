//! Disks in QMP: the arguments of `blockdev-add`.

use serde::Serialize;

/// A command of QMP's `blockdev-add`: a raw image in a file or on a block device.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockNode {
    /// Always "raw".
    pub driver: &'static str,
    /// Its name.
    pub node_name: String,
    /// It cannot be written.
    pub read_only: bool,
    /// "unmap" if freed blocks are returned to the host.
    pub discard: &'static str,
    /// Where the bytes are.
    pub file: BlockFile,
}

/// Where a [`BlockNode`]'s bytes are.
#[derive(Debug, Clone, Serialize)]
pub struct BlockFile {
    /// "file" or "host_device".
    pub driver: &'static str,
    /// Its path.
    pub filename: String,
    /// As in [`BlockNode`]: how the host's file is opened.
    #[serde(rename = "read-only")]
    pub read_only: bool,
    /// As in [`BlockNode`].
    pub discard: &'static str,
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
