//! A double of kubelet's volumes on a node for one pod: the cases use CRI without a kubelet.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::case::Case;

/// Counter for versions of all volumes; kubelet uses the time.
static VERSION: AtomicU32 = AtomicU32::new(1);

/// A pod's directories below `<stack>/kubelet/pods`, removed when this is dropped.
pub struct Kubelet {
    pod: PathBuf,
    mounts: Vec<PathBuf>,
    loops: Vec<PathBuf>,
}

impl Kubelet {
    /// Creates the directories of a pod of `case`.
    pub fn new(case: &Case) -> Result<Self> {
        Self::named(case, "")
    }

    /// Creates the directories of one of several pods of `case`, identified by `name`: the pods whose uid is
    /// [`Kubelet::uid`].
    pub fn named(case: &Case, name: &str) -> Result<Self> {
        let pod = case.stack.dir().join("kubelet/pods").join(format!("uid-{}{name}", case.name));
        fs::create_dir_all(&pod).with_context(|| format!("cannot create {}", pod.display()))?;
        Ok(Self { pod, mounts: Vec::new(), loops: Vec::new() })
    }

    /// Returns the uid of the pods that these volumes are of.
    pub fn uid(&self) -> String {
        self.pod.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn volume(&self, plugin: &str, name: &str) -> Result<PathBuf> {
        let dir = self.pod.join("volumes").join(format!("kubernetes.io~{plugin}")).join(name);
        fs::create_dir_all(&dir)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777))?;
        Ok(dir)
    }

    /// Returns a volume of files, such as a `configmap` or a `secret`.
    pub fn files(&self, plugin: &str, name: &str, files: &[(&str, &str)]) -> Result<PathBuf> {
        let dir = self.volume(plugin, name)?;
        self.replace(&dir, files)?;
        Ok(dir)
    }

    /// Replaces the files of a volume in kubelet's order: a new version, the link to it, links to its files, and
    /// then the old version goes.
    pub fn replace(&self, dir: &Path, files: &[(&str, &str)]) -> Result<()> {
        let version = format!("..{}", VERSION.fetch_add(1, Ordering::Relaxed));
        fs::create_dir(dir.join(&version))?;
        for (name, content) in files {
            fs::write(dir.join(&version).join(name), content)?;
        }
        symlink(&version, dir.join("..data_tmp"))?;
        fs::rename(dir.join("..data_tmp"), dir.join("..data"))?;
        for (name, _) in files {
            if dir.join(name).symlink_metadata().is_err() {
                symlink(Path::new("..data").join(name), dir.join(name))?;
            }
        }
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let is_current = name.to_str().is_some_and(|name| {
                name == version || name == "..data" || files.iter().any(|(file, _)| *file == name)
            });
            match is_current {
                true => {}
                false if entry.file_type()?.is_dir() => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        Ok(())
    }

    /// Returns an emptyDir of the default medium.
    pub fn empty_dir(&self, name: &str) -> Result<PathBuf> {
        self.volume("empty-dir", name)
    }

    /// Returns an emptyDir in memory, of at most `size` (as mount(8) takes it).
    pub fn memory(&mut self, name: &str, size: &str) -> Result<PathBuf> {
        let dir = self.volume("empty-dir", name)?;
        let options = format!("size={size},mode=0777");
        mount(Some("tmpfs"), &dir, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))?;
        // As on a node whose init is systemd.
        mount(None::<&str>, &dir, None::<&str>, MsFlags::MS_SHARED, None::<&str>)?;
        self.mounts.push(dir.clone());
        Ok(dir)
    }

    /// Returns a subPath: what is at `part` of a volume, bound to a path of its own. A directory is made if it is missing.
    pub fn sub_path(&mut self, volume: &Path, part: &str) -> Result<PathBuf> {
        self.sub_path_of("c", volume, part)
    }

    /// Returns a subPath as [`Kubelet::sub_path`] does, of a container with this name.
    pub fn sub_path_of(&mut self, container: &str, volume: &Path, part: &str) -> Result<PathBuf> {
        let source = volume.join(part);
        if !source.exists() {
            fs::create_dir_all(&source)?;
        }
        let name = volume.file_name().context("a volume has a name")?;
        let parent = self.pod.join("volume-subpaths").join(name).join(container);
        fs::create_dir_all(&parent)?;
        let target = parent.join(self.mounts.len().to_string());
        if source.is_dir() {
            fs::create_dir(&target)?;
        } else {
            fs::write(&target, "")?;
        }
        mount(Some(&source), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        self.mounts.push(target.clone());
        Ok(target)
    }

    /// Returns the file for a container's termination message.
    pub fn termination_log(&self) -> Result<PathBuf> {
        let dir = self.pod.join("containers/c");
        fs::create_dir_all(&dir)?;
        let file = dir.join("0a1b2c3d");
        fs::write(&file, "")?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666))?;
        Ok(file)
    }

    /// Returns a block device of `bytes`, and the file behind it.
    pub fn block_device(&mut self, bytes: u64) -> Result<(PathBuf, PathBuf)> {
        let file = self.pod.join(format!("block-{}", self.loops.len()));
        fs::File::create(&file)?.set_len(bytes)?;
        let output = Command::new("losetup").args(["-f", "--show"]).arg(&file).output()?;
        ensure!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        let device = PathBuf::from(String::from_utf8(output.stdout)?.trim());
        self.loops.push(device.clone());
        Ok((device, file))
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        for mount in self.mounts.iter().rev() {
            if let Err(error) = umount2(mount, MntFlags::MNT_DETACH) {
                eprintln!("{} stays mounted: {error}", mount.display());
            }
        }
        for device in &self.loops {
            let detached = Command::new("losetup").arg("-d").arg(device).status();
            if !detached.is_ok_and(|status| status.success()) {
                eprintln!("{} stays a loop device", device.display());
            }
        }
        if let Err(error) = fs::remove_dir_all(&self.pod) {
            eprintln!("{} stays: {error}", self.pod.display());
        }
    }
}
