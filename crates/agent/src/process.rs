//! One process of a container (its init or an exec), as seen by the host.
//!
//! ```text
//!  Created ──start──▶ Running ──death──▶ Exited
//!     └──────────────death──────────────────▲
//! ```

use std::sync::{Arc, Mutex};

use rustix::termios::{Winsize, tcsetwinsize};
use tokio::{
    io::Interest,
    sync::{oneshot, watch},
};

use crate::{
    failure::{Failure, internal},
    io::{Input, Output, Pipes, StdioSpec, Stream, capture, stream},
    reaper::{Death, Reaper},
    sync::lock,
};

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The process is registered. An exec has no process yet; an init waits to be started.
    Created {
        /// The guest PID, if there is a process.
        pid: Option<i32>,
    },
    /// The process runs its program.
    Running {
        /// The guest PID.
        pid: i32,
    },
    /// The process has exited, or will never start.
    Exited {
        /// The guest PID, if there ever was one.
        pid: Option<i32>,
        /// How it exited.
        exit: Exit,
    },
}

/// How a process exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// The exit code, or 128 + signal.
    pub code: u32,
    /// The time of the exit: CLOCK_REALTIME, ns since 1970.
    pub at_ns: u64,
    /// Whether the OOM killer killed it.
    pub oom_killed: bool,
}

/// A process with its streams.
pub struct Process {
    state: watch::Sender<State>,
    /// The sender that notifies the captures when the process itself no longer writes.
    exited: watch::Sender<bool>,
    /// The standard output, or the terminal's output.
    pub stdout: Option<Arc<Output>>,
    /// The standard error.
    pub stderr: Option<Arc<Output>>,
    stdio: StdioSpec,
    // The agent's ends of the streams, set when the process is created. The lock is never held across an await.
    ends: Mutex<Ends>,
}

#[derive(Default)]
struct Ends {
    input: Option<Arc<Input>>,
    terminal: Option<Stream>,
    captures: Vec<tokio::task::AbortHandle>,
}

impl Process {
    /// Creates the record of a process with the streams of `stdio`.
    pub fn new(stdio: StdioSpec) -> Self {
        let output = |is_open: bool| is_open.then(Arc::<Output>::default);
        Self {
            state: watch::Sender::new(State::Created { pid: None }),
            exited: watch::Sender::new(false),
            stdout: output(stdio.terminal || stdio.stdout),
            stderr: output(stdio.stderr && !stdio.terminal),
            stdio,
            ends: Mutex::default(),
        }
    }

    /// Returns the streams that the process has.
    pub fn stdio(&self) -> StdioSpec {
        self.stdio
    }

    /// Returns the process's state.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Connects the agent's ends of the process's pipes.
    pub fn connect_pipes(&self, pipes: Pipes) -> Result<(), Failure> {
        let failed = || internal("cannot watch a process's pipes");
        if let Some(stdin) = pipes.stdin {
            let to = stream(stdin, Interest::WRITABLE).map_err(failed())?;
            lock(&self.ends).input = Some(Arc::new(Input::new(to, false)));
        }
        for (pipe, output) in [(pipes.stdout, &self.stdout), (pipes.stderr, &self.stderr)] {
            if let (Some(pipe), Some(output)) = (pipe, output) {
                let from = stream(pipe, Interest::READABLE).map_err(failed())?;
                self.capture(from, false, output);
            }
        }
        Ok(())
    }

    /// Connects the master of the process's terminal.
    pub fn connect_terminal(&self, master: std::os::fd::OwnedFd) -> Result<(), Failure> {
        let terminal = stream(master, Interest::READABLE | Interest::WRITABLE)
            .map_err(internal("cannot watch a process's terminal"))?;
        if let Some(output) = &self.stdout {
            self.capture(Arc::clone(&terminal), true, output);
        }
        let mut ends = lock(&self.ends);
        if self.stdio.stdin {
            ends.input = Some(Arc::new(Input::new(Arc::clone(&terminal), true)));
        }
        ends.terminal = Some(terminal);
        Ok(())
    }

    fn capture(&self, from: Stream, terminal: bool, output: &Arc<Output>) {
        let task = tokio::spawn(capture(from, terminal, Arc::clone(output), self.exited.subscribe()));
        lock(&self.ends).captures.push(task.abort_handle());
    }

