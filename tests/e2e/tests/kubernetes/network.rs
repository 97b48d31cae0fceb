//! Pods' addresses, ports of the node, and the network of the node.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use crate::cases;
use crate::node::{run_within, text};
use crate::pods::{PATIENCE, Pod, Run, container, merged};

cases![pods_and_ports, host_network];

/// Serves `hello` on a port.
fn server(port: u16) -> String {
    format!("mkdir /www; echo hello >/www/index.html; httpd -p {port} -h /www; while :; do sleep 1; done")
}

/// Returns what an address serves to a program on the node.
fn get(run: &Run<'_>, address: &str) -> Result<String> {
    let mut curl = run.node.inside("curl");
    let output = run_within(curl.args(["-sS", "--max-time", "10", &format!("http://{address}/")]), PATIENCE)?;
    Ok(if output.status.success() { text(&output.stdout) } else { "nothing".to_owned() })
}

fn address(pod: &Pod<'_>) -> Result<String> {
    Ok(pod.get()?["status"]["podIP"].as_str().unwrap_or_default().to_owned())
}

fn pods_and_ports(run: &Run<'_>) -> Result<()> {
    let port = if run.in_vm() { 18080 } else { 18081 };
    let probe = json!({ "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 1 });
    let ports = json!([{ "containerPort": 8080, "hostPort": port }]);
    let served = merged(container("c", &server(8080)), json!({ "ports": ports, "readinessProbe": probe }));
    let pod = run.ready_pod("", served)?;
    let other = run.ready_pod("other", container("c", "while :; do sleep 1; done"))?;
    let at = format!("{}:8080", address(&pod)?);
    run.see("from the node", get(run, &at)?, "hello");
    run.see("from another pod", other.exec("c", &format!("wget -q -O - http://{at}/"))?, "hello");
    run.see("from itself", pod.exec("c", &format!("wget -q -O - http://{at}/"))?, "hello");
    run.see("by a port of the node", get(run, &format!("203.0.113.1:{port}"))?, "hello");
    run.see("hostname", pod.exec("c", "hostname")? == pod.name, true);
    Ok(())
}

/// A VM cannot be in the node's network. A probe must not take another server of the node for the pod.
fn host_network(run: &Run<'_>) -> Result<()> {
    let port = if run.in_vm() { 18082 } else { 18083 };
    let probe = json!({ "httpGet": { "path": "/", "port": port }, "periodSeconds": 1 });
    let served = merged(container("c", &server(port)), json!({ "readinessProbe": probe }));
    let pod = run.pod("", json!({ "hostNetwork": true, "containers": [served] }))?;
    let is_ready = crate::node::eventually("Ready", Duration::from_secs(30), || {
        Ok(crate::pods::is_ready(&pod.get()?["status"]).then_some(()))
    });
    run.see("Ready", is_ready.is_ok(), true);
    run.see("from the node", get(run, &format!("203.0.113.1:{port}"))?, "hello");
    Ok(())
}
