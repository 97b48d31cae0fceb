//! Random images, with users, volumes and mounts: what a container sees of its root file system on both sides.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::join;
use k8s_cri::v1::{DnsConfig, Int64Value, Mount, PodSandboxConfig};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sandboxer_e2e::case::{Case, Pod, security, shell};
use sandboxer_e2e::image::{Entry, Kind, LOOK, archive};
use serde_json::{Map, Value, json};
use tonic::Status;

use crate::known::LINKS;
use crate::steps::shrink;

/// Layers of the highest image.
const LAYERS: usize = 4;
/// Images in one pod.
const PER_POD: usize = 20;
/// Attempts to make an image smaller.
const ATTEMPTS: usize = 40;
/// Lines of a difference that are shown.
const SHOWN: usize = 8;

/// A part of an image, or of a container of it.
#[derive(Debug, Clone)]
enum Part {
    /// In this layer.
    Entry(usize, Entry),
    /// Of the image's configuration.
    Volume(String),
    /// As that.
    User(String),
    /// As that.
    Directory(String),
    /// A directory of the host, or a file, at this path.
    Mount { path: String, file: bool, read_only: bool },
    /// The container cannot write to its root.
    ReadOnly,
    /// The container's user.
    RunAs(i64),
}

const NAMES: [&str; 9] = ["a", "b", "c", "etc", "data", "with space", "ünïcode", "-dash", ".hidden"];
const USERS: [&str; 8] = ["0", "1000", "user", "user:extra", "1000:50001", "4000:4000", "65534", "user:user"];
const OWNERS: [u64; 6] = [0, 0, 1000, 65534, 100_000, 4_294_967_294];
const MODES: [u32; 9] = [0o644, 0o755, 0o600, 0o4755, 0o2755, 0o6711, 0o1777, 0o000, 0o111];
const SIZES: [usize; 7] = [0, 1, 4095, 4096, 4097, 70_000, 300_000];

/// What every image has.
fn base() -> Vec<Entry> {
    let file = |path: &str, content: &[u8], mode| Entry::new(path, Kind::File(content.to_vec()), mode);
    let dir = |path: &str, mode| Entry::new(path, Kind::Dir, mode);
    vec![
        dir("proc", 0o555),
        dir("sys", 0o555),
        dir("dev", 0o755),
        dir("etc", 0o755),
        dir("tmp", 0o1777),
        file("look", LOOK, 0o755),
        file("etc/passwd", b"root:x:0:0::/root:/look\nuser:x:1000:1000::/tmp:/look\n", 0o644),
        file("etc/group", b"root:x:0:\nuser:x:1000:\nextra:x:50001:user\n", 0o644),
    ]
}

fn of<T: Copy>(rng: &mut StdRng, all: &[T]) -> Option<T> {
    all.choose(rng).copied()
}

