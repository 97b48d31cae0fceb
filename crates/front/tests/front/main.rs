//! The front with a test double of the worker, which dies on request.
//!
//! Run with an argument, this is the front, or the double. A request to the double is a word; the double
//! responds with its number, and whether the request was repeated:
//!
//! | word | the double |
//! |---|---|
//! | `hello` | responds |
//! | `die` | dies; responds to the repeated request |
//! | `half` | sends half a frame, then dies; responds to the repeated request |
//! | `wait` | responds to the repeated request |
//! | `need` | makes the front keep what the next worker must support, then responds |
//! | `forget` | makes the front close the pipe that it keeps, then responds |
//! | `open` | makes the front open it again, then responds |
//! | `deadly` | dies each time |
//! | `slow` | responds after a moment |
//! | `linger` | responds, and leaves a process that has its end of the control socket open, until `gone` is there |
//! | `hang` | waits in a system call that cannot be interrupted; responds to the repeated request |
//! | `stop` | stops, as if its threads were stuck; responds to the repeated request |
//! | `Wait`, `Hold` | never responds |
//!
//! A word with a capital letter is the method of a complete request.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{
    ffi::OsString,
    io::{Read, Write},
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use harness::{Front, PATIENCE, command, pass, until, wire};
use libtest_mimic::{Arguments, Failed, Trial};
use nix::{
    sys::{
        resource::{Resource, setrlimit},
        signal::{Signal, kill},
    },
    unistd::Pid,
};
use sandboxer_front::{Build, frame::REQUEST};
use worker::NEEDED;

mod harness;
#[allow(dead_code, reason = "another test uses the rest")]
#[path = "../../../sandboxer/tests/hung_volume/mod.rs"]
mod hung_volume;
mod worker;

/// A worker that is silent for so long is replaced.
const SILENCE: Duration = Duration::from_secs(3);
/// The file with what the double tells that it supports; without it, the double exits with an error.
const SUPPORTED: &str = "supported";

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    match args.first().and_then(|role| role.to_str()) {
        Some("front") => front(Path::new(&args[1]), None),
        Some("front-resume") => front(Path::new(&args[2]), Some(descriptor(&args[1]))),
        Some("front-check") => checked(descriptor(&args[1])),
        Some(path) if path.ends_with(SUPPORTED) => match std::fs::read_to_string(path) {
            Ok(text) => {
                print!("{text}");
                ExitCode::SUCCESS
            }
            Err(_) => ExitCode::FAILURE,
        },
        Some("worker") => worker::double(Path::new(&args[1]), descriptor(&args[3])),
        _ => {
            let trials = [
                (
                    "a_request_that_kills_the_worker_is_given_to_the_next_one",
                    killed as fn() -> Result<(), Failed>,
                ),
                ("half_an_answer_is_never_seen", half),
                ("requests_that_wait_are_given_again_and_others_are_not", waiting),
                ("what_a_worker_keeps_outlives_it_until_it_is_forgotten", keeps),
                ("a_reload_changes_the_worker_and_an_end_ends_both", reload_and_end),
                ("a_reload_changes_the_front_too_and_costs_nothing", upgraded),
                ("a_front_that_cannot_be_executed_or_refuses_the_state_leaves_the_old_one", not_upgraded),
                ("a_front_that_is_killed_has_a_successor_and_nothing_is_lost", front_killed),
                ("an_end_that_comes_while_a_front_is_replaced_is_not_lost", ended_between_fronts),
                #[cfg(feature = "failpoints")]
                ("a_fifo_that_a_killed_front_has_not_recorded_stays_open", fifo_loose),
                ("fronts_and_workers_killed_at_random_answer_each_request_once", killed_at_random),
                #[cfg(feature = "failpoints")]
                ("a_front_may_be_killed_at_each_of_its_steps", killed_at_each_step),
                #[cfg(feature = "failpoints")]
                ("a_front_may_fail_at_each_step_of_its_recovery", failed_at_each_step),
                ("a_worker_that_does_not_go_costs_its_front_nothing", lingering),
                ("a_killed_worker_that_no_signal_reaches_is_replaced", hanging),
                ("a_reload_that_was_refused_is_forgotten", refused_reload),
                ("a_worker_that_lacks_what_is_needed_takes_no_place", unfit),
                ("what_is_kept_twice_is_closed_once_both_are_forgotten", keeps_twice),
                ("front_and_worker_end_with_their_keeper", keeper_killed),
                ("a_first_worker_that_refuses_takes_the_front_along", refused),
                ("a_request_that_ends_three_workers_is_answered_and_others_go_on", poisoned),
                ("a_wait_is_no_request_that_ends_workers", waits),
                ("requests_that_are_under_way_at_a_reload_are_no_suspects", reloads),
                ("a_worker_that_answers_nothing_is_replaced", stopped),
                ("a_log_that_is_gone_costs_its_lines", lost_log),
                ("a_log_that_nobody_reads_costs_its_lines", log_full),
                ("without_descriptors_connections_wait_and_the_front_rests", starved),
                ("a_client_that_speaks_rubbish_loses_its_own_connection", rubbish),
            ];
            let trials = trials.map(|(name, test)| Trial::test(name, test));
            libtest_mimic::run(&Arguments::from_args(), trials.into()).exit_code()
        }
    }
}

