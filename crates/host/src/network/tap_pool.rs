//! Taps of VMs that have no pod yet.
//!
//! Moving a tap to another network namespace takes 17 ms (measured), mostly because the kernel waits for readers of the
//! device. Creating a veth pair takes 1 ms, and copies no packets.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sandboxer_netlink::Netlink;
use sandboxer_vmm::NamedTaps;

use super::{
    RTNETLINK,
    error::{At, Failed},
    link, namespace, tap,
};

/// A network namespace without a pod. The kernel removes it with the last VMM that holds a tap in it.
#[derive(Debug, Default)]
pub struct TapPool {
    // The plain lock is held while the namespace is created, once.
    namespace: Mutex<Option<OwnedFd>>,
    made: AtomicU64,
}

/// A tap in a [`TapPool`]. Its VM's VMM holds it open, or opens it.
#[derive(Debug)]
pub struct PooledTap {
    number: u64,
    /// The tap's namespace, if its VM has one of its own.
    namespace: Option<Arc<OwnedFd>>,
}

impl PooledTap {
    fn tap(&self) -> String {
        format!("t{}", self.number)
    }

    fn veth(&self) -> String {
        format!("c{}", self.number)
    }
}

impl TapPool {
    /// Creates `count` taps. Blocks.
    pub fn taps(&self, count: u8) -> io::Result<Vec<(OwnedFd, PooledTap)>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let wanted = self.wanted(count, None);
        namespace::within(self.namespace()?, || {
            wanted.into_iter().map(|pooled| Ok((tap::open(&CString::new(pooled.tap())?)?, pooled))).collect()
        })
    }

    /// Creates `count` taps in a namespace for one VM, whose VMM opens them by name. Blocks.
    pub fn named_taps(&self, count: u8) -> io::Result<(NamedTaps, Vec<PooledTap>)> {
        let namespace = Arc::new(namespace::fresh()?);
        let pooled = self.wanted(count, Some(&namespace));
        let names: Vec<String> = pooled.iter().map(PooledTap::tap).collect();
        namespace::within(&*namespace, || {
            names.iter().try_for_each(|name| tap::leave(&CString::new(name.as_str())?))
        })?;
        Ok((NamedTaps { namespace, names }, pooled))
    }

    fn wanted(&self, count: u8, namespace: Option<&Arc<OwnedFd>>) -> Vec<PooledTap> {
        let next =
            || PooledTap { number: self.made.fetch_add(1, Ordering::Relaxed), namespace: namespace.cloned() };
        (0..count).map(|_| next()).collect()
    }

    /// Creates a veth pair between `here`, in the calling thread's namespace, which `netlink` belongs to, and the tap's
    /// namespace.
    pub(super) fn veth(
        &self,
        netlink: &mut Netlink,
        tap: &PooledTap,
        here: &str,
        mtu: u32,
    ) -> io::Result<()> {
        let namespace = self.namespace_of(tap)?;
        link::veth(netlink, here, (&tap.veth(), namespace.as_fd()), mtu)
    }

    /// Joins taps to their veths, each with its MTU.
    pub(super) fn join(&self, taps: &[(u32, &PooledTap)]) -> Result<(), Failed> {
        // All taps of a VM are in one namespace.
        let Some((_, first)) = taps.first() else { return Ok(()) };
        namespace::within(self.namespace_of(first)?, || {
            let mut netlink = Netlink::open().at_step(RTNETLINK)?;
            for (mtu, pooled) in taps {
                let [tap, veth] = [pooled.tap(), pooled.veth()]
                    .map(|device| link::bring_up(&mut netlink, &device, *mtu).at("bring up", &device));
                link::join(&mut netlink, tap?, veth?).at("redirect packets of", &pooled.tap())?;
            }
            Ok(())
        })
    }

    fn namespace_of(&self, tap: &PooledTap) -> io::Result<OwnedFd> {
        tap.namespace.as_ref().map_or_else(|| self.namespace(), |namespace| namespace.try_clone())
    }

    fn namespace(&self) -> io::Result<OwnedFd> {
        let mut namespace = self.namespace.lock().unwrap_or_else(PoisonError::into_inner);
        match &*namespace {
            Some(namespace) => namespace.try_clone(),
            None => namespace.insert(namespace::fresh()?).try_clone(),
        }
    }
}
