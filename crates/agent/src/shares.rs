//! The guest's end of live shares: file requests of its kernel go to the host, answers come back.
//!
//! ```text
//!  kernel ─/dev/fuse─▶ a slot, in the queue ─exchange─▶ under way ─exchange─▶ /dev/fuse ─▶ kernel
//!                                ▲                          │
//!                                └────────── resume ────────┘  (the daemon that had it is gone)
//! ```
//!
//! While no slot is free nothing is read, and whoever wants a file waits. This is the thread by which the
//! kernel gets its answers: nothing on it may touch a path below [`GUEST_DIR`], or a pipe into which somebody may copy
//! from there (see [`deputy`]), or both wait for ever.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{Arc, Mutex},
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};
use sandboxer_protocol::share::{GUEST_DIR, Head, MAX_BATCH, MAX_DATA, MAX_MESSAGE, SLOTS, opcode};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    task::JoinHandle,
};

use crate::{
    deputy,
    failure::{Failure, internal},
    sync::{lock, watched},
};

/// A message and its slot.
pub type Slotted = (u32, Vec<u8>);

/// The shares of this guest.
#[derive(Default)]
pub struct Shares {
    // Never held across an await.
    mounted: Mutex<Option<Mounted>>,
    table: Arc<Table>,
}

struct Mounted {
    device: Arc<Device>,
    reader: JoinHandle<()>,
}

type Device = AsyncFd<OwnedFd>;

impl Shares {
    /// Mounts them, once.
    pub fn mount(&self) -> Result<(), Failure> {
        let mut mounted = lock(&self.mounted);
        if mounted.is_some() {
            return Ok(());
        }
        deputy::start().map_err(internal("failed to start the process that reads pipes"))?;
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")
            .map_err(internal("failed to open /dev/fuse"))?;
        fs::create_dir_all(GUEST_DIR).map_err(internal(format!("failed to create {GUEST_DIR}")))?;
        // The kernel asks nobody but itself who may do what, by the attributes it is given.
        let options = format!(
            "fd={},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions,max_read={MAX_DATA}",
            device.as_raw_fd()
        );
        mount(Some("sandboxer"), GUEST_DIR, Some("fuse"), MsFlags::MS_NODEV, Some(options.as_str()))
            .map_err(internal(format!("failed to mount shares on {GUEST_DIR}")))?;
        let device =
            watched(device.into(), Interest::READABLE).map_err(internal("failed to watch /dev/fuse"))?;
        let device = Arc::new(device);
        let reader = tokio::spawn(read(Arc::clone(&device), Arc::clone(&self.table)));
        *mounted = Some(Mounted { device, reader });
        Ok(())
    }

    /// Takes answers and waits for requests; none when another call has come meanwhile. `resume`: all that
    /// have no answer yet, whoever has had them.
    pub async fn exchange(&self, answers: Vec<Slotted>, resume: bool) -> Vec<Slotted> {
        let device = lock(&self.mounted).as_ref().map(|mounted| Arc::clone(&mounted.device));
        for (slot, answer) in answers {
            if self.table.take(slot, &answer)
                && let Some(device) = &device
                && !answer.is_empty()
                && let Err(error) = nix::unistd::write(device.get_ref(), &answer)
                // Whoever asked has been killed meanwhile.
                && error != Errno::ENOENT
            {
                tracing::warn!("the kernel doesn't take a share's answer: {error}");
            }
        }
        self.table.next(resume).await
    }

    /// Ends all requests, those under way and those to come, with an error. Before the guest's end: to write
    /// its disks out it would wait for answers that only this thread can give.
    pub async fn end(&self) {
        let mounted = lock(&self.mounted).take();
        if let Some(Mounted { device, reader }) = mounted {
            reader.abort();
            let _ = reader.await;
            // The last descriptor: closing it is what ends them.
            drop(device);
        }
    }
}

