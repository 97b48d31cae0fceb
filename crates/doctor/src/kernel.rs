//! The guest kernel: an uncompressed ELF file with a PVH entry.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use memchr::memmem;
use object::{
    Endianness, elf,
    read::{
        ReadCache, ReadRef,
        elf::{FileHeader, ProgramHeader},
    },
};
use sandboxer_base::digest::hex;
use sha2::{Digest, Sha256};

use super::verdict::{Check, Fix, Subject};

/// Maximum size of a kernel, bytes.
const MAX_BYTES: u64 = 512 << 20;
/// Maximum size of a kernel's unpacked configuration, bytes; a distribution's has a third of a MiB.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Maximum number of characters of a release in messages.
const RELEASE: usize = 64;
/// Type of the note with the PVH entry, owner "Xen" (`XEN_ELFNOTE_PHYS32_ENTRY`, Linux'
/// `include/xen/interface/elfnote.h`).
const PVH_ENTRY: u32 = 18;

/// Options that pods need. A guest has no modules.
const NEEDED: [&str; 10] = [
    "BLK_DEV_INITRD",
    "DEVTMPFS",
    "EROFS_FS",
    "EXT4_FS",
    "OVERLAY_FS",
    "PVH",
    "SCSI_VIRTIO",
    "SECCOMP_FILTER",
    "VIRTIO_CONSOLE",
    "VIRTIO_MMIO",
];

const KERNEL: Subject = Subject { name: "guest kernel", why: "every pod's VM boots it" };

/// The properties of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// Path of the file.
    pub path: PathBuf,
    /// The reason why it cannot be read.
    pub unreadable: Option<String>,
    /// Whether reading did not end within [`PATIENCE`](super::PATIENCE).
    pub slow: bool,
    /// Size of the file, bytes.
    pub size: u64,
    /// Whether the file is an ELF file for x86-64.
    pub elf: bool,
    /// Whether the kernel has a PVH entry.
    pub pvh: bool,
    /// Properties that need the whole file; `None` if only headers were read.
    pub content: Option<Content>,
}

/// The properties that need all bytes of a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content {
    /// SHA-256 of the file, in lower-case hex.
    pub sha256: String,
    /// Release of the kernel, as in its banner, such as "6.1.0".
    pub release: Option<String>,
    /// The kernel's embedded configuration, if any (`IKCONFIG`).
    pub config: Option<String>,
}

impl Reading {
    /// Returns the reading of a file that could not be read in time.
    pub fn silent(path: &Path) -> Self {
        Self { path: path.to_owned(), slow: true, ..Self::default() }
    }
}

/// Reads only headers and notes of the file.
pub fn read_headers(path: &Path) -> Reading {
    let reading = Reading { path: path.to_owned(), ..Reading::default() };
    match open(path) {
        Err(error) => Reading { unreadable: Some(error.to_string()), ..reading },
        Ok((file, size)) => {
            let pvh = has_pvh_entry(&ReadCache::new(file));
            Reading { size, elf: pvh.is_some(), pvh: pvh == Some(true), ..reading }
        }
    }
}

/// Reads the whole file.
pub fn read(path: &Path) -> Reading {
    let reading = read_headers(path);
    if !reading.elf {
        return reading;
    }
    let bytes = open(path).and_then(|(file, size)| {
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
        file.take(MAX_BYTES).read_to_end(&mut bytes).map(|_| bytes)
    });
    match bytes {
        Err(error) => Reading { unreadable: Some(error.to_string()), ..reading },
        Ok(bytes) => {
            let content = Content {
                sha256: hex(&Sha256::digest(&bytes)),
                release: release(&bytes),
                config: config(&bytes),
            };
            Reading { content: Some(content), ..reading }
        }
    }
}

fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    if size > MAX_BYTES {
        return Err(io::Error::other(format!("it has {size} bytes: too large for a kernel")));
    }
    Ok((file, size))
}