/// Returns a random image and container.
fn random(rng: &mut StdRng) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut dirs = vec!["etc".to_owned(), "tmp".to_owned()];
    let mut paths: Vec<String> = vec!["tmp".to_owned()];
    // Files of the whole image.
    let mut kept: Vec<String> = Vec::new();
    let layers = rng.random_range(1..=LAYERS);
    for layer in 0..layers {
        // A later entry of a layer must not go through what an earlier one has replaced: unpacking would fail on both sides.
        let mut new = BTreeSet::new();
        // Layers are unpacked apart: a link's file is in its own.
        let mut files: Vec<String> = Vec::new();
        for _ in 0..rng.random_range(1..12) {
            let again = !paths.is_empty() && rng.random_bool(0.25);
            let path = if again {
                paths.choose(rng).cloned().unwrap_or_default()
            } else {
                let name = of(rng, &NAMES).unwrap_or("a");
                match rng.random_bool(0.6) {
                    true => format!("{}/{name}", dirs.choose(rng).cloned().unwrap_or_default()),
                    false => name.to_owned(),
                }
            };
            if path == "etc" || path.len() > 80 || !new.insert(path.clone()) {
                continue;
            }
            let kind = match rng.random_range(0..20) {
                0..=4 => Kind::Dir,
                5..=9 => {
                    let size = of(rng, &SIZES).unwrap_or(1);
                    Kind::File(vec![if rng.random_bool(0.3) { 0 } else { b'x' }; size])
                }
                10..=13 => Kind::Symlink(target(rng, &paths)),
                14 | 15 if !files.is_empty() => Kind::Link(files.choose(rng).cloned().unwrap_or_default()),
                14..=16 => Kind::Fifo,
                17 => match rng.random_bool(0.5) {
                    true => Kind::Char(1, 3),
                    false => Kind::Block(7, 200),
                },
                18 => Kind::Whiteout,
                _ => Kind::Opaque,
            };
            match &kind {
                Kind::Dir => {
                    kept.retain(|known| known != &path);
                    dirs.push(path.clone());
                }
                Kind::File(_) => files.push(path.clone()),
                _ => {}
            }
            if kind != Kind::Dir {
                let below = format!("{path}/");
                let is_kept = |known: &String| known != &path && !known.starts_with(&below);
                if kind != Kind::Opaque {
                    dirs.retain(is_kept);
                }
                kept.retain(is_kept);
                if matches!(kind, Kind::Whiteout | Kind::Opaque) || !matches!(kind, Kind::File(_)) {
                    files.retain(is_kept);
                }
            }
            if matches!(kind, Kind::File(_)) {
                kept.push(path.clone());
            }
            paths.push(path.clone());
            let mut entry = Entry::new(&path, kind, of(rng, &MODES).unwrap_or(0o644));
            entry.owner = (of(rng, &OWNERS).unwrap_or(0), of(rng, &OWNERS).unwrap_or(0));
            let takes_attributes = matches!(entry.kind, Kind::File(_) | Kind::Dir);
            if takes_attributes && rng.random_bool(0.15) {
                // cap_net_bind_service, effective and permitted, as setcap(8) writes it.
                let value = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
                if matches!(entry.kind, Kind::File(_)) {
                    entry.attributes.push(("security.capability", value));
                }
                entry.attributes.push(("user.note", b"of a user\0".to_vec()));
            }
            parts.push(Part::Entry(layer, entry));
        }
    }
    // Where both refuse to put anything there is nothing to compare, so most places are possible ones.
    let place = |rng: &mut StdRng, file: bool| {
        let any = |rng: &mut StdRng, all: &[String]| all.choose(rng).cloned().unwrap_or_default();
        let dir = any(rng, &dirs);
        match rng.random_range(0..20) {
            0..=5 if file && !kept.is_empty() => format!("/{}", any(rng, &kept)),
            0..=5 if !file => format!("/{dir}"),
            0..=11 => format!("/{dir}/new"),
            12..=14 => "/not/there/yet".to_owned(),
            15 | 16 => format!("/{}", any(rng, &paths)),
            17 => format!("/{}/new", any(rng, &paths)),
            _ => format!("/{}", of(rng, &NAMES).unwrap_or("a")),
        }
    };
    if rng.random_bool(0.3) {
        parts.push(Part::Volume(place(rng, false)));
    }
    if rng.random_bool(0.3) {
        parts.push(Part::Directory(place(rng, false)));
    }
    if rng.random_bool(0.4) {
        let user = if rng.random_bool(0.03) { "nobody-here" } else { of(rng, &USERS).unwrap_or("0") };
        parts.push(Part::User(user.to_owned()));
    }
    if rng.random_bool(0.1) {
        parts.push(Part::RunAs(of(rng, &[0, 1000, 4242]).unwrap_or(0)));
    }
    if rng.random_bool(0.15) {
        parts.push(Part::ReadOnly);
    }
    if rng.random_bool(0.4) {
        let file = rng.random_bool(0.4);
        let path = place(rng, file);
        parts.push(Part::Mount { path, file, read_only: rng.random_bool(0.4) });
    }
    parts
}

