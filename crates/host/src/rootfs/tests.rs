//! The store on real files, with the real mkfs.erofs, overlayfs and loop devices: these need root.
//!
//! Each test mounts only in a mount namespace of one of its own threads, so nothing can be left behind.

mod layers;
mod seen;

use std::{
    fs::{self, File, Permissions},
    io::Write,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    process::Command,
    time::Duration,
};

use nix::{
    mount::{MsFlags, mount},
    sys::stat::{Mode, SFlag, mknod},
    unistd::mkfifo,
};
use sandboxer_base::chain;
use tempfile::TempDir;

use super::{program::tests::runs, *};
use layers::awkward_layers;
use seen::{apart, see_image, see_overlay, set_xattr};

/// Snapshots in the layout of containerd's overlayfs snapshotter, and a store.
struct Fixture {
    dir: TempDir,
    /// A directory outside /tmp: mkfs.erofs has its own /tmp.
    programs: TempDir,
    config: RootfsConfig,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let programs = tempfile::tempdir_in("/var/tmp").unwrap();
        let config = RootfsConfig {
            mkfs_erofs: "mkfs.erofs".into(),
            cache_bytes: 1 << 30,
            writable: WritableTo::Memory,
            writable_bytes: 7,
        };
        Self { dir, programs, config }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn store(&self) -> Arc<RootfsStore> {
        let store = RootfsStore::open(&self.path("store"), &self.config, helpers()).unwrap();
        store.settle();
        store
    }

    /// Returns an mkfs of this fixture only, whose [runs] can be counted; it executes `program`.
    fn replace_mkfs(&mut self, program: &str) -> PathBuf {
        let script = self.programs.path().join("mkfs");
        fs::write(&script, format!("#!/bin/sh\nexec {program} \"$@\"\n")).unwrap();
        fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        self.config.mkfs_erofs = script.clone();
        script
    }

    /// Creates a committed layer with one file.
    fn layer(&self, name: &str, content: &str) -> PathBuf {
        let dir = self.path(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("name"), content).unwrap();
        dir
    }

    fn overlay(&self, layers: &[&Path]) -> Vec<Mount> {
        let upper = self.path("upper");
        fs::create_dir_all(&upper).unwrap();
        let lower: Vec<_> = layers.iter().map(|layer| layer.to_str().unwrap()).collect();
        vec![Mount {
            fstype: "overlay".into(),
            source: "overlay".into(),
            options: vec![
                "index=off".into(),
                format!("workdir={}", self.path("work").display()),
                format!("upperdir={}", upper.display()),
                format!("lowerdir={}", lower.join(":")),
            ],
        }]
    }

    /// Lists the store's directory, without the directories for views and scratch disks.
    fn images(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("store")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| !["work", "scratch"].contains(&name.as_str()));
        names.sort();
        names
    }
}

/// Returns helpers that are threads: these tests only read local files.
fn helpers() -> Helpers {
    Helpers::new(None, Duration::from_secs(60))
}

fn plain(fstype: &str, source: &Path, options: &[&str]) -> Vec<Mount> {
    let options = options.iter().map(|&option| option.to_owned()).collect();
    vec![Mount { fstype: fstype.into(), source: source.to_str().unwrap().into(), options }]
}

async fn prepare(store: &RootfsStore, mounts: &[Mount]) -> Result<RootfsPlan, RootfsError> {
    store.prepare(&"pod".parse().unwrap(), &"container".parse().unwrap(), mounts).await
}

fn no_view_is_mounted(fixture: &Fixture) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(fixture.dir.path().to_str().unwrap()), "{mounts}");
}

