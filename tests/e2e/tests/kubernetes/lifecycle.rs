//! From creation to deletion: phases, exit codes, restarts, messages, hooks, several containers.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cases;
use crate::node::eventually;
use crate::pods::{PATIENCE, Run, WAIT, condition, container, container_status, end_of, is_ready, merged};

cases![
    runs_and_is_deleted,
    exit_codes,
    restarts_with_back_off,
    termination_messages,
    hooks,
    init_containers,
    native_sidecar,
    ephemeral_container,
    shared_processes,
    static_pod,
];

fn runs_and_is_deleted(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", WAIT))?;
    let status = pod.get()?["status"].clone();
    run.see("phase", &status["phase"], json!("Running"));
    for name in ["PodReadyToStartContainers", "Initialized", "ContainersReady"] {
        run.see(name, condition(&status, name), "True");
    }
    run.see("restarts", &container_status(&status, "c")["restartCount"], 0);
    run.see("address", status["podIP"].as_str().is_some_and(|ip| ip.starts_with("192.0.2.")), true);
    run.see("host address", &status["hostIP"], json!("203.0.113.1"));
    let took = pod.delete()?;
    // The container ends at TERM, before the grace period of 2 s. Generous, since guests are emulated.
    run.see("gone within 20 s", took < Duration::from_secs(20), true);
    let reasons: Vec<_> = pod.events(|_| true)?.into_iter().map(|(reason, _)| reason).collect();
    let mut reasons: Vec<_> = reasons.iter().map(String::as_str).collect();
    reasons.sort_unstable();
    run.see("events", reasons.join(" "), "Created Killing Pulled Started");
    Ok(())
}

fn exit_codes(run: &Run<'_>) -> Result<()> {
    let containers = [
        ("good", "exit 0"),
        ("bad", "exit 3"),
        ("killed", "sleep 100 & kill -9 $!; wait $!"),
        ("absent", "/no/such/program"),
    ];
    let containers = containers.map(|(name, script)| container(name, script));
    let mut wrong = container("wrong", "");
    wrong["command"] = json!(["/no/such/program"]);
    let containers: Vec<_> = containers.into_iter().chain([wrong]).collect();
    let pod = run.pod("", json!({ "restartPolicy": "Never", "containers": containers }))?;
    run.see("phase", pod.ended()?, "Failed");
    let status = pod.get()?["status"].clone();
    for (name, wanted) in [
        ("good", "Completed/0"),
        ("bad", "Error/3"),
        ("killed", "Error/137"),
        ("absent", "Error/127"),
        ("wrong", "StartError/128"),
    ] {
        run.see(name, end_of(&container_status(&status, name)["state"]), wanted);
    }
    let message =
        container_status(&status, "wrong")["state"]["terminated"]["message"].as_str().unwrap_or_default();
    run.see("message names the program", message.contains("/no/such/program"), true);
    Ok(())
}

fn restarts_with_back_off(run: &Run<'_>) -> Result<()> {
    let pod = run.pod("", json!({ "containers": [container("c", "echo hello; exit 4")] }))?;
    let status = pod.wait("back-off", |status| {
        let c = container_status(status, "c");
        let waits = c["state"]["waiting"]["reason"] == "CrashLoopBackOff";
        (waits && c["restartCount"].as_u64() >= Some(1)).then(|| status.clone())
    })?;
    run.see("phase", &status["phase"], json!("Running"));
    run.see("last end", end_of(&container_status(&status, "c")["lastState"]), "Error/4");
    run.see("log", pod.logs("c", &[])?, "hello");
    run.see("log of the one before", pod.logs("c", &["--previous"])?, "hello");
    run.see("told", pod.events(|reason| reason == "BackOff")?.len(), 1);
    Ok(())
}

