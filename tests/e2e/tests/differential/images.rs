//! Random images, with users, volumes and mounts: what a container sees of its root file system on both sides.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::join;
use k8s_cri::v1::{DnsConfig, Int64Value, Mount, PodSandboxConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use sandboxer_e2e::case::{Case, PATIENCE, Pod, security, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::image::{Kind, archive};
use serde_json::{Map, Value, json};
use tonic::Status;

use crate::known::{BENEATH, COPIED, GHOSTS, IN_MEMORY, LINKS};
use crate::parts::{Image, Part, base, random, shown};
use crate::steps::shrink;

/// Files of the pod in each container.
const OWN: [&str; 3] = ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
/// Images in one pod.
const PER_POD: usize = 20;
/// Attempts to make an image smaller.
const ATTEMPTS: usize = 40;
/// What the daemon alone refuses.
const NO_DEV: &str = "a volume cannot be all of /dev";
/// Lines of a difference that are shown.
const SHOWN: usize = 8;

/// A run over random images.
pub struct Images {
    runc: Case,
    ours: Case,
    pods: Option<(Pod, Pod)>,
    in_pod: usize,
    /// Where the directories are that are mounted.
    volumes: PathBuf,
    number: usize,
    tally: Tally,
    /// The differences; what is in one of them is not told again.
    found: Vec<Vec<String>>,
}

/// What has come of the images.
#[derive(Default)]
struct Tally {
    images: usize,
    hostile: usize,
    unlike_links: usize,
    paths: usize,
    refused: usize,
    refused_hostile: usize,
    /// Differences that did not show again.
    unsteady: usize,
    /// Why both refused an image, in the words of runc, or the daemon alone.
    reasons: BTreeMap<String, usize>,
}

/// What a side has come to: how it failed, or what it saw.
type Seen = std::result::Result<Vec<String>, String>;

/// What the two sides have come to.
enum Compared {
    /// The outcome on both, which saw so many paths.
    Same(usize),
    /// Neither started it, or the daemon alone, for this reason.
    Refused(String),
    /// The lines that only one of them has.
    Unlike(Vec<String>),
}

impl Images {
    /// Makes where the mounts come from.
    pub fn new(runc: Case, ours: Case) -> Result<Self> {
        let volumes = runc.stack.dir().join("mounted");
        fs::create_dir(&volumes)?;
        let (tally, found) = (Tally::default(), Vec::new());
        Ok(Self { runc, ours, pods: None, in_pod: 0, volumes, number: 0, tally, found })
    }

    /// Runs random images until `end`; one alone if it is asked for.
    pub async fn until(&mut self, end: Instant, seed: u64, only: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let mut last_report = Instant::now();
        for number in only.unwrap_or(0).. {
            let image = random(&mut StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let compared = self.compared(&image.parts).await?;
            self.tally.count(&image, &compared);
            if let Compared::Unlike(difference) = compared {
                self.look_closer(seed, number, image.parts, difference).await?;
            }
            if last_report.elapsed() > Duration::from_secs(20) || only.is_some() {
                last_report = Instant::now();
                println!("{:4.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
            }
            if Instant::now() >= end || only.is_some() {
                break;
            }
        }
        println!("seed {seed}, {:.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
        for (reason, times) in &self.tally.reasons {
            println!("  {times} times refused: {reason}");
        }
        println!("  in {} images link counts are not compared: {LINKS}", self.tally.unlike_links);
        println!("  names that only runc lists are passed over: {GHOSTS}");
        println!("  the pod's own files may be seen where runc hides them: {BENEATH}");
        println!("  in read-only containers, users' attributes of directories are not compared: {IN_MEMORY}");
        println!("  in images with volumes, times of directories are not compared: {COPIED}");
        ensure!(self.found.is_empty(), "{} differences that have no reason", self.found.len());
        Ok(())
    }

    fn summary(&self) -> String {
        let Tally { images, hostile, paths, refused, refused_hostile, unsteady, .. } = &self.tally;
        format!(
            "{images} images, {hostile} of them hostile; {paths} paths; refused by both {refused} ({:.0} %), of the hostile \
             {refused_hostile}; {} differences, {unsteady} that did not show again",
            100.0 * *refused as f64 / (*images).max(1) as f64,
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
        println!("image {number} of seed {seed}: {}", excerpt(&difference));
        match self.compared(&parts).await? {
            Compared::Unlike(lines) if lines.contains(&difference[0]) => {}
            _ => {
                self.tally.unsteady += 1;
                println!("  it does not show again");
                return Ok(());
            }
        }
        let run = tokio::sync::Mutex::new(&mut *self);
        let (run, first) = (&run, &difference[0]);
        let smallest = shrink(parts, ATTEMPTS, |parts| async move {
            let again = run.lock().await.compared(&parts).await;
            again.is_ok_and(|again| matches!(again, Compared::Unlike(lines) if lines.contains(first)))
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
    async fn compared(&mut self, parts: &[Part]) -> Result<Compared> {
        self.number += 1;
        let name = format!("localhost/differential:{}", self.number);
        import(&self.runc, &name, parts)?;
        eventually(&format!("image {name} in CRI"), PATIENCE, || async {
            Ok(self.runc.cri.has_image(&name).await?.then_some(()))
        })
        .await?;
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
        let lines = match (seen.0?, seen.1?) {
            (Err(runc), Err(_)) => {
                return Ok(Compared::Refused(in_short(&runc)));
            }
            (Err(runc), Ok(_)) => vec![format!("runc refuses it: {}", without_ids(&runc))],
            (Ok(_), Err(ours)) if ours.contains(NO_DEV) => return Ok(Compared::Refused(NO_DEV.to_owned())),
            (Ok(_), Err(ours)) => vec![format!("sandboxer refuses it: {}", without_ids(&ours))],
            (Ok(runc), Ok(ours)) => {
                let lines = unlike_lines(&runc, &ours);
                if lines.is_empty() {
                    return Ok(Compared::Same(runc.len()));
                }
                lines
            }
        };
        let is_new = |line: &String| !self.found.iter().flatten().any(|found| found == line);
        let new: Vec<_> = lines.into_iter().filter(is_new).collect();
        Ok(if new.is_empty() { Compared::Same(0) } else { Compared::Unlike(new) })
    }

    /// Runs a container, and returns what it prints.
    async fn seen(&self, case: &Case, pod: &Pod, image: &str, parts: &[Part]) -> Result<Seen> {
        let mut config = shell(&format!("look{}", self.number), "");
        config.command = vec!["/look".into(), "/".into()];
        config.image.get_or_insert_default().image = image.to_owned();
        // One for each side: a start may make what it mounts on below.
        let volume = self.volumes.join(format!("{}-{}", self.number, case.name));
        if parts.iter().any(|part| matches!(part, Part::Mount { .. })) {
            fill(&volume).with_context(|| format!("make what is mounted, {}", volume.display()))?;
        }
        for part in parts {
            match part {
                Part::ReadOnly => security(&mut config).readonly_rootfs = true,
                Part::RunAs(user) => {
                    security(&mut config).run_as_user = Some(Int64Value { value: *user });
                }
                Part::Mount { path, file, read_only } => config.mounts.push(Mount {
                    container_path: path.clone(),
                    host_path: volume.join(if *file { "file" } else { "dir" }).display().to_string(),
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
        let _ = fs::remove_dir_all(&volume);
        if status.exit_code != 0 {
            return Ok(Err(format!("exit {}", status.exit_code)));
        }
        let unlike = Unlike {
            has_links: !may_hide_links(parts),
            has_volumes: parts.iter().any(|part| matches!(part, Part::Volume(_))),
            is_read_only: parts.iter().any(|part| matches!(part, Part::ReadOnly)),
        };
        Ok(Ok(output.lines().map(|line| comparable(line, unlike)).collect()))
    }
}

impl Tally {
    fn count(&mut self, image: &Image, compared: &Compared) {
        self.images += 1;
        self.hostile += usize::from(image.is_hostile);
        self.unlike_links += usize::from(may_hide_links(&image.parts));
        match compared {
            Compared::Same(paths) => self.paths += paths,
            Compared::Unlike(_) => {}
            Compared::Refused(reason) => {
                self.refused += 1;
                self.refused_hostile += usize::from(image.is_hostile);
                *self.reasons.entry(reason.clone()).or_default() += 1;
            }
        }
    }
}

/// Returns what failed and why, of all that an error says.
fn in_short(error: &str) -> String {
    let mut words = error.lines().next().unwrap_or_default().split(": ").skip(1);
    let first = words.next().unwrap_or(error);
    words.last().map_or_else(|| first.to_owned(), |last| format!("{first}: {last}"))
}

/// Returns an error without the ids of pods and containers.
fn without_ids(error: &str) -> String {
    let is_id = |word: &str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let words = error.split_inclusive(|char: char| !char.is_ascii_alphanumeric());
    let word = |word: &str| {
        let bare = word.trim_end_matches(|char: char| !char.is_ascii_alphanumeric());
        if is_id(bare) { word.replace(bare, "ID") } else { word.to_owned() }
    };
    words.map(word).collect()
}

/// Returns the lines that only one side has, but for the names that [`GHOSTS`] and [`BENEATH`] explain.
fn unlike_lines(runc: &[String], ours: &[String]) -> Vec<String> {
    let all = |lines: &[String]| lines.iter().cloned().collect::<BTreeSet<_>>();
    let (mut runc, mut ours) = (all(runc), all(ours));
    let has = |lines: &BTreeSet<String>, path: &str| lines.iter().any(|line| path_of(line) == path);
    ours.retain(|line| !OWN.contains(&path_of(line)) || has(&runc, path_of(line)));
    // A user who may list a directory, but not enter it, sees the same of every name on both.
    runc.retain(|line| !line.ends_with(" gone") || ours.contains(line));
    let mut lines = Vec::new();
    for (side, one, other) in [("runc", &runc, &ours), ("sandboxer", &ours, &runc)] {
        lines.extend(one.difference(other).map(|line| format!("{side:9} {line}")));
    }
    lines
}

/// Returns the path that a line is about.
fn path_of(line: &str) -> &str {
    line.split(' ').next().unwrap_or_default()
}

/// Makes what is mounted into a container.
fn fill(volume: &Path) -> Result<()> {
    fs::create_dir_all(volume.join("dir"))?;
    // As it may be mounted over the image's.
    fs::write(volume.join("file"), "root:x:0:0::/mounted:/look\nuser:x:1000:1000::/mounted:/look\n")?;
    fs::write(volume.join("dir/one"), "one\n")?;
    symlink("one", volume.join("dir/two"))?;
    Ok(chown(volume.join("dir/one"), Some(1000), Some(1000))?)
}

/// Returns lines of a difference, as many as are shown.
fn excerpt(lines: &[String]) -> String {
    let shown: String = lines.iter().take(SHOWN).map(|line| format!("\n      {line}")).collect();
    format!("{} lines{shown}", lines.len())
}

/// Returns whether a layer may hide one of the names of a file of a layer below: see [`LINKS`].
fn may_hide_links(parts: &[Part]) -> bool {
    let entries = || {
        parts
            .iter()
            .filter_map(|part| if let Part::Entry(layer, entry) = part { Some((layer, entry)) } else { None })
    };
    let lowest =
        entries().filter(|(_, entry)| matches!(entry.kind, Kind::Link(_))).map(|(layer, _)| layer).min();
    lowest.is_some_and(|lowest| entries().any(|(layer, _)| layer > lowest))
}

/// What an image and its container have, of which some is not compared.
#[derive(Clone, Copy)]
struct Unlike {
    has_links: bool,
    has_volumes: bool,
    is_read_only: bool,
}

/// Returns a line without what differs by chance: the content of the pod's own files, and times of what was just made;
/// without link counts unless the image has links, and without what [`COPIED`] and [`IN_MEMORY`] explain.
fn comparable(line: &str, unlike: Unlike) -> String {
    let mut words = line.split(' ');
    let path = words.next().unwrap_or_default();
    let is_dir = line.contains(" dir ");
    let mut compared = vec![path];
    for word in words {
        let is_time = word.starts_with("time=");
        let is_content = word.len() == 16 || word.starts_with("size=") || is_time;
        let is_unlike = word.starts_with("links=") && !unlike.has_links
            || is_content && OWN.contains(&path)
            || is_dir && unlike.has_volumes && is_time
            || is_dir && unlike.is_read_only && word.starts_with("user.");
        if is_unlike {
            continue;
        }
        compared.push(if is_time && word != "time=1700000000" { "time=new" } else { word });
    }
    compared.join(" ")
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
