//! File systems of the host kernel, and the program that makes EROFS images.

use std::path::{Path, PathBuf};

use super::{
    host::Host,
    program::{self, Answer},
    verdict::{Check, Fix, Subject},
};

const OVERLAY: Subject =
    Subject { name: "overlay", why: "it merges the layers of an image into one root file system" };
const EROFS: Subject = Subject {
    name: "erofs",
    why: "containerd's erofs snapshotter mounts layers on the host for some images",
};
const LOOP: Subject =
    Subject { name: "loop", why: "containerd's erofs and blockfile snapshotters mount image files with it" };
const MKFS: Subject =
    Subject { name: "mkfs.erofs", why: "it makes a disk image of a container's root file system" };

/// The availability of a part of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The part is built in or loaded.
    There,
    /// The part is a module that is not loaded.
    Module,
    /// The part was not found.
    Absent,
}

/// Returns the availability of a file system.
pub fn filesystem(host: &Host, name: &str) -> Support {
    let known = host.text("/proc/filesystems").unwrap_or_default();
    // "nodev\toverlay" or "\terofs".
    match known.lines().any(|line| line.split_whitespace().last() == Some(name)) {
        true => Support::There,
        false => module(host, name),
    }
}

/// Returns the availability of loop devices.
pub fn loop_devices(host: &Host) -> Support {
    match host.path("/dev/loop-control").exists() {
        true => Support::There,
        false => module(host, "loop"),
    }
}

fn module(host: &Host, name: &str) -> Support {
    let release = host.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let modules = host.text(format!("/lib/modules/{release}/modules.dep")).unwrap_or_default();
    let file = format!("/{name}.ko");
    // "kernel/fs/overlayfs/overlay.ko.xz: …"
    let there = modules.lines().any(|line| line.split(':').next().is_some_and(|path| path.contains(&file)));
    if there { Support::Module } else { Support::Absent }
}

/// Checks overlayfs, which containers of the overlayfs snapshotter need.
pub fn overlay(support: Support) -> Check {
    match support {
        Support::There => OVERLAY.ok("the kernel has it"),
        Support::Module => OVERLAY.ok("a module; the first mount loads it"),
        Support::Absent => OVERLAY.failure(
            "the kernel does not have it",
            Fix::commands("load its module, or use a kernel with it", ["modprobe overlay"]),
        ),
    }
}

/// Checks EROFS, which only some of containerd's snapshotters need.
pub fn erofs(support: Support) -> Check {
    optional(&EROFS, support)
}

/// Checks loop devices, which only some of containerd's snapshotters need.
pub fn loops(support: Support) -> Check {
    optional(&LOOP, support)
}

fn optional(subject: &Subject, support: Support) -> Check {
    match support {
        Support::There => subject.ok("the kernel has it"),
        Support::Module => subject.ok("a module that is not loaded"),
        Support::Absent => {
            subject.not_applicable("the kernel does not have it; the overlayfs snapshotter does not need it")
        }
    }
}

/// A program that makes EROFS images, and its version output.
#[derive(Debug, Clone)]
pub struct Mkfs {
    /// The program, as configured.
    pub program: PathBuf,
    /// Output of `-V`.
    pub answer: Answer,
}

/// Runs the program with `-V`.
pub async fn read_mkfs(program: &Path) -> Mkfs {
    // erofs-utils 1.5 has no such option, but prints the version before the error.
    Mkfs { program: program.to_owned(), answer: program::ask(program, "-V").await }
}

/// Checks the program.
pub fn mkfs(reading: &Mkfs) -> Check {
    let Mkfs { program, answer } = reading;
    let install = || {
        Fix::commands(
            "install it, or set rootfs.mkfs_erofs in the configuration",
            ["apt-get install erofs-utils"],
        )
    };
    match answer {
        Answer::Printed(line) if line.starts_with("mkfs.erofs") => MKFS.ok(line),
        Answer::Printed(line) => {
            MKFS.failure(format!("{program:?} is not mkfs.erofs: it printed {line:?}"), install())
        }
        Answer::Missing => MKFS.failure(format!("{program:?} does not exist"), install()),
        Answer::Broken(how) => MKFS.failure(format!("{program:?} {how}"), install()),
        Answer::Silent => MKFS.warning(
            program::too_slow(program),
            Fix::words("retry when the host is less busy; if it stays slow, check that it is mkfs.erofs"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Verdict;

    #[test]
    fn a_file_system_is_there_a_module_or_absent() {
        let root = tempfile::tempdir().unwrap();
        let host = Host::below(root.path());
        for (path, text) in [
            ("proc/filesystems", "nodev\tproc\nnodev\toverlay\n\text4\n"),
            ("proc/sys/kernel/osrelease", "6.1.0\n"),
            ("lib/modules/6.1.0/modules.dep", "kernel/fs/erofs/erofs.ko.xz: kernel/lib/lz4.ko\n"),
        ] {
            fs::create_dir_all(host.path(path).parent().unwrap()).unwrap();
            fs::write(host.path(path), text).unwrap();
        }
        assert_eq!(filesystem(&host, "overlay"), Support::There);
        assert_eq!(filesystem(&host, "ext4"), Support::There);
        assert_eq!(filesystem(&host, "erofs"), Support::Module);
        assert_eq!(filesystem(&host, "lz4"), Support::Absent, "a dependency, no file system");
        assert_eq!(filesystem(&host, "nodev"), Support::Absent);
        assert_eq!(loop_devices(&host), Support::Absent);
    }

    #[test]
    fn only_overlay_is_needed() {
        use Support::{Absent, Module, There};
        assert_eq!(
            [There, Module, Absent].map(|s| overlay(s).verdict),
            [Verdict::Ok, Verdict::Ok, Verdict::Failure]
        );
        for check in [erofs, loops] {
            let verdicts = [There, Module, Absent].map(|support| check(support).verdict);
            assert_eq!(verdicts, [Verdict::Ok, Verdict::Ok, Verdict::NotApplicable]);
        }
    }

    #[test]
    fn mkfs_must_answer_as_what_it_is() {
        for (answer, verdict) in [
            (Answer::Printed("mkfs.erofs 1.5".into()), Verdict::Ok),
            (Answer::Printed("mkfs.erofs (erofs-utils) 1.8".into()), Verdict::Ok),
            (Answer::Printed("hello".into()), Verdict::Failure),
            (Answer::Missing, Verdict::Failure),
            (Answer::Broken("ended with 1".into()), Verdict::Failure),
            (Answer::Silent, Verdict::Warning),
        ] {
            assert_eq!(mkfs(&Mkfs { program: "mkfs.erofs".into(), answer }).verdict, verdict);
        }
    }
}
