//! Checks, before a reload changes anything, whether the installed build can take over the pods of this one.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use sandboxer_protocol::SPOKEN;
use tokio::process::Command;

use crate::{pod::DaemonState, state::PodState};

/// Versions of the protocol with agents.
type Protocols = RangeInclusive<u32>;

/// Versions assumed for a build that does not report any: no such build supports a later one.
const UNTOLD: Protocols = 6..=6;
/// Time limit for the build's response.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns why the installed build must not take over: it does not support the protocol of running agents.
pub async fn refusal(node: &DaemonState) -> Option<String> {
    // The front executes the worker by this path.
    let program = std::env::args_os().next().map(PathBuf::from)?;
    let installed = spoken_by(&program).await?;
    let idle = [PodState::Created, PodState::Stopped];
    let pods = node.registry.pods().iter().filter(|pod| !idle.contains(&pod.status().state)).count();
    why_not(&installed, &SPOKEN, pods)
}

/// Returns why the `installed` build cannot talk to the agents of this many `pods`, which speak a version of `ours`;
/// `None` if it can.
fn why_not(installed: &Protocols, ours: &Protocols, pods: usize) -> Option<String> {
    let all = installed.contains(ours.start()) && installed.contains(ours.end());
    let text = |range: &Protocols| match range.start() == range.end() {
        true => range.end().to_string(),
        false => format!("{} to {}", range.start(), range.end()),
    };
    (pods > 0 && !all).then(|| {
        format!(
            "the installed build speaks protocol {} with agents, and those of {pods} pods speak {}: drain the node \
             (kubectl drain) and reload then, or install a build that speaks both; this one continues",
            text(installed),
            text(ours)
        )
    })
}

/// Returns the protocol versions that a build supports. `None`: it cannot be run, which the front reports later.
pub async fn spoken_by(program: &Path) -> Option<Protocols> {
    let mut command = Command::new(program);
    command.arg("--protocols").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let told = text.trim().split_once(' ').filter(|_| output.status.success());
    let told = told.and_then(|(oldest, latest)| Some(oldest.parse().ok()?..=latest.parse().ok()?));
    Some(told.unwrap_or(UNTOLD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_does_not_speak_with_every_agent_is_refused_while_there_are_pods() {
        for (installed, ours) in [(6..=6, 6..=6), (6..=7, 6..=6), (5..=7, 5..=6)] {
            assert_eq!(why_not(&installed, &ours, 3), None);
        }
        for (installed, ours) in [(7..=7, 6..=6), (6..=6, 6..=7), (5..=5, 6..=6), (6..=7, 5..=6)] {
            let text = why_not(&installed, &ours, 3).unwrap();
            assert!(text.contains("3 pods") && text.contains("drain"), "{text}");
            assert_eq!(why_not(&installed, &ours, 0), None);
        }
        assert!(why_not(&(7..=8), &(6..=6), 1).unwrap().contains("protocol 7 to 8 with agents"));
    }

    #[tokio::test]
    async fn a_build_that_does_not_tell_is_an_old_one_and_one_that_cannot_run_is_the_fronts_matter() {
        assert_eq!(spoken_by(Path::new("/bin/false")).await, Some(UNTOLD));
        assert_eq!(spoken_by(Path::new("/bin/echo")).await, Some(UNTOLD));
        assert_eq!(spoken_by(Path::new("/nonexistent")).await, None);
    }
}
