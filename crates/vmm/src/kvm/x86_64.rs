//! The guest that measures KVM, in x86-64 machine code.

use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

use super::{KvmUnusable, MIN_EXITS_PER_SECOND, uninterrupted};

/// Maximum number of timed rounds. The fastest counts, because others may have shared their CPU.
const ROUNDS: usize = 16;
/// Time after which no further round starts.
const DEADLINE: Duration = Duration::from_millis(100);
/// Instructions of one round of [`CODE`]'s loop.
const ROUND: f64 = 8.0 * 1000.0;

/// Layout of the guest's memory: code, data, three levels of page tables, stack.
const CODE_AT: usize = 0x1000;
const PML4_AT: usize = 0x3000;
const PDPT_AT: usize = 0x4000;
const PD_AT: usize = 0x5000;
const STACK_TOP: usize = 0x8000;
const PAGE: usize = 0x1000;
/// Address of the second part of [`CODE`].
const NEEDS_AT: usize = CODE_AT + 0xb0;

/// Code of the guest, entered in real mode at [`CODE_AT`].
#[rustfmt::skip]
const CODE: [u8; 0xcd] = [
    0xfa,                                           // cli
    0x31, 0xc0, 0x8e, 0xd8,                         // xor ax,ax; mov ds,ax
    0x66, 0x0f, 0x01, 0x16, 0x68, 0x10,             // lgdt [0x1068]
    0x66, 0xb8, 0x00, 0x30, 0x00, 0x00,             // mov eax,PML4_AT
    0x0f, 0x22, 0xd8,                               // mov cr3,eax
    0x66, 0xb8, 0x20, 0x00, 0x00, 0x00,             // mov eax,CR4.PAE
    0x0f, 0x22, 0xe0,                               // mov cr4,eax
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0,             // mov ecx,MSR_EFER
    0x66, 0xb8, 0x00, 0x01, 0x00, 0x00,             // mov eax,EFER.LME
    0x66, 0x31, 0xd2,                               // xor edx,edx
    0x0f, 0x30,                                     // wrmsr
    0x0f, 0x20, 0xc0,                               // mov eax,cr0
    0x66, 0x0d, 0x01, 0x00, 0x00, 0x80,             // or eax,CR0.PG|CR0.PE
    0x0f, 0x22, 0xc0,                               // mov cr0,eax
    0x66, 0xea, 0x80, 0x10, 0x00, 0x00, 0x08, 0x00, // ljmp 8:0x1080
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    // 0x1050: GDT: nothing, 64-bit code, data
    0, 0, 0, 0, 0, 0, 0, 0,
    0xff, 0xff, 0, 0, 0, 0x9a, 0xaf, 0,
    0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0,
    // 0x1068: its limit and address
    0x17, 0x00, 0x50, 0x10, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    // 0x1080: 64-bit
    0xb8, 0x10, 0, 0, 0,                            // mov eax,0x10
    0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0,             // mov ds,eax; mov es,eax; mov ss,eax
    // 0x108b: one round
    0xbf, 0xe8, 0x03, 0, 0,                         // mov edi,1000
    0x31, 0xc0,                                     // again: xor eax,eax
    0xf0, 0x48, 0x0f, 0xc1, 0x04, 0x25, 0x00, 0x20, 0, 0, // lock xadd [0x2000],rax
    0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8,             // mov rax,cr3; mov cr3,rax
    0x9c, 0x58,                                     // pushf; pop rax
    0xff, 0xcf, 0x75, 0xe8,                         // dec edi; jnz again
    0xf4, 0xeb, 0xe0,                               // hlt; jmp 0x108b
    0, 0, 0, 0, 0,
    // 0x10b0: what Linux needs and interpreters lack
    0xf0, 0x48, 0x0f, 0xc7, 0x0c, 0x25, 0x00, 0x20, 0, 0, // lock cmpxchg16b [0x2000]
    0x48, 0x0f, 0xae, 0x04, 0x25, 0x00, 0x22, 0, 0, // fxsave64 [0x2200]
    0x48, 0x0f, 0xae, 0x0c, 0x25, 0x00, 0x22, 0, 0, // fxrstor64 [0x2200]
    0xf4,                                           // hlt
];

