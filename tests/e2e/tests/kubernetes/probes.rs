//! Probes of each kind, and what kubelet does by them.

use anyhow::Result;
use serde_json::{Value, json};

use crate::cases;
use crate::pods::{Pod, Run, WAIT, container, container_status, end_of, is_ready, merged};

cases![exec_liveness, http_readiness, tcp_startup, slow_answer];

/// Serves /tmp/www on port 8080.
const SERVER: &str = "mkdir -p /tmp/www; touch /tmp/www/ok; httpd -p 8080 -h /tmp/www; ";

/// Returns the end of container `c` that was restarted.
fn restarted(pod: &Pod<'_>) -> Result<String> {
    pod.wait("a restart", |status| {
        let last = &container_status(status, "c")["lastState"];
        last.get("terminated").map(|_| end_of(last))
    })
}

/// Returns whether an event of this reason has `part` in its message.
fn has_event(pod: &Pod<'_>, reason: &str, part: &str) -> Result<bool> {
    Ok(pod.events(|each| each == reason)?.iter().any(|(_, message)| message.contains(part)))
}

fn exec_liveness(run: &Run<'_>) -> Result<()> {
    let probe = json!({
        "exec": { "command": ["test", "!", "-e", "/tmp/ill"] }, "periodSeconds": 1, "failureThreshold": 2,
    });
    let ill = merged(
        container("c", &format!("(sleep 3; touch /tmp/ill) & {WAIT}")),
        json!({ "livenessProbe": probe }),
    );
    let pod = run.ready_pod("", ill)?;
    run.see("end", restarted(&pod)?, "Completed/0");
    run.see("told", has_event(&pod, "Unhealthy", "Liveness probe failed")?, true);
    run.see("told that it is killed", has_event(&pod, "Killing", "failed liveness probe")?, true);
    pod.ready()
}

fn http_readiness(run: &Run<'_>) -> Result<()> {
    let probe =
        json!({ "httpGet": { "path": "/ok", "port": 8080 }, "periodSeconds": 1, "failureThreshold": 1 });
    let served = merged(container("c", &format!("{SERVER}{WAIT}")), json!({ "readinessProbe": probe }));
    let pod = run.ready_pod("", served)?;
    pod.exec("c", "rm /tmp/www/ok")?;
    pod.wait("not Ready", |status| (!is_ready(status)).then_some(()))?;
    run.see("told", has_event(&pod, "Unhealthy", "statuscode: 404")?, true);
    pod.exec("c", "touch /tmp/www/ok")?;
    pod.ready()?;
    run.see("restarts", &container_status(&pod.get()?["status"], "c")["restartCount"], 0);
    Ok(())
}

fn tcp_startup(run: &Run<'_>) -> Result<()> {
    let tcp = |period: u32, failures: u32| -> Value {
        json!({ "tcpSocket": { "port": 8080 }, "periodSeconds": period, "failureThreshold": failures })
    };
    let late = merged(
        container("c", &format!("sleep 3; {SERVER}{WAIT}")),
        json!({ "startupProbe": tcp(1, 60), "livenessProbe": tcp(1, 1) }),
    );
    let pod = run.ready_pod("", late)?;
    let status = pod.get()?["status"].clone();
    run.see("started", &container_status(&status, "c")["started"], true);
    run.see("restarts", &container_status(&status, "c")["restartCount"], 0);

    let never = merged(container("c", WAIT), json!({ "startupProbe": tcp(1, 3) }));
    let pod = run.pod("never", json!({ "containers": [never] }))?;
    run.see("end of one that never starts", restarted(&pod)?, "Completed/0");
    Ok(())
}

/// A probe that does not answer in time counts as failed.
fn slow_answer(run: &Run<'_>) -> Result<()> {
    let probe = json!({
        "exec": { "command": ["sleep", "30"] }, "periodSeconds": 2, "timeoutSeconds": 1, "failureThreshold": 1,
    });
    let slow = merged(container("c", WAIT), json!({ "livenessProbe": probe }));
    let pod = run.pod("", json!({ "containers": [slow] }))?;
    run.see("end", restarted(&pod)?, "Completed/0");
    run.see("told", has_event(&pod, "Unhealthy", "timed out")?, true);
    Ok(())
}
