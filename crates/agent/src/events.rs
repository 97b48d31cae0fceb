//! Events of the guest, numbered and kept until the host has fetched them.

use std::{
    collections::{HashMap, VecDeque},
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
};

use rustix::fs::inotify;
use sandboxer_protocol::id::ContainerId;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use crate::{
    cgroup::Cgroup,
    sync::{lock, watched},
};

/// The most events kept. A host that falls behind further sees a gap in the numbers.
const MAX_EVENTS: usize = 256;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The event's number, which rises by one from 1.
    pub sequence: u64,
    /// The container with a process that the OOM killer killed.
    pub oom: ContainerId,
}

/// The queue of events.
#[derive(Default)]
pub struct Events {
    // The lock is never held across an await.
    queue: Mutex<Queue>,
    grown: Notify,
}

#[derive(Default)]
struct Queue {
    last: u64,
    events: VecDeque<Event>,
}

impl Events {
    /// Adds an event: the OOM killer killed a process of `container`.
    pub fn oom(&self, container: ContainerId) {
        let mut queue = lock(&self.queue);
        queue.last += 1;
        let sequence = queue.last;
        queue.events.push_back(Event { sequence, oom: container });
        if queue.events.len() > MAX_EVENTS {
            queue.events.pop_front();
        }
        drop(queue);
        self.grown.notify_waiters();
    }

    /// Returns the events after number `after`; waits while there are none.
    pub async fn next(&self, after: u64) -> Vec<Event> {
        loop {
            let grown = self.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            let new: Vec<Event> =
                lock(&self.queue).events.iter().filter(|event| event.sequence > after).cloned().collect();
            if !new.is_empty() {
                return new;
            }
            grown.await;
        }
    }
}

/// Watches the containers' memory control groups for the OOM killer.
pub struct OomWatch {
    inotify: AsyncFd<OwnedFd>,
    events: Arc<Events>,
    // The lock is never held across an await.
    watched: Mutex<HashMap<ContainerId, Watched>>,
}

struct Watched {
    descriptor: i32,
    /// The number of kills that were reported as events.
    kills: u64,
    /// The number of kills up to the last exit that the OOM killer explained.
    explained: u64,
}

impl OomWatch {
    /// Creates a watch that reports to `events`.
    pub fn new(events: Arc<Events>) -> io::Result<Self> {
        let fd = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        let inotify = watched(fd, Interest::READABLE)?;
        Ok(Self { inotify, events, watched: Mutex::default() })
    }

    /// Starts watching a container.
    pub fn add(&self, id: &ContainerId) -> io::Result<()> {
        let file = Cgroup::of_container(id).file("memory.events");
        let descriptor = inotify::add_watch(self.inotify.get_ref(), file, inotify::WatchFlags::MODIFY)?;
        lock(&self.watched).insert(id.clone(), Watched { descriptor, kills: 0, explained: 0 });
        self.look(id);
        Ok(())
    }

    /// Stops watching a container.
    pub fn remove(&self, id: &ContainerId) {
        if let Some(watched) = lock(&self.watched).remove(id) {
            // Fails if the file is gone, and the watch with it.
            let _ = inotify::remove_watch(self.inotify.get_ref(), watched.descriptor);
        }
    }

    /// Reports new kills in a container.
    pub fn look(&self, id: &ContainerId) {
        let kills = Cgroup::of_container(id).oom_kills();
        let mut watched = lock(&self.watched);
        let news = watched.get_mut(id).is_some_and(|watched| {
            let news = kills > watched.kills;
            watched.kills = watched.kills.max(kills);
            news
        });
        drop(watched);
        if news {
            self.events.oom(id.clone());
        }
    }

    /// Returns whether the OOM killer killed a process of a container that ended by SIGKILL, which holds if it has
    /// killed there since the last such process. Reports new kills first.
    pub fn explains(&self, id: &ContainerId) -> bool {
        self.look(id);
        lock(&self.watched).get_mut(id).is_some_and(|watched| {
            let explains = watched.kills > watched.explained;
            watched.explained = watched.kills;
            explains
        })
    }

    /// Reports until the agent ends.
    pub async fn run(self: Arc<Self>) -> io::Result<()> {
        loop {
            let mut guard = self.inotify.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = inotify::Reader::new(self.inotify.get_ref(), &mut buffer);
            while reader.next().is_ok() {}
            guard.clear_ready();
            drop(guard);
            let ids: Vec<ContainerId> = lock(&self.watched).keys().cloned().collect();
            for id in ids {
                self.look(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_host_sees_the_newest_events_and_the_gap() {
        let events = Events::default();
        for _ in 0..MAX_EVENTS + 10 {
            events.oom("web".parse().unwrap());
        }
        let new_events = events.next(3).await;
        assert_eq!(new_events.len(), MAX_EVENTS);
        assert_eq!(new_events.first().map(|event| event.sequence), Some(11));
        assert_eq!(new_events.last().map(|event| event.sequence), Some(MAX_EVENTS as u64 + 10));
    }

    #[tokio::test]
    async fn whoever_waits_is_woken_by_the_next_event() {
        let events = Arc::new(Events::default());
        let waiting = Arc::clone(&events);
        let task = tokio::spawn(async move { waiting.next(0).await });
        tokio::task::yield_now().await;
        events.oom("web".parse().unwrap());
        assert_eq!(task.await.unwrap().len(), 1);
    }
}
