//! Volumes of kubelet, and their updates while a pod runs.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cases;
use crate::node::eventually;
use crate::pods::{PATIENCE, Pod, Run, WAIT, container, merged};

cases![files_and_their_updates, empty_dirs, small_empty_dirs, host_path, persistent_volume];

fn becomes(pod: &Pod<'_>, file: &str, wanted: &str) -> Result<String> {
    let mut last = String::new();
    let found = eventually(file, PATIENCE, || {
        last = pod.exec("c", &format!("cat {file}"))?;
        Ok((last == wanted).then(|| last.clone()))
    });
    Ok(found.unwrap_or(last))
}

fn files_and_their_updates(run: &Run<'_>) -> Result<()> {
    run.create("configmaps", "", json!({ "data": { "key": "one", "other": "same" } }))?;
    run.create("secrets", "", json!({ "stringData": { "key": "hush" } }))?;
    let name = run.name("");
    let projected = json!({ "sources": [
        { "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } },
        { "configMap": { "name": name, "items": [{ "key": "other", "path": "deep/other" }] } },
    ] });
    let fields =
        json!({ "items": [{ "path": "note", "fieldRef": { "fieldPath": "metadata.annotations['note']" } }] });
    let mount = |name: &str| json!({ "name": name, "mountPath": format!("/v/{name}"), "readOnly": true });
    let reader = merged(
        container("c", WAIT),
        json!({
            "volumeMounts": [mount("map"), mount("secret"), mount("all"), mount("fields"),
                { "name": "map", "mountPath": "/v/one-file", "subPath": "key" }],
            "env": [{ "name": "FROM_MAP", "valueFrom": { "configMapKeyRef": { "name": name, "key": "key" } } }],
        }),
    );
    let pod = run.pod(
        "",
        json!({ "containers": [reader], "volumes": [
            { "name": "map", "configMap": { "name": name } },
            { "name": "secret", "secret": { "secretName": name, "defaultMode": 0o400 } },
            { "name": "all", "projected": projected },
            { "name": "fields", "downwardAPI": fields },
        ] }),
    )?;
    pod.ready()?;
    run.see("map", pod.exec("c", "cat /v/map/key")?, "one");
    run.see("environment", pod.exec("c", "echo $FROM_MAP")?, "one");
    run.see(
        "secret and its mode",
        pod.exec("c", "cat /v/secret/key; stat -L -c %a /v/secret/key")?,
        "hush400",
    );
    run.see("parts of the token", pod.exec("c", "tr -cd . </v/all/token | wc -c")?, 2);
    run.see("projected path", pod.exec("c", "cat /v/all/deep/other")?, "same");
    run.see("read-only", pod.exec("c", "touch /v/map/x 2>&1 || true")?.contains("Read-only"), true);

    run.patch("configmaps", "", &json!({ "data": { "key": "two" } }))?;
    run.patch("secrets", "", &json!({ "stringData": { "key": "loud" } }))?;
    run.patch("pods", "", &json!({ "metadata": { "annotations": { "note": "noted" } } }))?;
    run.see("updated map", becomes(&pod, "/v/map/key", "two")?, "two");
    run.see("updated secret", becomes(&pod, "/v/secret/key", "loud")?, "loud");
    run.see("updated field", becomes(&pod, "/v/fields/note", "noted")?, "noted");
    run.see("a subPath stays", pod.exec("c", "cat /v/one-file")?, "one");
    Ok(())
}

fn empty_dirs(run: &Run<'_>) -> Result<()> {
    let mounts = json!({ "volumeMounts": [
        { "name": "disk", "mountPath": "/disk" },
        { "name": "memory", "mountPath": "/memory" },
        { "name": "disk", "mountPath": "/part", "subPath": "part" },
    ] });
    let containers: Vec<Value> = ["a", "b"].map(|name| merged(container(name, WAIT), mounts.clone())).into();
    let pod = run.pod(
        "",
        json!({ "containers": containers, "securityContext": { "fsGroup": 2000 }, "volumes": [
            { "name": "disk", "emptyDir": {} },
            { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "16Mi" } },
        ] }),
    )?;
    pod.ready()?;
    pod.exec("a", "echo x >/disk/f; echo y >/memory/f; echo z >/part/f")?;
    run.see("seen by the other", pod.exec("b", "cat /disk/f /memory/f /part/f /disk/part/f")?, "x\ny\nz\nz");
    run.see("group", pod.exec("a", "stat -c %g /disk /memory /disk/f")?, "2000\n2000\n2000");
    run.see("kind of the one in memory", pod.exec("a", "stat -f -c %T /memory")?, "tmpfs");
    let size = pod.exec("a", "df -k /memory | tail -n 1 | awk '{ print $2 }'")?;
    run.see("size of the one in memory, KiB", size, 16384);
    Ok(())
}

