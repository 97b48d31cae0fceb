//! The disk on which the daemon keeps its records takes nothing more.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use sandboxer_e2e::case::Case;
use sandboxer_e2e::failing::reached;
use sandboxer_e2e::insist::nobody_there;
use sandboxer_e2e::kubelet::Kubelet;

use super::{Seen, life};

/// The daemon's records on a file system of their own, for as long as this is there.
struct OwnDisk<'a> {
    case: &'a Case,
    records: PathBuf,
}

impl<'a> OwnDisk<'a> {
    async fn mount(case: &'a Case) -> Result<Self> {
        let records = case.stack.daemon_dirs()[1].join("pods");
        case.stack.end("sandboxer", Signal::SIGTERM).await?;
        mount(Some("tmpfs"), &records, Some("tmpfs"), MsFlags::empty(), Some("size=256k,mode=0700"))?;
        case.stack.run_up()?;
        reached(case).await?;
        Ok(Self { case, records })
    }

    fn read_only(&self, yes: bool) -> Result<()> {
        let mut flags = MsFlags::MS_REMOUNT;
        flags.set(MsFlags::MS_RDONLY, yes);
        Ok(mount(None::<&str>, &self.records, None::<&str>, flags, None::<&str>)?)
    }

    async fn unmount(self) -> Result<()> {
        self.case.stack.end("sandboxer", Signal::SIGTERM).await?;
        umount2(&self.records, MntFlags::empty())?;
        self.case.stack.run_up()?;
        reached(self.case).await
    }
}

/// No pod starts, the error says why, and those that are there go on, also through a worker's death.
async fn refused_for_the_disk(seen: &mut Seen<'_>, named: &str) -> Result<()> {
    let case = seen.case;
    for killed in [false, true] {
        if killed {
            case.stack.kill_worker()?;
        }
        let refused = loop {
            match case.cri.run_pod(&case.pod_config(), case.handler).await {
                Ok(_) => bail!("a pod was started without a record of it"),
                Err(error) if nobody_there(&error) => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(error) => break error,
            }
        };
        ensure!(refused.message().contains(named), "the error does not name the cause: {refused}");
        seen.times += 1;
        seen.check().await?;
    }
    Ok(())
}

pub async fn disk_full(case: Case) -> Result<()> {
    let disk = OwnDisk::mount(&case).await?;
    let mut seen = Seen::begin(&case, "disk of the records full", 1).await?;
    let filler = disk.records.join("filler");
    let full = || {
        ensure!(fs::write(&filler, vec![0; 1 << 20]).is_err(), "the disk takes a MiB");
        Ok(())
    };
    let outcome = without_space(&mut seen, "No space left", full, || Ok(fs::remove_file(&filler)?)).await;
    disk.unmount().await?;
    outcome?;
    seen.close().await
}

pub async fn disk_read_only(case: Case) -> Result<()> {
    let disk = OwnDisk::mount(&case).await?;
    let mut seen = Seen::begin(&case, "disk of the records read-only", 1).await?;
    let outcome =
        without_space(&mut seen, "Read-only", || disk.read_only(true), || disk.read_only(false)).await;
    disk.unmount().await?;
    outcome?;
    seen.close().await
}

/// Has the disk take nothing for a while, and then again.
async fn without_space(
    seen: &mut Seen<'_>,
    named: &str,
    take_nothing: impl FnOnce() -> Result<()>,
    take_again: impl FnOnce() -> Result<()>,
) -> Result<()> {
    take_nothing()?;
    let outcome = refused_for_the_disk(seen, named).await;
    take_again()?;
    outcome?;
    life(seen.case, &Kubelet::new(seen.case)?).await.context("with a disk that takes records again")?;
    seen.end_pods().await
}
