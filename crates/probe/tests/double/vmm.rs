//! A double of a VMM of the series `vm`: a script that sends frames as the guest's helper does.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use sandboxer_probe::vm::{Accelerator, Vm};

/// Maximum time for what should happen at once.
pub const LIMIT: Duration = Duration::from_secs(20);
/// What the helper prints of a container.
pub const FACTS: &str = "{\"bench_facts\":{\"cpus\":1,\"quota_cpus\":null,\"memory_limit\":null,\"memory_total\":500000000,\
                     \"kernel\":\"6.1\"}}\n";

/// Recorded output of sysbench.
pub const EXAMPLE: &str = include_str!("../../../bench/tests/outputs/sysbench-cpu.txt");

/// Shell functions that send frames: `frame KIND FILE`, and `code LAST_BYTE`.
const FRAMES: &str = r#"
length() { printf '\\%03o' $(($1 >> 24 & 255)) $(($1 >> 16 & 255)) $(($1 >> 8 & 255)) $(($1 & 255)); }
frame() { printf "%s$(length $(wc -c <"$2"))" "$1" >&0; cat "$2" >&0; }
begun() { printf 'b\000\000\000\000' >&0; }
code() { printf "x\000\000\000\004\000\000\000\\$1" >&0; }
"#;

/// An image and a VMM whose behaviour is `script`, with control groups that are directories. The script has its directory in `$at`.
pub struct Made {
    pub dir: tempfile::TempDir,
    pub vm: Vm,
}

pub fn vmm(script: &str) -> Made {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.raw", "vmlinuz", "initrd"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    std::fs::write(dir.path().join("facts"), FACTS).unwrap();
    std::fs::write(dir.path().join("example"), EXAMPLE).unwrap();
    let groups = dir.path().join("groups");
    std::fs::create_dir(&groups).unwrap();
    std::fs::write(groups.join("cgroup.controllers"), "cpu memory").unwrap();
    let program = dir.path().join("qemu");
    let text = format!(
        "#!/bin/sh\nat={}\necho $$ >$at/pid\nprintf '%s\\n' \"$*\" >>$at/lines\n{FRAMES}{script}",
        dir.path().display()
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let accelerator = Accelerator { kvm: false, reason: "a double".into() };
    let vm = Vm {
        program,
        groups,
        ..Vm::new(&dir.path().join("disk.raw"), accelerator, Some("127.0.0.1".into()))
    };
    Made { dir, vm }
}

/// Prints facts, and the output of sysbench if the command is it.
pub const WORKS: &str = "begun
disk=$(printf '%s\\n' \"$*\" | sed 's/.*file=\\([^ ]*command\\).*/\\1/')
case $(head -n 1 $disk) in
*facts*) frame o $at/facts ;;
*) frame e $at/facts; frame o $at/example ;;
esac
code 000
exec sleep 60
";

impl Made {
    pub fn pid(&self) -> i32 {
        std::fs::read_to_string(self.dir.path().join("pid")).unwrap().trim().parse().unwrap()
    }

    pub fn lines(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("lines")).unwrap()
    }
}

pub fn alive(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}