/// Runs the front, or takes the place of the one that left this state.
fn front(dir: &Path, state: Option<OwnedFd>) -> ExitCode {
    let build = Build {
        // Absent unless a test puts it there: a link to this program, or something else.
        program: dir.join("next"),
        check: "front-check".into(),
        resume: "front-resume".into(),
        arguments: vec![dir.into()],
        tell: dir.join(SUPPORTED).into(),
        unfit: |supported, notes| {
            let supported = supported.map(String::from_utf8_lossy);
            (supported.as_deref() != Some(NEEDED)).then(|| format!("it tells {supported:?}, not {notes:?}"))
        },
    };
    let (program, worker) = (std::env::current_exe().unwrap(), ["worker".into(), dir.into()]);
    match state {
        None => sandboxer_front::run(&program, &worker, SILENCE, &build).unwrap(),
        Some(state) => sandboxer_front::resume(&program, &worker, SILENCE, &build, state).unwrap(),
    }
}

fn checked(state: OwnedFd) -> ExitCode {
    if sandboxer_front::check(state).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn descriptor(number: &OsString) -> OwnedFd {
    // SAFETY: whoever has started this program has passed it for this use.
    unsafe { OwnedFd::from_raw_fd(number.to_str().unwrap().parse().unwrap()) }
}

fn killed() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "hello"), "life 1");
    assert_eq!(client.call(3, "die"), "life 2, repeated");
    assert_eq!(client.call(5, "hello"), "life 2");
    assert_eq!(client.call(7, "die"), "life 3, repeated");
    assert_eq!(front.client().call(1, "hello"), "life 3");
    Ok(())
}

fn half() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "half"), "life 2, repeated");
    assert_eq!(client.call(3, "hello"), "life 2");
    Ok(())
}

fn waiting() -> Result<(), Failed> {
    let front = Front::start();
    let (mut one, mut other) = (front.client(), front.client());
    one.ask(1, "wait");
    assert_eq!(one.call(3, "hello"), "life 1");
    other.ask(1, "wait");
    other.ask(3, "die");
    let mut answered = vec![one.answer(), other.answer(), other.answer()];
    answered.sort();
    let expected = [1, 1, 3].map(|stream| (stream, "life 2, repeated".to_owned()));
    assert_eq!(answered, expected);
    Ok(())
}

fn keeps() -> Result<(), Failed> {
    let mut front = Front::start();
    let mut client = front.client();
    let mut byte = [0];
    assert_eq!(client.call(1, "die"), "life 2, repeated");
    let still_open = front.fifo.read(&mut byte).unwrap_err();
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    assert_eq!(client.call(3, "forget"), "life 2");
    until("the pipe's end", || matches!(front.fifo.read(&mut byte), Ok(0)));
    Ok(())
}

