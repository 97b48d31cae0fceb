//! The build of a template: boot a VM, wait for its agent, prepare its guest, freeze it.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandboxer_base::clock::now_ns;
use sandboxer_config::VmConfig;
use sandboxer_host::network::TapPool;
use sandboxer_process::cgroup::Cgroup;
use sandboxer_protocol::{boot::BootParams, id::SandboxId, link::LinkKey};
use sandboxer_vmm::{MEMORY, Vm, VmSpec, Vmm, VmmError, Vmms};
use tokio_util::sync::CancellationToken;

use super::{
    Preparation, Shape, TemplateError, image,
    key::{InputDigest, Inputs},
};
use crate::{error::PodError, taps::VmTaps};

/// A reason why a template could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The template's VM failed.
    #[error("the VM for a template failed")]
    Vm(#[from] VmmError),
    /// The taps for its VM cannot be created.
    #[error("cannot create taps for the VM of a template")]
    Taps(#[source] io::Error),
    /// The template's agent failed, or was never ready.
    #[error("the agent of the VM for a template failed")]
    Agent(#[from] PodError),
    /// The template could not be written.
    #[error(transparent)]
    Image(#[from] TemplateError),
    /// The VMM, the kernel or the initramfs was replaced during the build, so the template's inputs are unknown.
    #[error("the template's inputs changed during the build")]
    Changed,
    /// The daemon is stopping.
    #[error("the daemon is stopping: the next one builds the template")]
    Stopping,
    /// The bounds allow no further template: too many are in use.
    #[error(
        "no space for a template of {shape}: those used in the last {spared:?} reach templates.max ({most}) or \
         templates.max_mib ({most_mib})"
    )]
    NoRoom {
        /// The size of the template's VMs.
        shape: Shape,
        /// Time after their last use for which the other templates are kept.
        spared: Duration,
        /// Maximum number of templates.
        most: usize,
        /// Maximum size of all templates, MiB.
        most_mib: u64,
    },
}

/// The builder of templates.
#[derive(Debug)]
pub struct Builder {
    /// The VMMs that start VMs.
    pub vmms: Vmms,
    /// Configuration of the VMs.
    pub config: VmConfig,
    /// Directory for sockets of VMs that become templates.
    pub run_dir: PathBuf,
    /// Directory of the templates.
    pub root: PathBuf,
    /// Taps of VMs that become templates.
    pub tap_pool: Arc<TapPool>,
    /// Cgroup in which the memory of these VMs is counted.
    pub cgroup: Option<Cgroup>,
    /// The preparation of their guests.
    pub preparation: Arc<dyn Preparation>,
    /// Cancelled when the daemon stops; cancels a build.
    pub stopping: CancellationToken,
}

impl Builder {
    /// Returns the spec of the VM from which a template of this shape is built, with its files in `dir`.
    pub fn spec(&self, shape: Shape, dir: &Path) -> VmSpec {
        let (run_dir, link_key) = (self.run_dir.clone(), LinkKey::random());
        let spec = VmSpec::new(&self.config, template_id(), run_dir, shape, link_key);
        let (memory_file, cgroup) = (Some(dir.join(MEMORY)), self.cgroup.clone());
        let boot = BootParams { template: true, ..spec.boot };
        VmSpec { boot, memory_file, background: true, cgroup, ..spec }
    }

    /// Builds the template of the inputs in `survey`, which belong to `vmm`. One at a time; a failure leaves nothing
    /// behind.
    pub async fn build(&self, vmm: &dyn Vmm, survey: &InputDigest) -> Result<(), BuildError> {
        let inputs = survey.inputs.clone();
        let key = inputs.key();
        let dir = self.root.join(format!(".{key}"));
        for dir in [&dir, &self.run_dir] {
            clear(dir).and_then(|()| make(dir)).map_err(TemplateError::path("create", dir))?;
        }
        let spec = self.spec(inputs.shape, &dir);
        let taps = VmTaps::of_no_pod(vmm, &self.tap_pool, spec.nics);
        let spec = taps.map_err(BuildError::Taps)?.0.given_to(spec);
        let frozen = self.freeze(vmm, &spec, &dir).await;
        if let Err(error) = clear(&self.run_dir) {
            tracing::warn!(path = %self.run_dir.display(), %error, "cannot remove the run directory of a template's VM");
        }
        let is_current = survey.is_current(vmm, &spec);
        let (target, link_key) = (self.root.join(&key), spec.boot.link_key);
        let from = dir.clone();
        let built = match frozen {
            Ok(()) if !is_current => Err(BuildError::Changed),
            Ok(()) => {
                let result =
                    tokio::task::spawn_blocking(move || keep(&from, &target, inputs, link_key)).await;
                result
                    .unwrap_or_else(|panic| Err(TemplateError::path("write", &dir)(io::Error::other(panic))))
                    .map_err(BuildError::from)
            }
            Err(error) => Err(error),
        };
        if built.is_err() {
            // Best effort: the first error is what matters.
            let _ = clear(&dir);
        }
        built
    }

    async fn freeze(&self, vmm: &dyn Vmm, spec: &VmSpec, dir: &Path) -> Result<(), BuildError> {
        let vm = tokio::select! {
            // If this is dropped, a VMM that starts is killed.
            () = self.stopping.cancelled() => return Err(BuildError::Stopping),
            vm = vmm.boot(spec) => vm?,
        };
        let frozen = tokio::select! {
            frozen = self.freeze_ready(vmm, spec, &vm, dir) => frozen,
            exit = vm.exited() => Err(VmmError::Died {
                pod: spec.pod.clone(),
                call: "the agent's ready message".into(),
                how: exit.how,
                last_lines: exit.last_lines.join(" | "),
            }.into()),
            () = self.stopping.cancelled() => Err(BuildError::Stopping),
        };
        let ended = vm.kill().await;
        frozen?;
        Ok(ended?)
    }

    async fn freeze_ready(
        &self,
        vmm: &dyn Vmm,
        spec: &VmSpec,
        vm: &Arc<dyn Vm>,
        dir: &Path,
    ) -> Result<(), BuildError> {
        let limit = self.config.boot_timeout;
        let nics = if vmm.freezes_interfaces() { spec.nics } else { 0 };
        let prepared = async {
            let (key, patience) = (&spec.boot.link_key, self.config.agent_timeout);
            let (agent, _) = sandboxer_guest::connect(&spec.pod, vm.as_ref(), key, patience).await?;
            self.preparation.prepare(&spec.pod, vm, &agent, nics).await
        };
        match tokio::time::timeout(limit, prepared).await {
            Ok(prepared) => prepared?,
            Err(_) => {
                let console = vm.last_lines().await.join(" | ");
                return Err(PodError::NotReady { pod: spec.pod.clone(), limit, console }.into());
            }
        }
        Ok(vm.freeze(dir).await?)
    }
}

/// Returns the id of a VM that becomes a template, in place of a pod's id.
pub fn template_id() -> SandboxId {
    #[expect(clippy::expect_used, reason = "a constant, held by a test")]
    "template".parse().expect("is an id")
}

fn keep(dir: &Path, target: &Path, inputs: Inputs, link_key: LinkKey) -> Result<(), TemplateError> {
    image::write(dir, inputs, link_key, now_ns())?;
    // An existing template was found to be damaged.
    clear(target).map_err(TemplateError::path("replace", target))?;
    fs::rename(dir, target).map_err(TemplateError::path("rename to", target))
}

fn make(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

pub(super) fn clear(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
