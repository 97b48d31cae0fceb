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

use super::convert::id;
use crate::{
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

/// Name of containerd's directory of bundles, which has one directory for each namespace.
const TASKS: &str = "io.containerd.runtime.v2.task";

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
    /// A container that is a pod by itself: no pod of CRI has it.
    Alone,
}

/// The fields of `config.json` that are read here.
#[derive(Debug, Deserialize)]
struct Annotated {
    #[serde(default)]
    annotations: Option<HashMap<String, String>>,
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
    let annotations = config.annotations.unwrap_or_default();
    if annotations.keys().any(|name| name.starts_with(OF_CRI_O)) {
        return Err(invalid(format!(
            "its annotations {OF_CRI_O}* are CRI-O's, which is not supported: use containerd"
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
