//! CPUs that the VM gets while it runs: the kernel does not use a new one until a process brings it online.
//!
//! Giving a CPU up needs no process: the kernel takes it offline and ejects it when the VMM requests that.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{Instant, sleep};

use crate::failure::{Failure, internal};

const CPUS: &str = "/sys/devices/system/cpu";
/// How long the kernel may take to find new CPUs: less than the daemon waits for a response.
const PATIENCE: Duration = Duration::from_secs(4);
/// The delay between two checks.
const LOOK: Duration = Duration::from_millis(2);

/// Brings all CPUs online until there are `count`, or until [`PATIENCE`] has passed. Returns the number online.
pub async fn online(count: u32) -> Result<u32, Failure> {
    let began = Instant::now();
    loop {
        let online = bring_all(Path::new(CPUS)).map_err(internal("cannot bring CPUs online"))?;
        if online >= count || began.elapsed() >= PATIENCE {
            return Ok(online);
        }
        sleep(LOOK).await;
    }
}

/// Brings all CPUs below `dir` online. Returns the number online.
fn bring_all(dir: &Path) -> io::Result<u32> {
    let mut online = 0;
    for switch in switches(dir)? {
        // The first CPU has no switch: it is always online.
        let state = fs::read_to_string(&switch).unwrap_or_else(|_| "1".to_owned());
        let is_online = match state.trim() {
            "0" => match fs::write(&switch, "1") {
                Ok(()) => true,
                // The CPU may just be appearing or disappearing, and is checked again later.
                Err(error) => {
                    tracing::debug!(?switch, %error, "cannot bring a CPU online");
                    false
                }
            },
            _ => true,
        };
        online += u32::from(is_online);
    }
    Ok(online)
}

/// Returns the switches of all CPUs that are present.
fn switches(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut switches = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        if number.is_some_and(|number| number.parse::<u32>().is_ok()) {
            switches.push(entry.path().join("online"));
        }
    }
    Ok(switches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_that_are_present_come_online() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["cpu0", "cpu1", "cpu2", "cpufreq", "cpuidle"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        fs::write(dir.path().join("cpu1/online"), "1\n").unwrap();
        fs::write(dir.path().join("cpu2/online"), "0\n").unwrap();
        assert_eq!(bring_all(dir.path()).unwrap(), 3);
        assert_eq!(fs::read_to_string(dir.path().join("cpu2/online")).unwrap(), "1");
        assert_eq!(fs::read_dir(dir.path().join("cpu0")).unwrap().count(), 0, "the first one has no switch");
        bring_all(Path::new("/nonexistent")).unwrap_err();
    }
}
