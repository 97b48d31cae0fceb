//! VMMs that fail: each fault gives one error that names pod and call, and nothing remains.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_config::{Accelerator, VmConfig, VmmChoice};
use sandboxer_vmm::{Vmm, VmmError};

use super::{CloudHypervisor, api};
use crate::{
    double::behaviour::{Behaviour, Fault},
    listed,
    test_guest::{Guest, Pod, vm_config},
    vmm_suite::{Case, LONG, Running, Subject, cases::the_contract_of_all_vmms_is_kept, left_in, trial},
};

pub fn trials() -> Vec<Trial> {
    let cases: [Case<CloudHypervisor>; _] = listed![
        the_contract_of_all_vmms_is_kept,
        a_guest_that_resets_itself_is_ended,
        a_daemon_that_chose_another_vmm_takes_the_vm_up,
        a_vmm_that_is_missing_is_named,
        a_vmm_that_dies_while_it_starts_leaves_nothing,
        a_start_that_is_refused_leaves_nothing,
        a_start_that_is_never_answered_is_given_up,
        a_vmm_that_dies_over_a_disk_is_one_error,
        rubbish_is_told_from_a_refusal,
        an_answer_that_never_comes_holds_up_nobody_else,
        an_endless_answer_is_cut,
    ];
    // Each case chooses its double itself.
    let any = CloudHypervisor::Double(Behaviour::for_version("v53.0"));
    cases.into_iter().map(|case| trial("faults", &any, case)).collect()
}

fn double(call: &str, fault: Fault) -> CloudHypervisor {
    CloudHypervisor::Double(Behaviour::for_version("v53.0").with_fault(call, fault))
}

async fn a_guest_that_resets_itself_is_ended(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    Guest::connect(running.vm.as_ref()).await.tell("panic").await;
    let exit = tokio::time::timeout(LONG, running.vm.exited()).await.context("it was booted again")?;
    ensure!(exit.how == "was killed after its guest reset itself", "{exit:?}");
    ensure!(exit.last_lines.iter().any(|line| line.contains("Kernel panic")), "{exit:?}");
    running.end().await
}

async fn a_daemon_that_chose_another_vmm_takes_the_vm_up(subject: CloudHypervisor) -> Result<()> {
    let running = Running::start(&subject).await?;
    let config = VmConfig { vmm: VmmChoice::Qemu, accelerator: Accelerator::Tcg, ..vm_config() };
    let other = sandboxer_vmm::detect(&config).await?;
    ensure!(other.info().name == "qemu");
    let record = running.vm.record();
    let vm = other.adopt(&record).await?.context("the VM runs")?;
    vm.attach_disk(&running.pod.disk("late")).await?;
    let mut guest = Guest::connect(vm.as_ref()).await;
    ensure!(guest.ask("await late").await == "disk late ro=0 starts with late");
    running.end().await
}

async fn a_vmm_that_is_missing_is_named(subject: CloudHypervisor) -> Result<()> {
    let pod = Pod::new("contract");
    let vmm = subject.vmm(&pod, vm_config()).await?;
    // After its version was read.
    fs::remove_file(pod.path("cloud-hypervisor"))?;
    let error = vmm.boot(&pod.halting_spec()).await.err().context("booted")?;
    ensure!(
        matches!(&error, VmmError::Spawn { program, .. } if *program == pod.path("cloud-hypervisor")),
        "{error:?}"
    );
    ensure!(left_in(&pod.halting_spec())?.is_empty());
    Ok(())
}

async fn a_vmm_that_dies_while_it_starts_leaves_nothing(_: CloudHypervisor) -> Result<()> {
    for call in ["vm.create", "vm.boot"] {
        let fault = Fault::Exits(3, "cannot allocate 3 bytes".into());
        let error = failing_boot(double(call, fault), vm_config()).await?;
        ensure!(
            matches!(&error, VmmError::Died { pod, call: named, how, last_lines }
                if pod.as_str() == "contract" && named == call && how == "exited with status 3"
                    && last_lines.contains("cannot allocate 3 bytes")),
            "{error:?}"
        );
    }
    Ok(())
}

