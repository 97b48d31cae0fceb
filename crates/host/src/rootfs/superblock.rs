//! Checks an image's superblock on the host, so that a truncated or foreign image is an error that names the image, not
//! a mount error in the guest.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::unix::fs::FileExt,
    path::Path,
};

use sandboxer_base::digest::hex;

use super::{BuildError, FsType};

/// The offset of the superblock in both formats, bytes.
const OFFSET: u64 = 1024;
/// The number of bytes to check.
const LEN: usize = 1024;

/// Fields of EROFS' superblock (`fs/erofs/erofs_fs.h`).
mod erofs {
    pub const MAGIC: u32 = 0xe0f5_e1e2;
    pub const BLOCK_BITS: usize = 12;
    pub const BLOCKS_HIGH: usize = 14;
    pub const BLOCKS: usize = 36;
    pub const INCOMPAT: usize = 80;
    pub const EXTRA_DEVICES: usize = 86;
    pub const INCOMPAT_48BIT: u32 = 0x80;
}

/// Fields of ext4's superblock (`Documentation/filesystems/ext4/super.rst`).
mod ext4 {
    pub const MAGIC: u16 = 0xef53;
    pub const BLOCKS_LOW: usize = 0x4;
    pub const LOG_BLOCK_SIZE: usize = 0x18;
    pub const MAGIC_AT: usize = 0x38;
    pub const INCOMPAT: usize = 0x60;
    pub const UUID: u64 = 0x68;
    pub const BLOCKS_HIGH: usize = 0x150;
    pub const INCOMPAT_64BIT: u32 = 0x80;
}

/// Checks that a file or device, open for reading, contains a complete file system of type `fstype`; `path` names it.
pub fn check(mut file: &File, path: &Path, fstype: FsType) -> Result<(), BuildError> {
    let host = |source| BuildError::Path { action: "read image", path: path.to_owned(), source };
    let image = |reason| BuildError::Image { path: path.to_owned(), fstype, reason };

    // A block device's metadata has no length, but its end can be sought.
    let have = file.seek(SeekFrom::End(0)).map_err(host)?;
    let mut block = [0; LEN];
    if have < OFFSET + LEN as u64 {
        return Err(image(format!("it has {have} bytes")));
    }
    file.read_exact_at(&mut block, OFFSET).map_err(host)?;
    let need = match fstype {
        FsType::Erofs => erofs_bytes(&block),
        FsType::Ext4 => ext4_bytes(&block),
    }
    .map_err(|reason| image(reason.into()))?;
    if have < need {
        return Err(image(format!("it is truncated: {have} of {need} bytes are there")));
    }
    Ok(())
}

/// Returns the UUID of an ext4 file system, hex.
pub fn ext4_uuid(file: &File) -> io::Result<String> {
    let mut uuid = [0; 16];
    file.read_exact_at(&mut uuid, OFFSET + ext4::UUID)?;
    Ok(hex(&uuid))
}

/// Returns the size of an EROFS file system, bytes.
fn erofs_bytes(block: &[u8; LEN]) -> Result<u64, &'static str> {
    use erofs::*;
    if le32(block, 0) != MAGIC {
        return Err("its superblock has no EROFS magic number");
    }
    if le16(block, EXTRA_DEVICES) != 0 {
        return Err("its data is in other files (turn off merged metadata in the erofs snapshotter)");
    }
    let bits = block[BLOCK_BITS];
    if !(9..=16).contains(&bits) {
        return Err("its superblock has an invalid block size");
    }
    let high = match le32(block, INCOMPAT) & INCOMPAT_48BIT {
        0 => 0,
        _ => le16(block, BLOCKS_HIGH),
    };
    Ok((u64::from(high) << 32 | u64::from(le32(block, BLOCKS))) << bits)
}

/// Returns the size of an ext4 file system, bytes.
fn ext4_bytes(block: &[u8; LEN]) -> Result<u64, &'static str> {
    use ext4::*;
    if le16(block, MAGIC_AT) != MAGIC {
        return Err("its superblock has no ext4 magic number");
    }
    let log = le32(block, LOG_BLOCK_SIZE);
    if log > 6 {
        return Err("its superblock has an invalid block size");
    }
    let high = match le32(block, INCOMPAT) & INCOMPAT_64BIT {
        0 => 0,
        _ => le32(block, BLOCKS_HIGH),
    };
    (u64::from(high) << 32 | u64::from(le32(block, BLOCKS_LOW)))
        .checked_mul(1024 << log)
        .ok_or("its superblock has an invalid size")
}

fn le16(block: &[u8; LEN], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn le32(block: &[u8; LEN], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