#[tokio::test]
async fn an_image_holds_exactly_what_overlayfs_shows() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let [top, base] = awkward_layers(&fixture);
    for layers in [&[&top, &base][..], &[&base], &[&top]] {
        let layers: Vec<&Path> = layers.iter().map(|layer| layer.as_path()).collect();
        let plan = prepare(&store, &fixture.overlay(&layers)).await.unwrap();
        let [layer] = &plan.lower[..] else { panic!("{plan:?}") };
        assert_eq!((layer.fstype, layer.disk.read_only), (FsType::Erofs, true));
        assert!(matches!(plan.writable, Writable::Tmpfs { bytes: 7 }));
        let (image, merged) =
            (see_image(layer.disk.file.name()), see_overlay(&layers, &fixture.path("empty")));
        assert!(image.len() > 3);
        for (path, seen) in &merged {
            assert_eq!(image.get(path), Some(seen), "{path:?}");
        }
        assert_eq!(image.keys().collect::<Vec<_>>(), merged.keys().collect::<Vec<_>>());
    }
    no_view_is_mounted(&fixture);
}

#[tokio::test]
async fn a_snapshot_with_content_of_its_own_is_merged_with_its_layers_for_it_alone() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let base = fixture.layer("base", "base");
    fs::create_dir(base.join("dir")).unwrap();
    fs::write(base.join("dir/below"), "").unwrap();
    let mounts = fixture.overlay(&[&base]);
    mknod(&fixture.path("upper/name"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    fs::create_dir(fixture.path("upper/dir")).unwrap();
    fs::write(fixture.path("upper/dir/above"), "").unwrap();
    set_xattr(&fixture.path("upper/dir"), "trusted.overlay.opaque", b"y");
    let plan = prepare(&store, &mounts).await.unwrap();
    let [layer] = &plan.lower[..] else { panic!("{plan:?}") };
    let seen: Vec<PathBuf> = see_image(layer.disk.file.name()).into_keys().collect();
    assert_eq!(seen, ["", "dir", "dir/above"].map(PathBuf::from));
    assert!(layer.disk.serial.len() <= 20);
    // The image is not shared.
    drop(plan);
    assert!(fixture.images().is_empty());

    let bound = prepare(&store, &plain("bind", &base, &["rbind", "rw"])).await.unwrap();
    assert_eq!(
        see_image(bound.lower[0].disk.file.name())[Path::new("name")].content,
        Sha256::digest("base").to_vec()
    );
    drop(bound);
    assert!(fixture.images().is_empty());
}

/// In an image, such marks would be lost, and removed files would reappear.
#[tokio::test]
async fn a_snapshot_of_its_own_above_images_is_a_layer_more_or_refused_for_a_mark() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let base = fixture.layer("base", "base");
    let made = prepare(&store, &plain("bind", &base, &[])).await.unwrap();
    let image = fixture.path("layer.erofs");
    fs::copy(made.lower[0].disk.file.name(), &image).unwrap();
    let mut mounts = plain("erofs", &image, &["ro", "loop"]);
    let upper = fixture.path("upper");
    fs::create_dir(&upper).unwrap();
    let dirs = format!("upperdir={}", upper.display());
    let options = vec![dirs, "lowerdir={{ overlay 0 0 }}".into(), "workdir=/work".into()];
    mounts.push(Mount { fstype: "format/overlay".into(), source: "overlay".into(), options });
    mknod(&upper.join("name"), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
    fs::create_dir(upper.join("dir")).unwrap();
    let plan = prepare(&store, &mounts).await.unwrap();
    let [own, below] = &plan.lower[..] else { panic!("{plan:?}") };
    assert!(
        see_image(own.disk.file.name())[Path::new("name")].mode & 0o170000 == 0o020000,
        "the whiteout is kept"
    );
    assert_eq!(below.disk.file.name(), image);
    assert_ne!(own.disk.serial, below.disk.serial);

    set_xattr(&upper.join("dir"), "trusted.overlay.opaque", b"y");
    let error = prepare(&store, &mounts).await.unwrap_err();
    let text = chain(&error);
    assert!(text.contains("/upper/dir") && text.contains("trusted.overlay.opaque"), "{text}");
    assert_eq!(error.code(), sandboxer_base::Code::FailedPrecondition);
}

#[tokio::test]
async fn many_that_want_one_image_at_once_get_one() {
    let mut fixture = Fixture::new();
    let count = fixture.replace_mkfs("mkfs.erofs");
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let mounts = fixture.overlay(&[&layer]);
    let plans = futures::future::join_all((0..20).map(|_| prepare(&store, &mounts))).await;
    let paths: Vec<_> =
        plans.iter().map(|plan| plan.as_ref().unwrap().lower[0].disk.file.name().to_owned()).collect();
    assert!(paths.windows(2).all(|pair| pair[0] == pair[1]), "{paths:?}");
    assert_eq!((runs(&count), fixture.images().len()), (1, 1));

    // Another chain has another image, as does a recreated directory.
    let other = fixture.layer("other", "other");
    prepare(&store, &fixture.overlay(&[&other, &layer])).await.unwrap();
    assert_eq!(runs(&count), 2);
    fs::remove_dir_all(&layer).unwrap();
    fixture.layer("base", "new");
    let anew = prepare(&store, &mounts).await.unwrap();
    assert_eq!(
        see_image(anew.lower[0].disk.file.name())[Path::new("name")].content,
        Sha256::digest("new").to_vec()
    );
}

#[tokio::test]
async fn whoever_stops_waiting_takes_nothing_from_the_others() {
    let mut fixture = Fixture::new();
    let count = fixture.replace_mkfs("mkfs.erofs");
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let mounts = fixture.overlay(&[&layer]);
    let first = tokio::spawn({
        let (store, mounts) = (store.clone(), mounts.clone());
        async move { prepare(&store, &mounts).await.map(drop) }
    });
    while runs(&count) == 0 {
        assert!(!first.is_finished());
        tokio::task::yield_now().await;
    }
    first.abort();
    prepare(&store, &mounts).await.unwrap();
    assert_eq!(runs(&count), 1);
}

#[tokio::test]
async fn the_least_recently_used_goes_and_never_one_in_use() {
    let mut fixture = Fixture::new();
    fixture.config.cache_bytes = 1;
    let store = fixture.store();
    let (a, b, c) = (fixture.layer("a", "a"), fixture.layer("b", "b"), fixture.layer("c", "c"));
    let image = |plan: &RootfsPlan| plan.lower[0].disk.file.name().to_owned();
    let leased = prepare(&store, &fixture.overlay(&[&a])).await.unwrap();
    let idle = prepare(&store, &fixture.overlay(&[&b])).await.unwrap();
    let idle_image = image(&idle);
    assert!(idle_image.exists(), "in use, although there is no room");
    drop(idle);
    assert!(!idle_image.exists() && image(&leased).exists());
    let (again, other) = tokio::join!(async { store.lease(&image(&leased)) }, async {
        prepare(&store, &fixture.overlay(&[&c])).await.unwrap()
    });
    let path = image(&leased);
    drop((leased, other));
    assert!(path.exists(), "the second lease holds it");
    drop(again);
    assert!(fixture.images().is_empty());

    // With space for little more than one image, the most recently used one stays.
    fixture.config.cache_bytes = 6 << 10;
    drop(store);
    let store = fixture.store();
    for layer in [&a, &b, &a, &c] {
        prepare(&store, &fixture.overlay(&[layer])).await.unwrap();
    }
    let newest = prepare(&store, &fixture.overlay(&[&c])).await.unwrap();
    assert_eq!(fixture.images(), [image(&newest).file_name().unwrap().to_str().unwrap()]);
}

#[tokio::test]
async fn a_store_opened_again_knows_its_images() {
    let mut fixture = Fixture::new();
    let count = fixture.replace_mkfs("mkfs.erofs");
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let shared =
        prepare(&store, &fixture.overlay(&[&layer])).await.unwrap().lower[0].disk.file.name().to_owned();
    let own = prepare(&store, &plain("bind", &layer, &["rbind", "rw"])).await.unwrap();
    let private = own.lower[0].disk.file.name().to_owned();
    // As after SIGKILL: nothing was dropped, and a build was running.
    std::mem::forget(own);
    fs::write(fixture.path("store/unfinished-1"), "half").unwrap();

    let store = RootfsStore::open(&fixture.path("store"), &fixture.config, helpers()).unwrap();
    assert!(!fixture.path("store/unfinished-1").exists());
    let lease = store.lease(&private).unwrap();
    for other in ["store/none.erofs", "store/work", "base/name"] {
        assert!(store.lease(&fixture.path(other)).is_none(), "{other}");
    }
    prepare(&store, &fixture.overlay(&[&layer])).await.unwrap();
    store.settle();
    assert!(private.exists());
    assert_eq!(runs(&count), 2, "the shared image was found again");
    drop(lease);
    assert!(!private.exists() && shared.exists());
}

#[tokio::test]
async fn a_damaged_image_of_the_cache_is_made_again() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let image =
        prepare(&store, &fixture.overlay(&[&layer])).await.unwrap().lower[0].disk.file.name().to_owned();
    File::options().write(true).open(&image).unwrap().set_len(2048).unwrap();
    let again = prepare(&store, &fixture.overlay(&[&layer])).await.unwrap();
    assert_ne!(again.lower[0].disk.file.name(), image);
    assert!(see_image(again.lower[0].disk.file.name()).contains_key(Path::new("name")));
    assert_eq!(fixture.images().len(), 1);
}

