//! The jail of mkfs.erofs. A tenant made its input, so it sees only that and its output file. It runs as a user of its
//! own, which owns the output while it runs.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, chown, fchown},
    path::{Path, PathBuf},
};

use sandboxer_process::jail::Jail;

use super::{
    BuildError,
    build::{Content, Job},
};

/// Path of the image in the jail.
pub const IMAGE: &str = "/image";
/// Path of the source tree in the jail.
pub const TREE: &str = "/tree";

/// Temporary files beside an image while it is created, removed when dropped.
#[derive(Debug)]
pub struct Cell<'a> {
    job: &'a Job,
    tree: &'a Path,
    /// The temporary directory of mkfs.erofs. It becomes as large as the image if that is made of chunks, so it is on a
    /// disk.
    scratch: PathBuf,
}

impl<'a> Cell<'a> {
    /// Prepares the files for `job`, which reads `tree`.
    pub fn new(job: &'a Job, tree: &'a Path) -> Result<Self, BuildError> {
        let scratch = job.image.with_extension("scratch");
        let host = |path: &Path| {
            let path = path.to_owned();
            move |source| BuildError::Path { action: "create", path, source }
        };
        fs::DirBuilder::new().mode(0o700).create(&scratch).map_err(host(&scratch))?;
        let cell = Self { job, tree, scratch };
        File::create(&job.image).map_err(host(&job.image))?;
        Ok(cell)
    }

    /// Returns the jail.
    pub fn jail(&self) -> Result<Jail, BuildError> {
        self.try_jail().map_err(|source| BuildError::Path {
            action: "prepare a jail for mkfs in",
            path: self.job.work.clone(),
            source,
        })
    }

    fn try_jail(&self) -> io::Result<Jail> {
        // The view of a chain is mounted below the work directory, and must not be covered by another mount.
        let root = match self.job.content {
            Content::Directory(_) | Content::Upper(_) => self.job.work.clone(),
            Content::Chain(_) => self.job.work.join("jail"),
        };
        fs::create_dir_all(&root)?;
        let mut jail = Jail::of_tool(&root, &sandboxer_process::find(&self.job.mkfs), &self.scratch)?;
        for own in [&self.job.image, &self.scratch] {
            chown(own, Some(jail.user()), Some(jail.user()))?;
        }
        jail.bind(self.tree, TREE.trim_start_matches('/'), false)?;
        jail.bind(&self.job.image, IMAGE.trim_start_matches('/'), true)?;
        jail.bind(&self.scratch, "tmp", true)?;
        Ok(jail)
    }
}

/// Makes root the owner of the image again, and syncs it.
pub fn take_back(image: &Path) -> io::Result<()> {
    let file = File::open(image)?;
    fchown(&file, Some(0), Some(0))?;
    file.sync_all()
}

impl Drop for Cell<'_> {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.scratch) {
            tracing::warn!(path = %self.scratch.display(), %error, "cannot remove the temporary directory of mkfs");
        }
    }
}