fn reload_and_end() -> Result<(), Failed> {
    let mut front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "hello"), "life 1");
    client.ask(3, "wait");
    front.signal(Signal::SIGHUP);
    assert_eq!(client.answer(), (3, "life 2, repeated".to_owned()));
    front.signal(Signal::SIGTERM);
    assert!(front.ended().success());
    assert_eq!(client.stream.read(&mut [0])?, 0, "the connection outlived the front");
    Ok(())
}

/// Returns the first argument of the front's process.
fn role(front: &Front) -> String {
    let line = std::fs::read_to_string(format!("/proc/{}/cmdline", front.pid())).unwrap_or_default();
    line.split('\0').nth(1).unwrap_or_default().to_owned()
}

/// Returns how many descriptors the front and its keeper have.
fn descriptors(front: &Front) -> usize {
    let open_files =
        |pid| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(usize::MAX / 2, Iterator::count);
    open_files(front.process.id().to_string()) + open_files(front.pid().to_string())
}

fn upgraded() -> Result<(), Failed> {
    let mut front = Front::start();
    std::os::unix::fs::symlink(std::env::current_exe()?, front.dir.path().join("next"))?;
    let (mut client, mut cut) = (front.client(), front.client());
    let mut waiting = front.client();
    waiting.ask_method(1, "Hold");
    assert_eq!(role(&front), "front");
    let mut had = None;
    for life in 2..6 {
        client.ask(life * 2 + 1, "wait");
        assert_eq!(client.call(101, "hello"), format!("life {}", life - 1), "the worker has the request");
        let request = wire(life * 2 + 1, REQUEST, b"hello");
        let (now, later) = request.split_at(7 + usize::try_from(life)?);
        cut.stream.write_all(now)?;
        front.signal(Signal::SIGHUP);
        assert_eq!(client.answer(), (life * 2 + 1, format!("life {life}, repeated")));
        assert_eq!(role(&front), "front-resume");
        cut.stream.write_all(later)?;
        assert_eq!(cut.answer(), (life * 2 + 1, format!("life {life}")));
        // Open while descriptors are counted, since one that closes is counted or not.
        let mut other = front.client();
        assert_eq!(other.call(1, "hello"), format!("life {life}"), "it accepts no others");
        // Two may be on their way between the front and its keeper.
        until("as many descriptors as before", || {
            *had.get_or_insert(descriptors(&front)) + 2 >= descriptors(&front)
        });
    }
    let still_open = front.fifo.read(&mut [0]).unwrap_err();
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    waiting.stream.set_nonblocking(true)?;
    let nothing = waiting.stream.read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "{nothing}");
    front.signal(Signal::SIGTERM);
    assert!(front.ended().success());
    Ok(())
}

fn not_upgraded() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    let next = front.dir.path().join("next");
    for (life, script) in (2..).zip([None, Some("exit 1"), Some("exec sleep 1000"), Some("kill -9 $$")]) {
        if let Some(script) = script {
            // Written by another process, since a process that another test forks at this moment would keep it open.
            let text = front.dir.path().join("text");
            std::fs::write(&text, format!("#!/bin/sh\n{script}\n"))?;
            assert!(Command::new("install").args(["-m", "755"]).args([&text, &next]).status()?.success());
        }
        client.ask(life * 2 + 1, "wait");
        assert_eq!(client.call(101, "hello"), format!("life {}", life - 1), "the worker has the request");
        front.signal(Signal::SIGHUP);
        assert_eq!(client.answer(), (life * 2 + 1, format!("life {life}, repeated")), "{script:?}");
        assert_eq!(role(&front), "front", "{script:?}");
    }
    Ok(())
}

