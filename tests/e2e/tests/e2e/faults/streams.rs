//! Streams that are open while the daemon dies.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{Case, PATIENCE, Pod, shell};
use sandboxer_e2e::forward::Forward;
use sandboxer_e2e::stream::Session;

/// What each session runs.
const ECHO: &str = "stty -echo 2>/dev/null; echo ready; while read line; do echo \"got $line\"; done";

/// An exec, an attach with a terminal and a forwarded port of one pod. Each returns what it is sent.
pub struct Streams {
    exec: Session,
    attach: Session,
    forward: Forward,
    sent: usize,
}

impl Streams {
    pub async fn open(case: &Case, pod: &Pod) -> Result<Self> {
        let mut config = shell("attached", ECHO);
        (config.stdin, config.tty) = (true, true);
        let attached = pod.start(config).await?;
        let container = pod.start(shell("serves", "nc -ll -s 127.0.0.1 -p 8080 -e cat")).await?;
        let exec = Session::open(&case.cri.exec(&container.id, &["sh", "-c", ECHO], false).await?).await?;
        let attach = Session::open(&case.cri.attach(&attached.id, true).await?).await?;
        let listens = "until netstat -ltn | grep -q :8080; do sleep 0.1; done";
        container.sh(listens).await.context("wait for the port")?;
        let forward = Forward::open(&case.cri.port_forward(&pod.id, 8080).await?).await?;
        Ok(Self { exec, attach, forward, sent: 0 })
    }

    /// Sends one line on each stream, and waits for what returns: no stream may have ended.
    pub async fn check(&mut self) -> Result<()> {
        self.sent += 1;
        let line = format!("line {}", self.sent);
        for (name, session) in [("exec", &mut self.exec), ("attach", &mut self.attach)] {
            session.write(&format!("{line}\n")).await.context(name)?;
            session.until(&format!("got {line}"), PATIENCE).await.context(name)?;
        }
        let expected = self.expected(|n| format!("line {n}\n"));
        self.forward.write(format!("{line}\n").as_bytes()).await.context("forward")?;
        let enough = |data: &[u8], _: &[u8]| data.len() >= expected.len();
        self.forward.until(enough, PATIENCE).await.context("forward")?;
        ensure!(
            self.forward.data() == expected.as_bytes(),
            "{:?}",
            String::from_utf8_lossy(self.forward.data())
        );
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
        Ok(self.sent * 3)
    }

    fn expected(&self, line: impl Fn(usize) -> String) -> String {
        (1..=self.sent).map(line).collect()
    }
}

/// A moment before the next kill. Longer than a second most of the time, or the front would pause before the next worker.
pub async fn some_moment() {
    tokio::time::sleep(Duration::from_millis(500 + rand::random::<u64>() % 1500)).await;
}
