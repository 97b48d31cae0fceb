//! What a VMM may open: by Landlock, its kernel and initramfs, and its machine's directory.
//!
//! It confines itself, once it knows its machine. The copy of a frozen one is confined from its start, by
//! us: its memory is of a kind for which Landlock takes no rule, and needs none.
//!
//! A disk that is plugged in later lies anywhere. While the VMM opens it, it is bound into the
//! machine's directory; afterwards the VMM has it open and the path is gone again.

use std::{
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use landlock::{
    Access, AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
    path_beneath_rules,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::thread::{CapabilitySet, capabilities};

use crate::vmm::VmSpec;

/// Where disks are bound, in the machine's directory.
const DIR: &str = "disks";
/// The ABI that Cloud Hypervisor demands; it refuses machines on less. Linux 6.2.
const ABI: i64 = 3;

/// Whether VMMs can be confined on this host; `Err`: why not.
pub fn usable() -> Result<(), String> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of `linux/landlock.h`.
    const ASK_VERSION: u32 = 1;
    // SAFETY: without a ruleset, this system call only tells a number.
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0_usize, ASK_VERSION)
    };
    if abi < ABI {
        return Err(match abi {
            0.. => format!("this kernel's Landlock has ABI {abi}, {ABI} is needed"),
            _ => format!("this kernel has no Landlock: {}", io::Error::last_os_error()),
        });
    }
    let held = capabilities(None).map_err(|errno| format!("capabilities can't be read: {errno}"))?;
    match held.effective.contains(CapabilitySet::SYS_ADMIN) {
        true => Ok(()),
        false => Err("disks can't be bound into a machine's directory without CAP_SYS_ADMIN".to_owned()),
    }
}

/// What the VMM of a copy may open; `program` is to run confined by it.
pub fn rules(program: &Path, spec: &VmSpec) -> Result<Option<OwnedFd>, RulesetError> {
    const V: landlock::ABI = landlock::ABI::V3;
    let (read, write) = (AccessFs::from_read(V), AccessFs::from_write(V));
    // What isn't there, nobody opens.
    let libraries =
        [program, "/usr".as_ref(), "/lib".as_ref(), "/lib64".as_ref(), "/etc/ld.so.cache".as_ref()];
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(V))?
        .create()?
        .add_rules(path_beneath_rules(libraries, read))?
        .add_rules(path_beneath_rules([&spec.kernel, &spec.initramfs], AccessFs::ReadFile))?
        .add_rules(path_beneath_rules(["/dev/urandom"], AccessFs::ReadFile))?
        .add_rules(path_beneath_rules(["/dev/kvm"], AccessFs::ReadFile | AccessFs::WriteFile))?
        .add_rules(path_beneath_rules([&spec.run_dir], (read | write) & !AccessFs::Execute))?;
    Ok(rules.into())
}

/// A disk that is in its machine's directory until this is dropped.
#[derive(Debug)]
pub struct Shown(PathBuf);

impl Shown {
    /// Binds `disk` into the machine's directory as `name`.
    pub fn new(run_dir: &Path, name: &str, disk: &Path) -> io::Result<Self> {
        let dir = run_dir.join(DIR);
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let path = dir.join(name);
        fs::File::create_new(&path)?;
        let shown = Self(path);
        mount(Some(disk), &shown.0, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        Ok(shown)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Err(error) = hide(&self.0) {
            tracing::error!(path = %self.0.display(), %error, "a disk stays in its machine's directory");
        }
    }
}

fn hide(path: &Path) -> io::Result<()> {
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // Not bound: the daemon died just before, or binding it failed.
        Ok(()) | Err(nix::errno::Errno::EINVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    fs::remove_file(path)
}

/// Takes out what a daemon that died in the middle left there.
pub fn clear(run_dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(run_dir.join(DIR)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        hide(&entry?.path())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmm::{process, spec::tests::spec};

    #[test]
    fn a_disk_is_shown_for_a_while_and_a_dead_daemons_is_cleared() {
        if let Err(why) = usable() {
            println!("not tested: {why}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (disk, run_dir) = (dir.path().join("image"), dir.path().join("run"));
        fs::create_dir(&run_dir).unwrap();
        fs::write(&disk, "content").unwrap();
        clear(&run_dir).expect("nothing to clear is no error");

        let shown = Shown::new(&run_dir, "disk-a", &disk).unwrap();
        assert_eq!(fs::read_to_string(shown.path()).unwrap(), "content");
        assert!(Shown::new(&run_dir, "disk-a", &disk).is_err(), "shown twice under one name");
        std::mem::forget(shown);
        clear(&run_dir).unwrap();
        fs::remove_dir_all(&run_dir).expect("nothing is mounted any more");
        assert_eq!(fs::read_to_string(&disk).unwrap(), "content");
    }

    #[tokio::test]
    async fn a_confined_process_opens_its_machines_files_only() {
        if let Err(why) = usable() {
            println!("not tested: {why}");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("run")).unwrap();
        for file in ["run/own", "kernel", "initramfs", "foreign"] {
            fs::write(at(file), "content").unwrap();
        }
        let spec = VmSpec { kernel: at("kernel"), initramfs: at("initramfs"), run_dir: at("run"), ..spec() };
        let program = Path::new("/usr/bin/cp");
        for (from, to, status) in [
            ("run/own", "run/copy", 0),
            ("kernel", "run/kernel", 0),
            ("initramfs", "run/initramfs", 0),
            ("foreign", "run/foreign", 1),
            ("run/own", "copy", 1),
        ] {
            let rules = rules(program, &spec).unwrap();
            let arguments = vec![at(from).into(), at(to).into()];
            let (process, _words) = process::spawn(
                program,
                arguments,
                &at("run"),
                Vec::new(),
                None,
                false,
                rules.map(process::Confined::Landlocked),
            )
            .unwrap();
            assert_eq!(process.exited().await, process::Exit::Status(status), "{from} to {to}");
            assert_eq!(at(to).exists(), status == 0, "{from} to {to}");
        }
    }
}
