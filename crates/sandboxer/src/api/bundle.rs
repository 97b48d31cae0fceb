//! What containerd and the launcher write into a container's bundle about its pod.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

use oci_spec::runtime::{LinuxResources, Spec};
use sandboxer_protocol::id::{ContainerId, SandboxId};
use serde::{Deserialize, de::DeserializeOwned};

use super::{convert::id, cri_o};
use crate::{
    containerd::{LAUNCHED, launched_by},
    error::PodError,
    pod::container::spec::{MAX_SPEC, too_large},
};

/// CRI's annotations on a container.
const CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
const SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
/// Prefix of the annotations of CRI-O.
const OF_CRI_O: &str = "io.kubernetes.cri-o.";
/// Value of [`CONTAINER_TYPE`] for the container that stands for its pod.
const SANDBOX: &str = "sandbox";
/// Value of CRI-O's annotation for a container of a pod.
const CONTAINER: &str = "container";

/// Name of containerd's directory of bundles, which has one directory for each namespace.
const TASKS: &str = "io.containerd.runtime.v2.task";

/// The purpose of a bundle.
#[derive(Debug, PartialEq, Eq)]
pub enum Bundle {
    /// A container of this pod.
    Container(SandboxId),
    /// The sandbox container of a pod, from a containerd without a sandbox controller: the pod itself.
    Sandbox,
    /// A container of this pod, as its annotations of CRI-O say, which the pod's author can replace: see
    /// [`cri_o::check_pod`].
    ContainerOfCriO(SandboxId),
    /// The sandbox container of a pod of CRI-O: the pod itself.
    SandboxOfCriO,
    /// A container that is a pod by itself: no pod of CRI has it.
    Alone,
}

/// The fields of `config.json` that are read here.
#[derive(Debug, Deserialize)]
struct Annotated {
    #[serde(default)]
    annotations: Option<HashMap<String, String>>,
}

/// Returns the purpose of the bundle of `container`. containerd 2.x writes the pod's id into a file; CRI and CRI-O write
/// it into the annotations, each into its own.
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
    let annotations = config.annotations.unwrap_or_default();
    // By the launcher's file: pods' authors set annotations.
    if is_of_cri_o(bundle) {
        let kind = annotations.get(cri_o::CONTAINER_TYPE).map_or("", String::as_str);
        let pod = annotations.get(cri_o::SANDBOX_ID).map_or("", String::as_str);
        return match kind {
            SANDBOX if pod == container.as_str() => Ok(Bundle::SandboxOfCriO),
            CONTAINER if !pod.is_empty() => id("sandbox id", pod).map(Bundle::ContainerOfCriO),
            _ => Err(invalid(format!(
                "its annotations {:?}: {kind:?} and {:?}: {pod:?} are not what CRI-O writes; the pod may set neither",
                cri_o::CONTAINER_TYPE,
                cri_o::SANDBOX_ID,
            ))),
        };
    }
    if annotations.keys().any(|name| name.starts_with(OF_CRI_O)) {
        return Err(invalid(format!(
            "its annotations {OF_CRI_O}* are CRI-O's, which has not started it: install the daemon's version of the launcher"
        )));
    }
    match (annotations.get(CONTAINER_TYPE).map(String::as_str), annotations.get(SANDBOX_ID)) {
        (Some(SANDBOX), _) => Ok(Bundle::Sandbox),
        (_, Some(pod)) if !pod.is_empty() => id("sandbox id", pod).map(Bundle::Container),
        (None | Some(""), _) => Ok(Bundle::Alone),
        (Some(_), _) => Err(invalid(format!(
            "its annotation {CONTAINER_TYPE:?} makes it a container of a pod, and {SANDBOX_ID:?} does not say of which"
        ))),
    }
}

/// Returns the specification of a container.
pub fn spec(container: &ContainerId, bundle: &Path) -> Result<Spec, PodError> {
    let path = bundle.join("config.json");
    json(&path, MAX_SPEC).map_err(|error| PodError::Invalid {
        subject: format!("container {container}"),
        reason: format!("cannot read {path:?}: {error}"),
    })
}

/// Returns the namespace of containerd to which a bundle belongs, by the layout of containerd's directories; `None`: the
/// bundle is elsewhere.
pub fn namespace(bundle: &Path) -> Option<&str> {
    let dir = bundle.parent()?;
    (dir.parent()?.file_name()? == TASKS).then(|| dir.file_name()?.to_str())?
}

/// Returns whether CRI-O had the launcher start the container with this bundle.
pub fn is_of_cri_o(bundle: &Path) -> bool {
    launched_by(bundle).is_ok_and(|containerd| containerd.as_os_str().is_empty())
}

/// Returns the socket of the containerd that had the launcher start this sandbox container.
pub fn containerd(container: &ContainerId, bundle: &Path) -> Result<PathBuf, PodError> {
    launched_by(bundle).map_err(|error| PodError::Invalid {
        subject: format!("sandbox container {container}"),
        reason: format!(
            "cannot read {:?}, which the launcher writes: {error}; install the daemon's version of \
             containerd-shim-sandboxer-v1",
            bundle.join(LAUNCHED)
        ),
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
    fn cri_o_is_known_by_the_launchers_file_and_its_own_annotations() {
        let annotated = |kind: &str, pod: &str, launched: &str| {
            let config = serde_json::json!({"ociVersion": "1.0.2", "annotations":
                {cri_o::CONTAINER_TYPE: kind, cri_o::SANDBOX_ID: pod, CONTAINER_TYPE: "container", SANDBOX_ID: "p2"}});
            let launched = serde_json::json!({"containerd": launched}).to_string();
            bundle(&[("config.json", &config.to_string()), (LAUNCHED, &launched)])
        };
        assert_eq!(annotated("container", "p1", "").unwrap(), Bundle::ContainerOfCriO("p1".parse().unwrap()));
        assert_eq!(annotated("sandbox", "c1", "").unwrap(), Bundle::SandboxOfCriO);
        for (kind, pod) in [("sandbox", "p1"), ("container", ""), ("", "p1")] {
            let error = annotated(kind, pod, "").unwrap_err().to_string();
            assert!(error.contains("the pod may set neither"), "{error}");
        }
        let error = annotated("sandbox", "c1", "/run/containerd/containerd.sock").unwrap_err().to_string();
        assert!(error.contains("has not started it"), "{error}");
    }

    #[test]
    fn a_container_without_annotations_is_a_pod_by_itself() {
        for config in [
            r#"{"ociVersion":"1.0.2"}"#,
            r#"{"annotations":null}"#,
            r#"{"annotations":{"io.sandboxer.vcpus":"2"}}"#,
        ] {
            assert_eq!(bundle(&[("config.json", config)]).unwrap(), Bundle::Alone, "{config}");
        }
        let bundle = Path::new("/run/x/io.containerd.runtime.v2.task/moby/c1");
        assert_eq!((namespace(bundle), namespace(Path::new("/tmp/moby/c1"))), (Some("moby"), None));
    }

    #[test]
    fn containers_that_cannot_be_assigned_are_refused_by_name() {
        for (files, says) in [
            (&[][..], "cannot read"),
            (&[("config.json", "{")], "cannot read"),
            (
                &[("config.json", r#"{"annotations":{"io.kubernetes.cri.container-type":"container"}}"#)],
                "does not say of which",
            ),
            (&[("config.json", r#"{"annotations":{"io.kubernetes.cri-o.ContainerID":"x"}}"#)], "CRI-O's"),
            (&[("sandbox", "../x")], "sandbox id is invalid"),
        ] {
            let error = bundle(files).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
