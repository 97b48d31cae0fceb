//! Streams that are open while the daemon dies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{Case, PATIENCE, Pod, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::forward::Forward;
use sandboxer_e2e::stream::Session;

/// The forwarded port.
const PORT: u16 = 8080;
/// What each session runs.
const ECHO: &str = "stty -echo 2>/dev/null; echo ready; while read line; do echo \"got $line\"; done";

/// An exec and an attach with a terminal of one pod, which return what they are sent; and a port, whose forwarded connections end with
/// the worker.
pub struct Streams<'a> {
    case: &'a Case,
    pod: &'a Pod,
    exec: Session,
    attach: Session,
    sent: usize,
}

impl<'a> Streams<'a> {
    pub async fn open(case: &'a Case, pod: &'a Pod) -> Result<Self> {
        let mut config = shell("attached", ECHO);
        (config.stdin, config.tty) = (true, true);
        let attached = pod.start(config).await?;
        let container = pod.start(shell("serves", &format!("nc -ll -p {PORT} -e cat"))).await?;
        let exec = Session::open(&case.cri.exec(&container.id, &["sh", "-c", ECHO], false).await?).await?;
        let attach = Session::open(&case.cri.attach(&attached.id, true).await?).await?;
        let listens = format!("until netstat -ltn | grep -q :{PORT}; do sleep 0.1; done");
        container.sh(&listens).await.context("wait for the port")?;
        Ok(Self { case, pod, exec, attach, sent: 0 })
    }

    /// Sends one line on each stream, and waits for what returns: no exec and no attach may have ended.
    pub async fn check(&mut self) -> Result<()> {
        self.sent += 1;
        let line = format!("line {}", self.sent);
        for (name, session) in [("exec", &mut self.exec), ("attach", &mut self.attach)] {
            session.write(&format!("{line}\n")).await.context(name)?;
            session.until(&format!("got {line}"), PATIENCE).await.context(name)?;
        }
        eventually("a line through the forwarded port", PATIENCE, || async {
            Ok(self.forwarded(&line).await.ok())
        })
        .await
    }

    /// Sends a line through a new connection to the port.
    async fn forwarded(&self, line: &str) -> Result<()> {
        let url = self.case.cri.port_forward(&self.pod.id, PORT).await?;
        let mut forward = Forward::open(&url).await?;
        forward.write(line.as_bytes()).await?;
        forward.until(|data, _| data.len() >= line.len(), PATIENCE).await?;
        ensure!(forward.data() == line.as_bytes(), "{:?}", String::from_utf8_lossy(forward.data()));
        Ok(())
    }

    /// Checks that each line has returned once, in its order.
    pub async fn end(self) -> Result<usize> {
        let expected = self.expected(|n| format!("got line {n}\n"));
        for session in [self.exec, self.attach] {
            let text = session.stdout.replace("\r\n", "\n");
            // An attach may have come after the first words.
            let lines = text.trim_start_matches("ready\n");
            ensure!(lines == expected, "{lines:?}");
        }
        Ok(self.sent * 2)
    }

    fn expected(&self, line: impl Fn(usize) -> String) -> String {
        (1..=self.sent).map(line).collect()
    }
}

/// A moment before the next kill. Longer than a second most of the time, or the front would pause before the next worker.
pub async fn some_moment() {
    tokio::time::sleep(Duration::from_millis(500 + rand::random::<u64>() % 1500)).await;
}