/// Returns what a symbolic link says.
fn target(rng: &mut StdRng, paths: &[String]) -> String {
    let path = paths.choose(rng).cloned().unwrap_or_default();
    match rng.random_range(0..8) {
        0 => format!("/{path}"),
        1 => path,
        2 => format!("../{path}"),
        3 => "../../../../../../etc".to_owned(),
        4 => "/not/there".to_owned(),
        5 => "not-there".to_owned(),
        6 => "/proc/self/root".to_owned(),
        _ => "a".to_owned(),
    }
}

/// A run over random images.
pub struct Images {
    runc: Case,
    ours: Case,
    pods: Option<(Pod, Pod)>,
    in_pod: usize,
    volume: PathBuf,
    number: usize,
    images: usize,
    unlike_links: usize,
    paths: usize,
    refused: usize,
    /// The differences; what is in one of them is not told again.
    found: Vec<Vec<String>>,
    /// Why both refused an image, in the words of runc.
    reasons: BTreeMap<String, usize>,
}

/// What a side has come to: how it failed, or what it saw.
type Seen = std::result::Result<Vec<String>, String>;

impl Images {
    /// Makes what is mounted.
    pub fn new(runc: Case, ours: Case) -> Result<Self> {
        let volume = runc.stack.dir().join("mounted");
        fs::create_dir_all(volume.join("dir"))?;
        fs::write(volume.join("file"), "of the host\n")?;
        fs::write(volume.join("dir/one"), "one\n")?;
        std::os::unix::fs::symlink("one", volume.join("dir/two"))?;
        std::os::unix::fs::chown(volume.join("dir/one"), Some(1000), Some(1000))?;
        Ok(Self {
            runc,
            ours,
            pods: None,
            in_pod: 0,
            volume,
            number: 0,
            images: 0,
            unlike_links: 0,
            paths: 0,
            refused: 0,
            found: Vec::new(),
            reasons: BTreeMap::new(),
        })
    }

