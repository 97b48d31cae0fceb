//! An initramfs whose only program, a minimal `/init`, first connects to the host to report that it runs.

/// Size of the program, bytes.
const SIZE: usize = CODE + PROGRAM.len();
/// Address at which the program is loaded.
const BASE: u64 = 0x40_0000;
/// Offset of the program's code, in the file and from [`BASE`].
const CODE: usize = 0x78;

/// Machine code for x86-64, followed by the address to which it connects: port 1024 of the host.
#[rustfmt::skip]
const PROGRAM: [u8; 0x41] = [
    // socket(AF_VSOCK, SOCK_STREAM, 0)
    0xb8, 41, 0, 0, 0, 0xbf, 40, 0, 0, 0, 0xbe, 1, 0, 0, 0, 0x31, 0xd2, 0x0f, 0x05,
    // connect(socket, address, 16)
    0x89, 0xc7, 0x48, 0x8d, 0x35, 0x15, 0, 0, 0, 0xba, 16, 0, 0, 0, 0xb8, 42, 0, 0, 0, 0x0f, 0x05,
    // again: pause(); jmp again
    0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7,
    // struct sockaddr_vm: family, reserved, port, cid, zero.
    40, 0, 0, 0, 0, 4, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
];

/// Returns the program: an ELF file with one segment.
fn program() -> [u8; SIZE] {
    let mut elf = [0; SIZE];
    let mut put = |at: usize, bytes: &[u8]| elf[at..at + bytes.len()].copy_from_slice(bytes);
    // Identification: 64 bits, little-endian; type executable, machine x86-64.
    put(0x00, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(0x10, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(0x18, &(BASE + CODE as u64).to_le_bytes());
    // One program header, directly after this one.
    put(0x20, &0x40_u64.to_le_bytes());
    put(0x34, &[64, 0, 56, 0, 1, 0]);
    // The segment loads the whole file, readable and executable.
    put(0x40, &[1, 0, 0, 0, 5, 0, 0, 0]);
    put(0x50, &BASE.to_le_bytes());
    put(0x58, &BASE.to_le_bytes());
    put(0x60, &(SIZE as u64).to_le_bytes());
    put(0x68, &(SIZE as u64).to_le_bytes());
    put(0x70, &0x1000_u64.to_le_bytes());
    put(CODE, &PROGRAM);
    elf
}

/// Returns the initramfs, in cpio's format `newc`.
pub fn initramfs() -> Vec<u8> {
    let mut archive = Vec::new();
    entry(&mut archive, "init", 0o100_755, &program());
    entry(&mut archive, "TRAILER!!!", 0, &[]);
    archive
}

fn entry(archive: &mut Vec<u8>, name: &str, mode: usize, content: &[u8]) {
    let fields = [1, mode, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
    archive.extend(b"070701");
    archive.extend(fields.map(|field| format!("{field:08x}").into_bytes()).concat());
    archive.extend(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend(content);
    pad(archive);
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}
