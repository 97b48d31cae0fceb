//! A container that is made and removed in a machine before the machine waits.
//!
//! What a guest does for the first time is slow: an emulated one has the code translated first, and any
//! restored one gets its own copies of the pages it writes. Measured under emulation: making the first
//! container of a guest takes five times as long as making the second. So the first is this one: it has an
//! image of one empty file, is never started, and leaves nothing.

use std::{fs, io, path::Path, path::PathBuf, sync::Arc};

use oci_spec::runtime::Spec;
use sandboxer_protocol::id::{ContainerId, SandboxId};

use crate::{
    config::Way,
    container::{NewContainer, StdioPaths, start},
    error::PodError,
    host::rootfs::Mount,
    pod::{Node, spec::PodSpec, stages::Stages},
};

/// The container's program; nothing ever runs it.
const PROGRAM: &str = "rehearsal";

/// A bundle and an image on the host.
#[derive(Debug)]
pub struct Rehearsal {
    bundle: PathBuf,
    image: Mount,
}

impl Rehearsal {
    /// Prepares both below the state directory.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let bundle = state_dir.join("rehearsal");
        let dir = |name: &str| bundle.join(name);
        for name in ["lower", "upper", "work"] {
            fs::create_dir_all(dir(name))?;
        }
        let program = dir("lower").join(PROGRAM);
        fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o755).open(program)?;
        let mut spec = Spec::default();
        if let Some(process) = spec.process_mut() {
            process.set_args(Some(vec![format!("/{PROGRAM}")]));
        }
        fs::write(dir("config.json"), serde_json::to_vec(&spec)?)?;
        let image = Mount {
            fstype: "overlay".into(),
            source: "overlay".into(),
            options: [("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")]
                .map(|(option, name)| format!("{option}={}", dir(name).display()))
                .to_vec(),
        };
        Ok(Self { bundle, image })
    }

    /// Makes the container in a machine, and removes it.
    pub async fn run(&self, node: &Arc<Node>, id: &SandboxId, live: &start::Live) -> Result<(), PodError> {
        let container: ContainerId = id.clone();
        let pod = PodSpec {
            id: id.clone(),
            name: id.to_string(),
            namespace: String::new(),
            uid: String::new(),
            hostname: id.to_string(),
            netns: None,
            resolv_conf: None,
            sysctls: Default::default(),
            way: Way::Pool,
            vcpus: 0,
            memory_mib: 0,
        };
        let new = NewContainer {
            id: container.clone(),
            bundle: self.bundle.clone(),
            mounts: vec![self.image.clone()],
            stdio: StdioPaths::default(),
        };
        // Not among the times of pods.
        let stages = Stages::new(id.clone(), Arc::default());
        let created = start::create(&pod, live, &node.rootfs, &stages, &new).await?;
        start::delete(live, &container, &created.disks).await
    }
}
