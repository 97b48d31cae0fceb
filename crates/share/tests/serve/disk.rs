//! The disk through which a VMM's guest sends requests.

use std::{
    fs,
    io::{Read, Write},
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use libc::{O_CREAT, O_RDWR};
use sandboxer_protocol::share::{
    MAX_DATA, SLOTS,
    disk::{ANSWER, DONE, FIRST, LATER, SIZE, SLOT},
};
use sandboxer_share::attach::{Access, Source};

use crate::{
    kernel_double::{Kernel, Transport, named, op, words},
    server::{Server, source},
    vmm_double::{Disk, READ, WRITE, message_in, state},
};

/// Starts a server with a share, and a kernel on slot 0 of its disk.
fn sharing() -> (Server, Kernel, u64) {
    let server = Server::start_by("disk");
    server.attach(0, source(&server.host())).unwrap();
    let mut kernel = Kernel::by(Transport::Disk(server.disk(), 0));
    kernel.init();
    let share = kernel.lookup(1, "0").unwrap().node;
    (server, kernel, share)
}

/// Returns another VMM's connection, after the kernel's: they are served one at a time.
fn next_disk(server: &Server, kernel: Kernel) -> Disk {
    drop(kernel);
    server.disk()
}

#[test]
fn whole_megabytes_go_both_ways() {
    let (server, mut kernel, share) = sharing();
    let (file, handle) = kernel.create(share, "file", O_CREAT | O_RDWR, 0o600).unwrap();
    let block: Vec<u8> = (0..MAX_DATA).map(|n| (n % 251) as u8).collect();
    assert_eq!(kernel.write(file.node, handle, 3, &block).unwrap() as usize, MAX_DATA);
    assert_eq!(fs::read(server.host().join("file")).unwrap()[3..], block);
    assert_eq!(kernel.read(file.node, handle, 3, MAX_DATA as u32).unwrap(), block);
    assert_eq!(kernel.read(file.node, handle, 3 + MAX_DATA as u64 - 5, 4096).unwrap(), block[MAX_DATA - 5..]);
    // A request without a response is carried out as well.
    let forget = kernel.request(op::FORGET, file.node, &words(&[1, 0]));
    assert!(kernel.exchange(&forget).unwrap().is_empty());
    assert!(kernel.getattr(file.node).is_err(), "it was forgotten");
}

#[test]
fn who_looks_at_the_disk_finds_nothing() {
    let server = Server::start_by("disk");
    let mut disk = server.disk();
    for (offset, length) in
        [(0, 4096), (SIZE - 512, 512), (SLOT, 65536), (ANSWER + FIRST, 512), (ANSWER - 512, 8192)]
    {
        assert_eq!(disk.read(offset, length), vec![0; length], "{offset}");
    }
}

#[test]
fn an_answer_is_read_in_parts_in_any_order_and_the_request_is_carried_out_once() {
    let (server, mut kernel, share) = sharing();
    let making = kernel.request(op::MKDIR, share, &named(&[0o700, 0], &["dir"]));
    let mut disk = next_disk(&server, kernel);
    let mut padded = making.clone();
    padded.resize(512, 0);
    assert_eq!(disk.write(2 * SLOT, &padded), 0);
    assert!(!server.host().join("dir").exists(), "nobody has asked for the answer");
    let at = 2 * SLOT + ANSWER;
    for (cookie, offset, length) in [(1, at + FIRST + 512, 1024), (2, at + FIRST, 512), (3, at + FIRST, 1536)]
    {
        disk.ask(READ, cookie, offset, length, &[]);
    }
    let mut whole = Vec::new();
    let mut parts = Vec::new();
    for _ in 0..3 {
        let (error, cookie) = disk.answered();
        assert_eq!(error, 0);
        let data = disk.data([1024, 512, 1536][cookie as usize - 1]);
        if cookie == 3 { whole = data } else { parts.push((cookie, data)) }
    }
    parts.sort_by_key(|(cookie, _)| std::cmp::Reverse(*cookie));
    assert_eq!(parts.into_iter().flat_map(|(_, data)| data).collect::<Vec<_>>(), whole);
    let answer = message_in(&whole);
    assert_eq!(answer[4..8], [0; 4], "carried out twice, it would fail");
    assert!(server.host().join("dir").exists());
}

/// Takes or releases a lease of a file. The kernel signals a broken lease with a signal that is ignored.
fn lease(file: &fs::File, kind: i32) {
    // SAFETY: both calls take only numbers.
    unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
        assert_eq!(
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind),
            0,
            "{}",
            std::io::Error::last_os_error()
        );
    }
}

#[test]
fn an_answer_that_takes_long_is_put_off_and_other_slots_are_served() {
    let (server, mut kernel, share) = sharing();
    // An open for writing blocks until this lease is released.
    let path = server.host().join("leased");
    fs::write(&path, "").unwrap();
    let leased = fs::File::open(&path).unwrap();
    lease(&leased, libc::F_RDLCK);
    let node = kernel.lookup(share, "leased").unwrap().node;
    let mut opening = kernel.request(op::OPEN, node, &words(&[O_RDWR as u32, 0]));
    let mut looking = kernel.request(op::GETATTR, share, &words(&[0; 4]));
    let mut disk = next_disk(&server, kernel);
    opening.resize(512, 0);
    looking.resize(512, 0);
    assert_eq!(disk.write(SLOT, &opening), 0);
    let began = Instant::now();
    disk.ask(READ, 1, SLOT + ANSWER + FIRST, 4608, &[]);
    assert_eq!(disk.write(3 * SLOT, &looking), 0);
    disk.ask(READ, 2, 3 * SLOT + ANSWER + FIRST, 4608, &[]);
    assert_eq!(disk.answered(), (0, 2), "the other one waits, too");
    assert_eq!(state(&disk.data(4608)), DONE);
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    assert_eq!(disk.answered(), (0, 1));
    assert_eq!(state(&disk.data(4608)), LATER);
    // It is in flight: no other request can replace it.
    assert_ne!(disk.write(SLOT, &looking), 0);
    lease(&leased, libc::F_UNLCK);
    let answer = loop {
        let answer = disk.read(SLOT + ANSWER + FIRST, 4608);
        if state(&answer) == DONE {
            break message_in(&answer);
        }
    };
    assert_eq!(answer.len(), 32, "it is open");
}