fn front_killed() -> Result<(), Failed> {
    let mut front = Front::start();
    let (mut client, mut cut, mut holding) = (front.client(), front.client(), front.client());
    assert_eq!(client.call(1, "hello"), "life 1");
    holding.ask_method(1, "Hold");
    let mut had = None;
    for life in 2..12 {
        client.ask(life * 2 + 1, "wait");
        assert_eq!(client.call(101 + life * 2, "hello"), format!("life {}", life - 1));
        let request = wire(life * 2 + 1, REQUEST, b"hello");
        let (now, later) = request.split_at(usize::try_from(life)?);
        cut.stream.write_all(now)?;
        front.kill();
        assert_eq!(client.answer(), (life * 2 + 1, format!("life {life}, repeated")));
        cut.stream.write_all(later)?;
        assert_eq!(cut.answer(), (life * 2 + 1, format!("life {life}")));
        // Open while descriptors are counted, since one that closes is counted or not.
        let mut other = front.client();
        assert_eq!(other.call(1, "hello"), format!("life {life}"), "it accepts no others");
        // Two may be on their way between the front and its keeper.
        until("as many descriptors as before", || {
            *had.get_or_insert(descriptors(&front)) + 2 >= descriptors(&front)
        });
    }
    let still_open = front.fifo.read(&mut [0]).unwrap_err();
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    // What it was asked to do while it was dead is not forgotten.
    front.kill();
    front.signal(Signal::SIGTERM);
    assert!(front.ended().success());
    Ok(())
}

fn ended_between_fronts() -> Result<(), Failed> {
    for _ in 0..3 {
        let mut front = Front::start();
        front.kill();
        until("a keeper without a front", || front.children().is_empty());
        front.signal(Signal::SIGTERM);
        assert!(front.ended().success());
    }
    Ok(())
}

/// Opens the FIFO for reading, as containerd does, in a thread that returns the first bytes; none if it is closed before.
#[cfg(feature = "failpoints")]
fn reader(front: &Front) -> thread::JoinHandle<Vec<u8>> {
    let fifo = front.dir.path().join("fifo");
    thread::spawn(move || {
        let mut bytes = vec![0; 16];
        let count = std::fs::File::open(fifo).unwrap().read(&mut bytes).unwrap();
        bytes.truncate(count);
        bytes
    })
}

#[cfg(feature = "failpoints")]
fn fifo_loose() -> Result<(), Failed> {
    let points = tempfile::tempdir()?;
    let armed = points.path().join("armed");
    std::fs::write(&armed, "")?;
    let front = Front::start_with(|command| {
        command.env("SANDBOXER_FAILPOINTS", points.path());
    });
    let mut client = front.client();
    assert_eq!(client.call(1, "forget"), "life 1");
    std::fs::write(&armed, "the front has opened a FIFO\n")?;
    front.kill();
    assert!(client.call(3, "hello").starts_with("life 2"));
    let reader = reader(&front);
    assert_eq!(client.call(5, "open"), "life 3, repeated");
    assert!(!reader.is_finished(), "the FIFO was closed");
    std::fs::File::options().write(true).open(front.dir.path().join("fifo"))?.write_all(b"x")?;
    assert_eq!(reader.join().unwrap(), b"x");
    Ok(())
}