/// The probe of a mkfs.erofs that was taken over: it prints its user, its capabilities and what it could do, as an
/// error if it could do nothing.
const EXPLOIT: &str = r#"
    sub tried { print STDERR "$_[0]:", ($_[1] ? "done" : $!+0), ";" }
    my ($head, $sets) = (pack("LL", 0x20080522, 0), "\0" x 24);
    syscall(CAPGET, $head, $sets);
    print STDERR "user:$<,$>;caps:", join(",", map { sprintf "%x", $_ } unpack("L*", $sets)), ";";
    for my $path (qw(SECRET /etc/passwd /root /var/lib /run /sys /proc /dev/mem /dev/kmsg)) {
        print STDERR "sees $path;" if lstat $path;
    }
    for my $path (qw(/proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /tree/new /usr/new /new)) {
        tried($path, open(my $file, ">>", $path));
    }
    for my $path (qw(/tmp /image /tree)) {
        open(my $at, "<", $path);
        tried("freeze", ioctl($at, 0xC0045877, 0));
        tried("shutdown", ioctl($at, 0x8004587d, my $how = pack("L", 2)));
    }
    my ($proc, $at, $memory) = ("proc", "/tmp/p", "/tmp/mem");
    mkdir $at;
    tried("mount", syscall(MOUNT, $proc, $at, $proc, 0, 0) == 0);
    tried("handle", syscall(HANDLE, 0, 0, 0) >= 0);
    tried("unshare", syscall(UNSHARE, 0x10000000) == 0);
    tried("clone", syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0) >= 0);
    tried("device", syscall(MKNODAT, -100, $memory, 0020666, 257) == 0);
    tried("socket", socket(my $socket, 1, 1, 0));
    tried("root", syscall(SETUID, 0) == 0);
    tried("give", chown(0, 0, "/image"));
    my $child = fork;
    if ($child == 0) { syscall(X32 + GETPID); exit 0 }
    waitpid $child, 0;
    print STDERR "x32:", $? & 127, ";";
    for my $path (qw(/tree/name /tree/private)) {
        my $file;
        open($file, "<", $path) and print STDERR <$file>;
    }
    print STDERR "image;" if open(my $file, "+>", "/image") and open($file, "+>", "/tmp/scratch");
    exit 4;