async fn a_start_that_is_refused_leaves_nothing(_: CloudHypervisor) -> Result<()> {
    for call in ["vm.create", "vm.boot"] {
        let error = failing_boot(double(call, Fault::Refuses(500, "no".into())), vm_config()).await?;
        ensure!(
            matches!(&error, VmmError::Refused { call: named, reason, .. }
                if named == call && reason == "Error from API: no"),
            "{error:?}"
        );
    }
    Ok(())
}

async fn a_start_that_is_never_answered_is_given_up(_: CloudHypervisor) -> Result<()> {
    let limit = Duration::from_millis(500);
    let config = VmConfig { boot_timeout: limit, ..vm_config() };
    let error = failing_boot(double("vm.create", Fault::Silent), config).await?;
    ensure!(
        matches!(&error, VmmError::Hung { call, limit: named, .. } if call == "vm.create" && *named == limit),
        "{error:?}"
    );
    Ok(())
}

/// Returns the error of a start, after which only logs may remain.
async fn failing_boot(subject: CloudHypervisor, config: VmConfig) -> Result<VmmError> {
    let pod = Pod::new("contract");
    let spec = pod.halting_spec();
    let error = subject.vmm(&pod, config).await?.boot(&spec).await.err().context("booted")?;
    let left = left_in(&spec)?;
    ensure!(left.iter().all(|name| name.ends_with(".log")), "{left:?}");
    pod.assert_nothing_left().await;
    Ok(error)
}

async fn a_vmm_that_dies_over_a_disk_is_one_error(_: CloudHypervisor) -> Result<()> {
    let fault = Fault::Exits(101, "thread 'vmm' panicked".into());
    let running = Running::start(&double("vm.add-disk", fault)).await?;
    let error = attach(&running).await?;
    ensure!(
        matches!(&error, VmmError::Died { call, how, last_lines, .. }
            if call.contains("as disk late") && how == "exited with status 101"
                && last_lines.contains("thread 'vmm' panicked")),
        "{error:?}"
    );
    running.end().await
}

async fn rubbish_is_told_from_a_refusal(_: CloudHypervisor) -> Result<()> {
    for fault in [
        Fault::Says("what?\r\n\r\n".into()),
        Fault::Says("HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\n{".into()),
        Fault::Says("HTTP/1.1 302 \r\nContent-Length: 0\r\n\r\n".into()),
        Fault::Says(format!("HTTP/1.1 200 \r\nX: {}\r\n\r\n", "x".repeat(1 << 20))),
        Fault::Body("not json".into()),
        Fault::Body("{\"id\": \"disk-late\"}".into()),
        Fault::Body("[]".into()),
        Fault::Closes,
    ] {
        let running = Running::start(&double("vm.add-disk", fault.clone())).await?;
        let error = attach(&running).await?;
        ensure!(
            matches!(&error, VmmError::Malformed { call, .. } if call.contains("as disk late")),
            "{fault:?}: {error:?}"
        );
        running.end().await?;
    }
    Ok(())
}

async fn an_answer_that_never_comes_holds_up_nobody_else(_: CloudHypervisor) -> Result<()> {
    let config = VmConfig { call_timeout: Duration::from_secs(3), ..vm_config() };
    let running = Running::start_with(&double("vm.add-disk", Fault::Silent), config).await?;
    let api = api(running.vm.as_ref());
    let (error, info) = tokio::join!(attach(&running), api.info());
    info.context("another call was held up")?;
    ensure!(matches!(&error, Ok(VmmError::Hung { call, .. }) if call.contains("as disk late")), "{error:?}");
    running.end().await
}

async fn an_endless_answer_is_cut(_: CloudHypervisor) -> Result<()> {
    let running = Running::start(&double("vm.add-disk", Fault::Huge(100 << 20))).await?;
    let error = attach(&running).await?;
    ensure!(
        matches!(&error, VmmError::Malformed { reason, .. } if reason.contains("longer than 1048576 bytes")),
        "{error:?}"
    );
    running.end().await
}

async fn attach(running: &Running<CloudHypervisor>) -> Result<VmmError> {
    running.vm.attach_disk(&running.pod.disk("late")).await.err().context("a disk was plugged in")
}