/// A client that has always one request pending checks that each is answered once, in whatever life.
fn killed_at_random() -> Result<(), Failed> {
    const KILLS: u32 = 60;
    let front = Front::start();
    let done = std::sync::atomic::AtomicBool::new(false);
    let requests: Vec<u32> = thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|_| {
                let mut client = front.client();
                let done = &done;
                scope.spawn(move || {
                    let mut stream = 1;
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        // Of all lengths, also longer than a pipe's or a socket's buffer.
                        let words = "x".repeat(usize::try_from(stream % 7 * 40_000).unwrap());
                        let answer = client.call(stream, &words);
                        // On a busy host, workers die faster than they answer.
                        assert!(
                            answer.starts_with("life ") || answer.contains("failed: 3 workers"),
                            "{answer:?}"
                        );
                        stream += 2;
                    }
                    stream / 2
                })
            })
            .collect();
        let mut random = 0x2545_f491_u32;
        for kills in 0..KILLS {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            pass(Duration::from_micros(u64::from(random % 150_000)));
            if kills % 3 > 0
                && let Some(worker) = worker(&front)
            {
                // It may have died by itself.
                let _ = kill(worker, Signal::SIGKILL);
            }
            if kills % 3 < 2 {
                front.kill();
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    println!("{requests:?} requests during {KILLS} kills");
    assert_eq!(front.client().call(1, "hello").split(' ').next(), Some("life"));
    Ok(())
}

/// Returns the front's worker, if it has one.
fn worker(front: &Front) -> Option<Pid> {
    let front = front.pid();
    let children = std::fs::read_to_string(format!("/proc/{front}/task/{front}/children")).ok()?;
    Some(Pid::from_raw(children.split_whitespace().next()?.parse().ok()?))
}

/// Does one of everything that the front does.
#[cfg(feature = "failpoints")]
fn everything(front: &Front, stream: &mut u32) -> Result<(), Failed> {
    let (mut client, mut other) = (front.client(), front.client());
    let mut ask = |client: &mut harness::Client, word: &str| {
        *stream += 2;
        assert!(client.call(*stream, word).starts_with("life "), "{word}");
    };
    ask(&mut client, "hello");
    ask(&mut other, "open");
    ask(&mut client, &"long".repeat(10_000));
    ask(&mut other, "forget");
    ask(&mut client, "die");
    drop(other);
    front.signal(Signal::SIGHUP);
    ask(&mut client, "hello");
    Ok(())
}

#[cfg(feature = "failpoints")]
fn killed_at_each_step() -> Result<(), Failed> {
    let points = tempfile::tempdir()?;
    let file = |name: &str| points.path().join(name);
    std::fs::write(file("armed"), "")?;
    let front = Front::start_with(|command| {
        command.env("SANDBOXER_FAILPOINTS", points.path());
    });
    std::os::unix::fs::symlink(std::env::current_exe()?, front.dir.path().join("next"))?;
    let mut stream = 1;
    everything(&front, &mut stream)?;
    // Without those that only the first one comes by.
    std::fs::remove_file(file("passed"))?;
    front.kill();
    everything(&front, &mut stream)?;
    let passed = std::fs::read_to_string(file("passed"))?;
    let steps: Vec<&str> = passed.lines().collect();
    assert!(steps.len() >= 20, "{steps:?}");
    for step in steps {
        let died = || std::fs::read_to_string(file("died")).is_ok_and(|died| died == step);
        // A reload that was under way may have taken the order. And some points only a front comes by that has just been executed: every
        // other time the order is for that one.
        for attempt in 0..6 {
            if died() {
                break;
            }
            assert!(attempt < 5, "no front has died at {step:?}");
            let first = if attempt % 2 == 1 { "\n" } else { "" };
            std::fs::write(file("armed"), format!("{first}{step}\n"))?;
            let armed = std::fs::metadata(file("armed"))?.len();
            front.kill();
            until("a front that takes it", || {
                std::fs::metadata(file("armed")).is_ok_and(|left| left.len() < armed)
            });
            for _ in 0..3 {
                everything(&front, &mut stream)?;
            }
        }
    }
    Ok(())
}

/// As if there were no descriptors, no memory, or no space when a front takes another one's place.
#[cfg(feature = "failpoints")]
fn failed_at_each_step() -> Result<(), Failed> {
    use nix::errno::Errno;
    let points = tempfile::tempdir()?;
    let file = |name: &str| points.path().join(name);
    std::fs::write(file("armed"), "")?;
    let mut front = Front::start_with(|command| {
        command.env("SANDBOXER_FAILPOINTS", points.path());
    });
    let (mut client, mut waiting) = (front.client(), front.client());
    assert_eq!(client.call(1, "hello"), "life 1");
    waiting.ask_method(1, "Hold");
    front.kill();
    assert_eq!(client.call(3, "hello"), "life 2");
    let passed = std::fs::read_to_string(file("passed"))?;
    let of_recovery = |step: &&str| step.contains("takes over") || step.contains("watches");
    let steps: Vec<&str> = passed.lines().filter(of_recovery).collect();
    assert_eq!(steps.len(), 6, "{steps:?}");
    let errors = [Errno::EMFILE, Errno::ENOMEM, Errno::ENOSPC];
    let all = steps.iter().flat_map(|step| errors.map(|error| format!("{} {step}\n", error as i32)));
    for (stream, armed) in (5..).step_by(2).zip(all) {
        std::fs::write(file("armed"), &armed)?;
        front.kill();
        until("a front that fails there", || std::fs::read(file("armed")).is_ok_and(|left| left.is_empty()));
        assert!(client.call(stream, "hello").starts_with("life "), "after {armed:?}");
    }
    let still_open = front.fifo.read(&mut [0]).unwrap_err();
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    waiting.stream.set_nonblocking(true)?;
    let nothing = waiting.stream.read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "{nothing}");
    Ok(())
}

