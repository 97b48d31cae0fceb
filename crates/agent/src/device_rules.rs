//! Device access of a container: OCI's rules as a BPF program that the kernel runs at each use.
//!
//! For each type of access (mknod, read, write) the last matching rule decides; without one, access is denied. Without
//! such a program, a container that may create nodes could reach every disk of its pod.

use std::{fs::File, io};

use libcontainer::oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};
use sandboxer_bpf::{Instruction, Kind, Program, code::*, instruction};

use crate::cgroup::Cgroup;

// Types of access and of devices, from linux/bpf.h.
const MAKE: u8 = 1;
const READ: u8 = 2;
const WRITE: u8 = 4;
const EVERY_WAY: u8 = MAKE | READ | WRITE;
const BLOCK: i32 = 1;
const CHARACTER: i32 = 2;

/// The character devices that every container may use, as with any runtime; `None` as minor means all.
const USUAL: [(i32, Option<i32>); 10] = [
    // null, zero, full, random, urandom
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    // tty, console, ptmx, terminals
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
    // net/tun: creating a network interface needs CAP_NET_ADMIN.
    (10, Some(200)),
];

/// A rule about some devices; `None` as type, major or minor means any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    allow: bool,
    kind: Option<i32>,
    major: Option<i32>,
    minor: Option<i32>,
    /// The types of access that the rule covers.
    ways: u8,
}

impl Rule {
    /// Allows access to a disk of the guest that was attached for the container.
    pub fn disk(number: libc::dev_t, read_only: bool) -> Self {
        let ways = if read_only { READ } else { READ | WRITE };
        // A device's numbers have 12 and 20 bits.
        let (major, minor) = (libc::major(number).cast_signed(), libc::minor(number).cast_signed());
        Self { allow: true, kind: Some(BLOCK), major: Some(major), minor: Some(minor), ways }
    }

    /// Converts a rule of a container's spec; `None` if no device can have its numbers.
    fn from_spec(rule: &LinuxDeviceCgroup) -> Option<Self> {
        // In OCI, -1 also means any.
        let number = |number: Option<i64>| match number {
            None | Some(-1) => Some(None),
            Some(number) => i32::try_from(number).ok().filter(|number| *number >= 0).map(Some),
        };
        let ways = match rule.access() {
            None => EVERY_WAY,
            Some(text) => text.bytes().fold(0, |ways, way| {
                ways | match way {
                    b'm' => MAKE,
                    b'r' => READ,
                    b'w' => WRITE,
                    _ => 0,
                }
            }),
        };
        let kind = match rule.typ() {
            None | Some(LinuxDeviceType::A) => None,
            Some(LinuxDeviceType::B) => Some(BLOCK),
            Some(LinuxDeviceType::C | LinuxDeviceType::U) => Some(CHARACTER),
            Some(LinuxDeviceType::P) => return None,
        };
        let (major, minor) = (number(rule.major())?, number(rule.minor())?);
        Some(Self { allow: rule.allow(), kind, major, minor, ways })
    }
}

/// Returns all rules for a container whose spec has the rules `of_spec`: the usual devices and its own `disks` come
/// last.
pub fn all(of_spec: &[LinuxDeviceCgroup], disks: impl IntoIterator<Item = Rule>) -> Vec<Rule> {
    // Creating a node gives no access; CAP_MKNOD controls it.
    let nodes = Rule { allow: true, kind: None, major: None, minor: None, ways: MAKE };
    let usual = USUAL.map(|(major, minor)| Rule {
        allow: true,
        kind: Some(CHARACTER),
        major: Some(major),
        minor,
        ways: EVERY_WAY,
    });
    of_spec.iter().filter_map(Rule::from_spec).chain([nodes]).chain(usual).chain(disks).collect()
}

/// Enforces `rules` for the container's processes.
pub fn enforce(cgroup: &Cgroup, rules: &[Rule]) -> io::Result<()> {
    Program::load(Kind::CgroupDevice, &program(rules))?.attach(File::open(cgroup.file(""))?)
}

