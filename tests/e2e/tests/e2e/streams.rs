//! What goes in and out of containers: logs, exec, attach.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::stream::Session;

crate::cases![
    Any: logs_keep_streams_apart, long_lines_and_much_output, log_reopened, exec_sync,
    exec_binary, exec_many_at_once,
    exec_of_what_is_not_there, exec_that_takes_too_long, exec_with_stdin, exec_stdin_ends, exec_with_terminal,
    attach_to_stdin;
    Vm: exit_while_nobody_reads_what_is_attached
];

async fn logs_keep_streams_apart(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let ended = pod.run(shell("c", "echo one; echo two >&2; echo three; printf 'no newline'")).await?;
    ensure!(ended.logs.stdout == "one\nthree\nno newline", "{:?}", ended.logs);
    ensure!(ended.logs.stderr == "two\n", "{:?}", ended.logs);
    Ok(())
}

async fn long_lines_and_much_output(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    // A line of 40,000 characters, then 1 MB in short lines; the container ends at once after the last byte.
    let script = "head -c 40000 /dev/zero | tr '\\0' x; echo; yes 0123456789abcde | head -n 65536; echo last";
    let logs = pod.run(shell("c", script)).await?.logs;
    let mut lines = logs.stdout.lines();
    ensure!(lines.next().is_some_and(|line| line.len() == 40_000), "the long line is not whole");
    ensure!(lines.clone().count() == 65_537, "{} lines", lines.count());
    ensure!(
        lines.next_back() == Some("last") && lines.all(|line| line == "0123456789abcde"),
        "damaged lines"
    );
    Ok(())
}

/// A kubelet moves the log away and asks for a new one: no line is lost, none written twice.
async fn log_reopened(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i + 1)); usleep 10000; done";
    let container = pod.start(shell("c", script)).await?;
    container.logged("line 20\n").await?;
    let first = container.move_log_away("1")?;
    case.cri.reopen_log(&container.id).await?;
    container.ended().await?;
    let both = first.stdout()? + &container.logs()?.stdout;
    let expected: String = (0..200).map(|n| format!("line {n}\n")).collect();
    ensure!(both == expected, "{both}");
    Ok(())
}

async fn exec_sync(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let answer =
        case.cri.exec_sync(&container.id, &["sh", "-c", "echo out; echo err >&2; exit 5"], None).await?;
    ensure!(answer.exit_code == 5, "{answer:?}");
    ensure!(
        (answer.stdout.as_slice(), answer.stderr.as_slice()) == (b"out\n".as_slice(), b"err\n".as_slice())
    );
    let answer = case
        .cri
        .exec_sync(&container.id, &["sh", "-c", "yes 0123456789abcde | head -c 1048576"], None)
        .await?;
    ensure!(answer.stdout.len() == 1 << 20, "{} of 1048576 bytes", answer.stdout.len());
    // Arguments arrive as they are, no shell in between.
    let answer =
        case.cri.exec_sync(&container.id, &["printf", "[%s]", "", "a b", "$HOME", "'"], None).await?;
    ensure!(answer.stdout == b"[][a b][$HOME][']", "{answer:?}");
    Ok(())
}

/// Every value a byte can have, both ways.
async fn exec_binary(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let script = "for i in $(seq 0 255); do printf \\\\$(printf %03o $i); done";
    let answer = case.cri.exec_sync(&container.id, &["sh", "-c", script], None).await?;
    ensure!(answer.stdout.iter().copied().eq(0..=255), "{:?}", answer.stdout);
    Ok(())
}

async fn exec_many_at_once(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let execs = (0..100).map(|n| {
        let container = container.clone();
        async move {
            let output = container.sh(&format!("echo {n}")).await?;
            ensure!(output == n.to_string(), "exec {n} said {output}");
            Ok(())
        }
    });
    futures::future::join_all(execs).await.into_iter().collect()
}

async fn exec_of_what_is_not_there(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let error = match case.cri.exec_sync(&container.id, &["/not/there"], None).await {
        Ok(answer) => anyhow::bail!("was run: {answer:?}"),
        Err(error) => error,
    };
    ensure!(error.message().contains("/not/there"), "the error does not name the program: {error}");
    ensure!(container.sh("echo fine").await? == "fine");

    let ended = pod.start(shell("ended", "true")).await?;
    ended.ended().await?;
    ensure!(
        case.cri.exec_sync(&ended.id, &["true"], None).await.is_err(),
        "exec in a container that has ended"
    );
    Ok(())
}

async fn exec_that_takes_too_long(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let slow = case.cri.exec_sync(&container.id, &["sleep", "987"], Some(Duration::from_secs(1))).await;
    let error = slow.err().context("sleep 987 was over within a second")?;
    ensure!(error.code() == tonic::Code::DeadlineExceeded, "{error:?}");
    // What was given up runs no more.
    sandboxer_e2e::eventually("end of the exec that took too long", PATIENCE, || async {
        let left = container.sh("ps -o args | grep -c '[s]leep 987' || true").await?;
        Ok((left == "0").then_some(()))
    })
    .await
}