/// kubelet measures every 10 s or less often: an empty volume is never more than its limit, a full one is.
fn small_empty_dirs(run: &Run<'_>) -> Result<()> {
    let small = |suffix: &str, script: &str| {
        let mounts = json!({ "volumeMounts": [{ "name": "v", "mountPath": "/v" }] });
        let volume = json!({ "name": "v", "emptyDir": { "sizeLimit": "1Mi" } });
        let containers = json!([merged(container("c", script), mounts)]);
        run.pod(suffix, json!({ "containers": containers, "volumes": [volume] }))
    };
    let empty = small("", WAIT)?;
    empty.ready()?;
    let full = small("full", &format!("head -c 8388608 /dev/zero >/v/x; sync; {WAIT}"))?;
    let evicted = eventually("eviction", PATIENCE, || Ok(full.is_evicted()?.then_some(())));
    run.see("a full one of 1 MiB", if evicted.is_ok() { "evicted" } else { "stays" }, "evicted");
    run.see("an empty one of 1 MiB", if empty.is_evicted()? { "evicted" } else { "stays" }, "stays");
    Ok(())
}

fn host_path(run: &Run<'_>) -> Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("from-host"), "host")?;
    let writer =
        merged(container("c", WAIT), json!({ "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }));
    let volume = json!({ "name": "v", "hostPath": { "path": dir.path(), "type": "Directory" } });
    let pod = run.pod("", json!({ "containers": [writer], "volumes": [volume] }))?;
    pod.ready()?;
    run.see("from the host", pod.exec("c", "cat /v/from-host; echo pod >/v/from-pod")?, "host");
    let written = std::fs::read_to_string(dir.path().join("from-pod")).context("a file from the pod")?;
    run.see("from the pod", written.trim(), "pod");
    Ok(())
}

/// A local volume, bound by hand: there is no controller that does it.
fn persistent_volume(run: &Run<'_>) -> Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("from-host"), "host")?;
    let name = run.name("");
    let node = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node1"] });
    let terms = json!({ "nodeSelectorTerms": [{ "matchExpressions": [node] }] });
    let common = json!({ "storageClassName": "by-hand", "accessModes": ["ReadWriteOnce"] });
    let claim = merged(
        common.clone(),
        json!({ "volumeName": name, "resources": { "requests": { "storage": "1Mi" } } }),
    );
    let claim = run.create("persistentvolumeclaims", "", json!({ "spec": claim }))?;
    let volume = json!({
        "capacity": { "storage": "1Mi" }, "local": { "path": dir.path() }, "nodeAffinity": { "required": terms },
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": { "namespace": "default", "name": name, "uid": claim["metadata"]["uid"] },
    });
    run.create_for_all("persistentvolumes", "", json!({ "spec": merged(common, volume) }))?;
    run.patch("persistentvolumeclaims", "", &json!({ "metadata": { "finalizers": null } }))?;
    // Without a capacity kubelet would resize the volume first.
    let bound =
        json!({ "phase": "Bound", "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"] });
    run.patch_status("persistentvolumeclaims", "", &json!({ "status": bound }))?;

    let mounts = json!({ "volumeMounts": [{ "name": "v", "mountPath": "/v" }] });
    let volume = json!({ "name": "v", "persistentVolumeClaim": { "claimName": name } });
    let spec = json!({ "containers": [merged(container("c", WAIT), mounts)], "volumes": [volume] });
    let first = run.pod("first", spec.clone())?;
    first.ready()?;
    run.see("from the host", first.exec("c", "cat /v/from-host; echo pod >/v/from-pod")?, "host");
    let written = std::fs::read_to_string(dir.path().join("from-pod")).context("a file from the pod")?;
    run.see("from the pod", written.trim(), "pod");
    first.delete()?;
    let second = run.pod("second", spec)?;
    second.ready()?;
    run.see("what the first pod wrote", second.exec("c", "cat /v/from-pod")?, "pod");
    // The directory is removed with this case, so no pod may still have it.
    second.delete()?;
    Ok(())
}
