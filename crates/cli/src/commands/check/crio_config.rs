//! The settings that CRI-O needs.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::Context;
use sandboxer_config::Config;
use sandboxer_doctor::cri::HANDLER;
use toml_edit::{DocumentMut, Item, Table, value};

use super::Args;
use crate::render;

/// The directory of additions to CRI-O's configuration.
const DIR: &str = "/etc/crio/crio.conf.d";
/// The launcher's name for CRI-O, which takes no name without `-v2`: a link beside it.
const LAUNCHER: &str = "containerd-shim-sandboxer-v2";
/// The launcher of a package, if there is none beside this program.
const INSTALLED: &str = "/usr/bin";
/// The directory of the FIFOs that CRI-O makes for containers.
const FIFOS: &str = "/run/crio/sandboxer";

/// Prints the settings.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // A mistake in it would be told at each pod.
    Config::load_or_default(args.config.as_deref())?;
    let own = args.config.as_deref().map(std::path::absolute).transpose();
    let own = own.with_context(|| format!("cannot find {:?}", args.config))?;
    render::print(settings(&launcher()).to_string().trim_end())?;
    eprintln!("save it as {DIR}/50-sandboxer.conf, and restart crio: the runtime handler is {HANDLER}");
    if let Some(own) = own {
        // CRI-O tells the launcher of no file.
        eprintln!("CRI-O's service needs the variable SANDBOXER_CONFIG={}", own.display());
    }
    Ok(())
}

/// Returns the path of the launcher by its name for CRI-O.
fn launcher() -> PathBuf {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.join(LAUNCHER)));
    beside.filter(|path| path.exists()).unwrap_or_else(|| Path::new(INSTALLED).join(LAUNCHER))
}

fn settings(launcher: &Path) -> DocumentMut {
    let mut runtime = Table::new();
    for (key, text) in [
        ("runtime_path", launcher.to_string_lossy().as_ref()),
        ("runtime_type", "vm"),
        ("runtime_root", FIFOS),
    ] {
        runtime[key] = value(text);
    }
    // Devices of the host are not in a guest.
    runtime["privileged_without_host_devices"] = value(true);
    let mut document = DocumentMut::new();
    let mut at = document.as_table_mut();
    for key in ["crio", "runtime", "runtimes"] {
        let mut table = Table::new();
        table.set_implicit(true);
        let entry = at.entry(key).or_insert(Item::Table(table));
        // It was just inserted.
        let Some(table) = entry.as_table_mut() else { return DocumentMut::new() };
        at = table;
    }
    at.insert(HANDLER, Item::Table(runtime));
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cri_o_learns_of_the_launcher_by_a_name_that_it_takes() {
        let expected = "[crio.runtime.runtimes.sandboxer]\n\
                        runtime_path = \"/usr/bin/containerd-shim-sandboxer-v2\"\n\
                        runtime_type = \"vm\"\n\
                        runtime_root = \"/run/crio/sandboxer\"\n\
                        privileged_without_host_devices = true\n";
        assert_eq!(settings(&Path::new(INSTALLED).join(LAUNCHER)).to_string(), expected);
    }
}
