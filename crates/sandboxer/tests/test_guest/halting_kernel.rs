//! A kernel that halts: the minimal ELF that a VMM can boot.

/// Returns an ELF of one page at 1 MiB, with the PVH note that names its entry.
pub const ELF: [u8; 0x200] = {
    let mut elf = [0; 0x200];
    // Identification: 64 bits, little-endian; type executable, machine x86-64.
    put(&mut elf, 0x00, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(&mut elf, 0x10, &[2, 0, 62, 0, 1, 0, 0, 0]);
    // Entry, and the offset of the two program headers.
    put(&mut elf, 0x18, &ENTRY.to_le_bytes());
    put(&mut elf, 0x20, &0x40_u64.to_le_bytes());
    put(&mut elf, 0x34, &[64, 0, 56, 0, 2, 0]);
    // Segment to load: all of it, at its entry.
    segment(&mut elf, 0x40, 1, 0x100, 0x10);
    // The note: sizes of name and content, type `XEN_ELFNOTE_PHYS32_ENTRY`.
    segment(&mut elf, 0x78, 4, 0x110, 0x14);
    put(&mut elf, 0x110, &[4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0, b'X', b'e', b'n', 0]);
    put(&mut elf, 0x120, &(ENTRY as u32).to_le_bytes());
    // cli; again: hlt; jmp again
    put(&mut elf, 0x100, &[0xfa, 0xf4, 0xeb, 0xfd]);
    elf
};

const ENTRY: u64 = 0x10_0000;

/// Returns a program header at `at`: `size` bytes at `offset` of the file.
const fn segment(elf: &mut [u8], at: usize, kind: u8, offset: u64, size: u64) {
    put(elf, at, &[kind, 0, 0, 0, 5, 0, 0, 0]);
    put(elf, at + 0x08, &offset.to_le_bytes());
    put(elf, at + 0x10, &ENTRY.to_le_bytes());
    put(elf, at + 0x18, &ENTRY.to_le_bytes());
    put(elf, at + 0x20, &size.to_le_bytes());
    put(elf, at + 0x28, &size.to_le_bytes());
    put(elf, at + 0x30, &4_u64.to_le_bytes());
}

const fn put(elf: &mut [u8], at: usize, bytes: &[u8]) {
    let mut index = 0;
    while index < bytes.len() {
        elf[at + index] = bytes[index];
        index += 1;
    }
}