// Offsets in `struct bpf_cgroup_dev_ctx`: the type in the lower half of a word and the access in the upper; major;
// minor.
const ACCESS: i16 = 0;
const MAJOR: i16 = 4;
const MINOR: i16 = 8;
const HALF: i32 = 16;
// Registers: the context, the requested device, a copy, and the types of access that no rule has decided yet.
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const COPY_OF_WAYS: u8 = 3;
const MAJOR_NUMBER: u8 = 4;
const MINOR_NUMBER: u8 = 5;
const WAYS: u8 = 6;
const ANSWER: u8 = 0;

/// Generates the program, which checks the rules from the last to the first. A rule that allows removes its types of
/// access from the undecided ones; a rule that denies one of those ends the program. A rule about every type of access
/// always ends it. Rules after one that also matches every device are left out, since the kernel rejects unreachable
/// code.
fn program(rules: &[Rule]) -> Vec<Instruction> {
    let mut program = vec![
        instruction(LOAD_WORD, KIND, CONTEXT, ACCESS, 0),
        instruction(COPY, WAYS, KIND, 0, 0),
        instruction(SHIFT_RIGHT, WAYS, 0, 0, HALF),
        instruction(AND, KIND, 0, 0, 0xffff),
        instruction(LOAD_WORD, MAJOR_NUMBER, CONTEXT, MAJOR, 0),
        instruction(LOAD_WORD, MINOR_NUMBER, CONTEXT, MINOR, 0),
    ];
    for rule in rules.iter().rev() {
        program.extend(consider(rule));
        if rule.ways == EVERY_WAY && (rule.kind, rule.major, rule.minor) == (None, None, None) {
            return program;
        }
    }
    program.extend(answer(false));
    program
}

fn consider(rule: &Rule) -> Vec<Instruction> {
    let ways = i32::from(rule.ways);
    let condition = match (rule.ways, rule.allow) {
        // Some type of access is undecided here, or the program would have ended. This is not checked, since the kernel
        // verifies each branch when the program is loaded: see `enforce`.
        (EVERY_WAY, _) => vec![],
        (_, true) => vec![
            instruction(AND, WAYS, 0, 0, !ways),
            // Skips the result.
            instruction(JUMP_IF_NOT, WAYS, 0, 2, 0),
        ],
        (_, false) => vec![
            instruction(COPY, COPY_OF_WAYS, WAYS, 0, 0),
            instruction(AND, COPY_OF_WAYS, 0, 0, ways),
            instruction(JUMP_IF_EQUAL, COPY_OF_WAYS, 0, 2, 0),
        ],
    };
    let verdict = [condition, answer(rule.allow).into()].concat();
    let conditions = [(KIND, rule.kind), (MAJOR_NUMBER, rule.major), (MINOR_NUMBER, rule.minor)];
    let compared: Vec<_> =
        conditions.into_iter().filter_map(|(register, value)| Some((register, value?))).collect();
    let mut considered = Vec::with_capacity(compared.len() + verdict.len());
    for (n, (register, value)) in compared.iter().enumerate() {
        // A jump skips the remaining conditions and the result: a dozen instructions at most.
        let over = (compared.len() - n - 1 + verdict.len()) as i16;
        considered.push(instruction(JUMP_IF_NOT, *register, 0, over, *value));
    }
    considered.extend(verdict);
    considered
}

