//! Makes the files of a frozen VM from what the VMM writes of one that goes on.
//!
//! ```text
//!  the VMM, to a directory that is in its jail for one call              a frozen VM's, as of a template
//!  config.json       memory without a file                         ─▶    one zone in a file
//!  state.json        which memory is in which place of the next    ─▶    none: it is in the zone's file
//!  memory-ranges     all memory, also what no guest has touched    ─▶    memory, sparse
//! ```
//!
//! So a copy maps the memory privately, as one of a template does, and does not read it. A guest may have broken into its VMM:
//! every length is checked, and what is kept is written by the daemon.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{Mode, OFlags, SeekFrom, openat, seek};
use serde_json::{Value, json};

use super::{
    api::Api,
    opened::Opened,
    template::{CONFIG, MAX_CONFIG, MAX_STATE, STATE, ZONE},
};
use crate::{
    Destination, DiskRecord, MEMORY, SavedDisk, VmmError, jailed::Jailed, mounted_disk::MountedDir,
    run_dir::path_error,
};

/// The call, in errors.
const CALL: &str = "a checkpoint";
/// Name of the directory for the VMM's files, where the checkpoint is made and in the jail.
const DIR: &str = "of-the-vmm";
/// Name of the VMM's file with memory.
const RANGES: &str = "memory-ranges";
/// The factor of the time limit for writing the memory of a VM, which takes as long as the disk does.
const LONG_CALL: u32 = 12;
/// Size of a page, bytes.
const PAGE: usize = 4096;
/// The bytes of memory that are read at once.
const BLOCK: usize = 64 * PAGE;
/// Where the state of the memory is in that of the VM.
const OF_MEMORY: &str = "/snapshots/memory-manager/snapshot_data/state";

/// Saves a VM, as [`Vm::checkpoint`](crate::Vm::checkpoint) does.
pub async fn save(
    vm: &Jailed,
    api: &Api,
    opened: &Opened,
    to: &Destination,
    disks: &[DiskRecord],
) -> Result<Vec<SavedDisk>, VmmError> {
    let (pid, opened, disks) = (vm.process.handle.pid(), opened.clone(), disks.to_vec());
    let files = blocking(move || Ok(opened.files(pid, &disks))).await;
    let files = files.map_err(path_error(vm.pod(), "open the disks to save to", to.dir.clone()))?;
    let files = files.map_err(|reason| vm.refused(CALL, format!("the VM cannot be saved: {reason}")))?;
    let mounted = mount(vm, &to.dir).await?;
    vm.process.call("pausing the guest", api.pause()).await?;
    let written = vm.process.call("saving the guest", api.lasting(LONG_CALL).snapshot(mounted.path())).await;
    // From now on, the VMM's user must not change what it wrote.
    drop(mounted);
    written?;
    let (dir, bytes) = (to.dir.clone(), to.memory_mib << 20);
    let stored = blocking(move || store(&dir, bytes)).await;
    stored.map_err(path_error(vm.pod(), "save the guest's memory in", to.dir.clone()))?;
    Ok(files)
}

/// Makes the directory to which the VMM writes.
async fn mount(vm: &Jailed, dir: &Path) -> Result<MountedDir, VmmError> {
    let (process, user, dir) = (vm.process.handle.clone(), vm.user, dir.join(DIR));
    let failed = path_error(vm.pod(), "show the VMM a directory,", dir.clone());
    let mounted = blocking(move || {
        DirBuilder::new().mode(0o700).create(&dir)?;
        MountedDir::new(process, user, open_dir(&dir)?, DIR)
    });
    match mounted.await {
        Err(_) if vm.process.is_ending().await => Err(vm.process.died(CALL).await),
        mounted => mounted.map_err(failed),
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|panic| Err(io::Error::other(panic)))
}

fn open_dir(dir: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(dir)
}

/// Turns the VMM's files into those of a frozen VM with `bytes` of memory, in `dir`, and removes the VMM's.
fn store(dir: &Path, bytes: u64) -> io::Result<()> {
    let written = dir.join(DIR);
    let of_vmm = open_dir(&written)?;
    let (config, state) = (parsed(&of_vmm, CONFIG, MAX_CONFIG)?, parsed(&of_vmm, STATE, MAX_STATE)?);
    let (config, state) = in_one_file(config, state, bytes).map_err(io::Error::other)?;
    let create = |name: &str| File::options().write(true).create_new(true).mode(0o600).open(dir.join(name));
    create(CONFIG)?.write_all(config.to_string().as_bytes())?;
    create(STATE)?.write_all(state.to_string().as_bytes())?;
    let ranges = open(&of_vmm, RANGES)?;
    let has = ranges.metadata()?.len();
    if has != bytes {
        return Err(io::Error::other(format!("the VMM wrote {has} bytes of memory, expected {bytes}")));
    }
    copy_used(&ranges, &create(MEMORY)?, bytes)?;
    fs::remove_dir_all(written)
}

