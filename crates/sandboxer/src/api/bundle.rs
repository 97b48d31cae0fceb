//! What containerd and the launcher write into a container's bundle about its pod.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use oci_spec::runtime::LinuxResources;
use sandboxer_protocol::id::{ContainerId, SandboxId};
use serde::{Deserialize, de::DeserializeOwned};

use super::convert::id;
use crate::{
    error::PodError,
    pod::container::spec::{MAX_SPEC, too_large},
};

/// CRI's annotations on a container.
const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
/// Value of [`CONTAINER_TYPE`] for the container that stands for its pod.
const SANDBOX: &str = "sandbox";

/// Name of the launcher's file in a bundle.
const LAUNCHED: &str = "sandboxer.json";
/// Maximum size of the launcher's file, bytes.
const MAX_LAUNCHED: u64 = 4096;

/// The purpose of a bundle.
#[derive(Debug, PartialEq, Eq)]
pub enum Bundle {
    /// A container of this pod.
    Container(SandboxId),
    /// The sandbox container of a pod, from a containerd without a sandbox controller: the pod itself.
    Sandbox,
}

/// The fields of `config.json` that are read here.
#[derive(Debug, Deserialize)]
struct Annotated {
    #[serde(default)]
    annotations: Option<Annotations>,
}

#[derive(Debug, Deserialize)]
struct Annotations {
    #[serde(rename = "io.kubernetes.cri.container-type", default)]
    container_type: String,
    #[serde(rename = "io.kubernetes.cri.sandbox-id", default)]
    sandbox_id: String,
}

/// Returns the purpose of the bundle of `container`. containerd 2.x writes the pod's id into a file; CRI writes it into
/// the annotations.
pub fn read(container: &ContainerId, bundle: &Path) -> Result<Bundle, PodError> {
    let invalid = |reason: String| PodError::Invalid { subject: format!("container {container}"), reason };
    if let Ok(text) = fs::read_to_string(bundle.join("sandbox"))
        && text.trim() != container.as_str()
    {
        return id("sandbox id", text.trim()).map(Bundle::Container);
    }
    let path = bundle.join("config.json");
    if let Ok(length) = fs::metadata(&path).map(|metadata| metadata.len())
        && length > MAX_SPEC
    {
        return Err(too_large(container, length));
    }
    let config: Annotated =
        json(&path, MAX_SPEC).map_err(|error| invalid(format!("cannot read {path:?}: {error}")))?;
    match config.annotations {
        Some(found) if found.container_type == SANDBOX => Ok(Bundle::Sandbox),
        Some(found) if !found.sandbox_id.is_empty() => {
            id("sandbox id", &found.sandbox_id).map(Bundle::Container)
        }
        _ => Err(invalid(format!(
            "its annotations have neither {CONTAINER_TYPE:?} = {SANDBOX:?} nor {SANDBOX_ID:?}: only containers of CRI \
             have a pod (crictl, kubelet)"
        ))),
    }
}

/// Returns the socket of the containerd that had the launcher start this sandbox container.
pub fn containerd(container: &ContainerId, bundle: &Path) -> Result<PathBuf, PodError> {
    #[derive(Deserialize)]
    struct Launched {
        containerd: PathBuf,
    }
    let path = bundle.join(LAUNCHED);
    json::<Launched>(&path, MAX_LAUNCHED).map(|launched| launched.containerd).map_err(|error| {
        PodError::Invalid {
            subject: format!("sandbox container {container}"),
            reason: format!(
                "cannot read {path:?}, which the launcher writes: {error}; install the daemon's version of \
                 containerd-shim-sandboxer-v1"
            ),
        }
    })
}

/// Returns the sysctls in the specification of a pod's sandbox container: those CRI requests and those containerd adds.
pub fn sysctls(bundle: &Path) -> BTreeMap<String, String> {
    #[derive(Default, Deserialize)]
    struct Spec {
        #[serde(default)]
        linux: Linux,
    }
    #[derive(Default, Deserialize)]
    struct Linux {
        #[serde(default)]
        sysctl: BTreeMap<String, String>,
    }
    json::<Spec>(&bundle.join("config.json"), MAX_SPEC).unwrap_or_default().linux.sysctl
}

/// Returns the resources in the specification of a container.
pub fn resources(bundle: &Path) -> Option<LinuxResources> {
    #[derive(Deserialize)]
    struct Spec {
        linux: Linux,
    }
    #[derive(Deserialize)]
    struct Linux {
        resources: LinuxResources,
    }
    Some(json::<Spec>(&bundle.join("config.json"), MAX_SPEC).ok()?.linux.resources)
}

fn json<T: DeserializeOwned>(path: &Path, most: u64) -> io::Result<T> {
    let mut text = Vec::new();
    let read = fs::File::open(path)?.take(most + 1).read_to_end(&mut text)?;
    if read as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {most} bytes")));
    }
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle(files: &[(&str, &str)]) -> Result<Bundle, PodError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        read(&"c1".parse().unwrap(), dir.path())
    }

    #[test]
    fn the_pod_is_named_by_a_file_or_by_annotations() {
        let of = |pod: &str| Bundle::Container(pod.parse().unwrap());
        assert_eq!(bundle(&[("sandbox", "p1\n")]).unwrap(), of("p1"));
        let annotated = |kind: &str, pod: &str| {
            let config = serde_json::json!({"ociVersion": "1.0.2", "annotations":
                {CONTAINER_TYPE: kind, SANDBOX_ID: pod, "a": "b"}});
            bundle(&[("config.json", &config.to_string())])
        };
        assert_eq!(annotated("container", "p1").unwrap(), of("p1"));
        assert_eq!(annotated("sandbox", "c1").unwrap(), Bundle::Sandbox);
        let own = [
            ("sandbox", "c1"),
            ("config.json", r#"{"annotations":{"io.kubernetes.cri.container-type":"sandbox"}}"#),
        ];
        assert_eq!(bundle(&own).unwrap(), Bundle::Sandbox);
    }

    #[test]
    fn containers_that_no_pod_has_are_refused_by_name() {
        for (files, says) in [
            (&[][..], "cannot read"),
            (&[("config.json", "{")], "cannot read"),
            (&[("config.json", r#"{"ociVersion":"1.0.2"}"#)], "only containers of CRI have a pod"),
            (&[("sandbox", "../x")], "sandbox id is invalid"),
        ] {
            let error = bundle(files).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
