//! Errors of a pod's network set-up.

use std::{fmt, io, path::PathBuf};

use sandboxer_base::Code;
use sandboxer_protocol::id::SandboxId;

use super::interface::Unsuitable;

/// Why a pod's network cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A step failed.
    #[error("network namespace {netns:?} of pod {pod}: cannot {step}")]
    Step {
        /// The pod.
        pod: SandboxId,
        /// The path of the pod's network namespace.
        netns: PathBuf,
        /// The step, and its device.
        step: Step,
        /// The system's error.
        source: io::Error,
    },
    /// The namespace has packet filters, which would not apply to the guest.
    #[error(
        "network namespace {netns:?} of pod {pod} has {rules}, which the guest's packets would bypass: put them into the \
         guest (a mesh's init container does), or set network.foreign_rules to \"ignore\""
    )]
    ForeignRules {
        /// The pod.
        pod: SandboxId,
        /// The path of the pod's network namespace.
        netns: PathBuf,
        /// The filters, such as "rules of iptables, table nat".
        rules: String,
    },
    /// The namespace has a configuration that a VM cannot have.
    #[error("network namespace {netns:?} of pod {pod} {source}")]
    Unsuitable {
        /// The pod.
        pod: SandboxId,
        /// The path of the pod's network namespace.
        netns: PathBuf,
        /// The unsuitable configuration.
        source: Unsuitable,
    },
}

impl NetworkError {
    /// Returns the gRPC code of the response.
    pub fn code(&self) -> Code {
        match self {
            Self::Step { .. } => Code::Internal,
            Self::ForeignRules { .. } | Self::Unsuitable { .. } => Code::Unimplemented,
        }
    }
}

/// A step of setting up a pod's network; completes "cannot …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The action, such as "create tap" or "list routes".
    pub action: &'static str,
    /// The device, if the step has one.
    pub device: Option<String>,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device {
            Some(device) => write!(f, "{} {device:?}", self.action),
            None => f.write_str(self.action),
        }
    }
}

/// A failed step, before the pod is known.
#[derive(Debug)]
pub(super) struct Failed {
    pub step: Step,
    pub source: io::Error,
}

/// An error without a step occurred when the namespace was entered.
impl From<io::Error> for Failed {
    fn from(source: io::Error) -> Self {
        Self { step: Step { action: "enter it", device: None }, source }
    }
}

/// Adds the step to an error.
pub(super) trait At<T> {
    /// Adds a step with a device.
    fn at(self, action: &'static str, device: &str) -> Result<T, Failed>;
    /// Adds a step without a device.
    fn at_step(self, action: &'static str) -> Result<T, Failed>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, device: &str) -> Result<T, Failed> {
        self.map_err(|source| Failed { step: Step { action, device: Some(device.to_owned()) }, source })
    }

    fn at_step(self, action: &'static str) -> Result<T, Failed> {
        self.map_err(|source| Failed { step: Step { action, device: None }, source })
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_base::chain;

    use super::*;

    #[test]
    fn an_error_names_step_device_namespace_and_pod() {
        let failed =
            Err::<(), _>(io::Error::from_raw_os_error(libc::EBUSY)).at("bring up", "sbx-2").unwrap_err();
        let error = NetworkError::Step {
            pod: "p1".parse().unwrap(),
            netns: "/run/netns/n1".into(),
            step: failed.step,
            source: failed.source,
        };
        assert_eq!(
            chain(&error),
            "network namespace \"/run/netns/n1\" of pod p1: cannot bring up \"sbx-2\": Device or resource busy (os error 16)"
        );
    }
}