    /// Runs random images until `end`; one alone if it is asked for.
    pub async fn until(&mut self, end: Instant, seed: u64, only: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let mut said = Instant::now();
        for number in only.unwrap_or(0).. {
            let parts = random(&mut StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            if let Some(difference) = self.compared(&parts).await? {
                self.look_closer(seed, number, parts, difference).await?;
            }
            if said.elapsed() > Duration::from_secs(20) || only.is_some() {
                said = Instant::now();
                println!("{:4.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
            }
            if Instant::now() >= end || only.is_some() {
                break;
            }
        }
        println!("seed {seed}, {:.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
        for (reason, times) in &self.reasons {
            println!("  {times} times refused by both: {reason}");
        }
        println!("  in {} images link counts are not compared: {LINKS}", self.unlike_links);
        ensure!(self.found.is_empty(), "{} differences that have no reason", self.found.len());
        Ok(())
    }

    fn summary(&self) -> String {
        format!(
            "{} images, {} paths, {} refused by both; {} differences",
            self.images,
            self.paths,
            self.refused,
            self.found.len()
        )
    }

    async fn look_closer(
        &mut self,
        seed: u64,
        number: u64,
        parts: Vec<Part>,
        difference: Vec<String>,
    ) -> Result<()> {
        println!("image {number} of seed {seed}: {}", told(&difference));
        let run = tokio::sync::Mutex::new(&mut *self);
        let (run, first) = (&run, &difference[0]);
        let smallest = shrink(parts, ATTEMPTS, |parts| async move {
            let again = run.lock().await.compared(&parts).await;
            again.is_ok_and(|again| again.is_some_and(|lines| lines.contains(first)))
        })
        .await;
        println!("  the smallest image, as image {number} of seed {seed} has it:");
        for part in &smallest {
            println!("    {}", shown(part));
        }
        self.found.push(difference);
        Ok(())
    }

    /// Returns how the two sides differ.
    async fn compared(&mut self, parts: &[Part]) -> Result<Option<Vec<String>>> {
        self.number += 1;
        let name = format!("localhost/differential:{}", self.number);
        import(&self.runc, &name, parts)?;
        if self.in_pod >= PER_POD
            && let Some((runc, ours)) = self.pods.take()
        {
            let (one, other) = join(self.runc.remove(&runc.id), self.ours.remove(&ours.id)).await;
            one.and(other)?;
        }
        let (runc, ours) = match self.pods.take() {
            Some(pods) => pods,
            None => {
                self.in_pod = 0;
                let (runc, ours) = join(self.runc.pod_with(resolver), self.ours.pod_with(resolver)).await;
                (runc?, ours?)
            }
        };
        self.in_pod += 1;
        let seen =
            join(self.seen(&self.runc, &runc, &name, parts), self.seen(&self.ours, &ours, &name, parts))
                .await;
        self.pods = Some((runc, ours));
        let _ = self.runc.stack.command("ctr").args(["-n", "k8s.io", "images", "rm", &name]).output();
        self.images += 1;
        self.unlike_links += usize::from(may_hide_links(parts));
        Ok(match (seen.0?, seen.1?) {
            (Err(runc), Err(_)) => {
                self.refused += 1;
                let words = runc.rsplit(": ").next().unwrap_or_default();
                *self.reasons.entry(words.to_owned()).or_default() += 1;
                None
            }
            (Err(runc), Ok(_)) => self.new_lines(vec![format!("runc refuses it: {runc}")]),
            (Ok(_), Err(ours)) => self.new_lines(vec![format!("sandboxer refuses it: {ours}")]),
            (Ok(runc), Ok(ours)) => {
                self.paths += runc.len();
                self.unlike_lines(&runc, &ours)
            }
        })
    }

    fn unlike_lines(&self, runc: &[String], ours: &[String]) -> Option<Vec<String>> {
        let all = |lines: &[String]| lines.iter().cloned().collect::<BTreeSet<_>>();
        let (runc, ours) = (all(runc), all(ours));
        let mut told = Vec::new();
        for (of, one, other) in [("runc", &runc, &ours), ("sandboxer", &ours, &runc)] {
            told.extend(one.difference(other).map(|line| format!("{of:9} {line}")));
        }
        self.new_lines(told)
    }

    fn new_lines(&self, mut lines: Vec<String>) -> Option<Vec<String>> {
        lines.retain(|line| !self.found.iter().flatten().any(|found| found == line));
        (!lines.is_empty()).then_some(lines)
    }

    /// Runs a container, and returns what it prints.
    async fn seen(&self, case: &Case, pod: &Pod, image: &str, parts: &[Part]) -> Result<Seen> {
        let mut config = shell(&format!("look{}", self.number), "");
        config.command = vec!["/look".into(), "/".into()];
        config.image.get_or_insert_default().image = image.to_owned();
        for part in parts {
            match part {
                Part::ReadOnly => security(&mut config).readonly_rootfs = true,
                Part::RunAs(user) => {
                    security(&mut config).run_as_user = Some(Int64Value { value: *user });
                }
                Part::Mount { path, file, read_only } => config.mounts.push(Mount {
                    container_path: path.clone(),
                    host_path: self.volume.join(if *file { "file" } else { "dir" }).display().to_string(),
                    readonly: *read_only,
                    ..Default::default()
                }),
                _ => {}
            }
        }
        let refused = |status: Status| Ok(Err(format!("{:?}: {}", status.code(), status.message())));
        let container = match pod.create(config).await {
            Ok(container) => container,
            Err(status) => return refused(status),
        };
        if let Err(status) = case.cri.start(&container.id).await {
            case.cri.remove(&container.id).await?;
            return refused(status);
        }
        let status = container.ended().await?;
        let output = container.logs()?.stdout;
        case.cri.remove(&container.id).await?;
        if status.exit_code != 0 {
            return Ok(Err(format!("exit {}", status.exit_code)));
        }
        let has_links = !may_hide_links(parts);
        Ok(Ok(output.lines().map(|line| comparable(line, has_links)).collect()))
    }
}

/// Returns lines of a difference, as many as are shown.
fn told(lines: &[String]) -> String {
    let shown: String = lines.iter().take(SHOWN).map(|line| format!("\n      {line}")).collect();
    format!("{} lines{shown}", lines.len())
}

/// Returns whether a layer may hide one of the names of a file of a layer below: see [`LINKS`].
fn may_hide_links(parts: &[Part]) -> bool {
    let entries = || {
        parts
            .iter()
            .filter_map(|part| if let Part::Entry(layer, of) = part { Some((layer, of)) } else { None })
    };
    let lowest =
        entries().filter(|(_, entry)| matches!(entry.kind, Kind::Link(_))).map(|(layer, _)| layer).min();
    lowest.is_some_and(|lowest| entries().any(|(layer, _)| layer > lowest))
}

/// Returns a line without what differs by chance: the content of the pod's own files, and times of what was just made;
/// and without link counts unless `has_links`.
fn comparable(line: &str, has_links: bool) -> String {
    let own = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
    let mut words = line.split(' ');
    let path = words.next().unwrap_or_default();
    let mut kept = vec![path];
    for word in words {
        let is_new = word.strip_prefix("time=").is_some_and(|time| time != "1700000000");
        let is_content = word.len() == 16 || word.starts_with("size=") || word.starts_with("time=");
        let is_unlike = word.starts_with("links=") && !has_links;
        if is_unlike || is_content && own.contains(&path) {
            continue;
        }
        kept.push(if is_new { "time=new" } else { word });
    }
    kept.join(" ")
}

/// As kubelet gives one to every pod; without, runc has a copy of the host's.
fn resolver(config: &mut PodSandboxConfig) {
    let servers = vec!["192.0.2.53".to_owned()];
    config.dns_config = Some(DnsConfig { servers, ..Default::default() });
}

/// Makes an image known to containerd.
fn import(case: &Case, name: &str, parts: &[Part]) -> Result<()> {
    let mut layers = vec![base()];
    let mut config = Map::new();
    config.insert("Env".to_owned(), json!(["PATH=/"]));
    for part in parts {
        match part {
            Part::Entry(layer, entry) => {
                while layers.len() <= *layer + 1 {
                    layers.push(Vec::new());
                }
                if let Some(layer) = layers.get_mut(layer + 1) {
                    layer.push(entry.clone());
                }
            }
            Part::Volume(path) => {
                config.insert("Volumes".to_owned(), json!({ path: {} }));
            }
            Part::User(user) => {
                config.insert("User".to_owned(), Value::from(user.as_str()));
            }
            Part::Directory(path) => {
                config.insert("WorkingDir".to_owned(), Value::from(path.as_str()));
            }
            _ => {}
        }
    }
    let file = case.stack.dir().join("image.tar");
    fs::write(&file, archive(name, &layers, &Value::Object(config))?)?;
    let output = case
        .stack
        .command("ctr")
        .args(["-n", "k8s.io", "images", "import", "--no-unpack"])
        .arg(&file)
        .output()?;
    ensure!(output.status.success(), "ctr images import: {}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(Path::new(&file)).context("remove the archive")
}

fn shown(part: &Part) -> String {
    match part {
        Part::Entry(layer, Entry { path, kind, mode, owner: (user, group), attributes }) => {
            let kind = match kind {
                Kind::File(content) => format!("File of {} bytes", content.len()),
                kind => format!("{kind:?}"),
            };
            let names = attributes.iter().map(|(name, _)| format!(" {name}")).collect::<String>();
            format!("layer {}: {path:?} {kind} {mode:o} {user}:{group}{names}", layer + 1)
        }
        other => format!("{other:?}"),
    }
}