"#;

/// A tenant made the source of an image, and may attack its reader.
#[tokio::test]
async fn mkfs_that_was_taken_over_reads_the_tree_writes_the_image_and_does_no_more() {
    let mut fixture = Fixture::new();
    let secret = fixture.path("secret");
    fs::write(&secret, "of the host").unwrap();
    let mut exploit = EXPLOIT.replace("SECRET", secret.to_str().unwrap());
    for (name, number) in [
        ("CAPGET", libc::SYS_capget),
        ("MOUNT", libc::SYS_mount),
        ("HANDLE", libc::SYS_open_by_handle_at),
        ("UNSHARE", libc::SYS_unshare),
        ("CLONE", libc::SYS_clone),
        ("MKNODAT", libc::SYS_mknodat),
        ("SETUID", libc::SYS_setuid),
        ("X32", 0x4000_0000),
        ("GETPID", libc::SYS_getpid),
    ] {
        exploit = exploit.replace(name, &number.to_string());
    }
    fixture.replace_mkfs(&format!("perl -e '{exploit}' --"));
    let store = fixture.store();
    let layer = fixture.layer("base", "the tree;");
    fs::write(layer.join("private"), "of another owner;").unwrap();
    std::os::unix::fs::chown(layer.join("private"), Some(4242), Some(4242)).unwrap();
    fs::set_permissions(layer.join("private"), Permissions::from_mode(0o600)).unwrap();
    let text = chain(&prepare(&store, &fixture.overlay(&[&layer])).await.unwrap_err());
    let (_, printed) = text.split_once("user:").unwrap_or_else(|| panic!("{text}"));
    let (users, printed) = printed.split_once(';').unwrap();
    for user in users.split(',') {
        assert!(user.parse::<u32>().unwrap() >= 0x7ff0_0000, "{text}");
    }
    // Effective, permitted and inheritable: CAP_DAC_READ_SEARCH alone.
    let [none, refused, fixed] = [libc::ENOENT, libc::EPERM, libc::EROFS];
    let deaf = libc::ENOTTY;
    let expected = format!(
        "caps:4,4,4,0,0,0;/proc/sys/kernel/core_pattern:{none};/proc/sys/vm/drop_caches:{none};/tree/new:{fixed};\
         /usr/new:{fixed};/new:{fixed};freeze:{deaf};shutdown:{deaf};freeze:{deaf};shutdown:{deaf};freeze:{deaf};\
         shutdown:{deaf};mount:{refused};handle:{refused};unshare:{refused};clone:{refused};device:{refused};\
         socket:{refused};root:{refused};give:{refused};x32:{};the tree;of another owner;image;",
        libc::SIGSYS
    );
    assert_eq!(printed.trim(), expected, "{text}");
}

