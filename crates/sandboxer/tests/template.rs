//! Templates and the pool, with doubles for the VMM and the agent; the files are real.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod template_host;

use std::{fs, os::unix::fs::FileExt, path::Path, time::Duration};

use nix::errno::Errno;
use sandboxer::{
    pod::{self, DaemonState},
    template::{BuildError, Missing, Template, TemplateError},
};
use sandboxer_base::{Code, digest::hex, failpoint::inject};
use sandboxer_config::StartPath;
use sandboxer_vmm_fake::Fault;
use sha2::{Digest, Sha256};
use template_host::{
    Host, LARGER, LARGEST, LONG, Log, SHAPE, filled, later, missed, started, started_at_best, try_started,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

#[tokio::test(flavor = "multi_thread")]
async fn the_first_pod_boots_and_the_next_is_a_copy_with_a_key_of_its_own() {
    let host = Host::new();
    let node = host.node();
    let first = started(&node, "first").await;
    assert_eq!(first.status().start_path, Some(StartPath::Boot));
    assert_eq!(
        (missed(&node, StartPath::Pool, "off"), missed(&node, StartPath::Template, "preparing")),
        (1, 1)
    );

    let template = node.templates.prepare(SHAPE).await.unwrap();
    let second = started(&node, "second").await;
    assert_eq!(second.status().start_path, Some(StartPath::Template));
    let cold = started_at_best(&node, "cold", StartPath::Boot).await;
    assert_eq!(cold.status().start_path, Some(StartPath::Boot));

    // After a restart only this copy answers to its own key.
    let records: Vec<_> = node.journal.records().unwrap().into_iter().map(Result::unwrap).collect();
    let second = records.into_iter().find(|record| record.spec.id.as_str() == "second").unwrap();
    assert_ne!(second.link_key, template.link_key);
    let later = host.node();
    assert_eq!(pod::recover::recover(&later, pod::recover::Records::read(&later).unwrap()).await.alive, 3);
    assert!(host.path("run/pods/second").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_outlives_its_daemon_and_no_other_is_made() {
    let host = Host::new();
    let made = host.node().templates.prepare(SHAPE).await.unwrap();
    let found = host.node().templates.prepare(SHAPE).await.unwrap();
    assert_eq!((&found.key, &found.link_key), (&made.key, &made.link_key), "it was made anew");
    assert_eq!(host.templates().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_wrong_with_a_template_is_named_and_it_is_made_anew() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("memory\" is damaged: checksum mismatch", |dir| flip_bit(&dir.join("memory"))),
        ("state\" is damaged: checksum mismatch", |dir| flip_bit(&dir.join("state"))),
        ("memory\" is damaged: it has 7 bytes", |dir| truncate(&dir.join("memory"), 7)),
        ("memory\" of a template", |dir| fs::remove_file(dir.join("memory")).unwrap()),
        ("template.json\" is damaged", |dir| truncate(&dir.join("template.json"), 40)),
        ("template.json\" is damaged", |dir| {
            replace(&dir.join("template.json"), "\"vcpus\":1", "\"vcpus\":2")
        }),
    ];
    let host = Host::new();
    for (says, damage) in damages {
        let before = host.node().templates.prepare(SHAPE).await.unwrap();
        let [dir] = host.templates().try_into().unwrap();
        damage(&dir);
        let node = host.node();
        let error = verify(&node, &before).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        let after = node.templates.prepare(SHAPE).await.unwrap();
        assert_eq!(after.key, before.key);
        assert_ne!(after.link_key, before.link_key, "{says}: the damaged one was used");
        verify(&node, &after).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_cannot_be_read_now_is_kept() {
    for (point, error) in ["a template is opened", "a template is read"].into_iter().flat_map(|point| {
        [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EIO].map(|error| (point, error))
    }) {
        let host = Host::new();
        let made = host.node().templates.prepare(SHAPE).await.unwrap();
        let [dir] = host.templates().try_into().unwrap();
        let node = host.node();
        let failing = inject(point, dir.to_str().unwrap(), error as i32, 1);
        node.templates.prepare(SHAPE).await.unwrap_err();
        assert!(failing.is_used_up(), "{point}: {error}");
        let again = node.templates.prepare(SHAPE).await.unwrap();
        assert_eq!(
            (&again.key, &again.link_key),
            (&made.key, &made.link_key),
            "{point}: {error}: it was made anew"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_of_another_name_is_a_foreign_one() {
    let host = Host::new();
    let made = host.node().templates.prepare(SHAPE).await.unwrap();
    let [dir] = host.templates().try_into().unwrap();
    // Its name says the current inputs; its content says the earlier ones.
    fs::write(host.path("initramfs"), "another initramfs").unwrap();
    let node = host.node();
    let next = node.templates.prepare(SHAPE).await.unwrap();
    let next_dir = dir.with_file_name(next.key.to_string());
    fs::remove_dir_all(&next_dir).unwrap();
    fs::rename(&dir, &next_dir).unwrap();
    let error = verify(&node, &next).unwrap_err();
    assert!(matches!(&error, TemplateError::Foreign { key, .. } if *key == made.key), "{error}");
    let rebuilt = host.node().templates.prepare(SHAPE).await.unwrap();
    assert_ne!(rebuilt.link_key, made.link_key, "the foreign one was used");
}

/// Such as one that came with a copy of the state from another host. Firecracker itself only warns of another processor.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_template_of_another_version_or_processor_is_never_restored() {
    let host = Host::new();
    for (own, other) in
        [("\"version\":\"0\"", "\"version\":\"1\""), ("\"cpu\":[", "\"cpu\":[\"model name\\t: another\",")]
    {
        let made = host.node().templates.prepare(SHAPE).await.unwrap();
        let [dir] = host.templates().try_into().unwrap();
        rewrite(&dir.join("template.json"), own, other);
        let node = host.node();
        let error = verify(&node, &made).unwrap_err();
        assert!(matches!(&error, TemplateError::Foreign { key, .. } if *key != made.key), "{other}: {error}");
        assert!(error.to_string().contains(&*dir.to_string_lossy()), "{error}");
        let rebuilt = node.templates.prepare(SHAPE).await.unwrap();
        assert_ne!(rebuilt.link_key, made.link_key, "{other}: the foreign one was used");
        host.assert_stored(&[&made.key]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_template_depends_on_is_looked_at_before_each_start() {
    let host = Host::new();
    let node = host.node();
    let old = node.templates.prepare(SHAPE).await.unwrap();
    assert_eq!(started(&node, "copy").await.status().start_path, Some(StartPath::Template));
    fs::write(host.path("initramfs"), "an upgraded initramfs").unwrap();
    assert_eq!(
        started(&node, "after-upgrade").await.status().start_path,
        Some(StartPath::Boot),
        "an old agent runs"
    );
    let new = node.templates.prepare(SHAPE).await.unwrap();
    assert_ne!(new.key, old.key);
    assert_eq!(started(&node, "copy-of-new").await.status().start_path, Some(StartPath::Template));

    host.vmm.upgrade("1");
    let node = host.node();
    assert_ne!(node.templates.prepare(SHAPE).await.unwrap().key, new.key, "it is of another version's VMM");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_refuses_templates_costs_time_and_no_pod() {
    let host = Host::new();
    let node = host.node();
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::RefusesTemplates);
    let pod = started(&node, "pod").await;
    assert_eq!(pod.status().start_path, Some(StartPath::Boot));
    assert_eq!(missed(&node, StartPath::Template, "restore-failed"), 1);
    pod.remove().await.unwrap();
    assert!(!host.path("run/pods/pod").exists());
}

#[tokio::test]
async fn why_pods_start_in_a_slower_way_is_counted_always_and_told_once() {
    let host = Host::new();
    let node = host.node();
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::RefusesTemplates);
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _logged = tracing::subscriber::set_default(subscriber);
    for id in ["one", "two", "three"] {
        started(&node, id).await;
    }
    assert_eq!(missed(&node, StartPath::Template, "restore-failed"), 3);
    assert_eq!(log.lines("injected refusal"), 1);

    // A template that cannot be built is logged once, however often it is tried.
    host.vmm.inject(Fault::FailsToBoot);
    for _ in 0..3 {
        node.templates.prepare(LARGER).await.unwrap_err();
    }
    assert_eq!(log.lines("no template"), 1);
    assert_eq!(node.templates.get(LARGER).unwrap_err(), Missing::NotMade);
    fs::remove_file(host.path("kernel")).unwrap();
    node.templates.prepare(LARGER).await.unwrap_err();
    assert_eq!(log.lines("no template"), 2, "it fails in something else");
}

#[tokio::test]
async fn all_ways_together_take_no_longer_than_a_pod_may() {
    let host = Host::new();
    let node = host.node();
    let limit = node.config.vm.boot_timeout;
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::HangsOnRestore);
    tokio::time::pause();
    let began = Instant::now();
    assert_eq!(started(&node, "hangs-on-restore").await.status().start_path, Some(StartPath::Boot));
    assert_eq!(missed(&node, StartPath::Template, "silent"), 1);
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());

    // Every start path gives a VM, and none logs a warning.
    host.vmm.inject(Fault::NeverReady);
    let began = Instant::now();
    let error = try_started(&node, "never-ready").await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
    assert_eq!(
        (missed(&node, StartPath::Template, "silent"), missed(&node, StartPath::Boot, "silent")),
        (2, 1)
    );
    assert!(began.elapsed() <= limit + Duration::from_millis(10), "{:?}", began.elapsed());
}

/// A reload must not wait for a boot.
#[tokio::test(flavor = "multi_thread")]
async fn a_template_in_preparation_ends_with_the_daemon_and_leaves_nothing() {
    for fault in [Fault::NeverReady, Fault::Hangs] {
        let host = Host::new();
        let node = host.node();
        host.vmm.inject(fault);
        let preparing = tokio::spawn({
            let templates = node.templates.clone();
            async move { templates.prepare(SHAPE).await }
        });
        while !host.path("run/template").exists() {
            assert!(!preparing.is_finished());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::timeout(node.config.vm.boot_timeout / 2, node.templates.stop()).await.unwrap();
        for error in [preparing.await.unwrap(), node.templates.prepare(SHAPE).await].map(Result::unwrap_err) {
            assert!(matches!(error, BuildError::Stopping), "{error}");
        }
        assert!(host.vmm.running().is_empty() && !host.path("run/template").exists());
        host.assert_stored(&[]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_size_is_compared_with_what_its_own_template_was_made_of() {
    let host = Host::new();
    let node = host.node();
    let old = [node.templates.prepare(SHAPE).await.unwrap(), node.templates.prepare(LARGER).await.unwrap()];
    fs::write(host.path("initramfs"), "an upgraded initramfs").unwrap();
    // This makes the store check the files again, for one of the sizes.
    let new = node.templates.prepare(SHAPE).await.unwrap();
    assert_ne!(new.key, old[0].key);
    assert_eq!(node.templates.get(LARGER).unwrap_err(), Missing::Stale, "an old agent runs");
    assert_ne!(node.templates.prepare(LARGER).await.unwrap().key, old[1].key);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_replaced_while_a_template_is_made_makes_no_template() {
    let host = Host::new();
    let node = host.node();
    *host.meddles_with.lock().unwrap() = Some(host.path("kernel"));
    let error = node.templates.prepare(SHAPE).await.unwrap_err();
    assert!(matches!(error, BuildError::Changed), "{error}");
    host.assert_stored(&[]);
    node.templates.prepare(SHAPE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_is_there_waits_for_none_that_is_made() {
    let host = Host::new();
    let node = host.node();
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::Hangs);
    let daemon = node.clone();
    let foreign = tokio::spawn(async move { daemon.templates.prepare(LARGER).await });
    let begun = async {
        while !host.path("run/template").exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, begun).await.expect("another template is being made");
    tokio::time::timeout(LONG, node.templates.prepare(SHAPE)).await.expect("it is there").unwrap();
    foreign.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_its_vmm_refuses_is_made_anew_once() {
    let host = Host::new();
    let found = host.node().templates.prepare(SHAPE).await.unwrap().link_key.clone();
    let node = host.node();
    node.templates.prepare(SHAPE).await.unwrap();
    host.vmm.inject(Fault::RefusesTemplates);
    assert_eq!(started(&node, "one").await.status().start_path, Some(StartPath::Boot));
    let made = node.templates.prepare(SHAPE).await.unwrap().link_key.clone();
    assert_ne!(made, found, "what is refused is used still");
    assert_eq!(started(&node, "two").await.status().start_path, Some(StartPath::Boot));
    let again = node.templates.prepare(SHAPE).await.unwrap().link_key.clone();
    assert_eq!(again, made, "it is made again and again");
    assert_eq!(missed(&node, StartPath::Template, "restore-failed"), 2);
}

#[tokio::test]
async fn the_least_recently_used_template_goes_first_and_none_that_is_in_use() {
    let mut host = Host { most: 2, ..Host::new() };
    let node = host.node();
    let first = node.templates.prepare(SHAPE).await.unwrap().key.clone();
    let second = node.templates.prepare(LARGER).await.unwrap().key.clone();
    let error = node.templates.prepare(LARGEST).await.unwrap_err();
    assert!(matches!(error, BuildError::NoRoom { .. }), "{error}");
    assert_eq!(node.templates.get(LARGEST).unwrap_err(), Missing::NoRoom);
    host.assert_stored(&[&first, &second]);

    // Its use is written to disk in the background.
    later(Duration::from_secs(61)).await;
    let used = |key| host.template(key).metadata().unwrap().modified().unwrap();
    node.templates.get(SHAPE).unwrap();
    let written = async {
        while used(&first) <= used(&second) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, written).await.expect("its use is written down");
    later(Duration::from_secs(61)).await;
    let third = node.templates.prepare(LARGEST).await.unwrap().key.clone();
    host.assert_stored(&[&first, &third]);

    host.most = 1;
    host.node();
    host.assert_stored(&[&third]);
}

#[tokio::test]
async fn templates_keep_within_their_bytes_whatever_is_in_them() {
    let mut host = Host::new();
    let first = host.node().templates.prepare(SHAPE).await.unwrap().key.clone();
    host.most_bytes = host.taken(&first) * 5 / 2;
    let node = host.node();
    let second = node.templates.prepare(LARGER).await.unwrap().key.clone();
    node.templates.prepare(SHAPE).await.unwrap();
    let error = node.templates.prepare(LARGEST).await.unwrap_err();
    assert!(matches!(error, BuildError::NoRoom { .. }), "{error}");
    host.assert_stored(&[&first, &second]);
    later(Duration::from_secs(61)).await;
    let third = node.templates.prepare(LARGEST).await.unwrap().key.clone();
    host.assert_stored(&[&first, &third]);

    // A template that cannot be read takes space all the same.
    truncate(&host.template(&first).join("template.json"), 40);
    host.most_bytes = host.taken(&third) * 3 / 2;
    host.node();
    host.assert_stored(&[&third]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_fills_gives_and_is_filled_again() {
    let host = Host { pool: 2, ..Host::new() };
    let node = host.node();
    let daemon = node.clone();
    let shutdown = CancellationToken::new();
    let until = shutdown.clone();
    let filling = tokio::spawn(async move { daemon.pool.keep_filled(&daemon, &until).await });
    filled(&node, 2).await;
    let waiting = host.vmm.running();
    let pod = started(&node, "claims").await;
    assert_eq!(pod.status().start_path, Some(StartPath::Pool));
    assert_eq!(host.vmm.running().iter().filter(|id| waiting.contains(id)).count(), 1, "no VM was taken");
    assert!(host.path("run/pods/claims").exists());
    filled(&node, 2).await;

    // A VM that died while it waited does not affect pods.
    let doomed = host.vmm.running().into_iter().find(|id| id.as_str().starts_with("pool-")).unwrap();
    host.vmm.crash(&doomed);
    for id in ["one", "two", "three"] {
        started(&node, id).await;
    }
    filled(&node, 2).await;

    // VMs of a stale template are removed.
    let before = host.vmm.running();
    fs::write(host.path("initramfs"), "an upgraded initramfs").unwrap();
    assert_ne!(
        started(&node, "after-upgrade").await.status().start_path,
        Some(StartPath::Pool),
        "an old agent runs"
    );
    filled(&node, 2).await;
    let renewed = || {
        node.pool.list().len() == 2
            && !host.vmm.running().iter().any(|id| is_pooled(id) && before.contains(id))
    };
    let all = async {
        while !renewed() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, all).await.expect("VMs of the old template are replaced");

    // The shutdown begins while another VM is being made.
    started(&node, "last").await;
    shutdown.cancel();
    filling.await.unwrap();
    node.pool.drain().await;
    assert!(host.vmm.running().iter().all(|id| !is_pooled(id)), "a VM still waits");
    let left: Vec<_> = fs::read_dir(host.path("run/pool")).unwrap().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

fn is_pooled(id: &sandboxer_protocol::id::SandboxId) -> bool {
    id.as_str().starts_with("pool-")
}

fn verify(node: &DaemonState, template: &Template) -> Result<(), TemplateError> {
    node.templates.verify(&template.key)
}

fn flip_bit(path: &Path) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 9).unwrap();
}

fn truncate(path: &Path, bytes: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn replace(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// Changes a manifest as one who knows its checksum.
fn rewrite(manifest: &Path, from: &str, to: &str) {
    replace(manifest, from, to);
    let text = fs::read_to_string(manifest).unwrap();
    let (_, body) = text.split_once("\"manifest\":").unwrap();
    let body = body.strip_suffix('}').unwrap();
    let sha256 = hex(&Sha256::digest(body));
    fs::write(manifest, format!("{{\"sha256\":\"{sha256}\",\"manifest\":{body}}}")).unwrap();
}