async fn exec_with_stdin(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let url = case
        .cri
        .exec(&container.id, &["sh", "-c", "read a; echo \"got $a\"; echo oops >&2; exit 3"], false)
        .await?;
    let mut session = Session::open(&url).await?;
    session.write("a line\n").await?;
    let (stdout, stderr, result) = session.end(PATIENCE).await?;
    ensure!((stdout.as_str(), stderr.as_str()) == ("got a line\n", "oops\n"), "{stdout:?} {stderr:?}");
    let result: serde_json::Value =
        serde_json::from_str(&result).with_context(|| format!("result {result:?}"))?;
    ensure!(result["details"]["causes"][0]["message"] == "3", "exit code in {result}");
    Ok(())
}

async fn exec_stdin_ends(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let input = tempfile::NamedTempFile::new()?;
    std::fs::write(input.path(), vec![b'x'; 300_000])?;
    // ctr closes the exec's stdin at the end of its own; kubectl's protocol cannot say so.
    let mut command = case.stack.command("ctr");
    command.args(["tasks", "exec", "--exec-id", "e1", &container.id, "wc", "-c"]);
    command.stdin(Stdio::from(std::fs::File::open(input.path())?));
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = tokio::time::timeout(PATIENCE, output).await.context("wc saw no end of its input")???;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(stdout.trim() == "300000", "{stdout} {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

async fn exec_with_terminal(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let url = case.cri.exec(&container.id, &["sh"], true).await?;
    let mut session = Session::open(&url).await?;
    session.resize(123, 45).await?;
    session.write("echo re''ady\n").await?;
    session.until("ready\r\n", PATIENCE).await?;
    session.resize(101, 42).await?;
    session.write("tty; for i in 1 2 3 4 5 6 7 8 9; do [ \"$(stty size)\" = '42 101' ] && break; sleep 1; done; stty size\n").await?;
    session.until("42 101\r\n", PATIENCE).await?;
    ensure!(session.stdout.contains("/dev/pts/"), "{:?}", session.stdout);
    // The terminal makes a signal of ^C and an end of ^D.
    session.write("sh -c 'echo begi''ns; exec sleep 1000'\n").await?;
    session.until("begins\r\n", PATIENCE).await?;
    session.write("\u{3}").await?;
    session.write("echo af''ter\n").await?;
    session.until("after\r\n", PATIENCE).await?;
    // To a program and not to the shell, which throws away what comes before its prompt is ready.
    session.write("echo cat''ting; cat; exit\n").await?;
    session.until("catting\r\n", PATIENCE).await?;
    session.write("\u{4}").await?;
    session.end(PATIENCE).await?;
    Ok(())
}

/// containerd reads an attached client's input before it adds the client to the output: a line that is answered at once
/// is then in the log alone. So the container speaks until it is spoken to, and the client writes once it hears that.
async fn attach_to_stdin(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let script = "until read -t 1 line; do echo waits; done; echo \"read $line\"; \
                  while read line; do echo \"read $line\"; [ \"$line\" = end ] && exit 4; done";
    let mut config = shell("c", script);
    config.stdin = true;
    let container = pod.start(config).await?;
    let mut session = Session::open(&case.cri.attach(&container.id, false).await?).await?;
    session.until("waits\n", PATIENCE).await?;
    session.write("hello\n").await?;
    session.until("read hello\n", PATIENCE).await?;
    session.write("end\n").await?;
    session.until("read end\n", PATIENCE).await?;
    let status = container.ended().await?;
    ensure!(status.exit_code == 4, "{status:?}");
    let logs = container.logs()?;
    ensure!(logs.stdout.replace("waits\n", "") == "read hello\nread end\n", "{logs:?}");
    Ok(())
}

/// A terminal that was stopped, or whose link hangs, while it is attached: the daemon reports the exit at once, and
/// containerd, which writes to the terminal first, reports it once the terminal is gone.
async fn exit_while_nobody_reads_what_is_attached(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    // More than all sockets and pipes on the way hold, by a process that does not end by itself.
    let script = "read go; { head -c 64000000 /dev/zero | tr '\\0' x; } & sleep 1; exit 3";
    let mut config = shell("c", script);
    config.stdin = true;
    let container = pod.start(config).await?;
    let url = case.cri.attach(&container.id, false).await?;
    let mut session = Session::open(&url).await?;
    session.write("go\n").await?;
    eventually("the exit in the daemon", PATIENCE, || async {
        let container = &case.stack.cli_json(&["inspect", &pod.id])?["containers"][0];
        Ok((container["state"] == "exited" && container["exit_code"] == 3).then_some(()))
    })
    .await?;
    drop(session);
    let status = container.ended().await?;
    ensure!(status.exit_code == 3, "{status:?}");
    case.cri.remove(&container.id).await?;
    Ok(())
}
