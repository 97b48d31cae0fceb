//! Limits, what happens beyond them, their change while a pod runs, and statistics.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cases;
use crate::node::{eventually, pause};
use crate::pods::{
    PATIENCE, Pod, Run, WAIT, condition, container, container_status, end_of, is_ready, merged,
};

cases![
    limits,
    out_of_memory,
    busy_empty_dir_in_memory,
    resized,
    resized_beyond_the_vm,
    statistics,
    ephemeral_storage_limit
];

/// Prints limits of memory in bytes and of CPU in µs per 100 ms, from either version of control groups.
const READ_LIMITS: &str = "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; \
                           cut -d' ' -f1 /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us";

fn limited(memory: &str, cpu: &str) -> Value {
    json!({ "resources": {
        "limits": { "memory": memory, "cpu": cpu }, "requests": { "memory": "16Mi", "cpu": "10m" },
    } })
}

fn limits(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", merged(container("c", WAIT), limited("64Mi", "500m")))?;
    run.see("limits inside", pod.exec("c", READ_LIMITS)?, format!("{}\n50000", 64 << 20));
    let allocated = container_status(&pod.get()?["status"], "c")["resources"]["limits"].clone();
    run.see("limits in the status", allocated, json!({ "cpu": "500m", "memory": "64Mi" }));
    Ok(())
}

fn out_of_memory(run: &Run<'_>) -> Result<()> {
    let hungry = merged(container("c", "exec tail /dev/zero"), limited("32Mi", "500m"));
    let other = merged(container("other", WAIT), limited("32Mi", "500m"));
    let pod = run.pod("", json!({ "restartPolicy": "Never", "containers": [hungry, other] }))?;
    let end = pod.wait("the end of the hungry one", |status| {
        let state = &container_status(status, "c")["state"];
        state.get("terminated").map(|_| end_of(state))
    })?;
    run.see("end", end, "OOMKilled/137");
    run.see(
        "the other one runs",
        container_status(&pod.get()?["status"], "other")["state"].get("running").is_some(),
        true,
    );
    Ok(())
}

/// Files in memory count as their container's memory. Within its limit nothing may end the pod, on the host neither.
fn busy_empty_dir_in_memory(run: &Run<'_>) -> Result<()> {
    let mounts = json!({ "volumeMounts": [{ "name": "v", "mountPath": "/v" }] });
    let writer = merged(merged(container("c", WAIT), limited("200Mi", "1")), mounts);
    let volume = json!({ "name": "v", "emptyDir": { "medium": "Memory" } });
    let pod = run.pod("", json!({ "containers": [writer], "volumes": [volume] }))?;
    pod.ready()?;
    for round in 1..=3 {
        let script = "head -c 188743680 /dev/urandom >/v/file && wc -c </v/file";
        run.see(&format!("bytes written, {round}"), pod.exec("c", script)?, 188_743_680);
    }
    pause(Duration::from_secs(10));
    let status = pod.get()?["status"].clone();
    run.see("restarts", &container_status(&status, "c")["restartCount"], 0);
    run.see("Ready", is_ready(&status), true);
    run.see("the file stays", pod.exec("c", "wc -c </v/file")?, 188_743_680);
    Ok(())
}

fn resize(pod: &Pod<'_>, memory: &str, cpu: &str) -> Result<()> {
    let to = merged(json!({ "name": "c" }), limited(memory, cpu));
    pod.patch("resize", &json!({ "spec": { "containers": [to] } })).map(drop)
}

fn limits_become(pod: &Pod<'_>, wanted: &str) -> Result<String> {
    let mut last = String::new();
    let found = eventually("limits", Duration::from_secs(30), || {
        last = pod.exec("c", READ_LIMITS)?;
        Ok((last == wanted).then(|| last.clone()))
    });
    Ok(found.unwrap_or(last))
}

