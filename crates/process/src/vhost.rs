//! The kernel threads that carry packets between a VMM's taps and its guest (vhost-net), one for each network
//! interface.
//!
//! Since Linux 6.4 they are threads of the VMM. An older kernel creates a process for each, in the control group that
//! the VMM is in at that moment. The process ends with the VMM, but does not follow it into another group.

use std::{fs, io};

use super::cgroup;

/// The carriers of one VMM's packets.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Carriers {
    /// IDs of carriers that are threads of the VMM.
    pub threads: Vec<u32>,
    /// IDs of carriers that are processes.
    pub processes: Vec<u32>,
}

/// Finds the carriers of VMM `pid`, at most `count`. Blocks.
pub fn find(pid: u32, count: usize) -> io::Result<Carriers> {
    let name = format!("vhost-{pid}");
    let is_one = |comm: &str| fs::read_to_string(comm).is_ok_and(|found| found.trim_end() == name.as_str());
    let listed = fs::read_dir(format!("/proc/{pid}/task"))?;
    let threads = listed.filter_map(|thread| thread.ok()?.file_name().to_str()?.parse().ok());
    let threads: Vec<u32> =
        threads.filter(|thread| is_one(&format!("/proc/{pid}/task/{thread}/comm"))).take(count).collect();
    if threads.len() == count {
        return Ok(Carriers { threads, processes: Vec::new() });
    }
    let mut beside = cgroup::beside(pid)?;
    // The carriers were created right after the VMM.
    beside.sort_by_key(|other| other.wrapping_sub(pid));
    let processes = beside.into_iter().filter(|other| is_one(&format!("/proc/{other}/comm")));
    let processes = processes.take(count - threads.len()).collect();
    Ok(Carriers { threads, processes })
}

impl Carriers {
    /// Gives the carriers SCHED_BATCH so that they do not preempt vCPUs; a carrier that shares a CPU with its guest
    /// then handles several packets per wake-up.
    ///
    /// Otherwise the kernel gives a carrier the CPU for each packet, at the cost of an exit of the guest and an
    /// interrupt. A carrier with a CPU of its own runs as before.
    pub fn serve_in_batches(&self) -> io::Result<()> {
        self.threads.iter().chain(&self.processes).try_for_each(|&thread| {
            let parameter = libc::sched_param { sched_priority: 0 };
            // SAFETY: the parameter outlives the call, which keeps no reference to it.
            match unsafe {
                libc::sched_setscheduler(thread.cast_signed(), libc::SCHED_BATCH, &raw const parameter)
            } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        process,
        sync::mpsc,
        thread::{self, Builder},
    };

    use nix::unistd::gettid;

    use super::*;

    #[test]
    fn threads_of_the_vmm_are_found_by_their_name_and_serve_in_batches() {
        let pid = process::id();
        let (sender, tid) = mpsc::channel();
        let (over, ends) = mpsc::channel::<()>();
        let carrier = move || {
            sender.send(gettid().as_raw().cast_unsigned()).unwrap();
            let _ = ends.recv();
        };
        let carrier = Builder::new().name(format!("vhost-{pid}")).spawn(carrier).unwrap();
        let tid = tid.recv().unwrap();
        let found = find(pid, 1).unwrap();
        assert_eq!(found, Carriers { threads: vec![tid], processes: Vec::new() });
        found.serve_in_batches().unwrap();
        // SAFETY: no pointer is passed.
        let policy = |thread: u32| unsafe { libc::sched_getscheduler(thread.cast_signed()) };
        assert_eq!(policy(tid), libc::SCHED_BATCH);
        assert_eq!(policy(0), libc::SCHED_OTHER, "another thread");
        drop(over);
        carrier.join().unwrap();
        thread::yield_now();
    }

    #[test]
    fn a_process_is_found_in_the_vmms_control_group() {
        // A link gives the process the name of a carrier of this one. A copy would still be open for writing in a
        // child that another test forks just then, and could not be executed.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(format!("vhost-{}", process::id()));
        symlink("/bin/sleep", &program).unwrap();
        let mut carrier = process::Command::new(&program).arg("60").spawn().unwrap();
        let found = find(process::id(), 1);
        carrier.kill().unwrap();
        let id = carrier.id();
        carrier.wait().unwrap();
        assert_eq!(found.unwrap(), Carriers { threads: Vec::new(), processes: vec![id] });
    }
}
