//! Hung volumes: only their users must wait. Needs root: the volumes are mounted, in a mount namespace of
//! the test's own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]
#![allow(dead_code, reason = "other tests use all of their doubles")]

mod fake_agent;
mod hung_volume;
mod test_node;

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use fake_agent::{FakeAgent, OUTPUT};
use hung_volume::HungVolume;
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use oci_spec::runtime::{Mount, MountBuilder};
use sandboxer_base::Code;
use sandboxer_host::helper::{HelperError, Helpers};
use sandboxer_vmm_fake::FakeVmm;
use tempfile::TempDir;
use test_node::{TestNode, id, reader, with_share};
use tokio::{io::AsyncReadExt, runtime::Builder, time::timeout};

/// Time limit of a path lookup in these tests.
const LIMIT: Duration = Duration::from_millis(500);
/// What takes longer is hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Held by the test that runs: helpers are counted as children of this process.
static ONE: Mutex<()> = Mutex::new(());

/// Runs `test` in a mount namespace of its own, on a runtime whose only thread must never wait for a volume, nor
/// its only thread for blocking work.
fn apart<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let _one_at_a_time = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        let runtime = Builder::new_current_thread().max_blocking_threads(1).enable_all().build().unwrap();
        runtime.block_on(async { timeout(PATIENCE, test()).await.expect("the daemon's own threads go on") });
        runtime.shutdown_background();
    });
    thread.join().unwrap();
}

fn volumes(dir: &TempDir, count: usize) -> Vec<HungVolume> {
    let volume = |n: usize| {
        let at = dir.path().join(format!("volume{n}"));
        fs::create_dir(&at).unwrap();
        HungVolume::mount(&at).unwrap()
    };
    (0..count).map(volume).collect()
}

fn bind(source: &Path) -> Mount {
    let options = vec!["rbind".to_owned(), "rw".to_owned()];
    MountBuilder::default().destination("/data").typ("bind").source(source).options(options).build().unwrap()
}

async fn look(helpers: &Helpers, pod: &str, path: &Path) -> Result<(), HelperError> {
    helpers.look(&pod.parse().unwrap(), &bind(path)).await.map(drop)
}

/// Waits until `fine` is true.
async fn eventually(fine: impl Fn() -> bool) {
    while !fine() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the helper processes of this one that are hung.
fn hanging() -> usize {
    let me = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let stat = |pid: &Path| fs::read_to_string(pid.join("stat")).unwrap_or_default();
    processes.filter(|process| stat(&process.path()).contains(&format!("(sandboxer-path) D {me} "))).count()
}

#[test]
fn a_helper_that_hangs_is_given_up_and_its_path_refused_until_the_server_is_back() {
    apart(|| async {
        let dir = tempfile::tempdir().unwrap();
        let mut hung = volumes(&dir, 1);
        let helpers = Helpers::new(Some(env!("CARGO_BIN_EXE_sandboxer").into()), LIMIT);
        look(&helpers, "a", hung[0].path()).await.unwrap();
        look(&helpers, "a", &hung[0].path().join("file")).await.unwrap();

        hung[0].set_silent(true);
        let error = look(&helpers, "a", hung[0].path()).await.unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        let text = error.to_string();
        let path = format!("{:?}", hung[0].path());
        assert!(text.contains("the server of this volume does not answer") && text.contains(&path), "{text}");
        assert!(text.contains("pod a") && text.contains("umount"), "{text}");
        assert_eq!((helpers.hung(), hung[0].left_waiting()), (1, 1));
        let hangs = timeout(PATIENCE, eventually(|| hanging() == 1)).await;
        hangs.expect("what hangs in the kernel cannot be killed");

        // At once, and without another process.
        for pod in ["a", "b"] {
            let again = look(&helpers, pod, hung[0].path()).await.unwrap_err();
            assert!(matches!(again, HelperError::Silent { .. }), "{again}");
        }
        assert_eq!(hung[0].left_waiting(), 1);
        look(&helpers, "a", dir.path()).await.unwrap();

        let path = hung[0].path().to_owned();
        hung.clear();
        eventually(|| helpers.hung() == 0 && hanging() == 0).await;
        look(&helpers, "a", &path).await.unwrap();
    });
}

#[test]
fn a_pod_has_no_more_helpers_that_hang_than_it_may_and_others_have_theirs() {
    apart(|| async {
        let dir = tempfile::tempdir().unwrap();
        let hung = volumes(&dir, 5);
        let helpers = Helpers::new(Some(env!("CARGO_BIN_EXE_sandboxer").into()), LIMIT);
        hung.iter().for_each(|volume| volume.set_silent(true));
        for volume in &hung[..4] {
            let error = look(&helpers, "a", volume.path()).await.unwrap_err();
            assert!(matches!(error, HelperError::Silent { .. }), "{error}");
        }
        let error = look(&helpers, "a", hung[4].path()).await.unwrap_err();
        assert!(matches!(error, HelperError::TooMany { most: 4, whose: "this pod", .. }), "{error}");
        assert_eq!((error.code(), hung[4].left_waiting()), (Code::DeadlineExceeded, 0));
        look(&helpers, "b", dir.path()).await.unwrap();
        drop(hung);
        eventually(|| helpers.hung() == 0).await;
        look(&helpers, "a", dir.path()).await.unwrap();
    });
}

#[test]
fn hung_volumes_cost_their_pod_its_containers_and_other_pods_nothing() {
    apart(|| async {
        let agent = FakeAgent::default();
        let vmm = Arc::new(FakeVmm::new(move |guest| agent.serve(guest)));
        let test = TestNode::with(vmm, |config| {
            config.volumes.timeout = LIMIT;
            // Paths that one container could block for others.
            config.concurrent_containers = 1;
        });
        let hung = volumes(&test.dir, 2);
        hung.iter().for_each(|volume| volume.set_silent(true));
        let (bad, good) = (test.pod("bad"), test.pod("good"));
        bad.start().await.unwrap();
        good.start().await.unwrap();

        let containers = [("h0", &hung[0]), ("h1", &hung[1])].map(|(name, volume)| {
            let (bad, new) = (bad.clone(), with_share(test.container(name, "true"), volume.path()));
            tokio::spawn(async move { bad.create_container(new).await })
        });
        eventually(|| hung.iter().all(|volume| volume.left_waiting() == 1)).await;
        let new = test.container("c", "true");
        let mut stdout = reader(&new.stdio.stdout);
        good.create_container(new).await.unwrap();
        good.start_process(id("c"), None).await.unwrap();
        let mut seen = vec![0; OUTPUT.len()];
        stdout.read_exact(&mut seen).await.unwrap();
        good.inspect().await.unwrap();
        bad.inspect().await.unwrap();
        assert!(containers.iter().all(|container| !container.is_finished()), "the good pod did not wait");

        for container in containers {
            let error = container.await.unwrap().unwrap_err();
            assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        }
        bad.remove().await.unwrap();
        good.remove().await.unwrap();
        assert!(hung.iter().all(|volume| volume.left_waiting() == 1));
    });
}
