//! The descriptors that an earlier front left in the store, and how they get back to their numbers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env, io,
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
};

use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    libc,
};

use super::{
    JOURNAL, NUMBER, close,
    lot::{ENDS, Lot, lots, read_lot},
    remove_named,
};

/// The descriptors that an earlier front left in the store.
#[derive(Debug, Default)]
pub struct Left {
    /// The journals, by generation.
    pub journals: BTreeMap<u32, RawFd>,
    /// All other descriptors, at their numbers.
    numbers: BTreeSet<RawFd>,
    /// The quotients of lots without one of their ends.
    halves: Vec<RawFd>,
}

impl Left {
    /// Receives the descriptors that the service manager has passed to this process, and moves each to its number. Must
    /// be called before any file is opened.
    pub fn take() -> io::Result<Self> {
        let (mut left, mut wanted) = (Self::default(), BTreeMap::new());
        let (mut journals, mut ends) = (Vec::new(), BTreeMap::<_, BTreeMap<_, _>>::new());
        for (name, fd) in passed() {
            // SAFETY: the descriptor was passed to this process.
            fcntl(unsafe { BorrowedFd::borrow_raw(fd) }, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
            let parts =
                name.split_at_checked(1).and_then(|(prefix, rest)| Some((prefix, rest.parse::<u32>().ok()?)));
            let Some((prefix, number)) = parts else { continue };
            let at = RawFd::try_from(number).unwrap_or_default();
            match ENDS.iter().position(|end| *end == prefix) {
                Some(end) => drop(ends.entry(at).or_default().insert(end, fd)),
                None if prefix == JOURNAL => journals.push((number, fd)),
                None if prefix == NUMBER => drop(wanted.insert(at, fd)),
                None => {}
            }
        }
        let (mut whole, mut of_lots) = (Vec::new(), Vec::new());
        for (quotient, ends) in ends {
            let [Some(read), Some(write)] = [0, 1].map(|end| ends.get(&end).copied()) else {
                // The other end was not stored yet, so the lot was empty.
                left.halves.push(quotient);
                continue;
            };
            // SAFETY: the descriptor was passed to this process.
            let (numbers, fds) = read_lot(unsafe { BorrowedFd::borrow_raw(read) })?;
            wanted.extend(fds.into_iter().map(|(number, fd)| (number, fd.into_raw_fd())));
            of_lots.extend([read, write]);
            whole.push((quotient, numbers));
        }
        let others = journals.iter().map(|(_, fd)| *fd).chain(of_lots);
        let mut moves: Vec<_> = others.map(|fd| (fd, None)).collect();
        moves.extend(wanted.into_iter().map(|(at, fd)| (fd, Some(at))));
        place(&mut moves)?;
        let mut moved = moves.into_iter().map(|(fd, _)| fd);
        left.journals = journals.into_iter().map(|(generation, _)| generation).zip(&mut moved).collect();
        for (quotient, numbers) in whole {
            let (Some(read), Some(write)) = (moved.next(), moved.next()) else { break };
            // SAFETY: the descriptors were passed to this process.
            let ends = [read, write].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
            lots().insert(quotient, Lot { ends, numbers });
        }
        left.numbers = moved.collect();
        Ok(left)
    }

    /// Removes the halves of lots from the store.
    pub fn remove_halves(&self) {
        for quotient in &self.halves {
            ENDS.iter().for_each(|prefix| remove_named(&format!("{prefix}{quotient}")));
        }
    }

    /// Closes the descriptors that are not in `retained`, and the journals except the generation `journal`; removes them
    /// from the store.
    pub fn close_but(&self, retained: &BTreeSet<RawFd>, journal: Option<u32>) {
        self.numbers.difference(retained).copied().for_each(close);
        for (generation, fd) in self.journals.iter().filter(|(generation, _)| Some(**generation) != journal) {
            remove_named(&format!("{JOURNAL}{generation}"));
            // SAFETY: nothing else owns the descriptor.
            drop(unsafe { OwnedFd::from_raw_fd(*fd) });
        }
    }
}

/// Returns the descriptors that the service manager has passed to this process, with their names.
fn passed() -> Vec<(String, RawFd)> {
    let number = |name| env::var(name).ok().and_then(|number| number.parse::<RawFd>().ok());
    if number("LISTEN_PID") != Some(nix::unistd::getpid().as_raw()) {
        return Vec::new();
    }
    let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
    let count = usize::try_from(number("LISTEN_FDS").unwrap_or_default()).unwrap_or_default();
    names.split(':').map(str::to_owned).zip(3..).take(count).collect()
}

/// Moves descriptors to distinct numbers, with at most one additional descriptor open at a time. Those without a target
/// move only if they are in the way. Afterwards each `from` is the descriptor's current number.
pub fn place(moves: &mut [(RawFd, Option<RawFd>)]) -> io::Result<()> {
    let mut at: HashMap<RawFd, usize> = moves.iter().enumerate().map(|(n, (from, _))| (*from, n)).collect();
    for n in 0..moves.len() {
        let (from, Some(to)) = moves[n] else { continue };
        if from == to {
            continue;
        }
        if let Some(other) = at.remove(&to) {
            // SAFETY: the descriptor is open.
            let free = fcntl(unsafe { BorrowedFd::borrow_raw(to) }, FcntlArg::F_DUPFD_CLOEXEC(3))?;
            moves[other].0 = free;
            at.insert(free, other);
        }
        // SAFETY: the caller owns `from`, which is open, and the descriptor that was at `to` has moved.
        if unsafe { libc::dup3(from, to, libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor has moved, so nothing uses the old number.
        drop(unsafe { OwnedFd::from_raw_fd(from) });
        at.remove(&from);
        moves[n].0 = to;
        at.insert(to, n);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{text, written};
    use super::*;

    /// The first of the numbers that parallel tests do not get.
    const BASE: RawFd = 700;

    #[test]
    fn descriptors_are_put_where_they_were_whatever_is_in_the_way() {
        let at = |number: RawFd, text: &str| {
            let fd = written(text).into_raw_fd();
            // SAFETY: both numbers are this test's.
            unsafe {
                assert_eq!(libc::dup3(fd, BASE + number, libc::O_CLOEXEC), BASE + number);
                libc::close(fd);
            }
            BASE + number
        };
        // A cycle of three, one that is already in place, one in the way of another, and one that moves further.
        let mut moves: Vec<_> = [(0, 1), (1, 2), (2, 0), (3, 3), (5, 4), (6, 9)]
            .map(|(from, to)| (at(from, &format!("for {to}")), Some(BASE + to)))
            .into();
        moves.push((at(4, "without"), None));
        place(&mut moves).unwrap();
        for (fd, to) in &moves {
            assert!(to.is_none_or(|to| to == *fd));
            let expected = to.map_or("without".to_owned(), |to| format!("for {}", to - BASE));
            assert_eq!(text(*fd), expected);
        }
    }
}