/// Something has a copy of the worker's socket, as a process in the middle of its end has.
fn lingering() -> Result<(), Failed> {
    let mut front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "linger"), "life 1");
    client.ask(3, "wait");
    assert_eq!(client.call(101, "hello"), "life 1", "the worker has the request");
    let killed = front.pid();
    front.kill();
    until("another front", || front.pid() != killed);
    let next = front.pid();
    pass(Duration::from_secs(2));
    assert_eq!(front.pid(), next, "a front has died of it");
    // It waits for as long as it takes, and goes on to accept.
    let mut other = front.client();
    other.ask(1, "hello");
    std::fs::write(front.dir.path().join("gone"), "")?;
    assert_eq!(client.answer(), (3, "life 2, repeated".to_owned()));
    assert!(other.answer().1.starts_with("life 2"));
    let still_open = front.fifo.read(&mut [0]).unwrap_err();
    assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    assert_eq!(front.pid(), next);
    // Nor does such a one keep the front from its end.
    std::fs::remove_file(front.dir.path().join("gone"))?;
    assert_eq!(client.call(5, "linger"), "life 2");
    front.kill();
    front.signal(Signal::SIGTERM);
    assert!(front.ended().success());
    Ok(std::fs::write(front.dir.path().join("gone"), "")?)
}

/// A file system that does not answer, which only root can make.
fn hanging() -> Result<(), Failed> {
    if !nix::unistd::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        println!("skipped: only root mounts, and only with /dev/fuse");
        return Ok(());
    }
    let log = tempfile::NamedTempFile::new()?;
    let front = Front::start_with(|command| {
        command.stderr(log.reopen().unwrap());
    });
    let hung = front.dir.path().join("hung");
    std::fs::create_dir(&hung)?;
    let volume = hung_volume::HungVolume::mount(&hung)?;
    volume.set_silent(true);
    let mut client = front.client();
    client.stream.set_read_timeout(Some(PATIENCE * 2))?;
    assert_eq!(client.call(1, "hello"), "life 1");
    let hanging = worker(&front).unwrap();
    client.ask(3, "hang");
    until("a request that is not answered", || volume.left_waiting() > 0);
    kill(hanging, Signal::SIGKILL)?;
    // Long before the file system answers.
    assert_eq!(client.answer(), (3, "life 2, repeated".to_owned()));
    let logged = std::fs::read_to_string(log.path())?;
    assert!(logged.contains(&format!("the killed worker {hanging} has not ended")), "{logged}");
    assert!(logged.contains("(helper) is in system call"), "{logged}");
    drop(volume);
    until("the end of the first worker", || kill(hanging, None).is_err());
    assert_eq!(client.call(5, "hello"), "life 2");
    Ok(())
}

fn refused_reload() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    client.ask(1, "wait");
    assert_eq!(client.call(101, "hello"), "life 1", "the worker has the request");
    // There is no other build.
    front.signal(Signal::SIGHUP);
    assert_eq!(client.answer(), (1, "life 2, repeated".to_owned()));
    std::os::unix::fs::symlink(std::env::current_exe()?, front.dir.path().join("next"))?;
    for life in 3..5 {
        client.ask(life * 2 + 1, "wait");
        assert_eq!(client.call(101 + life * 2, "hello"), format!("life {}", life - 1));
        front.kill();
        assert_eq!(client.answer(), (life * 2 + 1, format!("life {life}, repeated")));
        assert_eq!(role(&front), "front", "the front was replaced by a build that nobody has asked for");
    }
    Ok(())
}