#[tokio::test]
async fn an_image_belongs_to_root_when_it_is_kept() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let image =
        prepare(&store, &fixture.overlay(&[&layer])).await.unwrap().lower[0].disk.file.name().to_owned();
    let meta = image.metadata().unwrap();
    assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o022), (0, 0, 0));
}

#[tokio::test]
async fn a_failed_build_says_why_and_leaves_nothing() {
    let mut fixture = Fixture::new();
    fixture.replace_mkfs("sh -c 'for arg; do image=$last; last=$arg; done; printf half > \"$image\"; echo \"no good\" >&2; exit 4'");
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let text = chain(&prepare(&store, &fixture.overlay(&[&layer])).await.unwrap_err());
    assert!(text.contains("container container in pod pod"), "{text}");
    assert!(text.contains("exited with status 4") && text.contains("no good"), "{text}");
    assert!(fixture.images().is_empty());

    drop(store);
    fixture.config.mkfs_erofs = "/no/such/mkfs".into();
    let store = fixture.store();
    let text = chain(&prepare(&store, &fixture.overlay(&[&layer])).await.unwrap_err());
    assert!(text.contains("/no/such/mkfs") && text.contains("rootfs.mkfs_erofs"), "{text}");
    let text = chain(&prepare(&store, &fixture.overlay(&[&fixture.path("none")])).await.unwrap_err());
    assert!(text.contains("stat layer") && text.contains("none"), "{text}");
    drop(store);

    fixture.config.mkfs_erofs = "mkfs.erofs".into();
    prepare(&fixture.store(), &fixture.overlay(&[&layer])).await.unwrap();
    no_view_is_mounted(&fixture);
}