/// One page of guest memory.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Runs the guest. Returns the instructions per second.
pub fn measure(kvm: &Kvm) -> Result<f64, KvmUnusable> {
    let setup = |action| move |error: kvm_ioctls::Error| KvmUnusable::Setup { action, source: error.into() };
    // Declared before the VM, hence dropped after it.
    let mut memory = guest_memory();
    let vm = uninterrupted(|| kvm.create_vm()).map_err(setup("create a VM"))?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: size_of_val(&*memory) as u64,
        userspace_addr: memory.as_mut_ptr() as u64,
    };
    // SAFETY: the region is page-aligned and as long as `memory`, which outlives `vm` and `vcpu` and is not read
    // meanwhile.
    unsafe { vm.set_user_memory_region(region) }.map_err(setup("give a VM memory"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(setup("create a vCPU"))?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(setup("list CPU features"))?;
    vcpu.set_cpuid2(&cpuid).map_err(setup("set CPU features"))?;
    let mut segments = vcpu.get_sregs().map_err(setup("read registers"))?;
    (segments.cs.base, segments.cs.selector) = (0, 0);
    vcpu.set_sregs(&segments).map_err(setup("set registers"))?;
    enter_at(&vcpu, CODE_AT).map_err(setup("set registers"))?;
    judge(&mut vcpu)
}

/// Returns memory with the code and with tables that map the first 2 MiB to themselves.
fn guest_memory() -> Box<[Page]> {
    const PRESENT_WRITABLE: usize = 0x3;
    const LARGE: usize = 0x80;
    let mut memory = vec![Page([0; PAGE]); STACK_TOP / PAGE].into_boxed_slice();
    memory[CODE_AT / PAGE].0[..CODE.len()].copy_from_slice(&CODE);
    for (at, entry) in [
        (PML4_AT, PDPT_AT | PRESENT_WRITABLE),
        (PDPT_AT, PD_AT | PRESENT_WRITABLE),
        (PD_AT, LARGE | PRESENT_WRITABLE),
    ] {
        memory[at / PAGE].0[..size_of::<usize>()].copy_from_slice(&entry.to_le_bytes());
    }
    memory
}

fn enter_at(vcpu: &VcpuFd, address: usize) -> Result<(), kvm_ioctls::Error> {
    vcpu.set_regs(&kvm_regs {
        rip: address as u64,
        rsp: STACK_TOP as u64,
        // Bit 1 is always set.
        rflags: 2,
        ..kvm_regs::default()
    })
}

fn judge(vcpu: &mut VcpuFd) -> Result<f64, KvmUnusable> {
    let begun = Instant::now();
    let mut rate: f64 = 0.0;
    for _ in 0..ROUNDS {
        let round = Instant::now();
        run(vcpu, rate)?;
        rate = rate.max(ROUND / round.elapsed().as_secs_f64());
        if begun.elapsed() > DEADLINE {
            break;
        }
    }
    enter_at(vcpu, NEEDS_AT)
        .map_err(|error| KvmUnusable::Setup { action: "set registers", source: error.into() })?;
    run(vcpu, rate)?;
    if rate < MIN_EXITS_PER_SECOND { Err(KvmUnusable::Slow { rate }) } else { Ok(rate) }
}

/// Runs the guest until it halts.
fn run(vcpu: &mut VcpuFd, rate: f64) -> Result<(), KvmUnusable> {
    loop {
        return match vcpu.run() {
            Ok(VcpuExit::Hlt) => Ok(()),
            Ok(other) => Err(KvmUnusable::Fault { rate, exit: format!("{other:?}") }),
            // A signal to this process, such as the end of a child, interrupted the guest, which continues where it
            // was.
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => Err(KvmUnusable::Setup { action: "run a guest", source: error.into() }),
        };
    }
}
