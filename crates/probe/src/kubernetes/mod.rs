//! Start-up as a cluster sees it: from a pod's creation until it is Ready, by the API server's own timestamps. Works
//! with any RuntimeClass and needs no access to the nodes.
//!
//! | module | what it holds |
//! |---|---|
//! | [`kubeconfig`] | the cluster and the user of a kubeconfig |
//! | [`client`] | requests to the API server |
//! | [`startup`] | the plan, the pods and their stamps |
//! | [`report`] | the result |

pub mod client;
pub mod kubeconfig;
pub mod report;
pub mod startup;
