//! The images of the cache that are in its directory or being built.

use std::{collections::HashMap, fs, io, os::unix::fs::MetadataExt, path::Path, time::SystemTime};

use super::{Building, Key, PRIVATE, SHARED, UNFINISHED};

#[derive(Default)]
pub(super) struct State {
    pub(super) images: HashMap<String, Image>,
    pub(super) by_key: HashMap<Key, String>,
    pub(super) building: HashMap<Key, Building>,
    /// Whether unused images may be removed. Until then, VMs of an earlier daemon that are not adopted yet may use
    /// them.
    pub(super) settled: bool,
}

#[derive(Debug)]
pub(super) struct Image {
    pub(super) bytes: u64,
    pub(super) used: SystemTime,
    pub(super) leases: usize,
    /// The key of a shared image; `None`: the image is for one container and is removed with its last lease.
    pub(super) key: Option<Key>,
}

impl State {
    /// Reads the images that an earlier daemon left in `dir`.
    pub(super) fn read(dir: &Path) -> io::Result<Self> {
        let mut state = Self::default();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if name.starts_with(UNFINISHED) {
                // The entry is an image or mkfs.erofs' temporary directory.
                let removed = match entry.file_type()?.is_dir() {
                    true => fs::remove_dir_all(entry.path()),
                    false => fs::remove_file(entry.path()),
                };
                if let Err(error) = removed {
                    tracing::warn!(path = ?entry.path(), %error, "cannot remove an unfinished image; the next daemon does");
                }
                continue;
            }
            let key = name
                .strip_prefix(SHARED)
                .and_then(|name| name.split_once('-'))
                .map(|(key, _)| key.to_owned());
            if key.is_none() && !name.starts_with(PRIVATE) {
                continue;
            }
            let file = entry.metadata()?;
            let image = Image { bytes: file.blocks() * 512, used: file.modified()?, leases: 0, key };
            if let Some(key) = &image.key {
                state.by_key.insert(key.clone(), name.clone());
            }
            state.images.insert(name, image);
        }
        Ok(state)
    }

    /// Returns the bytes of images that could be removed.
    pub(super) fn unused_bytes(&self) -> u64 {
        let unused = self.images.values().filter(|image| self.settled && image.leases == 0);
        unused.map(|image| image.bytes).sum()
    }

    /// Removes from the state the images to delete, and returns their names.
    pub(super) fn victims(&mut self, most: u64) -> Vec<String> {
        if !self.settled {
            return Vec::new();
        }
        let mut total: u64 = self.images.values().map(|image| image.bytes).sum();
        let mut unused: Vec<_> = self
            .images
            .iter()
            .filter(|(_, image)| image.leases == 0)
            .map(|(name, image)| (image.key.is_some(), image.used, name.clone()))
            .collect();
        unused.sort();
        let mut victims = Vec::new();
        for (shared, _, name) in unused {
            if shared && total <= most {
                break;
            }
            if let Some(image) = self.images.remove(&name) {
                total -= image.bytes;
                if let Some(key) = image.key.filter(|key| self.by_key.get(key) == Some(&name)) {
                    self.by_key.remove(&key);
                }
            }
            victims.push(name);
        }
        victims
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn image() -> impl Strategy<Value = Image> {
        (0_u64..50, 0_u64..20, 0_usize..3, any::<bool>()).prop_map(|(bytes, used, leases, shared)| Image {
            bytes,
            used: SystemTime::UNIX_EPOCH + Duration::from_secs(used),
            leases,
            key: shared.then(String::new),
        })
    }

    proptest! {
        #[test]
        fn what_goes_is_unused_oldest_first_and_no_more_than_needed(
            images in proptest::collection::vec(image(), 0..12),
            most in 0_u64..200,
        ) {
            let images: HashMap<_, _> = images.into_iter().enumerate().map(|(n, i)| (n.to_string(), i)).collect();
            let before: HashMap<_, _> =
                images.iter().map(|(name, i)| (name.clone(), (i.bytes, i.used, i.leases, i.key.is_some()))).collect();
            let mut state = State { images, ..State::default() };
            prop_assert!(state.victims(most).is_empty(), "before it is settled nothing goes");
            state.settled = true;
            let victims = state.victims(most);

            let total = |names: &mut dyn Iterator<Item = &String>| names.map(|name| before[name].0).sum::<u64>();
            for (name, (_, used, leases, shared)) in &before {
                let is_evicted = victims.contains(name);
                prop_assert_ne!(is_evicted, state.images.contains_key(name));
                prop_assert!(!(is_evicted && *leases > 0), "{} was in use", name);
                prop_assert!(is_evicted || *leases > 0 || *shared, "{} is nobody's", name);
                if !is_evicted && *leases == 0 {
                    prop_assert!(total(&mut state.images.keys()) <= most);
                    let newer = victims.iter().filter(|name| before[*name].3).all(|name| before[name].1 <= *used);
                    prop_assert!(newer, "{} was used before one that stays", name);
                }
            }
            if let Some(last) = victims.last().filter(|name| before[*name].3) {
                prop_assert!(total(&mut state.images.keys().chain([last])) > most, "{} went needlessly", last);
            }
        }
    }
}