fn answer(allowed: bool) -> [Instruction; 2] {
    [instruction(SET, ANSWER, 0, 0, i32::from(allowed)), instruction(EXIT, 0, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Evaluates OCI's rules for each type of access separately.
    fn allowed(rules: &[Rule], kind: i32, major: i32, minor: i32, ways: u8) -> bool {
        let speaks = |rule: &Rule, way: u8| {
            let matches = |condition: Option<i32>, requested: i32| {
                condition.is_none_or(|condition| condition == requested)
            };
            rule.ways & way != 0
                && matches(rule.kind, kind)
                && matches(rule.major, major)
                && matches(rule.minor, minor)
        };
        let requested = [MAKE, READ, WRITE].into_iter().filter(|way| ways & way != 0);
        requested
            .into_iter()
            .all(|way| rules.iter().rfind(|rule| speaks(rule, way)).is_some_and(|rule| rule.allow))
    }

    /// Interprets the BPF instructions that these programs use.
    fn run(program: &[Instruction], context: [u32; 3]) -> bool {
        let mut registers = [0_u64; 11];
        let mut at = 0;
        loop {
            let Instruction { code, registers: pair, offset, immediate } = program[at];
            let (to, from) = (usize::from(pair & 15), usize::from(pair >> 4));
            let constant = i64::from(immediate).cast_unsigned();
            let mut jump = false;
            match code {
                LOAD_WORD => registers[to] = context[offset as usize / 4].into(),
                COPY => registers[to] = registers[from],
                SHIFT_RIGHT => registers[to] >>= constant,
                AND => registers[to] &= constant,
                SET => registers[to] = constant,
                JUMP_IF_EQUAL => jump = registers[to] == constant,
                JUMP_IF_NOT => jump = registers[to] != constant,
                EXIT => return registers[0] == 1,
                other => panic!("code {other:#x}"),
            }
            at += 1 + if jump { offset as usize } else { 0 };
        }
    }

    fn some_rule() -> impl Strategy<Value = Rule> {
        let number = || prop::option::of(0..3_i32);
        (any::<bool>(), prop::option::of(1..3_i32), number(), number(), 0..8_u8)
            .prop_map(|(allow, kind, major, minor, ways)| Rule { allow, kind, major, minor, ways })
    }

    proptest! {
        #[test]
        fn the_program_says_what_the_rules_say(
            rules in prop::collection::vec(some_rule(), 0..12),
            kind in 1..3_i32, major in 0..3_i32, minor in 0..3_i32, ways in 1..8_u8,
        ) {
            let access = (u32::from(ways) << HALF) | kind.cast_unsigned();
            let result = run(&program(&rules), [access, major.cast_unsigned(), minor.cast_unsigned()]);
            prop_assert_eq!(result, allowed(&rules, kind, major, minor, ways));
        }
    }

    fn of_spec(json: serde_json::Value) -> Vec<LinuxDeviceCgroup> {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_container_has_the_usual_devices_its_own_disks_and_no_others() {
        let spec = of_spec(serde_json::json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"},
        ]));
        let disks = [Rule::disk(libc::makedev(254, 16), false), Rule::disk(libc::makedev(254, 32), true)];
        let rules = all(&spec, disks);
        for (kind, major, minor, ways, expected) in [
            (CHARACTER, 1, 3, READ | WRITE, true),
            (CHARACTER, 136, 7, READ | WRITE, true),
            (CHARACTER, 10, 229, READ | WRITE, true),
            (CHARACTER, 10, 232, READ, false),
            (CHARACTER, 1, 1, READ, false),
            (BLOCK, 254, 16, READ | WRITE, true),
            (BLOCK, 254, 32, READ, true),
            (BLOCK, 254, 32, READ | WRITE, false),
            (BLOCK, 254, 0, READ, false),
            (BLOCK, 254, 0, MAKE, true),
        ] {
            let result = allowed(&rules, kind, major, minor, ways);
            assert_eq!(result, expected, "{kind} {major}:{minor} {ways}");
        }
    }

    #[test]
    fn rules_of_numbers_that_no_device_has_say_nothing() {
        let rules = of_spec(serde_json::json!([
            {"allow": true, "type": "c", "major": -1, "minor": -1, "access": "r"},
            {"allow": true, "type": "c", "major": 1_i64 << 40, "minor": 0},
            {"allow": true, "type": "b", "major": -5},
            {"allow": true, "type": "p"},
        ]));
        let read: Vec<_> = rules.iter().filter_map(Rule::from_spec).collect();
        let any = Rule { allow: true, kind: Some(CHARACTER), major: None, minor: None, ways: READ };
        assert_eq!(read, [any]);
    }

    #[test]
    fn the_kernel_takes_such_a_program() {
        let rules = all(&of_spec(serde_json::json!([{"allow": false}, {"allow": true}])), []);
        Program::load(Kind::CgroupDevice, &program(&rules)).expect("only root loads programs");
    }
}