/// Nothing may change, so the worker that was there must be the one that answers.
fn unfit() -> Result<(), Failed> {
    let (mut log, theirs) = std::io::pipe()?;
    nix::fcntl::fcntl(&log, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    let front = Front::start_with(|command| {
        command.stderr(theirs);
    });
    std::os::unix::fs::symlink(std::env::current_exe()?, front.dir.path().join("next"))?;
    let mut client = front.client();
    assert_eq!(client.call(1, "hello"), "life 1");
    // Nothing is needed yet.
    front.signal(Signal::SIGHUP);
    until("another front", || role(&front) == "front-resume");
    until("another worker", || front.client().call(1, "hello") == "life 2");
    assert_eq!(client.call(3, "need"), "life 2");
    let (pid, before) = (front.pid(), worker(&front));
    client.ask(5, "wait");
    for (stream, supported) in [(7, None), (9, Some("that")), (11, Some("this, not quite"))] {
        if let Some(supported) = supported {
            std::fs::write(front.dir.path().join(SUPPORTED), supported)?;
        }
        front.signal(Signal::SIGHUP);
        let mut logged = String::new();
        until("a refusal", || {
            let mut bytes = [0; 4096];
            let count = log.read(&mut bytes).unwrap_or_default();
            logged += &String::from_utf8_lossy(&bytes[..count]);
            logged.contains("nothing is reloaded")
        });
        assert_eq!(client.call(stream, "hello"), "life 2", "{supported:?}: {logged}");
        assert_eq!((front.pid(), worker(&front)), (pid, before), "{supported:?}: {logged}");
    }
    std::fs::write(front.dir.path().join(SUPPORTED), NEEDED)?;
    front.signal(Signal::SIGHUP);
    assert_eq!(client.answer(), (5, "life 3, repeated".to_owned()));
    Ok(())
}

/// The store takes the same open file once.
fn keeps_twice() -> Result<(), Failed> {
    let mut front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "twice"), "life 1");
    assert_eq!(client.call(3, "forget"), "life 1");
    let mut byte = [0];
    for (life, stream) in (2..4).zip([5, 7]) {
        front.kill();
        assert_eq!(client.call(stream, "hello"), format!("life {life}"));
        let still_open = front.fifo.read(&mut byte).unwrap_err();
        assert_eq!(still_open.kind(), std::io::ErrorKind::WouldBlock, "{still_open}");
    }
    assert_eq!(client.call(9, "forget copy"), "life 3");
    until("the pipe's end", || matches!(front.fifo.read(&mut byte), Ok(0)));
    Ok(())
}

fn keeper_killed() -> Result<(), Failed> {
    let mut front = Front::start();
    let mut client = front.client();
    assert_eq!(client.call(1, "hello"), "life 1");
    let processes = [front.pid(), worker(&front).unwrap()];
    front.process.kill()?;
    front.process.wait()?;
    until("the end of both", || processes.iter().all(|process| kill(*process, None).is_err()));
    assert_eq!(client.stream.read(&mut [0])?, 0);
    Ok(())
}

fn refused() -> Result<(), Failed> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("refuse"), "")?;
    assert_eq!(command(dir.path()).status()?.code(), Some(3));
    Ok(())
}

fn rubbish() -> Result<(), Failed> {
    let front = Front::start();
    let (mut good, mut bad) = (front.client(), front.client());
    assert_eq!(good.call(1, "hello"), "life 1");
    bad.stream.write_all(&[0xff; 64])?;
    assert_eq!(bad.stream.read(&mut [0])?, 0, "the connection is still open");
    assert_eq!(good.call(3, "hello"), "life 1");
    Ok(())
}

/// Each connection has a request pending at each death; only one of them is the cause.
fn poisoned() -> Result<(), Failed> {
    let front = Front::start();
    let (mut poison, mut one, mut other) = (front.client(), front.client(), front.client());
    assert_eq!(one.call(1, "hello"), "life 1");
    one.ask(3, "slow");
    other.ask(1, "slow");
    poison.ask_method(1, "Deadly");
    let (answered, words) = poison.answer();
    assert_eq!(answered, 1);
    assert!(words.starts_with("\n") && words.contains("\x08\x0d\x12"), "no status INTERNAL: {words:?}");
    assert!(words.contains("Deadly of container c1 failed: 3 workers"), "{words:?}");
    // They ended with two workers, too; the third had them one by one.
    assert_eq!(one.answer(), (3, "life 3, repeated".to_owned()));
    assert_eq!(other.answer(), (1, "life 3, repeated".to_owned()));
    assert_eq!(poison.call(3, "hello"), "life 4");
    // Again, without a known method.
    poison.ask(5, "deadly");
    let (_, words) = poison.answer();
    assert!(words.contains("a request failed: 3 workers"), "{words:?}");
    assert_eq!(one.call(5, "hello"), "life 7");
    Ok(())
}