/// Reads requests from the kernel until it is done.
async fn read(device: Arc<Device>, table: Arc<Table>) {
    let mut buffer = vec![0; MAX_MESSAGE];
    loop {
        table.has_room().await;
        let Ok(mut guard) = device.readable().await else { return };
        match nix::unistd::read(device.get_ref(), &mut buffer) {
            Ok(length) => table.enter(&buffer[..length]),
            Err(Errno::EAGAIN) => guard.clear_ready(),
            // A request that was given up before it was read.
            Err(Errno::ENOENT | Errno::EINTR) => {}
            Err(error) => return tracing::debug!("the kernel has no more requests: {error}"),
        }
    }
}

/// The requests under way.
#[derive(Default)]
struct Table {
    // Never held across an await.
    inner: Mutex<Inner>,
    /// A request has come, or a caller that makes earlier ones give up.
    news: Notify,
    /// A slot is free.
    room: Notify,
}

#[derive(Default)]
struct Inner {
    slots: [Option<UnderWay>; SLOTS],
    /// Slots whose requests are to be handed out.
    queue: VecDeque<u32>,
    /// Number of the last caller.
    caller: u64,
}

struct UnderWay {
    head: Head,
    request: Vec<u8>,
}

impl Table {
    async fn has_room(&self) {
        while lock(&self.inner).slots.iter().all(Option::is_some) {
            self.room.notified().await;
        }
    }

    /// Gives a request a slot.
    fn enter(&self, request: &[u8]) {
        let Some(head) = Head::of(request) else {
            return tracing::warn!("the kernel sent what is no request");
        };
        // Nothing here is so slow, or would know how to stop.
        if head.opcode == opcode::INTERRUPT {
            return;
        }
        let mut inner = lock(&self.inner);
        let Some(free) = inner.slots.iter().position(Option::is_none) else { return };
        inner.slots[free] = Some(UnderWay { head, request: request.to_vec() });
        inner.queue.push_back(free as u32);
        drop(inner);
        self.news.notify_waiters();
    }

    /// Whether `answer` is the one that `slot` waits for; the slot is free then.
    fn take(&self, slot: u32, answer: &[u8]) -> bool {
        let mut inner = lock(&self.inner);
        let waits = usize::try_from(slot).ok().and_then(|slot| inner.slots.get_mut(slot));
        // One that came twice, by way of a daemon that is gone, finds its slot empty or another's.
        let Some(waits) =
            waits.filter(|waits| waits.as_ref().is_some_and(|of| of.head.is_answered_by(answer)))
        else {
            return false;
        };
        *waits = None;
        inner.queue.retain(|&queued| queued != slot);
        drop(inner);
        self.room.notify_one();
        true
    }

    async fn next(&self, resume: bool) -> Vec<Slotted> {
        let caller = {
            let mut inner = lock(&self.inner);
            if resume {
                let Inner { slots, queue, .. } = &mut *inner;
                let mut unanswered: Vec<_> = (0..)
                    .zip(&*slots)
                    .filter_map(|(slot, of)| Some((of.as_ref()?.head.unique, slot)))
                    .collect();
                unanswered.sort_unstable();
                *queue = unanswered.into_iter().map(|(_, slot)| slot).collect();
            }
            inner.caller += 1;
            inner.caller
        };
        self.news.notify_waiters();
        loop {
            let news = self.news.notified();
            tokio::pin!(news);
            news.as_mut().enable();
            {
                let mut inner = lock(&self.inner);
                if inner.caller != caller {
                    return Vec::new();
                }
                if !inner.queue.is_empty() {
                    return inner.hand_out();
                }
            }
            news.await;
        }
    }
}

impl Inner {
    /// As many requests as the host takes at once, oldest first.
    fn hand_out(&mut self) -> Vec<Slotted> {
        let (mut handed_out, mut room) = (Vec::new(), MAX_BATCH);
        while let Some(&slot) = self.queue.front() {
            if let Some(of) = &self.slots[slot as usize] {
                let Some(left) = room.checked_sub(of.request.len()) else { break };
                room = left;
                handed_out.push((slot, of.request.clone()));
            }
            self.queue.pop_front();
        }
        handed_out
    }
}

