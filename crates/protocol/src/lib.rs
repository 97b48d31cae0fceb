//! Protocols between the daemon, its guests and its clients.
//!
//! | module | between | carried by |
//! |---|---|---|
//! | [`agent`] | daemon and the agent in a guest | ttrpc over a [`link`] |
//! | [`boot`] | daemon and the agent, once | the guest kernel's command line |
//! | [`check`] | a checking program and the daemon | a pod that never exists |
//! | [`frames`] | daemon and agents, containerd and daemon | ttrpc, polled |
//! | [`mark`] | the doctor and an agent's file | a text in the file |
//! | [`newer`] | what an agent of the release before does not know | |
//! | [`share`] | a guest's kernel and the process that serves its shares | a disk, or vsock |
//! | [`stage`] | daemon, its traces, the probes and the benches | names |
//! | `admin`, `controller` (feature `host`) | CLI and daemon, containerd and daemon | gRPC over unix sockets |
//! | `cri` (feature `host`) | callers of CRI's checkpoints and daemon, daemon and containerd | gRPC over unix sockets |

use std::ops::RangeInclusive;

pub mod boot;
pub mod check;
pub mod disk_index;
pub mod frames;
pub mod id;
pub mod link;
pub mod mark;
pub mod newer;
pub mod share;
pub mod stage;

/// The version of the protocol between the daemon and an agent.
///
/// Incremented with the first change after a release, also a compatible one: [`newer`] says which version knows what. Both
/// sides refuse a version that is not in [`SPOKEN`], and name both versions.
pub const PROTOCOL_VERSION: u32 = 7;

/// The versions that daemon and agent speak. A guest keeps the agent with which it was started, so the daemon of the
/// next release must speak with it, and after a downgrade the daemon of the previous release.
pub const SPOKEN: RangeInclusive<u32> = 6..=PROTOCOL_VERSION;

// Otherwise an upgrade would lose every pod of its node. Agents of version 5 and earlier accept no other version.
const _: () = assert!(*SPOKEN.start() < PROTOCOL_VERSION, "speak the version before, too");

/// The directory of the pod's volumes in a guest, each in a directory named by its identifier.
pub const VOLUMES_DIR: &str = "/run/sandboxer/volumes";

/// The source of a bind mount in a container's spec that stands for a new directory on the container's own disk, with a
/// copy of the image's files at the mount's target.
pub const IMAGE_VOLUME: &str = "/run/sandboxer/image-volume";

/// The agent's service and messages, generated from `proto/agent.proto`.
#[allow(
    missing_docs,
    nonstandard_style,
    unused,
    clippy::all,
    clippy::pedantic,
    clippy::unwrap_used,
    clippy::expect_used
)]
pub mod agent {
    mod agent {
        include!(concat!(env!("OUT_DIR"), "/agent/agent.rs"));
    }
    mod service {
        include!(concat!(env!("OUT_DIR"), "/agent/agent_ttrpc.rs"));
    }

    /// The transport of an [`AgentClient`]'s calls.
    pub trait Caller {
        /// Makes one call.
        fn request(
            &self,
            request: ::ttrpc::Request,
        ) -> impl Future<Output = ::ttrpc::Result<::ttrpc::Response>> + Send;
    }

    impl Caller for ::ttrpc::r#async::Client {
        fn request(
            &self,
            request: ::ttrpc::Request,
        ) -> impl Future<Output = ::ttrpc::Result<::ttrpc::Response>> + Send {
            ::ttrpc::r#async::Client::request(self, request)
        }
    }

    pub use agent::*;
    pub use service::{Agent, AgentClient, create_agent};
}

/// The daemon's admin service, generated from `proto/admin.proto`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod admin {
    tonic::include_proto!("sandboxer.admin.v1");
}

/// containerd's sandbox controller contract, generated from `proto/containerd`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod controller {
    /// Types shared by containerd's services.
    pub mod types {
        tonic::include_proto!("containerd.types");
    }
    mod services {
        pub mod sandbox {
            pub mod v1 {
                tonic::include_proto!("containerd.services.sandbox.v1");
            }
        }
    }
    pub use services::sandbox::v1::*;
}

/// The part of containerd's introspection service that the doctor reads, generated from `proto/containerd`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod introspection {
    tonic::include_proto!("containerd.services.introspection.v1");
}

/// The part of containerd's containers service that the daemon reads, generated from `proto/containerd`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod containers {
    tonic::include_proto!("containerd.services.containers.v1");
}

/// The part of containerd's tasks service that the daemon calls, generated from `proto/containerd`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod tasks {
    tonic::include_proto!("containerd.services.tasks.v1");
}

/// The part of CRI that saves and restores pods, generated from `proto/cri.proto`.
#[cfg(feature = "host")]
#[allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::expect_used)]
pub mod cri {
    tonic::include_proto!("runtime.v1");
}
