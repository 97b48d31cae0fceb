//! The choice of the VMM on this host.

use std::sync::Arc;

use async_trait::async_trait;
use sandboxer_base::chain;
use sandboxer_config::{Accelerator, Config, VmConfig, VmmChoice};

use super::{
    Frozen, TemplateInputs, Vm, VmRecord, VmSpec, Vmm, VmmError, VmmInfo, Vmms,
    accelerator::{self, AcceleratorError},
    cloud_hypervisor::{self, CloudHypervisor, CloudHypervisorDriver},
    firecracker::{self, FirecrackerDriver},
    jailed::{JailedVmm, VmmDriver, adopt},
    qemu::Qemu,
    version::VersionError,
};

/// The reason why no VMM can be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Guests cannot run as configured.
    #[error("no VMM can be used as configured")]
    Accelerator(#[from] AcceleratorError),
    /// The configured VMM cannot be used.
    #[error("vmm \"{0}\" is configured but cannot be used: set vmm to \"auto\" or \"qemu\"")]
    Unusable(&'static str, #[source] VersionError),
    /// The configured VMM cannot emulate.
    #[error("vmm \"{0}\" needs KVM but accelerator \"tcg\" is configured: change one of them")]
    Emulated(&'static str),
    /// The VMM of a runtime handler cannot be used.
    #[error("cannot serve runtime handler {handler:?}: change its vmm, or remove it from [handlers]")]
    Handler {
        /// Name of the handler.
        handler: String,
        /// The reason why its VMM cannot be used.
        #[source]
        source: Box<SetupError>,
    },
}

/// Finds the configured VMM and those of runtime handlers, and checks that they work.
pub async fn detect_all(config: &Config) -> Result<Vmms, SetupError> {
    let usual = detect(&config.vm).await?;
    let mut others = Vec::new();
    for (name, handler) in config.named_vmms() {
        if name.as_str() == usual.info().name {
            continue;
        }
        let vmm = detect(&VmConfig { vmm: name.into(), ..config.vm.clone() }).await;
        others.push(vmm.map_err(|source| SetupError::Handler {
            handler: handler.to_owned(),
            source: Box::new(source),
        })?);
    }
    Ok(Vmms::new(usual, others))
}

/// Finds the configured VMM and checks that it works.
pub async fn detect(config: &VmConfig) -> Result<Arc<dyn Vmm>, SetupError> {
    let accelerator = match (config.vmm, config.accelerator) {
        (VmmChoice::CloudHypervisor, Accelerator::Tcg) => {
            return Err(SetupError::Emulated(cloud_hypervisor::NAME));
        }
        (VmmChoice::Firecracker, Accelerator::Tcg) => return Err(SetupError::Emulated(firecracker::NAME)),
        (VmmChoice::CloudHypervisor | VmmChoice::Firecracker, _) => Accelerator::Kvm,
        (_, accelerator) => accelerator,
    };
    let (accelerator, reason) = accelerator::choose(accelerator).await?;
    let vmm = choose(config, accelerator, reason).await?;
    Ok(Arc::new(ConfiguredVmm { vmm, config: config.clone() }))
}

/// Chooses the VMM for "auto": Cloud Hypervisor if it and KVM work, else QEMU with KVM, else QEMU emulating.
async fn choose(
    config: &VmConfig,
    accelerator: &'static str,
    mut reason: String,
) -> Result<Arc<dyn Vmm>, SetupError> {
    match (config.vmm, accelerator) {
        (VmmChoice::Qemu, _) => {}
        (VmmChoice::CloudHypervisor, _) => return jailed::<CloudHypervisorDriver>(config, reason).await,
        (VmmChoice::Firecracker, _) => return jailed::<FirecrackerDriver>(config, reason).await,
        (VmmChoice::Auto, "kvm") => match CloudHypervisor::new(config, reason.clone()).await {
            Ok(vmm) => return Ok(Arc::new(vmm)),
            Err(unusable) => reason += &format!("; {}", chain(&unusable)),
        },
        (VmmChoice::Auto, _) => reason += "; Cloud Hypervisor needs KVM",
    }
    Ok(Arc::new(Qemu::on(config, accelerator, reason).await))
}

/// Returns the configured jailed VMM.
async fn jailed<D: VmmDriver>(config: &VmConfig, reason: String) -> Result<Arc<dyn Vmm>, SetupError> {
    let vmm = JailedVmm::<D>::new(config, reason).await;
    Ok(Arc::new(vmm.map_err(|source| SetupError::Unusable(D::NAME, source))?))
}

/// The chosen VMM. It also adopts VMs of the other VMMs, because an earlier daemon may have chosen one of them.
#[derive(Debug)]
struct ConfiguredVmm {
    vmm: Arc<dyn Vmm>,
    config: VmConfig,
}

#[async_trait]
impl Vmm for ConfiguredVmm {
    fn info(&self) -> VmmInfo {
        self.vmm.info()
    }

    async fn boot(&self, spec: &VmSpec) -> Result<Arc<dyn Vm>, VmmError> {
        self.vmm.boot(spec).await
    }

    fn opens_taps(&self) -> bool {
        self.vmm.opens_taps()
    }

    fn has_huge_pages(&self) -> bool {
        self.vmm.has_huge_pages()
    }

    fn freezes_interfaces(&self) -> bool {
        self.vmm.freezes_interfaces()
    }

    fn template_inputs(&self, spec: &VmSpec) -> TemplateInputs {
        self.vmm.template_inputs(spec)
    }

    async fn restore(&self, spec: &VmSpec, frozen: &Frozen) -> Result<Arc<dyn Vm>, VmmError> {
        self.vmm.restore(spec, frozen).await
    }

    async fn adopt(&self, record: &VmRecord) -> Result<Option<Arc<dyn Vm>>, VmmError> {
        if record.vmm == self.info().name {
            return self.vmm.adopt(record).await;
        }
        match record.vmm.as_str() {
            cloud_hypervisor::NAME => adopt::<CloudHypervisorDriver>(record, self.config.call_timeout).await,
            firecracker::NAME => adopt::<FirecrackerDriver>(record, self.config.call_timeout).await,
            _ => {
                let qemu = Qemu::on(&self.config, "tcg", "an earlier daemon's choice".into()).await;
                qemu.adopt(record).await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use sandboxer_config::{Handler, VmmName};

    use super::*;

    /// Returns a configuration whose Cloud Hypervisor is a script that prints `says`.
    fn config_of(dir: &tempfile::TempDir, vmm: VmmChoice, says: &str) -> VmConfig {
        let (text, script) = (dir.path().join("text"), dir.path().join("ch"));
        std::fs::write(&text, format!("#!/bin/sh\necho {says}\n")).unwrap();
        // Copied by another process. If the script were open for writing here, a process that another test forks at
        // this moment would inherit the descriptor, and the script could not be executed until that process is gone.
        let install = Command::new("install").args(["-m", "755"]).args([&text, &script]).status();
        assert!(install.unwrap().success());
        VmConfig { vmm, cloud_hypervisor: script, ..Config::default().vm }
    }

    async fn chosen(vmm: VmmChoice, accelerator: &'static str, says: &str) -> Result<VmmInfo, SetupError> {
        let dir = tempfile::tempdir().unwrap();
        let config = config_of(&dir, vmm, says);
        choose(&config, accelerator, "measured".into()).await.map(|vmm| vmm.info())
    }

    #[tokio::test]
    async fn left_the_choice_it_is_cloud_hypervisor_where_that_and_kvm_can_be_used() {
        let info = chosen(VmmChoice::Auto, "kvm", "cloud-hypervisor v53.0").await.unwrap();
        assert_eq!((info.name, info.version.as_str(), info.accelerator), ("cloud-hypervisor", "53.0", "kvm"));
        assert_eq!(info.accelerator_reason, "measured");

        let info = chosen(VmmChoice::Auto, "kvm", "cloud-hypervisor v51.1").await.unwrap();
        assert_eq!((info.name, info.accelerator), ("qemu", "kvm"));
        let why = &info.accelerator_reason;
        assert!(why.starts_with("measured; ") && why.contains("v51.1; supported are v52 to v53"), "{why}");

        let info = chosen(VmmChoice::Auto, "tcg", "cloud-hypervisor v53.0").await.unwrap();
        assert_eq!((info.name, info.accelerator), ("qemu", "tcg"));
        assert_eq!(info.accelerator_reason, "measured; Cloud Hypervisor needs KVM");
    }

    #[tokio::test]
    async fn firecracker_is_taken_only_where_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let config = |says| {
            let config = config_of(&dir, VmmChoice::Firecracker, says);
            VmConfig { firecracker: config.cloud_hypervisor.clone(), ..config }
        };
        let chosen = choose(&config("Firecracker v1.16.1"), "kvm", "measured".into()).await.unwrap().info();
        assert_eq!(
            (chosen.name, chosen.version.as_str(), chosen.accelerator),
            ("firecracker", "1.16.1", "kvm")
        );
        let error = choose(&config("Firecracker v1.13.0"), "kvm", String::new()).await.unwrap_err();
        assert!(
            matches!(error, SetupError::Unusable("firecracker", VersionError::Unsupported { .. })),
            "{error}"
        );
        let emulated = VmConfig { accelerator: Accelerator::Tcg, ..config("Firecracker v1.16.1") };
        assert!(matches!(detect(&emulated).await.unwrap_err(), SetupError::Emulated("firecracker")));
    }

    #[tokio::test]
    async fn a_handler_that_names_a_vmm_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let vm = config_of(&dir, VmmChoice::Qemu, "Firecracker v1.16.1");
        let vm = VmConfig { accelerator: Accelerator::Tcg, ..vm };
        let mut config = Config { vm, ..Config::default() };
        config.handlers.insert("plain".into(), Handler { vmm: Some(VmmName::Qemu), ..Handler::default() });
        let vmms = detect_all(&config).await.unwrap();
        assert_eq!(vmms.keys().count(), 1, "QEMU is there once");
        assert_eq!(vmms.key(Some(VmmName::Qemu)), vmms.key(None));
        assert_eq!(vmms.key(Some(VmmName::Firecracker)), None);
        config
            .handlers
            .insert("fc".into(), Handler { vmm: Some(VmmName::Firecracker), ..Handler::default() });
        let error = sandboxer_base::chain(&detect_all(&config).await.unwrap_err());
        assert!(error.contains("cannot serve runtime handler \"fc\""), "{error}");
        assert!(error.contains("vmm \"firecracker\" needs KVM"), "{error}");
    }

    #[tokio::test]
    async fn what_is_asked_for_is_taken_or_refused() {
        let info = chosen(VmmChoice::Qemu, "kvm", "cloud-hypervisor v53.0").await.unwrap();
        assert_eq!((info.name, info.accelerator_reason.as_str()), ("qemu", "measured"));
        let error = chosen(VmmChoice::CloudHypervisor, "kvm", "something").await.unwrap_err();
        assert!(
            matches!(error, SetupError::Unusable("cloud-hypervisor", VersionError::Foreign { .. })),
            "{error}"
        );
        let dir = tempfile::tempdir().unwrap();
        let emulated = VmConfig {
            accelerator: Accelerator::Tcg,
            ..config_of(&dir, VmmChoice::CloudHypervisor, "cloud-hypervisor v53.0")
        };
        assert!(matches!(detect(&emulated).await.unwrap_err(), SetupError::Emulated("cloud-hypervisor")));
    }
}
