//! A library that is preloaded into a VMM. It lets the VMM drop a copy's pages of memory that many copies share.
//!
//! To drop a page, QEMU first punches a hole into the file of the memory, then drop the mapping. In a copy of a template
//! this file is sealed: the kernel refuses the hole, and QEMU then keeps the mapping, too. With this library, a hole in a
//! sealed file is no error, so it goes on. There is no hole: the page is that of the template again.
//!
//! All other calls are the C library's, with its errors. `build.rs` compiles this file.

#![no_std]

use core::arch::asm;

/// `long fallocate(int fd, int mode, off_t offset, off_t length)`.
#[cfg(target_arch = "x86_64")]
const SYS_FALLOCATE: usize = 285;
#[cfg(target_arch = "aarch64")]
const SYS_FALLOCATE: usize = 47;
/// `FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`.
const PUNCH_HOLE: i32 = 0x01 | 0x02;
const EPERM: isize = 1;
/// Results from here on are errors.
const FIRST_ERROR: isize = -4095;

unsafe extern "C" {
    /// Returns where the C library has this thread's `errno`.
    fn __errno_location() -> *mut i32;
}

/// Replaces the C library's function. Returns 0, or -1 with `errno`.
#[unsafe(no_mangle)]
pub extern "C" fn fallocate64(fd: i32, mode: i32, offset: i64, length: i64) -> i32 {
    let result = system_call(SYS_FALLOCATE, fd as usize, mode as usize, offset as usize, length as usize);
    match result {
        // EPERM: the file is sealed. It does not ask for the seals: a VMM's filter of system calls may allow only the VMM's own calls.
        FIRST_ERROR..0 if !(result == -EPERM && mode == PUNCH_HOLE) => {
            // SAFETY: the C library's pointer is valid for this thread.
            unsafe { *__errno_location() = -result as i32 };
            -1
        }
        _ => 0,
    }
}

/// The same function under the name that programs use whose file offsets are always 64 bits.
#[unsafe(no_mangle)]
pub extern "C" fn fallocate(fd: i32, mode: i32, offset: i64, length: i64) -> i32 {
    fallocate64(fd, mode, offset, length)
}

/// Returns what the kernel returns: a negative number is an error's.
#[cfg(target_arch = "x86_64")]
fn system_call(number: usize, one: usize, two: usize, three: usize, four: usize) -> isize {
    let result;
    // SAFETY: the call has no pointer among its arguments.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") one,
            in("rsi") two,
            in("rdx") three,
            in("r10") four,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// The same.
#[cfg(target_arch = "aarch64")]
fn system_call(number: usize, one: usize, two: usize, three: usize, four: usize) -> isize {
    let result;
    // SAFETY: the call has no pointer among its arguments.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") one => result,
            in("x1") two,
            in("x2") three,
            in("x3") four,
            options(nostack),
        );
    }
    result
}

/// Nothing here panics, but the language requires it.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
