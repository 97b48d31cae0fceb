//! exec, logs, attach, cp, port-forward, and rotation of logs.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::cases;
use crate::node::{eventually, run_within, text};
use crate::pods::{PATIENCE, Run, WAIT, container, merged};

cases![exec, logs, attach, copy, port_forward, rotation];

fn exec(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", WAIT))?;
    let output = pod.kubectl("exec", &["--", "sh", "-c", "echo out; echo err >&2; exit 7"])?;
    run.see("code", output.status.code().unwrap_or(-1), 7);
    run.see("output", text(&output.stdout), "out");
    run.see("error", text(&output.stderr).lines().next().unwrap_or_default(), "err");
    let output = pod.kubectl("exec", &["--", "/no/such/program"])?;
    run.see("no program", output.status.success(), false);

    let mut command = run.node.kubectl(&["exec", "-i", &pod.name, "--", "wc", "-c"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    // A pipe and its buffers hold less.
    child.stdin.take().context("stdin")?.write_all(&vec![b'x'; 1 << 20])?;
    run.see("bytes of stdin", text(&child.wait_with_output()?.stdout), 1 << 20);
    let many = pod
        .exec("c", "yes 0123456789abcde | head -c 1048576 | md5sum; yes 0123456789abcde | head -c 1048576")?;
    run.see("bytes of stdout", many.len(), 36 + (1 << 20) - 1);
    Ok(())
}

fn logs(run: &Run<'_>) -> Result<()> {
    let script =
        "for i in 1 2 3; do echo out $i; sleep 0.2; echo err $i >&2; sleep 0.2; done; echo -n no newline";
    let pod = run.pod("", json!({ "restartPolicy": "Never", "containers": [container("c", script)] }))?;
    pod.ended()?;
    run.see("all", pod.logs("c", &[])?, "out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\nno newline");
    run.see("tail", pod.logs("c", &["--tail=2"])?, "err 3\nno newline");
    run.see("limit", pod.logs("c", &["--limit-bytes=5"])?, "out 1");
    let stamped = pod.logs("c", &["--timestamps", "--tail=1"])?;
    run.see("with times", stamped.starts_with("20") && stamped.ends_with("Z no newline"), true);

    let pod =
        run.ready_pod("follow", container("c", "for i in $(seq 20); do echo line $i; sleep 0.1; done"))?;
    let followed = pod.logs("c", &["--follow"])?;
    let lines: Vec<_> = (1..=20).map(|i| format!("line {i}")).collect();
    run.see("followed", followed.contains(&lines.join("\n")), true);
    Ok(())
}

fn attach(run: &Run<'_>) -> Result<()> {
    let reader = merged(
        container("c", "while read line; do echo got $line; done; echo end"),
        json!({ "stdin": true, "stdinOnce": true }),
    );
    let pod = run.pod("", json!({ "restartPolicy": "Never", "containers": [reader] }))?;
    pod.ready()?;
    let mut command = run.node.kubectl(&["attach", "-i", "-q", &pod.name]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut stdin = child.stdin.take().context("stdin")?;
    let mut lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
    stdin.write_all(b"one\n")?;
    run.see("first answer", lines.next().transpose()?.unwrap_or_default(), "got one");
    stdin.write_all(b"two\n")?;
    run.see("second answer", lines.next().transpose()?.unwrap_or_default(), "got two");
    drop(stdin);
    run.see("phase after the end of stdin", pod.ended()?, "Succeeded");
    child.wait()?;
    run.see("log", pod.logs("c", &[])?, "got one\ngot two\nend");
    Ok(())
}

fn copy(run: &Run<'_>) -> Result<()> {
    let pod = run.ready_pod("", container("c", WAIT))?;
    let dir = tempfile::tempdir()?;
    let (here, back) = (dir.path().join("here"), dir.path().join("back"));
    let mut bytes = vec![0; 3 << 20];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    std::fs::write(&here, &bytes)?;
    let there = format!("{}:/tmp/there", pod.name);
    for (from, to) in [(here.display().to_string(), there.clone()), (there, back.display().to_string())] {
        let output = run_within(&mut run.node.kubectl(&["cp", &from, &to]), PATIENCE)?;
        run.see(
            &format!("cp to {}", if to.contains(':') { "it" } else { "here" }),
            output.status.success(),
            true,
        );
    }
    run.see("the same bytes", std::fs::read(&back)? == bytes, true);
    Ok(())
}

fn port_forward(run: &Run<'_>) -> Result<()> {
    let server = "mkdir /www; echo hello >/www/index.html; head -c 1048576 /dev/zero >/www/big; \
                  httpd -p 127.0.0.1:8080 -h /www; while :; do sleep 1; done";
    let pod = run.ready_pod("", container("c", server))?;
    // Without a probe a pod is ready as soon as its container runs, and its server listens later.
    pod.exec("c", "until wget -q -O /dev/null http://127.0.0.1:8080/; do sleep 0.2; done")?;
    let mut command = run.node.kubectl(&["port-forward", &pod.name, ":8080"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
    let line = lines.next().transpose()?.unwrap_or_default();
    // Forwarding from 127.0.0.1:40123 -> 8080
    let address = line.split_whitespace().nth(2).unwrap_or_default().to_owned();
    let get = |path: &str| {
        let mut curl = run.node.inside("curl");
        run_within(curl.args(["-sS", "--max-time", "20", &format!("http://{address}/{path}")]), PATIENCE)
    };
    run.see("a server on loopback", text(&get("")?.stdout), "hello");
    run.see("bytes", get("big")?.stdout.len(), 1 << 20);
    child.kill()?;
    child.wait()?;
    Ok(())
}

/// Some 600 KiB in pieces, so that kubelet rotates between them, by 100 KiB and every 3 s.
fn rotation(run: &Run<'_>) -> Result<()> {
    let line = "n=0; pad=$(printf %060d 0); for part in 1 2 3; do i=0; while [ $i -lt 2000 ]; do n=$((n+1)); i=$((i+1)); \
                echo $n $pad; done; sleep 5; done; echo end; sleep 1000";
    let pod = run.ready_pod("", container("c", line))?;
    let followed = run_within(
        run.node.inside("timeout").args(["60", "sh", "-c"]).arg(format!(
            "{} logs -f {} | sed '/^end$/q'",
            run.node.stack().dir().join("bin/kubectl").display(),
            pod.name
        )),
        PATIENCE,
    )?;
    let numbers = |text: &str| -> Vec<u32> {
        text.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect()
    };
    let all: Vec<u32> = (1..=6000).collect();
    run.see("followed without a gap", numbers(&text(&followed.stdout)) == all, true);
    let dir = run.node.logs().join(format!("default_{}_{}/c", pod.name, pod.uid));
    let files = eventually("rotated files", Duration::from_secs(20), || {
        let files: Vec<_> = std::fs::read_dir(&dir)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
        Ok((files.len() >= 3).then_some(files))
    })?;
    let mut all_lines = Vec::new();
    let mut files = files;
    files.sort_by_key(|path| path.file_name().is_some_and(|name| name == "0.log"));
    let mut rotated: Vec<_> =
        files.iter().filter(|path| path.file_name().is_some_and(|name| name != "0.log")).collect();
    rotated.sort();
    for path in rotated.into_iter().chain(files.iter().filter(|path| path.ends_with("0.log"))) {
        let output = std::process::Command::new("zcat").arg("-f").arg(path).output()?;
        let numbers = text(&output.stdout);
        all_lines.extend(numbers.lines().filter_map(|line| line.split(' ').nth(3)?.parse::<u32>().ok()));
    }
    run.see("all lines in the files", all_lines == all, true);
    Ok(())
}
