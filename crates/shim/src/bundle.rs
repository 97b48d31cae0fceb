//! The files beside a container's `config.json` that say who serves it.

use std::{fs, io, path::Path};

use serde::Deserialize;
use serde_json::json;

/// The file that tells the daemon which containerd runs this container.
pub const LAUNCHED: &str = "sandboxer.json";
/// The file that this program writes, and that containerd 1.6 and 1.7 read when they are restarted.
const ADDRESS: &str = "address";
/// The file that containerd 2.0 and later write.
const BOOTSTRAP: &str = "bootstrap.json";

/// The content of `bootstrap.json`.
#[derive(Debug, Deserialize)]
struct Bootstrap {
    address: String,
}

/// Writes the addresses of the container's task service and of containerd's gRPC services.
pub fn write(dir: &Path, task: &str, containerd: &str) -> io::Result<()> {
    replace(dir, LAUNCHED, &json!({ "containerd": containerd }).to_string())?;
    replace(dir, ADDRESS, task)
}

/// Writes a new file and renames it: readers see all of it or none.
fn replace(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    let partial = dir.join(format!(".{name}"));
    fs::write(&partial, text)?;
    fs::rename(partial, dir.join(name))
}

/// Returns the address of the container's task service; `None` if no program has written it.
pub fn address(dir: &Path) -> Option<String> {
    let bootstrap = fs::read(dir.join(BOOTSTRAP)).ok();
    let bootstrap = bootstrap.and_then(|text| serde_json::from_slice::<Bootstrap>(&text).ok());
    bootstrap.map(|bootstrap| bootstrap.address).or_else(|| {
        let text = fs::read_to_string(dir.join(ADDRESS)).ok()?;
        Some(text.trim().to_owned()).filter(|address| !address.is_empty())
    })
}
