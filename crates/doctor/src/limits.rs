//! Limits of the kernel and of the daemon that many pods can reach.

use super::{
    host::Host,
    verdict::{Check, Fix, Subject},
};

/// Number of file descriptors of the daemon: its own, and those per pod with a container.
const DAEMON_FILES: u64 = 64;
const FILES_A_POD: u64 = 24;
/// Number of open files of the whole system per pod: daemon, VMM, containerd.
const SYSTEM_FILES_A_POD: u64 = 256;
/// Number of processes and threads per pod: VMM, vCPUs, workers.
const TASKS_A_POD: u64 = 32;
/// Number of inotify instances: those of containerd, kubelet and journald, and those per pod.
const WATCHERS: u64 = 64;
const WATCHERS_A_POD: u64 = 1;
/// Number of inotify watches: those of containerd, kubelet and journald, and those per pod.
const WATCHES: u64 = 4096;
const WATCHES_A_POD: u64 = 16;

const INOTIFY: Subject =
    Subject { name: "inotify", why: "containerd, kubelet and log collectors watch files of each pod" };
const FILES: Subject =
    Subject { name: "files", why: "the daemon opens sockets, logs and a pidfd per pod, a VMM its disks" };
const TASKS: Subject = Subject { name: "processes", why: "each pod is a VMM process with several threads" };

/// The kernel's limits; `None` if unknown.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Value of `fs.inotify.max_user_instances`.
    pub watchers: Option<u64>,
    /// Value of `fs.inotify.max_user_watches`.
    pub watches: Option<u64>,
    /// Maximum number of open files of the daemon, or of a process like this one.
    pub files: Option<u64>,
    /// Whether `files` is the daemon's limit.
    pub is_of_daemon: bool,
    /// Numbers of open files in use and at most, from `fs.file-nr`.
    pub system_files: Option<(u64, u64)>,
    /// Number of existing processes and threads.
    pub tasks: Option<u64>,
    /// The smaller of `kernel.pid_max` and `kernel.threads-max`.
    pub most_tasks: Option<u64>,
}

/// Reads the limits; `daemon` is the daemon's process.
pub fn read(host: &Host, daemon: Option<u32>) -> Reading {
    let limits_of = |pid: &str| host.text(format!("/proc/{pid}/limits")).ok();
    let daemons = daemon.and_then(|pid| limits_of(&pid.to_string()));
    let is_of_daemon = daemons.is_some();
    let files = daemons.or_else(|| limits_of("self")).and_then(|limits| {
        let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
        let soft = soft.split_whitespace().next()?;
        if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() }
    });
    let numbers = |path: &str| -> Vec<u64> {
        let text = host.text(path).unwrap_or_default();
        text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    // "0.00 0.01 0.05 1/234 5678": running and all.
    let load = host.text("/proc/loadavg").unwrap_or_default();
    let tasks = load.split_whitespace().nth(3).and_then(|word| word.split_once('/')?.1.parse().ok());
    let most = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];
    Reading {
        watchers: host.number("/proc/sys/fs/inotify/max_user_instances"),
        watches: host.number("/proc/sys/fs/inotify/max_user_watches"),
        files,
        is_of_daemon,
        system_files: match numbers("/proc/sys/fs/file-nr")[..] {
            [used, _, most] => Some((used, most)),
            _ => None,
        },
        tasks,
        most_tasks: most.into_iter().filter_map(|path| host.number(path)).min(),
    }
}

/// Checks the inotify limits.
pub fn inotify(reading: &Reading, pods: u32) -> Check {
    let pods = u64::from(pods);
    let (Some(watchers), Some(watches)) = (reading.watchers, reading.watches) else {
        return INOTIFY.warning("the kernel's limits are unknown", Fix::words("see /proc/sys/fs/inotify"));
    };
    let wanted = (WATCHERS + WATCHERS_A_POD * pods, WATCHES + WATCHES_A_POD * pods);
    let seen = format!("{watchers} instances and {watches} watches per user");
    if watchers >= wanted.0 && watches >= wanted.1 {
        return INOTIFY.ok(seen);
    }
    INOTIFY.warning(
        format!("{seen}; {pods} pods need {} and {}", wanted.0, wanted.1),
        Fix::commands(
            "raise the limits, permanently in /etc/sysctl.d",
            [
                format!(
                    "sysctl fs.inotify.max_user_instances={}",
                    watchers.max(wanted.0.next_power_of_two())
                ),
                format!("sysctl fs.inotify.max_user_watches={}", watches.max(wanted.1.next_power_of_two())),
            ],
        ),
    )
}