fn resized(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", merged(container("c", WAIT), limited("64Mi", "200m")))?;
    for (what, memory, cpu, wanted) in [
        ("up", "128Mi", "400m", format!("{}\n40000", 128 << 20)),
        ("down", "96Mi", "300m", format!("{}\n30000", 96 << 20)),
    ] {
        resize(&pod, memory, cpu)?;
        run.see(&format!("limits inside, {what}"), limits_become(&pod, &wanted)?, &wanted);
        let status = pod.wait("its status", |status| {
            (container_status(status, "c")["resources"]["limits"]["memory"] == memory).then(|| status.clone())
        });
        run.see(&format!("limits in the status, {what}"), status.is_ok(), true);
        let settled = pod.wait("no resize in progress", |status| {
            (condition(status, "PodResizeInProgress") == "absent").then_some(())
        });
        run.see(&format!("it is over, {what}"), settled.is_ok(), true);
    }
    run.see("restarts", &container_status(&pod.get()?["status"], "c")["restartCount"], 0);
    Ok(())
}

/// A VM keeps its size: more memory than it has is refused, also of a container that is restarted; less is not.
fn resized_beyond_the_vm(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", merged(container("c", WAIT), limited("64Mi", "200m")))?;
    resize(&pod, "2Gi", "200m")?;
    let wanted = format!("{}\n20000", 2_u64 << 30);
    let refused = || -> Result<bool> {
        let status = pod.get()?["status"].clone();
        let all = status["conditions"].as_array().cloned().unwrap_or_default();
        Ok(all.iter().any(|each| each["type"] == "PodResizeInProgress" && each["reason"] == "Error"))
    };
    // Which of the two comes first is the answer.
    let outcome = |what: &str| -> Result<&'static str> {
        eventually(what, PATIENCE, || {
            if refused()? {
                return Ok(Some("refused"));
            }
            Ok((pod.exec("c", READ_LIMITS)? == wanted).then_some("resized"))
        })
    };
    run.see("resize", outcome("an answer")?, "resized");
    pod.kubectl("exec", &["-c", "c", "--", "kill", "1"])?;
    // Again, which of the two comes first is the answer.
    let restarted = pod.wait("a restart", |status| {
        let c = container_status(status, "c");
        let waiting = c["state"]["waiting"]["message"].as_str().unwrap_or_default();
        if waiting.contains("restart the pod with limits of that size") {
            return Some("refused, with what to do");
        }
        let is_running = c["restartCount"].as_u64() >= Some(1) && c["state"].get("running").is_some();
        is_running.then_some("restarted")
    })?;
    run.see("restart of its container", restarted, "restarted");
    resize(&pod, "96Mi", "200m")?;
    pod.ready()?;
    let wanted = format!("{}\n20000", 96 << 20);
    run.see("limits inside after a resize within the VM", limits_become(&pod, &wanted)?, &wanted);
    Ok(())
}

