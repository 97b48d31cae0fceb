//! Where the taps of machines are that belong to no pod yet.
//!
//! A tap can be moved to another namespace, but not soon: 17 ms were measured, most of it the kernel's wait for
//! whoever may still look at the device. A cable is made in 1 ms and costs a packet no copy.

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

use super::{link, namespace, tap};

/// A network namespace of nobody's. It goes with the last VMM that has a tap from here.
#[derive(Debug, Default)]
pub struct Park {
    // A plain lock: held while the namespace is made, once.
    namespace: Mutex<Option<OwnedFd>>,
    made: AtomicU64,
}

/// A tap in a [`Park`], which its machine's VMM holds.
#[derive(Debug)]
pub struct Parked(u64);

impl Parked {
    fn tap(&self) -> String {
        format!("t{}", self.0)
    }

    fn cable(&self) -> String {
        format!("c{}", self.0)
    }
}

impl Park {
    /// Makes so many taps. Blocks while it does.
    pub fn taps(&self, count: u8) -> io::Result<Vec<(OwnedFd, Parked)>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let wanted: Vec<Parked> =
            (0..count).map(|_| Parked(self.made.fetch_add(1, Ordering::Relaxed))).collect();
        namespace::within(self.namespace()?, || {
            wanted.into_iter().map(|parked| Ok((tap::open(&CString::new(parked.tap())?)?, parked))).collect()
        })
    }

    /// Makes a cable from the calling thread's namespace, where `netlink` is, to where the tap is.
    pub(super) fn cable(&self, netlink: &mut Netlink, tap: &Parked, here: &str, mtu: u32) -> io::Result<()> {
        let namespace = self.namespace()?;
        link::cable(netlink, here, (&tap.cable(), namespace.as_fd()), mtu)
    }

    /// Joins taps to the cables that were made to them, of these MTUs.
    pub(super) fn connect<'a>(&self, taps: impl Iterator<Item = (u32, &'a Parked)> + Send) -> io::Result<()> {
        namespace::within(self.namespace()?, || {
            let mut netlink = Netlink::open()?;
            for (mtu, parked) in taps {
                let tap = link::bring_up(&mut netlink, &parked.tap(), mtu)?;
                let cable = link::bring_up(&mut netlink, &parked.cable(), mtu)?;
                link::join(&mut netlink, tap, cable)?;
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