fn termination_messages(run: &Run<'_>) -> Result<()> {
    let file = container("file", "echo -n from the file >/dev/termination-log; exit 1");
    let log = merged(
        container("log", "echo from the log; exit 1"),
        json!({ "terminationMessagePolicy": "FallbackToLogsOnError" }),
    );
    let path = merged(
        container("path", "echo -n elsewhere >/tmp/message"),
        json!({ "terminationMessagePath": "/tmp/message" }),
    );
    let pod = run.pod("", json!({ "restartPolicy": "Never", "containers": [file, log, path] }))?;
    pod.ended()?;
    let status = pod.get()?["status"].clone();
    for (name, wanted) in [("file", "from the file"), ("log", "from the log\n"), ("path", "elsewhere")] {
        let message =
            container_status(&status, name)["state"]["terminated"]["message"].as_str().unwrap_or_default();
        run.see(name, message, wanted);
    }
    Ok(())
}

fn hooks(run: &Run<'_>) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let hook =
        |text: &str| json!({ "exec": { "command": ["sh", "-c", format!("echo {text} >>/out/hooks")] } });
    let hooked = merged(
        container("c", "trap 'echo term >>/out/hooks; exit 0' TERM; while :; do sleep 1 & wait $!; done"),
        json!({
            "lifecycle": { "postStart": hook("started"), "preStop": hook("stopping") },
            "volumeMounts": [{ "name": "out", "mountPath": "/out" }],
        }),
    );
    let volume = json!({ "name": "out", "hostPath": { "path": dir.path() } });
    let pod = run.pod("", json!({ "containers": [hooked], "volumes": [volume] }))?;
    pod.ready()?;
    pod.delete()?;
    let lines = std::fs::read_to_string(dir.path().join("hooks"))?;
    run.see("order", lines.replace('\n', " "), "started stopping term ");

    let bad = merged(
        container("c", WAIT),
        json!({ "lifecycle": { "postStart": { "exec": { "command": ["false"] } } } }),
    );
    let pod = run.pod("bad", json!({ "containers": [bad] }))?;
    let event =
        pod.wait("a failed hook", |_| pod.events(|reason| reason == "FailedPostStartHook").ok()?.pop())?;
    run.see("failed hook", event.1.contains("PostStartHook failed"), true);
    Ok(())
}

fn init_containers(run: &Run<'_>) -> Result<()> {
    let mounts = json!({ "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }] });
    let init = |name: &str, script: &str| merged(container(name, script), mounts.clone());
    let pod = run.pod(
        "",
        json!({
            "restartPolicy": "Never",
            "initContainers": [init("one", "echo one >>/shared/f"), init("two", "echo two >>/shared/f")],
            "containers": [merged(container("c", "cat /shared/f"), mounts.clone())],
            "volumes": [{ "name": "shared", "emptyDir": {} }],
        }),
    )?;
    run.see("phase", pod.ended()?, "Succeeded");
    run.see("order", pod.logs("c", &[])?, "one\ntwo");
    let pod = run.pod(
        "bad",
        json!({
            "restartPolicy": "Never",
            "initContainers": [container("bad", "exit 5")],
            "containers": [container("c", "true")],
        }),
    )?;
    run.see("phase after a failure", pod.ended()?, "Failed");
    let status = pod.get()?["status"].clone();
    run.see("failed one", end_of(&container_status(&status, "bad")["state"]), "Error/5");
    run.see(
        "one never started",
        container_status(&status, "c")["state"]["waiting"]["reason"].clone(),
        json!("PodInitializing"),
    );
    Ok(())
}

fn native_sidecar(run: &Run<'_>) -> Result<()> {
    let sidecar = merged(
        container("sidecar", "touch /tmp/up; trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"),
        json!({
            "restartPolicy": "Always",
            "startupProbe": { "exec": { "command": ["test", "-e", "/tmp/up"] }, "periodSeconds": 1 },
        }),
    );
    let pod = run.pod(
        "",
        json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 10,
            "initContainers": [sidecar, container("init", "true")],
            "containers": [container("c", "sleep 2")],
        }),
    )?;
    run.see("phase", pod.ended()?, "Succeeded");
    let status = pod.wait("end of the sidecar", |status| {
        container_status(status, "sidecar")["state"].get("terminated").is_some().then(|| status.clone())
    })?;
    run.see("sidecar", end_of(&container_status(&status, "sidecar")["state"]), "Completed/0");
    let time = |name: &str, field: &str| {
        container_status(&status, name)["state"]["terminated"][field].as_str().map(str::to_owned)
    };
    let (main, sidecar) = (time("c", "finishedAt"), time("sidecar", "finishedAt"));
    run.see("it ends after the others", sidecar >= main, true);
    run.see("init after its start", time("sidecar", "startedAt") <= time("init", "startedAt"), true);
    Ok(())
}