#[test]
fn an_answer_of_which_a_part_was_put_off_is_read_again_as_a_whole() {
    let (server, mut kernel, share) = sharing();
    let path = server.host().join("leased");
    fs::write(&path, "").unwrap();
    let leased = fs::File::open(&path).unwrap();
    lease(&leased, libc::F_RDLCK);
    let node = kernel.lookup(share, "leased").unwrap().node;
    let mut opening = kernel.request(op::OPEN, node, &words(&[O_RDWR as u32, 0]));
    let mut disk = next_disk(&server, kernel);
    opening.resize(512, 0);
    assert_eq!(disk.write(SLOT, &opening), 0);
    // The second part is deferred before the first is requested, which then finds the response.
    assert!(disk.read(SLOT + ANSWER + FIRST + 512, 4096).iter().all(|byte| *byte == 0));
    lease(&leased, libc::F_UNLCK);
    disk.ask(READ, 1, SLOT + ANSWER + FIRST + 512, 4096, &[]);
    assert_eq!(disk.answered(), (0, 1));
    disk.data(4096);
    assert_eq!(state(&disk.read(SLOT + ANSWER + FIRST, 512)), LATER);
    assert_eq!(state(&disk.read(SLOT + ANSWER + FIRST, 4608)), DONE);
}

#[test]
fn what_no_vmm_asks_is_refused_or_hung_up_on_and_little_is_kept_for_it() {
    let (server, mut kernel, share) = sharing();
    let looking = kernel.request(op::GETATTR, share, &words(&[0; 4]));
    let mut disk = next_disk(&server, kernel);
    for (offset, length) in
        [(SIZE, 512), (ANSWER, 512), (SLOT - 512, 1024), (1 << 20, 512 + (64 << 10)), (usize::MAX >> 1, 512)]
    {
        disk.ask(WRITE, 1, offset, length, &vec![1; length]);
        assert_eq!(disk.answered(), (libc::EINVAL as u32, 1), "{offset}");
    }
    disk.ask(4, 2, 0, 512, &[]);
    assert_eq!(disk.answered(), (libc::EINVAL as u32, 2), "a trim");
    // Garbage instead of a request: the read completes, without a response for the guest's kernel.
    for rubbish in [vec![0xff; 512], vec![0; 512]] {
        assert_eq!(disk.write(SLOT, &rubbish), 0);
        let answer = disk.read(SLOT + ANSWER + FIRST, 512);
        assert_eq!((state(&answer), message_in(&[&answer[..], &[0; 64]].concat()).len()), (DONE, 0));
    }
    for rubbish in [&[0xff; 28][..], &[&0x2560_9513_u32.to_be_bytes()[..], &[0xff; 24]].concat()] {
        drop(disk);
        let mut other = server.disk();
        other.0.write_all(rubbish).unwrap();
        assert_eq!(other.0.read(&mut [0]).unwrap(), 0, "it was not hung up on");
        disk = server.disk();
    }
    // Full messages in all slots, and as many reads as possible.
    let mut largest = vec![0; 1 << 20];
    largest[..looking.len()].copy_from_slice(&looking);
    for round in 0..20 {
        for slot in 0..SLOTS {
            disk.write(slot * SLOT, &largest);
            for _ in 0..=round {
                disk.ask(READ, 9, slot * SLOT + ANSWER + FIRST, 1 << 20, &[]);
            }
            for _ in 0..=round {
                let (error, _) = disk.answered();
                if error == 0 {
                    disk.data(1 << 20);
                }
            }
        }
    }
    let peak = server.proc("status");
    let peak = peak.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let peak: u64 = peak.trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 24 << 10, "{peak} KiB");
}

#[test]
fn a_vmm_that_is_gone_is_followed_by_another_connection() {
    let (server, mut kernel, share) = sharing();
    let looking = kernel.request(op::GETATTR, share, &words(&[0; 4]));
    drop(kernel);
    for cut in [0, 5, 16, 20] {
        let mut dying = server.connect_raw();
        let _ = dying.write_all(&[0; 20][..cut]);
    }
    let answer = server.disk().exchange(1, &looking);
    assert_eq!(answer.len(), 16 + 104);
}

#[test]
fn a_read_only_share_is_read_only_by_the_disk_as_well() {
    let server = Server::start_by("disk");
    let host = server.host();
    server.attach(0, Source { access: Access::ReadOnly, ..source(&host) }).unwrap();
    let mut kernel = Kernel::by(Transport::Disk(server.disk(), 3));
    kernel.init();
    let share = kernel.lookup(1, "0").unwrap().node;
    assert_eq!(kernel.create(share, "new", O_CREAT | O_RDWR, 0o600).unwrap_err(), libc::EROFS);
}
