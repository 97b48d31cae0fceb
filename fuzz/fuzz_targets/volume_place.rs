//! Paths of mounts: what a pod's author can write comes after the pod's own directory. The first line is that; the second, a
//! path of the host. Whatever is written there, a volume is exactly where kubelet makes one.
#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use sandboxer_host::fuzzing::{Kubelet, Place, Plugin};

const UID: &str = "0f6a1111-2222";
const POD: &str = "/var/lib/kubelet/pods/0f6a1111-2222";

fuzz_target!(|text: &str| {
    let kubelet = Kubelet { root: "/var/lib/kubelet".into(), uid: UID.into() };
    let mut lines = text.lines();
    let (suffix, elsewhere) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());

    let path = format!("{POD}/{suffix}");
    if let Some(own) = kubelet.split(Path::new(&path)) {
        assert_eq!(own.pod, Path::new(POD), "{path:?}");
        assert!(own.is_configured);
        let below = own.path();
        assert!(below.components().all(|part| matches!(part, Component::Normal(_))));
        match own.place() {
            Place::Volume { plugin, root } => {
                assert!(root.components().count() == 3 && root.starts_with("volumes"), "{path:?}");
                assert!(below.starts_with(&root));
                // What the daemon reads or makes a disk in is a whole volume, never a part of one.
                assert!(plugin == Plugin::Other || below == root, "{path:?}");
            }
            Place::SubPath { .. } => {
                assert!(below.starts_with("volume-subpaths") && below.components().count() == 4)
            }
            Place::ContainerFile => {
                assert!(below.starts_with("containers") && below.components().count() == 3)
            }
            Place::Unknown => {}
        }
    }
    let path = format!("/{elsewhere}");
    if let Some(own) = kubelet.split(Path::new(&path)) {
        // The first directory of that name: everything before it is the host's.
        assert!(own.pod.ends_with(Path::new("pods").join(UID)), "{path:?}");
        let before = own.pod.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
        assert!(kubelet.split(before).is_none(), "{path:?}");
    }
});