#[test]
fn a_full_disk_is_told_and_room_is_made_by_what_is_unused() {
    apart(|| {
        let fixture = Fixture::new();
        let store_dir = fixture.path("store");
        fs::create_dir(&store_dir).unwrap();
        mount(Some("t"), &store_dir, Some("tmpfs"), MsFlags::empty(), Some("size=1m")).unwrap();
        let big = |name: &str, bytes: usize| {
            let layer = fixture.layer(name, name);
            let noise: Vec<u8> = (0..bytes).map(|_| rand::random()).collect();
            fs::write(layer.join("noise"), noise).unwrap();
            layer
        };
        let (first, second, huge) = (big("first", 600 << 10), big("second", 600 << 10), big("huge", 2 << 20));
        // All threads of the runtime start in this thread's namespace.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = fixture.store();
            prepare(&store, &fixture.overlay(&[&first])).await.unwrap();
            let leased = prepare(&store, &fixture.overlay(&[&second])).await.unwrap();
            assert_eq!(fixture.images().len(), 1, "the first made room");
            for layer in [&first, &huge] {
                let text = chain(&prepare(&store, &fixture.overlay(&[layer])).await.unwrap_err());
                assert!(text.contains("no space left") && text.contains("rootfs.cache_mib"), "{text}");
            }
            assert_eq!(
                fixture.images(),
                [leased.lower[0].disk.file.name().file_name().unwrap().to_str().unwrap()]
            );
            drop(leased);
            let text = chain(&prepare(&store, &fixture.overlay(&[&huge])).await.unwrap_err());
            assert!(text.contains("no space left"), "{text}");
            assert_eq!(fixture.images().len(), 1, "nothing goes for what never fits");
        });
        drop(runtime);
        nix::mount::umount(&store_dir).unwrap();
    });
}

#[tokio::test]
async fn a_mostly_empty_file_takes_little_room_and_an_endless_one_is_refused() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let file = File::create(layer.join("holes")).unwrap();
    file.set_len(80 << 20).unwrap();
    file.write_at(b"end", (80 << 20) - 3).unwrap();
    let plan = prepare(&store, &fixture.overlay(&[&layer])).await.unwrap();
    let image = plan.lower[0].disk.file.name();
    assert!(image.metadata().unwrap().len() < 1 << 20);
    assert_eq!(
        see_image(image)[Path::new("holes")],
        see_overlay(&[&layer], &fixture.path("empty")).remove(Path::new("holes")).unwrap()
    );
    file.set_len(1 << 40).unwrap();
    let endless = fixture.path("endless");
    fs::rename(&layer, &endless).unwrap();
    let text = chain(&prepare(&store, &fixture.overlay(&[&endless])).await.unwrap_err());
    assert!(text.contains("more than an image may hold"), "{text}");
}

#[tokio::test]
async fn a_chain_may_be_as_long_as_images_are() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let deep = "long path ".repeat(10);
    let layers: Vec<_> = (0..127).map(|n| fixture.layer(&format!("{deep}{n}/fs"), &n.to_string())).collect();
    for (n, layer) in layers.iter().enumerate() {
        fs::write(layer.join(n.to_string()), "").unwrap();
    }
    let layers: Vec<&Path> = layers.iter().map(PathBuf::as_path).collect();
    let plan = prepare(&store, &fixture.overlay(&layers)).await.unwrap();
    let seen = see_image(plan.lower[0].disk.file.name());
    assert_eq!(seen.len(), 127 + 2);
    assert_eq!(seen[Path::new("name")].content, Sha256::digest("0").to_vec());
}

