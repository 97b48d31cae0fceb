//! Generates the wire types: the agent's for ttrpc, the daemon's own services for gRPC.

use std::{env, error::Error, fs, path::PathBuf};

use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

/// Messages of CRI that `proto/cri.proto` only names.
#[cfg(feature = "host")]
const OF_CRI: [&str; 10] = [
    "PodSandboxConfig",
    "ContainerConfig",
    "RunPodSandboxRequest",
    "RunPodSandboxResponse",
    "StopPodSandboxRequest",
    "StopPodSandboxResponse",
    "RemovePodSandboxRequest",
    "RemovePodSandboxResponse",
    "CreateContainerRequest",
    "CreateContainerResponse",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);

    let agent = out.join("agent");
    fs::create_dir_all(&agent)?;
    Codegen::new()
        .inputs(["proto/agent.proto"])
        .include("proto")
        .out_dir(&agent)
        .rust_protobuf()
        .rust_protobuf_customize(ProtobufCustomize::default().gen_mod_rs(false))
        .customize(Customize { async_all: true, gen_mod: false, ..Default::default() })
        .run()?;
    // Inner attributes are not allowed in an included file.
    for name in ["agent.rs", "agent_ttrpc.rs"] {
        let path = agent.join(name);
        let text = fs::read_to_string(&path)?;
        let code: String = text
            .lines()
            .filter(|line| !line.starts_with("#![") && !line.starts_with("//!"))
            .flat_map(|line| [line, "\n"])
            .collect();
        // The daemon's client has a transport of its own.
        let code = code
            .replace("pub struct AgentClient {", "pub struct AgentClient<C = ::ttrpc::r#async::Client> {")
            .replace("impl AgentClient {", "impl<C: super::Caller> AgentClient<C> {")
            .replace("client: ::ttrpc::r#async::Client", "client: C");
        fs::write(&path, code)?;
    }

    #[cfg(feature = "host")]
    OF_CRI
        .into_iter()
        .fold(tonic_prost_build::configure(), |all, name| {
            all.extern_path(format!(".runtime.v1.{name}"), format!("::k8s_cri::v1::{name}"))
        })
        // What the CLI prints as JSON are these very messages.
        .type_attribute(".sandboxer.admin.v1", "#[derive(serde::Serialize)]")
        .compile_protos(
            &[
                "proto/admin.proto",
                "proto/containerd/containers.proto",
                "proto/containerd/controller.proto",
                "proto/containerd/introspection.proto",
                "proto/containerd/tasks.proto",
                "proto/cri.proto",
            ],
            &["proto"],
        )?;
    Ok(())
}
