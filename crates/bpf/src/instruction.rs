//! BPF instructions.

/// One instruction in the kernel's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// The operation: see [`code`].
    pub code: u8,
    /// The destination register in the lower half, the source in the upper.
    pub registers: u8,
    /// For a jump, the number of instructions to skip; for an access, the offset from the register, bytes.
    pub offset: i16,
    /// A constant.
    pub immediate: i32,
}

/// Returns an instruction; `to` and `from` are numbers of registers.
pub const fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, registers: to | from << 4, offset, immediate }
}

/// Codes of instructions, from linux/bpf.h and linux/bpf_common.h. Constants are sign-extended.
#[expect(missing_docs, reason = "their names say it")]
pub mod code {
    pub const LOAD_BYTE: u8 = 0x71;
    pub const LOAD_HALF: u8 = 0x69;
    pub const LOAD_WORD: u8 = 0x61;
    pub const STORE_WORD: u8 = 0x62;
    pub const STORE_WORD_FROM: u8 = 0x63;
    pub const STORE_HALF_FROM: u8 = 0x6b;
    pub const LOAD_64: u8 = 0x18;
    pub const SET: u8 = 0xb7;
    pub const COPY: u8 = 0xbf;
    pub const ADD: u8 = 0x07;
    pub const AND: u8 = 0x57;
    pub const SHIFT_RIGHT: u8 = 0x77;
    /// The constant is the number of bits.
    pub const BIG_ENDIAN: u8 = 0xdc;
    pub const JUMP: u8 = 0x05;
    pub const JUMP_IF_EQUAL: u8 = 0x15;
    pub const JUMP_IF_NOT: u8 = 0x55;
    pub const JUMP_IF_WORD_IS: u8 = 0x16;
    pub const JUMP_IF_WORD_IS_NOT: u8 = 0x56;
    pub const JUMP_IF_WORD_IS_ABOVE: u8 = 0x26;
    pub const JUMP_IF_WORD_IS_BELOW: u8 = 0xa6;
    pub const CALL: u8 = 0x85;
    pub const EXIT: u8 = 0x95;
}