fn waits() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    client.ask_method(1, "Wait");
    for life in 2..7 {
        assert_eq!(client.call(2 * life + 1, "die"), format!("life {life}, repeated"));
    }
    assert_eq!(client.call(101, "hello"), "life 6");
    Ok(())
}

fn reloads() -> Result<(), Failed> {
    let front = Front::start();
    let (mut client, mut waiting) = (front.client(), front.client());
    waiting.ask_method(1, "Hold");
    for (life, stream) in (1..).zip((1..11).step_by(2)) {
        assert_eq!(client.call(stream, "hello"), format!("life {life}"));
        front.signal(Signal::SIGHUP);
        let next = format!("life {}", life + 1);
        until("another worker", || client.call(100 + stream, "hello").starts_with(&next));
    }
    waiting.stream.set_nonblocking(true)?;
    let nothing = waiting.stream.read(&mut [0]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock, "{nothing}");
    Ok(())
}

fn stopped() -> Result<(), Failed> {
    let front = Front::start();
    let mut client = front.client();
    client.stream.set_read_timeout(Some(SILENCE + PATIENCE))?;
    // A worker that responds is not killed.
    pass(SILENCE + SILENCE / 2);
    assert_eq!(client.call(1, "hello"), "life 1");
    assert_eq!(client.call(3, "stop"), "life 2, repeated");
    assert_eq!(front.client().call(1, "hello"), "life 2");
    Ok(())
}

fn lost_log() -> Result<(), Failed> {
    let (read, log) = std::io::pipe()?;
    drop(read);
    let front = Front::start_with(|command| {
        command.stderr(Stdio::from(log));
    });
    let mut client = front.client();
    assert_eq!(client.call(1, "die"), "life 2, repeated");
    assert_eq!(client.call(3, "hello"), "life 2");
    Ok(())
}

fn log_full() -> Result<(), Failed> {
    let (_unread, mut log) = std::io::pipe()?;
    nix::fcntl::fcntl(&log, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
    while log.write(&[b'x'; 4096]).is_ok() {}
    nix::fcntl::fcntl(&log, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()))?;
    let front = Front::start_with(|command| {
        command.stderr(Stdio::from(log));
    });
    let mut client = front.client();
    assert_eq!(client.call(1, "die"), "life 2, repeated");
    assert_eq!(client.call(3, "hello"), "life 2");
    Ok(())
}

fn starved() -> Result<(), Failed> {
    const DESCRIPTORS: u64 = 40;
    let front = Front::start_with(|command| {
        // SAFETY: one system call is made before the program is executed, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, DESCRIPTORS)?));
        }
    });
    let mut first = front.client();
    assert_eq!(first.call(1, "hello"), "life 1");
    let mut many: Vec<_> = (0..DESCRIPTORS).map(|_| front.client()).collect();
    many.iter_mut().for_each(|client| client.ask(1, "hello"));
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", front.pid())).unwrap();
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    // Those within the limit are served; then the front must only wait.
    pass(Duration::from_secs(1));
    let before = ticks();
    pass(Duration::from_secs(2));
    let used = ticks() - before;
    assert!(used < 20, "the front was busy for {used} of 200 ticks");
    assert_eq!(first.call(3, "hello"), "life 1");
    // One that takes its place has enough.
    front.kill();
    assert_eq!(first.call(5, "hello"), "life 2");
    // Waiting clients are accepted as others disconnect.
    while !many.is_empty() {
        assert_eq!(many.remove(0).answer().0, 1);
    }
    Ok(())
}
