//! The jail of mkfs.erofs: a tenant made its input, so it sees only that, its output file, and nothing else.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use caps::Capability;
use sandboxer_process::jail::Jail;

use super::{
    BuildError,
    build::{Content, Job},
};

/// Path of the image in the jail.
pub const IMAGE: &str = "/image";
/// Path of the source tree in the jail.
pub const TREE: &str = "/tree";

/// Its capabilities: to read files of all owners, and to see `trusted.*` attributes, such as overlay's marks.
const KEEPS: [Capability; 2] = [Capability::CAP_DAC_READ_SEARCH, Capability::CAP_SYS_ADMIN];

/// Temporary files beside an image while it is created, removed when dropped.
#[derive(Debug)]
pub struct Cell<'a> {
    job: &'a Job,
    tree: &'a Path,
    /// Temporary directory of mkfs.erofs, as large as the image if that is made of chunks: so it is on a
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
        // For a chain, the view is mounted below the work directory, and must not be covered by another
        // mount.
        let root = match self.job.content {
            Content::Directory(_) => self.job.work.clone(),
            Content::Chain(_) => self.job.work.join("jail"),
        };
        fs::create_dir_all(&root)?;
        let mut jail = Jail::of_tool(&root, &sandboxer_process::find(&self.job.mkfs), &KEEPS)?;
        jail.bind(self.tree, TREE.trim_start_matches('/'), false)?;
        jail.bind(&self.job.image, IMAGE.trim_start_matches('/'), true)?;
        jail.bind(&self.scratch, "tmp", true)?;
        Ok(jail)
    }
}

impl Drop for Cell<'_> {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.scratch) {
            tracing::warn!(path = %self.scratch.display(), %error, "cannot remove the temporary directory of mkfs");
        }
    }
}
