//! Checks, before a reload changes anything, whether the installed build can take over the pods of this one. The worker
//! does, so that whoever asks for the reload hears of it, and so does the front, for a SIGHUP from elsewhere.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use sandboxer_protocol::SPOKEN;
use tokio::process::Command;

use crate::{pod::DaemonState, state::PodState};

/// The option with which a build prints the protocol versions that it supports.
pub const PROTOCOLS: &str = "--protocols";

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

/// Returns why a build that has `told` this must not take over: `notes` are those of the running worker's pods, each
/// with the oldest and the latest version that its agent may speak.
pub fn unfit(told: Option<&[u8]>, notes: &[&[u8]]) -> Option<String> {
    let notes = notes.iter().filter_map(|note| serde_json::from_slice::<(u32, u32)>(note).ok());
    let (oldest, latest): (Vec<_>, Vec<_>) = notes.unzip();
    let ours = *oldest.iter().min()?..=*latest.iter().max()?;
    why_not(&told.and_then(parse).unwrap_or(UNTOLD), &ours, oldest.len())
}

/// Parses the two numbers that a build prints.
fn parse(told: &[u8]) -> Option<Protocols> {
    let (oldest, latest) = str::from_utf8(told).ok()?.trim().split_once(' ')?;
    Some(oldest.parse().ok()?..=latest.parse().ok()?)
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
    command.arg(PROTOCOLS).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output()).await.ok()?.ok()?;
    let told = output.status.success().then(|| parse(&output.stdout)).flatten();
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

    #[test]
    fn the_front_refuses_by_what_the_worker_has_kept_of_its_pods() {
        assert_eq!(unfit(Some(b"7 7\n"), &[]), None);
        assert_eq!(unfit(Some(b"6 7\n"), &[b"[6,6]", b"[6,7]"]), None);
        assert_eq!(unfit(None, &[b"[6,6]"]), None);
        let text = unfit(Some(b"7 8\n"), &[b"[6,6]", b"[6,7]", b"of another build"]).unwrap();
        assert!(
            text.contains("protocol 7 to 8 with agents") && text.contains("2 pods speak 6 to 7"),
            "{text}"
        );
        assert!(unfit(None, &[b"[7,7]"]).is_some());
        assert!(unfit(Some(b"rubbish"), &[b"[7,7]"]).is_some());
    }

    #[tokio::test]
    async fn a_build_that_does_not_tell_is_an_old_one_and_one_that_cannot_run_is_the_fronts_matter() {
        assert_eq!(spoken_by(Path::new("/bin/false")).await, Some(UNTOLD));
        assert_eq!(spoken_by(Path::new("/bin/echo")).await, Some(UNTOLD));
        assert_eq!(spoken_by(Path::new("/nonexistent")).await, None);
    }
}