fn ephemeral_container(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", "exec sleep 4242"))?;
    let debug = json!({ "spec": { "ephemeralContainers": [{
        "name": "debug", "image": sandboxer_e2e::case::BUSYBOX, "imagePullPolicy": "Never",
        "targetContainerName": "c", "command": ["sh", "-c", "ps -o args; exec sleep 1000"],
    }] } });
    pod.patch("ephemeralcontainers", &debug)?;
    pod.wait("the ephemeral container", |status| {
        container_status(status, "debug")["state"].get("running").map(|_| ())
    })?;
    let log = pod.wait("its log", |_| pod.logs("debug", &[]).ok().filter(|log| !log.is_empty()))?;
    run.see("it sees the target's processes", log.contains("sleep 4242"), true);
    run.see("exec into it", pod.exec("debug", "echo here")?, "here");
    run.see("restarts", &container_status(&pod.get()?["status"], "c")["restartCount"], 0);
    Ok(())
}

fn shared_processes(run: &Run<'_>) -> Result<()> {
    let containers: Vec<Value> = vec![container("a", "exec sleep 4242"), container("b", WAIT)];
    let pod = run.pod("", json!({ "shareProcessNamespace": true, "containers": containers }))?;
    pod.ready()?;
    run.see("seen from the other", pod.exec("b", "ps -o args")?.contains("sleep 4242"), true);
    pod.exec("b", "kill -9 $(pidof sleep | tr ' ' '\\n' | while read p; do grep -q 4242 /proc/$p/cmdline && echo $p; done)")?;
    let ended = pod.wait("end by a signal from the other", |status| {
        let last = &container_status(status, "a")["lastState"];
        last.get("terminated").map(|_| end_of(last))
    });
    run.see("killed from the other", ended.context("a signal")?, "Error/137");
    Ok(())
}

/// A pod that kubelet reads from a file, and not from the API.
fn static_pod(run: &Run<'_>) -> Result<()> {
    let says = |word: &str| json!({ "containers": [container("c", &format!("echo {word}; {WAIT}"))] });
    let pod = run.static_pod("", says("one"))?;
    pod.ready()?;
    run.see("exec", pod.exec("c", "echo here")?, "here");
    run.see("log", pod.logs("c", &[])?, "one");
    // The API's user can delete only its mirror: the pod runs on, and is there again.
    let container_id = |status: &Value| container_status(status, "c")["containerID"].clone();
    let before = container_id(&pod.get()?["status"]);
    run.node.call("DELETE", &format!("/api/v1/namespaces/default/pods/{}", pod.name), None)?;
    let after = eventually("its mirror", PATIENCE, || {
        let status = pod.get().map(|pod| pod["status"].clone()).unwrap_or_default();
        Ok(is_ready(&status).then(|| container_id(&status)))
    })?;
    run.see("lives on without its mirror", after == before, true);
    run.static_pod("", says("two"))?;
    let log = eventually("the changed pod", PATIENCE, || {
        Ok(pod.logs("c", &[]).ok().filter(|log| !log.contains("one") && !log.is_empty()))
    });
    run.see("log after a change of its file", log.unwrap_or_default(), "two");
    run.remove_static_pod("")?;
    let removed = eventually("its end", PATIENCE, || Ok(pod.get().is_err().then_some(())));
    run.see("gone with its file", removed.is_ok(), true);
    Ok(())
}
