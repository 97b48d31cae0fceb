//! The rehearsal's program, as an ELF file: it makes the system calls with which most programs begin, prints one line
//! and exits.
//!
//! ```text
//!  file      0 ┌ ELF header, two program headers, code, table of calls ┐ segment 1, read and execute
//!         64K ─┤ padding: a page cache read-ahead                      │
//!              ├ one word ┐ segment 2, read and write                  ┘
//!  memory      └──────────┘ and three pages that are not in the file
//! ```

use std::iter;

/// Load address that linkers use by default.
const BASE: u64 = 0x40_0000;
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

/// Offset of the second segment, in the file and from `BASE`.
const DATA: u64 = 64 << 10;
const DATA_IN_FILE: u64 = 8;
const DATA_IN_MEMORY: u64 = 3 << 12;
/// Address of memory that calls may fill.
const SCRATCH: u64 = BASE + DATA + 0x1000;

/// Machine code for Linux on x86-64 that makes the calls of the table after it, in order. The last call does not
/// return.
const CODE: [u8; 38] = [
    0x48, 0x8d, 0x1d, 31, 0, 0, 0, // lea rbx, [rip + 31]
    0x48, 0x8b, 0x03, // mov rax, [rbx]
    0x48, 0x8b, 0x7b, 8, // mov rdi, [rbx + 8]
    0x48, 0x8b, 0x73, 16, // mov rsi, [rbx + 16]
    0x48, 0x8b, 0x53, 24, // mov rdx, [rbx + 24]
    0x4c, 0x8b, 0x53, 32, // mov r10, [rbx + 32]
    0x4c, 0x8b, 0x43, 40, // mov r8, [rbx + 40]
    0x0f, 0x05, // syscall
    0x48, 0x83, 0xc3, 48, // add rbx, 48
    0xeb, 0xe1, // jmp to the first mov
];

/// Numbers of x86-64's calls that arm64 does not have. The code above is for x86-64, too: guests on arm64 need another
/// one.
const ARCH_PRCTL: u64 = 158;
const READLINK: u64 = 89;
const FORK: u64 = 57;

/// A call's number and its first five arguments; the sixth is 0.
type Call = [u64; 6];

/// Returns the calls: those that C libraries and shells make at start-up, then writing the line and exiting. Their
/// results are ignored: it only matters that the kernel has executed them.
fn calls(words: u64) -> Vec<Call> {
    let (null, root, own, line) = (words, words + 16, words + 32, words + 48);
    let number = |number: i64| number.cast_unsigned();
    let flags = |flags: libc::c_int| i64::from(flags).cast_unsigned();
    let anonymous = flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    vec![
        [number(libc::SYS_brk), 0, 0, 0, 0, 0],
        [number(libc::SYS_mmap), 0, 2 << 12, flags(libc::PROT_READ | libc::PROT_WRITE), anonymous, u64::MAX],
        [number(libc::SYS_mprotect), BASE + DATA, 1 << 12, flags(libc::PROT_READ), 0, 0],
        // ARCH_SET_FS of arch_prctl(2), which libc does not name.
        [ARCH_PRCTL, 0x1002, SCRATCH, 0, 0, 0],
        [number(libc::SYS_set_tid_address), SCRATCH, 0, 0, 0, 0],
        [number(libc::SYS_prlimit64), 0, u64::from(libc::RLIMIT_STACK), 0, SCRATCH, 0],
        [number(libc::SYS_getrandom), SCRATCH, 16, u64::from(libc::GRND_NONBLOCK), 0, 0],
        [number(libc::SYS_uname), SCRATCH, 0, 0, 0, 0],
        [number(libc::SYS_getcwd), SCRATCH, 4096, 0, 0, 0],
        [READLINK, own, SCRATCH, 4096, 0, 0],
        [number(libc::SYS_rt_sigaction), flags(libc::SIGINT), 0, SCRATCH, 8, 0],
        [number(libc::SYS_rt_sigprocmask), 0, 0, SCRATCH, 8, 0],
        [number(libc::SYS_ioctl), 1, libc::TCGETS, SCRATCH, 0, 0],
        [number(libc::SYS_newfstatat), flags(libc::AT_FDCWD), root, SCRATCH, 0, 0],
        [number(libc::SYS_getuid), 0, 0, 0, 0, 0],
        // Most likely descriptor 3, which is closed.
        [number(libc::SYS_openat), flags(libc::AT_FDCWD), null, flags(libc::O_RDWR), 0, 0],
        [number(libc::SYS_read), 3, SCRATCH, 4096, 0, 0],
        [number(libc::SYS_close), 3, 0, 0, 0, 0],
        [number(libc::SYS_write), 1, line, 1, 0, 0],
        // From here on there are two processes.
        [FORK, 0, 0, 0, 0, 0],
        [number(libc::SYS_wait4), u64::MAX, SCRATCH, 0, 0, 0],
        [number(libc::SYS_exit_group), 0, 0, 0, 0, 0],
    ]
}

/// Returns the texts of 16 bytes that calls point to: /dev/null, /, /proc/self/exe, a line.
fn texts() -> Vec<u8> {
    let text = |text: &str| text.bytes().chain(iter::repeat(0)).take(16).collect::<Vec<u8>>();
    ["/dev/null", "/", "/proc/self/exe", "\n"].map(text).concat()
}

/// Returns the content of the ELF file.
pub fn elf() -> Vec<u8> {
    let headers = ELF_HEADER + 2 * PROGRAM_HEADER;
    let entry = BASE + headers as u64;
    let table = calls(0).len() * size_of::<Call>();
    let texts_at = entry + (CODE.len() + table) as u64;
    let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();

    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // Executable, x86-64, version 1.
    elf.extend([2_u16.to_le_bytes(), 62_u16.to_le_bytes()].concat());
    elf.extend(1_u32.to_le_bytes());
    elf.extend(words(&[entry, ELF_HEADER as u64, 0]));
    elf.extend(0_u32.to_le_bytes());
    // Two program headers, no section.
    elf.extend([ELF_HEADER as u16, PROGRAM_HEADER as u16, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
    // Segments to load: read (4) and execute (1), read and write (2).
    let first = (headers + CODE.len() + table + texts().len()) as u64;
    elf.extend([1_u32.to_le_bytes(), 5_u32.to_le_bytes()].concat());
    elf.extend(words(&[0, BASE, BASE, first, first, 0x1000]));
    elf.extend([1_u32.to_le_bytes(), 6_u32.to_le_bytes()].concat());
    elf.extend(words(&[DATA, BASE + DATA, BASE + DATA, DATA_IN_FILE, DATA_IN_MEMORY, 0x1000]));
    elf.extend(CODE);
    elf.extend(words(calls(texts_at).as_flattened()));
    elf.extend(texts());
    elf.resize((DATA + DATA_IN_FILE) as usize, 0);
    elf
}