/// Checks the limits on open files.
pub fn files(reading: &Reading, pods: u32) -> Check {
    let pods = u64::from(pods);
    let (Some(files), Some((used, most))) = (reading.files, reading.system_files) else {
        return FILES.warning("the kernel's limits are unknown", Fix::words("see /proc/self/limits"));
    };
    let whose = if reading.is_of_daemon { "the daemon" } else { "a process like this one (no daemon runs)" };
    let count = |files: u64| if files > 1 << 40 { "any number".to_owned() } else { files.to_string() };
    let seen = format!("{whose} may open {}, the system {}; {used} are open", count(files), count(most));
    let wanted = DAEMON_FILES + FILES_A_POD * pods;
    if files < wanted {
        return FILES.warning(
            format!("{seen}; with {pods} pods the daemon needs {wanted}"),
            Fix::words("start the daemon with LimitNOFILE=1048576, as its systemd unit does"),
        );
    }
    let wanted = used.saturating_add(SYSTEM_FILES_A_POD * pods);
    if most < wanted {
        return FILES.warning(
            format!("{seen}; {pods} pods need {wanted}"),
            Fix::commands(
                "raise the limit, permanently in /etc/sysctl.d",
                [format!("sysctl fs.file-max={}", wanted.next_power_of_two())],
            ),
        );
    }
    FILES.ok(seen)
}

/// Checks the limits on processes.
pub fn tasks(reading: &Reading, pods: u32) -> Check {
    let pods = u64::from(pods);
    let (Some(tasks), Some(most)) = (reading.tasks, reading.most_tasks) else {
        return TASKS.warning("the kernel's limits are unknown", Fix::words("see /proc/sys/kernel/pid_max"));
    };
    let seen = format!("{tasks} of at most {most}");
    let wanted = tasks.saturating_add(TASKS_A_POD * pods);
    if wanted <= most {
        return TASKS.ok(seen);
    }
    let raised = wanted.next_power_of_two();
    TASKS.warning(
        format!("{seen}; {pods} pods need {wanted}"),
        Fix::commands(
            "raise the limits, permanently in /etc/sysctl.d",
            [format!("sysctl kernel.pid_max={raised}"), format!("sysctl kernel.threads-max={raised}")],
        ),
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Verdict;

    fn roomy() -> Reading {
        Reading {
            watchers: Some(128),
            watches: Some(65_536),
            files: Some(1024),
            is_of_daemon: true,
            system_files: Some((1_000, 100_000)),
            tasks: Some(200),
            most_tasks: Some(32_768),
        }
    }

    #[test]
    fn limits_must_do_for_the_pods_asked_about() {
        type Judge = fn(&Reading, u32) -> Check;
        for (judge, enough, too_many, command) in [
            (inotify as Judge, 64, 65, Some("sysctl fs.inotify.max_user_instances=256")),
            (files, 40, 41, None),
            (tasks, 1017, 1018, Some("sysctl kernel.pid_max=65536")),
        ] {
            let check = judge(&roomy(), enough);
            assert_eq!(check.verdict, Verdict::Ok, "{check}");
            let check = judge(&roomy(), too_many);
            assert_eq!(check.verdict, Verdict::Warning, "{check}");
            assert!(check.seen.contains(&format!("{too_many} pods")), "{check}");
            let commands = check.fix.unwrap().commands;
            assert_eq!(commands.first().map(String::as_str), command, "{commands:?}");
            assert_eq!(judge(&Reading::default(), 1).verdict, Verdict::Warning);
        }
        let full = Reading { files: Some(u64::MAX), system_files: Some((99_000, 100_000)), ..roomy() };
        let check = files(&full, 10);
        assert!(check.verdict == Verdict::Warning && check.seen.contains("may open any number"), "{check}");
    }

    #[test]
    fn the_daemon_is_asked_about_if_it_runs() {
        let root = tempfile::tempdir().unwrap();
        let limits = |files: &str| format!("Limit  Soft  Hard\nMax open files   {files}  4096   files \n");
        for (path, text) in [
            ("proc/self/limits", limits("1024")),
            ("proc/7/limits", limits("unlimited")),
            ("proc/loadavg", "0.00 0.01 0.05 1/234 5678\n".to_owned()),
            ("proc/sys/kernel/pid_max", "32768\n".to_owned()),
            ("proc/sys/kernel/threads-max", "9000\n".to_owned()),
            ("proc/sys/fs/file-nr", "1216\t0\t9223372036854775807\n".to_owned()),
        ] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let host = Host::below(root.path());
        let (own, daemons) = (read(&host, None), read(&host, Some(7)));
        assert_eq!((own.files, own.is_of_daemon), (Some(1024), false));
        assert_eq!((daemons.files, daemons.is_of_daemon), (Some(u64::MAX), true));
        assert_eq!((own.tasks, own.most_tasks), (Some(234), Some(9000)));
        assert_eq!(own.system_files, Some((1216, i64::MAX as u64)));
        assert_eq!(read(&host, Some(8)).files, Some(1024), "a daemon that is not in sight");
    }
}
