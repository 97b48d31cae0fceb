//! Protocols between the daemon, its guests and its clients.
//!
//! | module | between | carried by |
//! |---|---|---|
//! | [`agent`] | daemon and the agent in a guest | ttrpc over a [`link`] |
//! | [`boot`] | daemon and the agent, once | the guest kernel's command line |
//! | [`check`] | a checking program and the daemon | a pod that never exists |
//! | [`frames`] | daemon and agents, containerd and daemon | ttrpc, polled |
//! | [`mark`] | the doctor and an agent's file | a text in the file |
//! | [`share`] | a guest's kernel and the process that serves its shares | a disk, or vsock |
//! | [`stage`] | daemon, its traces, the probes and the benches | names |
//! | `admin`, `controller` (feature `host`) | CLI and daemon, containerd and daemon | gRPC over unix sockets |

pub mod boot;
pub mod check;
pub mod disk_index;
pub mod frames;
pub mod id;
pub mod link;
pub mod mark;
pub mod share;
pub mod stage;

/// Version of the protocol between the daemon and an agent.
///
/// Increased with every incompatible change. Both sides refuse another version and name both
/// versions.
pub const PROTOCOL_VERSION: u32 = 6;

/// Directory of the pod's volumes in a guest, each in a directory named by its identifier.
pub const VOLUMES_DIR: &str = "/run/sandboxer/volumes";

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

    /// Makes the calls of an [`AgentClient`].
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
