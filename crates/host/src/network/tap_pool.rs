//! Taps of VMs without a pod yet.
//!
//! Moving a tap to another network namespace takes 17 ms (measured): mostly, the kernel waits for readers of
//! the device. Creating a veth pair takes 1 ms, and costs no copy of a packet.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sandboxer_netlink::Netlink;

use super::{
    RTNETLINK,
    error::{At, Failed},
    link, namespace, tap,
};

/// A network namespace without a pod. The kernel removes it with the last VMM that holds a tap in it.
#[derive(Debug, Default)]
pub struct TapPool {
    // A plain lock: held while the namespace is created, once.
    namespace: Mutex<Option<OwnedFd>>,
    made: AtomicU64,
}

/// A tap in a [`TapPool`]. The VMM of its VM holds it open.
#[derive(Debug)]
pub struct PooledTap(u64);

impl PooledTap {
    fn tap(&self) -> String {
        format!("t{}", self.0)
    }

    fn veth(&self) -> String {
        format!("c{}", self.0)
    }
}

impl TapPool {
    /// Creates `count` taps. Blocks meanwhile.
    pub fn taps(&self, count: u8) -> io::Result<Vec<(OwnedFd, PooledTap)>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let wanted: Vec<PooledTap> =
            (0..count).map(|_| PooledTap(self.made.fetch_add(1, Ordering::Relaxed))).collect();
        namespace::within(self.namespace()?, || {
            wanted.into_iter().map(|pooled| Ok((tap::open(&CString::new(pooled.tap())?)?, pooled))).collect()
        })
    }

    /// Creates a veth pair from `here` in the calling thread's namespace, which `netlink` belongs to, to the
    /// tap's namespace.
    pub(super) fn veth(
        &self,
        netlink: &mut Netlink,
        tap: &PooledTap,
        here: &str,
        mtu: u32,
    ) -> io::Result<()> {
        let namespace = self.namespace()?;
        link::veth(netlink, here, (&tap.veth(), namespace.as_fd()), mtu)
    }

    /// Joins taps to their veths, with these MTUs.
    pub(super) fn join<'a>(
        &self,
        taps: impl Iterator<Item = (u32, &'a PooledTap)> + Send,
    ) -> Result<(), Failed> {
        namespace::within(self.namespace()?, || {
            let mut netlink = Netlink::open().at_step(RTNETLINK)?;
            for (mtu, pooled) in taps {
                let [tap, veth] = [pooled.tap(), pooled.veth()]
                    .map(|device| link::bring_up(&mut netlink, &device, mtu).at("bring up", &device));
                link::join(&mut netlink, tap?, veth?).at("redirect packets of", &pooled.tap())?;
            }
            Ok(())
        })
    }

    fn namespace(&self) -> io::Result<OwnedFd> {
        let mut namespace = self.namespace.lock().unwrap_or_else(PoisonError::into_inner);
        match &*namespace {
            Some(namespace) => namespace.try_clone(),
            None => namespace.insert(namespace::fresh()?).try_clone(),
        }
    }
}