#[tokio::test]
async fn images_of_others_are_attached_as_they_are_or_refused() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let made = prepare(&store, &plain("bind", &layer, &[])).await.unwrap();
    let image = fixture.path("layer.erofs");
    fs::copy(made.lower[0].disk.file.name(), &image).unwrap();
    let plan = prepare(&store, &plain("erofs", &image, &["ro", "loop"])).await.unwrap();
    assert_eq!((plan.lower[0].disk.file.name(), plan.leases.len()), (image.as_path(), 0));

    // A block device's metadata has no length.
    let device = Command::new("losetup").args(["-f", "--show", "-r"]).arg(&image).output().unwrap();
    let device = PathBuf::from(String::from_utf8(device.stdout).unwrap().trim());
    let plan = prepare(&store, &plain("erofs", &device, &["ro"])).await;
    assert!(Command::new("losetup").arg("-d").arg(&device).status().unwrap().success());
    assert_eq!(plan.unwrap().lower[0].disk.file.name(), device);

    let bad = fixture.path("bad");
    let refused = async |fstype: &str, says: &str| {
        let text = chain(&prepare(&store, &plain(fstype, &bad, &[])).await.unwrap_err());
        assert!(text.contains(says) && text.contains("bad"), "{text}");
    };
    refused("erofs", "read image").await;
    fs::write(&bad, "short").unwrap();
    refused("ext4", "it has 5 bytes").await;
    fs::write(&bad, [0; 8192]).unwrap();
    refused("erofs", "no EROFS magic number").await;
    refused("ext4", "no ext4 magic number").await;
    let whole = fs::read(&image).unwrap();
    fs::write(&bad, &whole[..whole.len() - 1]).unwrap();
    refused("erofs", "truncated").await;
    fs::remove_file(&bad).unwrap();
    mkfifo(&bad, Mode::S_IRUSR).unwrap();
    refused("erofs", "neither a file nor a block device").await;
}

#[tokio::test]
async fn a_scratch_file_is_made_once() {
    let fixture = Fixture::new();
    let store = fixture.store();
    let layer = fixture.layer("base", "base");
    let made = prepare(&store, &plain("bind", &layer, &[])).await.unwrap();
    let scratch = fixture.path("rw.img");
    let mut mounts = plain("mkfs/ext4", &scratch, &["X-containerd.mkfs.size=16MiB", "loop"]);
    mounts.extend(plain("erofs", made.lower[0].disk.file.name(), &["ro", "loop"]));
    let options = ["upperdir={{ mount 0 }}/upper", "workdir={{ mount 0 }}/work", "lowerdir={{ mount 1 }}"];
    mounts.extend(plain("format/mkdir/overlay", Path::new("overlay"), &options));

    let plan = prepare(&store, &mounts).await.unwrap();
    let Writable::Overlay(layer) = &plan.writable else { panic!("{plan:?}") };
    assert_eq!(
        (layer.disk.file.name(), layer.fstype, layer.disk.read_only),
        (scratch.as_path(), FsType::Ext4, false)
    );
    assert_eq!(scratch.metadata().unwrap().len(), 16 << 20);
    assert!(scratch.metadata().unwrap().blocks() * 512 < 2 << 20, "sparse");
    let checked = Command::new("e2fsck").args(["-f", "-n"]).arg(&scratch).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");

    let before = fs::read(&scratch).unwrap();
    prepare(&store, &mounts).await.unwrap();
    assert!(fs::read(&scratch).unwrap() == before, "what is there stays");
    File::create(&scratch).unwrap().write_all(&[1; 4096]).unwrap();
    let text = chain(&prepare(&store, &mounts).await.unwrap_err());
    assert!(text.contains("ext4 magic"), "{text}");
    assert_eq!(fs::read(&scratch).unwrap(), [1; 4096], "never made over what is there");
}