/// Memory and disk of known sizes are in kubelet's statistics.
fn statistics(run: &Run<'_>) -> Result<()> {
    let script = format!(
        "head -c 33554432 /dev/zero >/dev/shm/x; head -c 16777216 /dev/zero >/root/y; head -c 8388608 /dev/zero >/v/z; \
         sync; echo some output; touch /tmp/done; (while :; do :; done) & {WAIT}"
    );
    let busy = merged(
        container("c", &script),
        merged(
            limited("128Mi", "200m"),
            json!({
                "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
                "readinessProbe": { "exec": { "command": ["test", "-e", "/tmp/done"] }, "periodSeconds": 1, "timeoutSeconds": 20 },
            }),
        ),
    );
    let idle = container("idle", WAIT);
    let volume = json!({ "name": "v", "emptyDir": {} });
    let pod = run.pod("", json!({ "containers": [busy, idle], "volumes": [volume] }))?;
    pod.ready()?;
    // Some of them are a minute's; those of the container's disk and of the pod come later than those of memory.
    let mut last = Value::Null;
    let enough = |entry: &Value| {
        let c = container_of(entry, "c");
        mib(&c["memory"]["workingSetBytes"]) >= 30
            && mib(&entry["memory"]["workingSetBytes"]) >= 30
            && entry["cpu"]["usageNanoCores"].as_u64().is_some_and(|cores| cores > 30_000_000)
            && mib(&c["rootfs"]["usedBytes"]) >= 15
            && c["cpu"]["usageNanoCores"].as_u64().is_some_and(|cores| cores > 30_000_000)
            && entry["volume"][0]["usedBytes"].as_u64().is_some_and(|bytes| bytes >= 8 << 20)
    };
    let _ = eventually("statistics", Duration::from_secs(90), || {
        let (entry, _) = run.node.summary(&pod.name)?;
        let entry = entry.unwrap_or_default();
        let done = enough(&entry).then_some(());
        last = entry;
        if done.is_none() {
            pause(Duration::from_secs(2));
        }
        Ok(done)
    });
    let (c, idle) = (container_of(&last, "c"), container_of(&last, "idle"));
    run.see("containers", last["containers"].as_array().map_or(0, Vec::len), 2);
    within(run, "memory of the container, MiB", mib(&c["memory"]["workingSetBytes"]), 30, 128);
    within(run, "memory of the idle one, MiB", mib(&idle["memory"]["workingSetBytes"]), 0, 8);
    within(run, "memory of the pod, MiB", mib(&last["memory"]["workingSetBytes"]), 30, 320);
    let cores = |value: &Value| value["cpu"]["usageNanoCores"].as_u64().map_or(0, |nano| nano / 1_000_000);
    within(run, "CPU of the container, millicores", cores(&c), 30, 260);
    within(run, "CPU of the idle one, millicores", cores(&idle), 0, 20);
    // Emulated guests have work of their own.
    within(run, "CPU of the pod, millicores", cores(&last), 30, 1000);
    within(run, "root file system of the container, MiB", mib(&c["rootfs"]["usedBytes"]), 15, 24);
    within(run, "root file system of the idle one, MiB", mib(&idle["rootfs"]["usedBytes"]), 0, 4);
    within(run, "volume, MiB", mib(&last["volume"][0]["usedBytes"]), 8, 16);
    within(run, "ephemeral storage of the pod, MiB", mib(&last["ephemeral-storage"]["usedBytes"]), 24, 48);
    run.see("log has a size", c["logs"]["usedBytes"].as_u64() > Some(0), true);
    run.see("network has counters", last["network"]["rxBytes"].as_u64().is_some(), true);
    run.see("processes", last["process_stats"]["process_count"].as_u64() >= Some(2), true);
    Ok(())
}

/// Notes whether a number is plausible; one that is not, as it is.
fn within(run: &Run<'_>, what: &str, seen: u64, least: u64, most: u64) {
    let wanted = format!("{least} to {most}");
    let seen = if (least..=most).contains(&seen) { wanted.clone() } else { seen.to_string() };
    run.see(what, seen, wanted);
}

fn container_of(entry: &Value, name: &str) -> Value {
    let mut all = entry["containers"].as_array().into_iter().flatten();
    all.find(|each| each["name"] == name).cloned().unwrap_or_default()
}

fn mib(bytes: &Value) -> u64 {
    bytes.as_u64().unwrap_or_default() >> 20
}

/// kubelet evicts a pod whose container writes more than its limit.
fn ephemeral_storage_limit(run: &Run<'_>) -> Result<()> {
    let writer = merged(
        container("c", &format!("head -c 33554432 /dev/zero >/root/x; sync; {WAIT}")),
        json!({ "resources": { "limits": { "ephemeral-storage": "8Mi" } } }),
    );
    let pod = run.pod("", json!({ "containers": [writer] }))?;
    pod.ready()?;
    let evicted = eventually("eviction", Duration::from_secs(150), || Ok(pod.is_evicted()?.then_some(())));
    run.see("a container beyond its limit", if evicted.is_ok() { "evicted" } else { "stays" }, "evicted");
    Ok(())
}