#[cfg(test)]
mod tests {
    use sandboxer_protocol::share::REQUEST_HEAD;

    use super::*;

    fn request(unique: u64) -> Vec<u8> {
        let mut request = vec![0; REQUEST_HEAD];
        request[0] = REQUEST_HEAD as u8;
        request[4] = opcode::LOOKUP as u8;
        request[8..16].copy_from_slice(&unique.to_le_bytes());
        request
    }

    fn answer(unique: u64) -> Vec<u8> {
        Head { opcode: opcode::LOOKUP, unique }.failed(2)
    }

    fn slots(handed_out: &[Slotted]) -> Vec<u32> {
        handed_out.iter().map(|(slot, _)| *slot).collect()
    }

    #[tokio::test]
    async fn requests_are_handed_out_once_and_all_unanswered_ones_to_who_resumes() {
        let table = Table::default();
        for unique in [10, 12, 14] {
            table.enter(&request(unique));
        }
        assert_eq!(slots(&table.next(false).await), [0, 1, 2]);
        assert!(table.take(1, &answer(12)));
        table.enter(&request(16));
        assert_eq!(slots(&table.next(false).await), [1]);
        // By age, not by slot.
        assert_eq!(slots(&table.next(true).await), [0, 2, 1]);
    }

    #[tokio::test]
    async fn an_answer_counts_once_and_for_its_request_only() {
        let table = Table::default();
        table.enter(&request(10));
        assert!(!table.take(0, &answer(11)), "another's");
        assert!(!table.take(1, &answer(10)) && !table.take(99, &answer(10)), "another slot's");
        assert!(!table.take(0, &[]) && !table.take(0, &answer(10)[..15]), "none");
        assert!(table.take(0, &answer(10)));
        assert!(!table.take(0, &answer(10)), "twice");
    }

    #[tokio::test]
    async fn a_later_caller_ends_an_earlier_ones_wait() {
        let table = Arc::new(Table::default());
        let waiting = tokio::spawn({
            let table = Arc::clone(&table);
            async move { table.next(false).await }
        });
        tokio::task::yield_now().await;
        let later = tokio::spawn({
            let table = Arc::clone(&table);
            async move { table.next(false).await }
        });
        assert_eq!(waiting.await.unwrap(), []);
        table.enter(&request(10));
        assert_eq!(slots(&later.await.unwrap()), [0]);
    }

    #[tokio::test]
    async fn what_is_handed_out_at_once_is_what_the_host_takes_at_once() {
        let table = Table::default();
        let mut long = request(10);
        long.resize(MAX_MESSAGE, 0);
        long[..4].copy_from_slice(&(MAX_MESSAGE as u32).to_le_bytes());
        for (unique, message) in [(10, &long), (12, &long), (14, &request(14)), (16, &request(16))] {
            let mut message = message.clone();
            message[8] = unique;
            table.enter(&message);
        }
        assert_eq!(slots(&table.next(false).await), [0]);
        assert_eq!(slots(&table.next(false).await), [1]);
        assert_eq!(slots(&table.next(false).await), [2, 3]);
    }

    #[tokio::test]
    async fn there_is_room_for_so_many_and_again_when_one_is_answered() {
        let table = Arc::new(Table::default());
        for unique in 0..SLOTS as u64 {
            table.has_room().await;
            table.enter(&request(unique));
        }
        let waiting = tokio::spawn({
            let table = Arc::clone(&table);
            async move { table.has_room().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        assert!(table.take(7, &answer(7)));
        waiting.await.unwrap();
        table.enter(&request(100));
        let last = table.next(true).await.pop().unwrap();
        assert_eq!(last, (7, request(100)));
    }
}