/// Returns whether there is a PVH entry, or `None` if the file is no ELF file for x86-64.
fn has_pvh_entry<'data>(data: impl ReadRef<'data>) -> Option<bool> {
    let header = elf::FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != elf::EM_X86_64 {
        return None;
    }
    let segments = header.program_headers(endian, data).ok()?;
    let mut notes = segments.iter().filter_map(|segment| segment.notes(endian, data).ok().flatten());
    Some(notes.any(|mut notes| {
        std::iter::from_fn(|| notes.next().ok().flatten())
            .any(|note| note.name() == b"Xen" && note.n_type(endian) == PVH_ENTRY)
    }))
}

/// Returns the word after `Linux version`.
fn release(kernel: &[u8]) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    memmem::find_iter(kernel, BANNER).find_map(|at| {
        let word = kernel.get(at + BANNER.len()..)?.iter().take(RELEASE);
        let word: String =
            word.take_while(|byte| byte.is_ascii_graphic()).map(|&byte| char::from(byte)).collect();
        // The kernel also contains the banner as a format, with %s in this place.
        word.starts_with(|c: char| c.is_ascii_digit()).then_some(word)
    })
}

/// Returns the configuration between the marks that Linux' `scripts/extract-ikconfig` searches.
fn config(kernel: &[u8]) -> Option<String> {
    const BEGIN: &[u8] = b"IKCFG_ST";
    memmem::find_iter(kernel, BEGIN).find_map(|at| {
        let mut text = String::new();
        let packed = kernel.get(at + BEGIN.len()..)?;
        GzDecoder::new(packed).take(MAX_CONFIG_BYTES).read_to_string(&mut text).ok()?;
        text.contains("CONFIG_").then_some(text)
    })
}

/// Checks a kernel.
pub fn judge(reading: &Reading) -> Check {
    let path = &reading.path;
    let build = |what: &str| {
        Fix::words(format!("{what}, or set vm.kernel; `make guest-image` in the source tree builds one"))
    };
    if reading.slow {
        return KERNEL.warning(super::slow_file(path), super::ask_again());
    }
    if let Some(why) = &reading.unreadable {
        return KERNEL
            .failure(format!("cannot read {path:?}: {why}"), build("install the guest kernel there"));
    }
    if !reading.elf {
        let seen = format!("{path:?} is not an ELF file for x86-64");
        return KERNEL.failure(seen, build("use an uncompressed vmlinux, not a bzImage"));
    }
    if !reading.pvh {
        let seen = format!("{path:?} has no PVH entry");
        return KERNEL.failure(seen, build("use a kernel with CONFIG_PVH"));
    }
    let mib = reading.size as f64 / f64::from(1 << 20);
    let Some(content) = &reading.content else { return KERNEL.ok(format!("PVH, {mib:.1} MiB")) };
    let release = content.release.as_deref().unwrap_or("unknown release");
    let seen = format!("{release}, PVH, {mib:.1} MiB, sha-256 {}", content.sha256);
    let Some(config) = &content.config else {
        return KERNEL.ok(format!("{seen}, no embedded configuration"));
    };
    let missing = missing(config);
    if missing.is_empty() {
        return KERNEL.ok(format!("{seen}, has the options that pods need"));
    }
    let missing = missing.join(", ");
    KERNEL.failure(format!("{path:?} lacks {missing}"), build("use a kernel with these built in"))
}

