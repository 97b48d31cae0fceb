//! A state directory that is full or read-only: the node keeps its pods, whichever daemon has them. Needs root: the directory is mounted,
//! in a mount namespace of the test's own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]
#![allow(dead_code, reason = "other tests use all of their doubles")]

mod fake_agent;
mod test_node;

use std::{fs, path::Path, sync::Arc, time::Duration};

use fake_agent::FakeAgent;
use nix::{
    mount::{MsFlags, mount, umount},
    sched::{CloneFlags, unshare},
};
use sandboxer::{
    pod::{DaemonState, recover},
    state::PodState,
};
use sandboxer_config::WritableTo;
use sandboxer_vmm_fake::FakeVmm;
use test_node::{TestNode, id, reader};
use tokio::{runtime::Builder, time::timeout};

const PATIENCE: Duration = Duration::from_secs(60);

/// What happens to the state directory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shortage {
    ReadOnly,
    Full,
}

impl Shortage {
    fn begin(self, state: &Path) {
        match self {
            Self::ReadOnly => {
                let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(None::<&str>, state, None::<&str>, flags, None::<&str>).unwrap();
            }
            Self::Full => {
                let mut options = fs::File::options();
                let filler = options.append(true).create(true).open(state.join("filler")).unwrap();
                let mut size = 1 << 20;
                while size > 0 {
                    // As much as fits.
                    let bytes = vec![1; size];
                    if std::io::Write::write_all(&mut &filler, &bytes).is_err() {
                        size /= 2;
                    }
                }
            }
        }
    }

    fn end(self, state: &Path) {
        match self {
            Self::ReadOnly => {
                mount(None::<&str>, state, None::<&str>, MsFlags::MS_REMOUNT, None::<&str>).unwrap();
            }
            Self::Full => fs::remove_file(state.join("filler")).unwrap(),
        }
    }
}

/// Runs `test` with a state directory of its own file system.
fn with_state_dir<F: Future<Output = ()>>(test: impl FnOnce(TestNode) -> F + Send + 'static) {
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let agent = FakeAgent::default();
            let mut state = None;
            let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
            let node = TestNode::with(vmm, |config| {
                fs::create_dir_all(&config.state_dir).unwrap();
                // A disk of a container that is open for writing would keep the file system from being made read-only.
                config.rootfs.writable = WritableTo::Memory;
                let options = Some("size=16m,mode=0700");
                mount(Some("state"), &config.state_dir, Some("tmpfs"), MsFlags::empty(), options).unwrap();
                state = Some(config.state_dir.clone());
            });
            timeout(PATIENCE, test(node)).await.expect("nothing waits for the disk");
            // Else its directory could not be removed.
            let _ = umount(&state.unwrap());
        });
        runtime.shutdown_background();
    });
    thread.join().unwrap();
}

/// Waits until `fine` is true: records are written beside.
async fn eventually(fine: impl Fn() -> bool) {
    while !fine() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn recovered(node: &Arc<DaemonState>) -> recover::Recovered {
    recover::recover(node, recover::Records::read(node).unwrap()).await
}

#[test]
fn the_next_worker_has_its_pods_on_a_disk_that_is_full_or_read_only() {
    for shortage in [Shortage::ReadOnly, Shortage::Full] {
        with_state_dir(move |test| async move {
            let state = test.node.config.state_dir.clone();
            let pods = ["a", "b"].map(|name| test.pod(name));
            for pod in &pods {
                pod.start().await.unwrap();
            }
            let new = test.container("c", "sleep");
            let _stdout = reader(&new.stdio.stdout);
            pods[0].create_container(new).await.unwrap();
            pods[0].start_process(id("c"), None).await.unwrap();
            // What a daemon that was killed leaves. It is empty: its removal makes no space.
            for left in ["pods/a.new", "rootfs/unfinished-1", "rootfs/scratch/c-1.ext4"] {
                fs::write(state.join(left), "").unwrap();
            }
            fs::create_dir(state.join("templates/.half")).unwrap();
            fs::rename(state.join("pods/b.json"), state.join("pods/b.before")).unwrap();

            shortage.begin(&state);
            let node = test.killed(pods);
            let found = recovered(&node).await;
            assert_eq!((found.alive, found.unknown, found.quarantined), (2, 0, 0), "{shortage:?}");
            let [a, b] = ["a", "b"].map(|name| node.registry.pod(&id(name)).unwrap());
            assert_eq!(a.status().state, PodState::Ready, "{shortage:?}");
            a.stats(None).await.unwrap();
            a.inspect().await.unwrap();
            // What the earlier daemon left was removed where that is possible: there is space again.
            shortage.begin(&state);
            // What is stopped has stopped, also if nobody can write that down.
            timeout(PATIENCE, b.stop()).await.unwrap().unwrap();
            assert_eq!(b.status().state, PodState::Stopped, "{shortage:?}");
            eventually(|| node.journal.trouble().is_some()).await;

            shortage.end(&state);
            a.stop().await.unwrap();
            eventually(|| node.journal.trouble().is_none()).await;
            for pod in [a, b] {
                pod.remove().await.unwrap();
            }
            assert!(test.vmm.running().is_empty());
        });
    }
}

/// Twice at once: a record that cannot be read, and cannot be put aside.
#[test]
fn a_pod_whose_record_is_unreadable_on_a_read_only_disk_is_left_alone() {
    with_state_dir(|test| async move {
        let state = test.node.config.state_dir.clone();
        let pods = ["a", "b"].map(|name| test.pod(name));
        for pod in &pods {
            pod.start().await.unwrap();
        }
        fs::write(state.join("pods/b.json"), "not a record").unwrap();
        let _ = fs::remove_file(state.join("pods/b.before"));
        Shortage::ReadOnly.begin(&state);
        let node = test.killed(pods);
        let found = recovered(&node).await;
        assert_eq!((found.alive, found.quarantined), (1, 1));
        assert_eq!(test.vmm.running().len(), 2);
        Shortage::ReadOnly.end(&state);
        node.registry.pod(&id("a")).unwrap().remove().await.unwrap();
    });
}