    /// Returns the process's input, once it is connected.
    pub fn input(&self) -> Result<Arc<Input>, Failure> {
        if !self.stdio.stdin {
            return Err(Failure::precondition("process has no standard input"));
        }
        lock(&self.ends).input.clone().ok_or_else(|| Failure::precondition("process has not been started"))
    }

    /// Sets the size of the process's terminal, in characters.
    pub fn resize(&self, columns: u16, rows: u16) -> Result<(), Failure> {
        if !self.stdio.terminal {
            return Err(Failure::precondition("process has no terminal"));
        }
        let terminal = lock(&self.ends).terminal.clone();
        let terminal = terminal.ok_or_else(|| Failure::precondition("process has not been started"))?;
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(terminal.get_ref(), size).map_err(internal("cannot resize the terminal"))
    }

    /// Records that the process was created and waits to be started.
    pub fn created(&self, pid: i32) {
        self.advance(State::Created { pid: Some(pid) });
    }

    /// Records that the process runs its program.
    pub fn running(&self, pid: i32) {
        self.advance(State::Running { pid });
    }

    /// Changes the state, but never from the final one: the exit may be known before the report of the creation.
    fn advance(&self, next: State) {
        self.state.send_if_modified(|state| {
            let forward = !matches!(state, State::Exited { .. });
            if forward {
                *state = next;
            }
            forward
        });
    }

    /// Records the process's exit.
    pub fn end(&self, exit: Exit) {
        self.exited.send_replace(true);
        self.state.send_if_modified(|state| {
            let pid = match *state {
                State::Created { pid } => pid,
                State::Running { pid } => Some(pid),
                State::Exited { .. } => return false,
            };
            *state = State::Exited { pid, exit };
            true
        });
    }

    /// Records that the process will never start, which ends its waiters and readers.
    pub fn give_up(&self, exit: Exit) {
        self.end(exit);
        for output in [&self.stdout, &self.stderr].into_iter().flatten() {
            output.finish();
        }
    }

    /// Waits for the process's exit.
    pub async fn wait(&self) -> Result<Exit, Failure> {
        let mut state = self.state.subscribe();
        let exit = state.wait_for(|state| matches!(state, State::Exited { .. })).await;
        match exit.map(|state| *state) {
            Ok(State::Exited { exit, .. }) => Ok(exit),
            // Unreachable: `self` owns the sender.
            _ => Err(Failure::precondition("process was dropped")),
        }
    }

    /// Records the process's exit, as `exit` returns it, when `death` is received.
    pub fn watch(
        self: &Arc<Self>,
        death: oneshot::Receiver<Death>,
        exit: impl Fn(Death) -> Exit + Send + 'static,
    ) {
        let process = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(death) = death.await {
                process.end(exit(death));
            }
        });
    }

    /// Sends `signal` to the process.
    pub fn signal(&self, reaper: &Reaper, signal: i32) -> Result<(), Failure> {
        let pid = match self.state() {
            State::Created { pid: Some(pid) } | State::Running { pid } => pid,
            State::Created { pid: None } => {
                return Err(Failure::precondition("process has not been started"));
            }
            State::Exited { .. } => return Err(Failure::not_found("process has exited")),
        };
        if !reaper.is_alive(pid) {
            return Err(Failure::not_found("process has exited"));
        }
        kill(pid, signal).map_err(internal(format!("cannot send signal {signal} to process {pid}")))
    }

    /// Counts the bytes of the streams from 0 again, for a host that has read and written none of them. Output that the
    /// host before has not read is dropped: it is that host's.
    pub fn begin_anew(&self) -> Result<(), Failure> {
        let input = lock(&self.ends).input.clone();
        if input.is_some_and(|input| !input.begin_anew()) {
            return Err(Failure::precondition("the process's input is still being written"));
        }
        for output in [&self.stdout, &self.stderr].into_iter().flatten() {
            output.begin_anew();
        }
        Ok(())
    }

    /// Stops capturing and closes the agent's ends.
    pub fn disconnect(&self) {
        let ends = std::mem::take(&mut *lock(&self.ends));
        for capture in ends.captures {
            capture.abort();
        }
    }
}

/// Sends any signal, including real-time signals, as kill(2) does.
pub fn kill(pid: i32, signal: i32) -> nix::Result<()> {
    // SAFETY: no memory is passed; the caller has checked the pid.
    nix::errno::Errno::result(unsafe { libc::kill(pid, signal) }).map(drop)
}