/// Returns the needed options that are not built in.
fn missing(config: &str) -> Vec<String> {
    let set = |option: &str| {
        config.lines().any(|line| line.strip_prefix(option).is_some_and(|value| value == "=y"))
    };
    NEEDED.iter().map(|name| format!("CONFIG_{name}")).filter(|option| !set(option)).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use flate2::{Compression, write::GzEncoder};

    use super::*;
    use crate::Verdict;

    /// Returns a vmlinux with one note, of this owner and type.
    fn vmlinux(owner: &[u8; 4], kind: u32, rest: &[u8]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(16, 0);
        file.extend(2u16.to_le_bytes()); // executable
        file.extend(62u16.to_le_bytes()); // x86-64
        file.extend(1u32.to_le_bytes());
        file.extend(0u64.to_le_bytes()); // entry
        file.extend(64u64.to_le_bytes()); // program headers
        file.extend(0u64.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        for half in [64u16, 56, 1, 64, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        let mut note = Vec::new();
        for word in [4u32, 4, kind] {
            note.extend(word.to_le_bytes());
        }
        note.extend(owner);
        note.extend([0; 4]);
        file.extend(4u32.to_le_bytes()); // PT_NOTE
        file.extend(4u32.to_le_bytes());
        for long in [120u64, 0, 0, note.len() as u64, note.len() as u64, 4] {
            file.extend(long.to_le_bytes());
        }
        file.extend(note);
        file.extend(rest);
        file
    }

    fn ikconfig(text: &str) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), Compression::default());
        packed.write_all(text.as_bytes()).unwrap();
        [b"IKCFG_ST".as_slice(), &packed.finish().unwrap(), b"IKCFG_ED"].concat()
    }

    fn needed() -> String {
        NEEDED.iter().map(|name| format!("CONFIG_{name}=y\n")).collect()
    }

    #[test]
    fn files_are_known_for_what_they_are() {
        let banner = b"Linux version %s (me)\0Linux version 6.1.0-sandboxer (me@here)\0";
        let whole = |config: &str| [banner.as_slice(), &ikconfig(config)].concat();
        let without = needed().replace("CONFIG_EROFS_FS=y", "CONFIG_EROFS_FS=m");
        for (bytes, verdict, seen) in [
            (vmlinux(b"Xen\0", PVH_ENTRY, &whole(&needed())), Verdict::Ok, "6.1.0-sandboxer, PVH"),
            (vmlinux(b"Xen\0", PVH_ENTRY, &whole(&needed())), Verdict::Ok, "has the options"),
            (vmlinux(b"Xen\0", PVH_ENTRY, b""), Verdict::Ok, "unknown release"),
            (
                vmlinux(b"Xen\0", PVH_ENTRY, b"IKCFG_ST\x1f\x8bbroken"),
                Verdict::Ok,
                "no embedded configuration",
            ),
            (vmlinux(b"Xen\0", PVH_ENTRY, &whole(&without)), Verdict::Failure, "lacks CONFIG_EROFS_FS"),
            (vmlinux(b"Xen\0", 7, b""), Verdict::Failure, "no PVH entry"),
            (vmlinux(b"GNU\0", PVH_ENTRY, b""), Verdict::Failure, "no PVH entry"),
            (b"\x1f\x8b no kernel".to_vec(), Verdict::Failure, "not an ELF file"),
            (Vec::new(), Verdict::Failure, "not an ELF file"),
        ] {
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), bytes).unwrap();
            let check = judge(&read(file.path()));
            assert_eq!(check.verdict, verdict, "{check}");
            assert!(check.seen.contains(seen), "{seen}: {check}");
            // The daemon's quick check agrees except for the options, which it does not see.
            let quick = judge(&read_headers(file.path()));
            assert!(quick.verdict == verdict || seen.contains("CONFIG_"), "{quick}");
        }
    }

    #[test]
    fn a_kernel_on_a_slow_disk_is_slow_and_not_broken() {
        let check = judge(&Reading::silent("/boot/vmlinux".as_ref()));
        assert_eq!(check.verdict, Verdict::Warning);
        assert!(check.seen.starts_with("\"/boot/vmlinux\" is slow to read"), "{check}");
    }

    #[test]
    fn every_cut_of_a_kernel_is_judged() {
        let whole = vmlinux(b"Xen\0", PVH_ENTRY, b"");
        for length in 0..whole.len() {
            assert_ne!(has_pvh_entry(&whole[..length]), Some(true), "cut at {length}");
        }
    }

    #[test]
    fn a_kernel_that_is_not_there_is_named() {
        let check = judge(&read("/nonexistent/vmlinux".as_ref()));
        assert_eq!(check.verdict, Verdict::Failure);
        assert!(check.to_string().contains("\"/nonexistent/vmlinux\": No such file"), "{check}");
    }

    #[test]
    fn a_configuration_that_unpacks_without_end_is_cut() {
        let bomb = ikconfig(&"# CONFIG_X is not set\n".repeat(1 << 19));
        assert_eq!(config(&bomb).unwrap().len() as u64, MAX_CONFIG_BYTES);
    }
}