/// Opens a regular file that a VMM wrote.
fn open(dir: &File, name: &str) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(openat(dir, name, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other(format!("{name} is not a regular file"))),
    }
}

fn parsed(dir: &File, name: &str, max: u64) -> io::Result<Value> {
    let mut text = Vec::new();
    open(dir, name)?.take(max).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Changes configuration and state so that all memory is at the same place of one file as in the VMM's own file.
fn in_one_file(mut config: Value, mut state: Value, bytes: u64) -> Result<(Value, Value), String> {
    let memory = config.get_mut("memory").ok_or("its configuration has no memory")?;
    let zone = match memory.get("zones").and_then(Value::as_array).map(Vec::as_slice) {
        None | Some([]) => json!({ "id": ZONE, "size": memory["size"] }),
        Some([zone]) if zone["id"] == ZONE => zone.clone(),
        Some(_) => return Err("its memory has several zones".to_owned()),
    };
    if zone["size"] != bytes {
        return Err(format!("its memory has {} bytes, expected {bytes}", zone["size"]));
    }
    memory["size"] = 0.into();
    memory["zones"] = json!([zone]);
    memory["zones"][0]["file"] = MEMORY.into();
    memory["zones"][0]["shared"] = false.into();

    let text = state.pointer_mut(OF_MEMORY).ok_or("its state has no memory")?;
    let mut of_memory: Value =
        serde_json::from_str(text.as_str().unwrap_or_default()).map_err(|error| error.to_string())?;
    let ranges = match of_memory.pointer_mut("/memory_ranges/data") {
        Some(Value::Array(ranges)) => std::mem::take(ranges),
        _ => return Err("its state does not say which memory was written".to_owned()),
    };
    let mappings = of_memory.get_mut("guest_ram_mappings").and_then(Value::as_array_mut);
    let mappings = mappings.ok_or("its state does not say where its memory is")?;
    let mut at = 0_u64;
    for range in &ranges {
        let mapping = mappings.iter_mut().find(|mapping| {
            mapping["virtio_mem"] == false
                && mapping["gpa"] == range["gpa"]
                && mapping["size"] == range["length"]
        });
        // Memory that was added while the VM ran would be in a part of a mapping.
        let mapping = mapping.ok_or("memory was added to it while it ran")?;
        mapping["zone_id"] = ZONE.into();
        mapping["file_offset"] = at.into();
        at = at.saturating_add(range["length"].as_u64().unwrap_or(u64::MAX));
    }
    let of_boot = mappings.iter().filter(|mapping| mapping["virtio_mem"] == false).count();
    if of_boot != ranges.len() || at != bytes {
        return Err(format!("the VMM wrote {at} bytes in {} parts of {of_boot}", ranges.len()));
    }
    *text = of_memory.to_string().into();
    Ok((config, state))
}

/// Copies the pages of `from` that are not empty to the same places of `to`.
fn copy_used(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    to.set_len(bytes)?;
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    while at < bytes {
        at = match seek(from, SeekFrom::Data(at)) {
            Ok(data) => data - data % PAGE as u64,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let length = usize::try_from(bytes.saturating_sub(at)).unwrap_or(BLOCK).min(BLOCK);
        let block = &mut block[..length];
        from.read_exact_at(block, at)?;
        let used = |page: &[u8]| page.iter().any(|&byte| byte != 0);
        let pages: Vec<&[u8]> = block.chunks(PAGE).collect();
        let mut offset = at;
        for run in pages.chunk_by(|one, next| used(one) == used(next)) {
            let run = run.concat();
            if used(&run) {
                to.write_all_at(&run, offset)?;
            }
            offset += run.len() as u64;
        }
        at += length as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn state(ranges: Value, mappings: Value) -> Value {
        let of_memory =
            json!({ "memory_ranges": { "data": ranges }, "guest_ram_mappings": mappings, "boot_ram": 7 });
        let of_memory = json!({ "snapshots": {}, "snapshot_data": { "state": of_memory.to_string() } });
        json!({ "snapshots": { "memory-manager": of_memory, "other": 1 }, "snapshot_data": null })
    }

    fn mapping(gpa: u64, size: u64, zone: &str, virtio_mem: bool, file_offset: u64) -> Value {
        json!({ "slot": 0, "gpa": gpa, "size": size, "zone_id": zone, "virtio_mem": virtio_mem, "file_offset": file_offset })
    }

    fn range(gpa: u64, length: u64) -> Value {
        json!({ "gpa": gpa, "length": length })
    }

    #[test]
    fn memory_without_a_file_comes_to_be_in_one() {
        let config = json!({ "memory": { "size": 4 * GIB, "zones": null, "thp": true }, "net": [] });
        let before = json!([mapping(0, 3 * GIB, "mem0", false, 0), mapping(4 * GIB, GIB, "mem0", false, 0)]);
        let ranges = json!([range(0, 3 * GIB), range(4 * GIB, GIB)]);
        let (config, changed) = in_one_file(config, state(ranges, before), 4 * GIB).unwrap();
        let zone = json!({ "id": "memory", "size": 4 * GIB, "file": "memory", "shared": false });
        assert_eq!(config, json!({ "memory": { "size": 0, "zones": [zone], "thp": true }, "net": [] }));
        let after = json!([mapping(0, 3 * GIB, ZONE, false, 0), mapping(4 * GIB, GIB, ZONE, false, 3 * GIB)]);
        assert_eq!(changed, state(json!([]), after));
    }

    #[test]
    fn the_zone_of_a_copy_stays_with_its_room_to_grow() {
        let zone = |file: &str| json!({ "id": "memory", "size": GIB, "file": file, "shared": false, "hotplug_size": GIB });
        let config = json!({ "memory": { "size": 0, "zones": [zone("/proc/self/fd/7")] } });
        let mappings = json!([mapping(0, GIB, ZONE, false, 0), mapping(8 * GIB, GIB, ZONE, true, 0)]);
        let saved = |ranges| in_one_file(config.clone(), state(ranges, mappings.clone()), GIB);
        let (kept, changed) = saved(json!([range(0, GIB)])).unwrap();
        assert_eq!(kept, json!({ "memory": { "size": 0, "zones": [zone("memory")] } }));
        assert_eq!(changed, state(json!([]), mappings.clone()));
        let error = saved(json!([range(8 * GIB, 1 << 20), range(0, GIB)])).unwrap_err();
        assert!(error.contains("while it ran"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let config = |memory: Value| json!({ "memory": memory });
        let plain = || config(json!({ "size": GIB }));
        let mappings = json!([mapping(0, GIB, "mem0", false, 0)]);
        let fits = || state(json!([range(0, GIB)]), mappings.clone());
        in_one_file(plain(), fits(), GIB).unwrap();
        let zones = json!([{ "id": "memory", "size": GIB }, { "id": "other", "size": GIB }]);
        let twice = json!([mapping(0, GIB, "mem0", false, 0), mapping(4 * GIB, GIB, "mem0", false, 0)]);
        for (config, state, bytes) in [
            (plain(), fits(), 2 * GIB),
            (config(json!({ "size": 0, "zones": zones })), fits(), GIB),
            (config(json!({ "size": 0, "zones": [{ "id": "other", "size": GIB }] })), fits(), GIB),
            (json!([]), fits(), GIB),
            (plain(), json!({}), GIB),
            (plain(), state(json!(7), mappings.clone()), GIB),
            (plain(), state(json!([range(0, GIB)]), json!(null)), GIB),
            (plain(), state(json!([]), mappings.clone()), GIB),
            (plain(), state(json!([range(0, GIB)]), twice), GIB),
            (plain(), state(json!([range(0, GIB), range(0, GIB)]), mappings.clone()), GIB),
            (plain(), state(json!([range(0, GIB / 2)]), mappings.clone()), GIB),
        ] {
            in_one_file(config, state, bytes).unwrap_err();
        }
    }

    #[test]
    fn pages_that_no_guest_touched_take_no_space() {
        let bytes = 4 * BLOCK + 3 * PAGE;
        let mut content = vec![0; bytes];
        for at in [0, PAGE, BLOCK - 1, 2 * BLOCK + 5 * PAGE, bytes - 1] {
            content[at] = 7;
        }
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::NamedTempFile::new().unwrap());
        from.write_all_at(&content, 0).unwrap();
        copy_used(&from, to.as_file(), bytes as u64).unwrap();
        assert!(fs::read(to.path()).unwrap() == content, "the content changed");
        let blocks = to.path().metadata().unwrap().blocks();
        assert!(blocks * 512 <= 5 * PAGE as u64, "{blocks} blocks");
        // A hole is not read.
        let (hole, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        hole.set_len(bytes as u64).unwrap();
        copy_used(&hole, &to, bytes as u64).unwrap();
        assert_eq!(to.metadata().unwrap().len(), bytes as u64);
        from.set_len(PAGE as u64).unwrap();
        copy_used(&from, &to, bytes as u64).unwrap_err();
    }

    #[test]
    fn only_regular_files_of_the_vmm_are_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("outside"), "{}").unwrap();
        let of_vmm = dir.path().join(DIR);
        fs::create_dir(&of_vmm).unwrap();
        std::os::unix::fs::symlink("../outside", of_vmm.join(CONFIG)).unwrap();
        fs::create_dir(of_vmm.join(STATE)).unwrap();
        let opened = open_dir(&of_vmm).unwrap();
        for name in [CONFIG, STATE, RANGES] {
            open(&opened, name).unwrap_err();
        }
        fs::write(of_vmm.join(RANGES), "{}").unwrap();
        assert_eq!(parsed(&opened, RANGES, 2).unwrap(), json!({}));
        parsed(&opened, RANGES, 1).unwrap_err();
        fs::rename(&of_vmm, dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("moved", &of_vmm).unwrap();
        open_dir(&of_vmm).unwrap_err();
    }
}
