//! Requests of the admin service about templates.

use std::{future::Future, sync::Arc};

use sandboxer_base::chain;
use sandboxer_config::{Config, VmmName};
use sandboxer_protocol::admin::{
    BuildTemplateRequest, ListTemplatesResponse, PooledVm, StartPathCount, Template,
};
use sandboxer_vmm::VmmKey;
use tonic::Status;

use crate::{
    pod::DaemonState,
    template::{Kind, Shape, TemplateView},
};

/// Lists the templates, the pool, and the start paths of pods.
pub async fn list(node: &Arc<DaemonState>) -> Result<ListTemplatesResponse, Status> {
    let templates = views(node).await?.into_iter().map(message).collect();
    let pool = node.pool.list().into_iter().map(|warm| PooledVm {
        vmm: warm.vmm,
        vcpus: warm.shape.vcpus,
        memory_mib: warm.shape.memory_mib,
        vmm_pid: warm.pid,
        node: warm.node,
    });
    let counts = node.start_paths.counts();
    let count = |start_path: &dyn ToString, reason: &str, pods| StartPathCount {
        start_path: start_path.to_string(),
        reason: reason.to_owned(),
        pods,
    };
    let taken = counts.taken.iter().map(|(start_path, pods)| count(start_path, "", *pods));
    let missed = counts.missed.iter().map(|((start_path, reason), pods)| count(start_path, reason, *pods));
    Ok(ListTemplatesResponse { templates, pool: pool.collect(), start_paths: taken.chain(missed).collect() })
}

/// Builds a template. VMM and size are checked before this returns.
pub fn build(
    node: Arc<DaemonState>,
    request: BuildTemplateRequest,
) -> Result<impl Future<Output = Result<Template, Status>>, Status> {
    let kind = Kind { vmm: vmm(&node, &request.vmm)?, shape: shape(&node.config, &request)? };
    Ok(async move {
        let template = node.templates.prepare(kind).await;
        let template = template.map_err(|error| Status::failed_precondition(chain(&error)))?;
        one(&node, &template.key.to_string()).await.map(message)
    })
}

/// Verifies all files of a template; the response describes any damage.
pub async fn verify(node: &Arc<DaemonState>, prefix: &str) -> Result<Template, Status> {
    let view = one(node, prefix).await?;
    let (templates, key) = (node.templates.clone(), view.key.clone());
    let verified = blocking(move || templates.verify(&key)).await?;
    let problem = verified.map_err(|error| chain(&error)).err().unwrap_or_default();
    Ok(Template { problem, ..message(view) })
}

/// Removes a template and returns its last state.
pub async fn remove(node: &Arc<DaemonState>, prefix: &str) -> Result<Template, Status> {
    let view = one(node, prefix).await?;
    let (templates, key) = (node.templates.clone(), view.key.clone());
    let removed = blocking(move || templates.remove(&key)).await?;
    removed.map_err(|error| Status::internal(format!("cannot remove template {}: {error}", view.key)))?;
    Ok(message(view))
}

/// Returns the VMM of this name; the configured one for "".
fn vmm(node: &DaemonState, name: &str) -> Result<VmmKey, Status> {
    let known = VmmName::ALL.into_iter().find(|known| known.as_str() == name);
    let asked = known.map(Some).or_else(|| name.is_empty().then_some(None));
    asked.and_then(|asked| node.vmms.key(asked)).ok_or_else(|| {
        let vmms = node.vmms.keys().map(|key| node.vmms.get(key).info().name).collect::<Vec<_>>().join(", ");
        Status::invalid_argument(format!(
            "this daemon runs no VMs in {name:?}, only in {vmms}: see vm.vmm and [handlers]"
        ))
    })
}

fn shape(config: &Config, request: &BuildTemplateRequest) -> Result<Shape, Status> {
    let vm = &config.vm;
    let asked = |value, default| if value == 0 { default } else { value };
    let vcpus = asked(request.vcpus.into(), vm.default_vcpus.into());
    let memory_mib = asked(request.memory_mib, vm.default_memory_mib);
    let most = (u64::from(vm.max_vcpus), vm.max_memory_mib);
    match u32::try_from(vcpus) {
        Ok(count) if vcpus <= most.0 && (64..=most.1).contains(&memory_mib) => {
            Ok(Shape { vcpus: count, memory_mib, nics: 1 })
        }
        _ => Err(Status::invalid_argument(format!(
            "a VM has 1 to {} vCPUs and 64 to {} MiB: see vm.max_vcpus and vm.max_memory_mib",
            most.0, most.1
        ))),
    }
}

async fn views(node: &Arc<DaemonState>) -> Result<Vec<TemplateView>, Status> {
    let templates = node.templates.clone();
    let listed = blocking(move || templates.list()).await?;
    listed.map_err(|error| Status::internal(format!("cannot read the directory of templates: {error}")))
}

/// Returns the only template whose key has this prefix.
async fn one(node: &Arc<DaemonState>, prefix: &str) -> Result<TemplateView, Status> {
    let mut matching = views(node).await?;
    matching.retain(|view| view.key.to_string().starts_with(prefix));
    match matching.len() {
        1 => Ok(matching.remove(0)),
        0 => Err(Status::not_found(format!("no template's key starts with {prefix:?}"))),
        more => Err(Status::invalid_argument(format!(
            "{more} templates' keys start with {prefix:?}: give more of it"
        ))),
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Status> {
    tokio::task::spawn_blocking(work).await.map_err(|panic| Status::internal(panic.to_string()))
}

fn message(view: TemplateView) -> Template {
    let (key, in_use) = (view.key.to_string(), view.in_use);
    match view.manifest {
        Ok(manifest) => Template {
            key,
            vcpus: manifest.inputs.shape.vcpus,
            memory_mib: manifest.inputs.shape.memory_mib,
            stored_bytes: manifest.files.values().map(|file| file.stored).sum(),
            made_at_ns: manifest.made_at_ns,
            vmm: manifest.inputs.vmm.vmm,
            vmm_version: manifest.inputs.vmm.version,
            accelerator: manifest.inputs.vmm.accelerator,
            in_use,
            problem: String::new(),
        },
        Err(error) => Template { key, in_use, problem: chain(&error), ..Default::default() },
    }
}
